"""torch.distributed.pipelining: ZB-V, which splits the backward, and interleaved 1F1B; skips relayed as outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from resting import Resting
from slow_network.cases import Case
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble


class Contiguous(torch.autograd.Function):
    """What crosses ranks has to be, in both directions, and no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return Contiguous.apply(x) if x.is_floating_point() else x


class Stage(torch.nn.Module):
    """A run of layers with its inputs and outputs as separate tensors."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> Any:
        values: Any = tuple(map(contiguous, inputs)) if len(inputs) > 1 else contiguous(inputs[0])
        for layer in self.layers:
            values = layer(values)
        return tuple(map(contiguous, values)) if isinstance(values, tuple) else contiguous(values)


def build(case: Case, *, boundaries: Sequence[int], zbv: bool) -> Callable[[], None]:
    rank, count = torch.distributed.get_rank(), len(boundaries) - 1
    mine = (rank, count - 1 - rank) if zbv else (rank, rank + case.ranks)
    made = case.relaying()
    modules = [
        Stage([kind(*arguments) for kind, *arguments in made[boundaries[stage] : boundaries[stage + 1]]])
        for stage in mine
    ]
    stages = [
        PipelineStage(module, stage, count, torch.device("cpu")) for module, stage in zip(modules, mine, strict=True)
    ]
    schedule = (ScheduleZBVZeroBubble if zbv else ScheduleInterleaved1F1B)(
        stages, n_microbatches=case.microbatches, loss_fn=torch.nn.functional.mse_loss
    )
    optimizer = Resting([weight for module in modules for weight in module.parameters()])
    inputs, labels = case.batch(case.microbatches)

    def step() -> None:
        first = (inputs if isinstance(inputs, tuple) else (inputs,)) if 0 in mine else ()
        last = {"target": labels, "losses": []} if count - 1 in mine else {}
        schedule.step(*first, **last)
        optimizer.step()
        optimizer.zero_grad()

    return step
