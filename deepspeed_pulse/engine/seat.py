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
    def of_neighbours(cls, num_ranks: int, device: torch.device) -> Seat:
        """In one of as many pipelines of ``num_ranks`` ranks as the world makes, which send in the world's own group.

        Ranks that are left over sit behind the last pipeline's end.
        """
        world = range(dist.get_world_size())
        pipelines = tuple(
            tuple(world[first : first + num_ranks]) for first in world[::num_ranks][: len(world) // num_ranks]
        )
        index = min(dist.get_rank() // num_ranks, len(pipelines) - 1)
        rank = dist.get_rank() - index * num_ranks
        return cls(pipelines=pipelines, index=index, rank=rank, group=None, device=device)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of this pipeline."""
        return self.pipelines[self.index]
