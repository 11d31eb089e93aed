"""A Plan's program as a DeepSpeed schedule; each instruction names the step of the program it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed.runtime.pipe import schedule as upstream

from deepspeed_pulse.ir.program import Step
from deepspeed_pulse.ir.schedule import FORWARDS

FROM_UPSTREAM = (upstream.ReduceTiedGrads, upstream.ReduceGrads, upstream.OptimizerStep)
"""Upstream's instructions among those of a step."""


class RunStep(upstream.PipeInstruction):
    """Run an action of the plan, with the messages before and after it."""


class RunFrozen(upstream.PipeInstruction):
    """Encode what the plan puts at this place for the next step."""


class FinishStep(upstream.PipeInstruction):
    """Wait for all sends, check that every buffer is empty and that all ranks saw the same data."""


class CompleteGrads(upstream.PipeInstruction):
    """What no microbatch has used here takes part in the sums all the same."""


class ExpectStageGrads(upstream.PipeInstruction):
    """The last backward of a stage comes: sum its gradients over the data-parallel replicas as they become whole."""


class ReduceStageGrads(upstream.PipeInstruction):
    """Start summing what is left of the gradients of a stage, whose last backward has ended."""


class EndBackbone(upstream.PipeInstruction):
    """A backbone's last backward has ended on all ranks, as the plan goes: its own reduction and optimizer step.

    ``earlier``: of the step before.
    """


class CountStep(upstream.PipeInstruction):
    """What an optimizer step does to the books, where backbones have made their own."""


@dataclass(frozen=True, kw_only=True)
class BackboneEnds:
    """Where backbones make their own steps.

    ``within``: numbers of the row's steps after which one does that has run on from the step before, with its index, in
    the order in which ranks meet. ``after``: those whose steps end with the row.
    """

    within: tuple[tuple[int, int], ...]
    after: tuple[int, ...]


class PulseSchedule(upstream.TrainSchedule):
    """The steps of one rank (its row of the program), then reduction and optimizer step when training.

    ``reduce_early``: a stage's gradients are reduced from its last backward on, not all at the end. ``frozen_at``:
    positions before which there is frozen work, or something of it to drop. ``ends``: where backbones make their own
    steps.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        training: bool,
        reduce_early: bool,
        micro_batches: int,
        stages: int,
        stage_id: int,
        frozen_at: frozenset[int] = frozenset(),
        ends: BackboneEnds | None = None,
    ) -> None:
        super().__init__(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
        self._steps, self._training, self._frozen_at = tuple(steps), training, frozen_at
        self._ends = ends
        last_backwards = {s.action.stage: s.action for s in self._steps if s.action.op not in FORWARDS}
        self._reduce_after = set(last_backwards.values()) if reduce_early else set()

    def steps(self) -> Iterator[list[upstream.PipeInstruction]]:
        for position, step in enumerate(self._steps):
            yield from self._ended(position)
            if position in self._frozen_at:
                yield [RunFrozen(position=position)]
            stage = step.action.stage
            if step.action in self._reduce_after:
                yield [ExpectStageGrads(stage=stage), RunStep(step=step), ReduceStageGrads(stage=stage)]
            else:
                yield [RunStep(step=step)]
        yield from self._ended(len(self._steps))
        if len(self._steps) in self._frozen_at:
            yield [RunFrozen(position=len(self._steps))]
        yield [FinishStep()]
        if self._ends is not None:
            yield [*(EndBackbone(backbone=index, earlier=False) for index in self._ends.after), CountStep()]
        elif self._training:
            yield [CompleteGrads(), *(instruction() for instruction in FROM_UPSTREAM)]

    def _ended(self, count: int) -> Iterator[list[upstream.PipeInstruction]]:
        """Backbones whose steps end when so many steps of the row have run."""
        for place, backbone in self._ends.within if self._ends is not None else ():
            if place == count:
                yield [EndBackbone(backbone=backbone, earlier=True)]

    def num_pipe_buffers(self) -> int:
        """Upstream's per-buffer lists are not used: the runtime keeps its own."""
        return 0
