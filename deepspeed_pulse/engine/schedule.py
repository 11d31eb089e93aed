"""A Plan's program as a DeepSpeed schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.runtime.pipe import schedule as upstream

from deepspeed_pulse.engine.instructions import (
    CompleteTiedGrads,
    ComputeAction,
    FinishStep,
    ReceiveMessages,
    SendMessages,
)
from deepspeed_pulse.ir.program import Step


class PulseSchedule(upstream.TrainSchedule):
    """The steps of one rank, then reduction and optimizer step when training.

    Args:
        steps: the rank's row of the program.
        training: False for a forward-only program.
    """

    def __init__(
        self, steps: Sequence[Step], *, training: bool, micro_batches: int, stages: int, stage_id: int
    ) -> None:
        super().__init__(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
        self._steps, self._training = tuple(steps), training

    def steps(self) -> Iterator[list[upstream.PipeInstruction]]:
        for step in self._steps:
            yield [ReceiveMessages(step=step), ComputeAction(step=step), SendMessages(step=step)]
        yield [FinishStep()]
        if self._training:
            yield [
                CompleteTiedGrads(),
                upstream.ReduceTiedGrads(),
                upstream.ReduceGrads(),
                upstream.OptimizerStep(),
            ]

    def num_pipe_buffers(self) -> int:
        """Upstream's per-buffer lists are not used: the runtime keeps its own."""
        return 0
