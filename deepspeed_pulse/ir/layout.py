"""How the ranks of a job are numbered; global ranks fill nodes in order, so this decides who shares a node."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Layout(str, enum.Enum):
    """Which ranks are neighbours."""

    PIPE_MAJOR = "pipe-major"
    """Global rank = pipeline rank * G + data index, upstream's own: data-parallel peers are neighbours."""

    DATA_MAJOR = "data-major"
    """Global rank = data index * P + pipeline rank: the ranks of one pipeline are neighbours."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """``data_parallel`` pipelines of ``pipeline_ranks`` ranks each."""

    pipeline_ranks: int
    data_parallel: int = 1
    layout: Layout = Layout.PIPE_MAJOR

    @property
    def num_ranks(self) -> int:
        return self.pipeline_ranks * self.data_parallel

    def global_rank(self, pipeline_rank: int, data_index: int) -> int:
        """
        >>> [Grid(pipeline_ranks=4, data_parallel=2, layout=layout).global_rank(1, 1) for layout in Layout]
        [3, 5]
        """
        if self.layout is Layout.PIPE_MAJOR:
            return pipeline_rank * self.data_parallel + data_index
        return data_index * self.pipeline_ranks + pipeline_rank
