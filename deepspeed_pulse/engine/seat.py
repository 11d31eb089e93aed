"""Where a process sits among the ranks of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank of one of the job's pipelines.

    ``pipelines``: global ranks of every pipeline; ``index`` of this one among them, ``rank`` in it; ``group``: its
    process group, None for the world's; ``device``: where this rank's tensors live.
    """

    pipelines: tuple[tuple[int, ...], ...]
    index: int
    rank: int
    group: Any
    device: torch.device

    @classmethod
    def of(cls, engine: Any) -> Seat:
        """The seat of an engine of upstream's."""
        grid = engine.grid
        pipelines = tuple(map(tuple, grid.topology().get_axis_comm_lists("pipe")))
        return cls(
            pipelines=pipelines,
            index=pipelines.index(tuple(grid.pp_group)),
            rank=engine.stage_id,
            group=grid.get_pipe_parallel_group(),
            device=torch.device(engine.device),
        )

    @classmethod
    def among_first(cls, num_ranks: int, device: torch.device) -> Seat:
        """In one pipeline of the world's first ranks, which send in the world's own group."""
        return cls(pipelines=(tuple(range(num_ranks)),), index=0, rank=dist.get_rank(), group=None, device=device)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of this pipeline."""
        return self.pipelines[self.index]
