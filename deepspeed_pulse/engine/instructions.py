"""Instructions of the pulse schedule; each names the step of the plan's program it belongs to."""

from __future__ import annotations

from deepspeed.runtime.pipe.schedule import PipeInstruction


class RunStep(PipeInstruction):
    """Run an action of the plan, with the messages before and after it."""


class RunFrozen(PipeInstruction):
    """Encode what the plan puts at this place for the next step."""


class FinishStep(PipeInstruction):
    """Wait for all sends, check that every buffer is empty and that all ranks saw the same data."""


class CompleteTiedGrads(PipeInstruction):
    """Give tied weights without a gradient a zero one, so that all their ranks take part in the reduction."""


class ReduceStageGrads(PipeInstruction):
    """Start summing the gradients of a stage, whose last backward has ended, over the data-parallel replicas."""
