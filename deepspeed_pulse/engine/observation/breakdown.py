"""Upstream's timers (``wall_clock_breakdown``) around what the steps of a plan do, under upstream's names.

``bwd_microstep``, ``bwd_inner`` and the rest of backward need nothing here: upstream's prologue and epilogue keep them.
``fwd_microstep`` holds the drawing of the microbatch too, which ``batch_input`` shows alone. Sends are started and not
waited for, so ``pipe_send_*`` are short; ``pipe_recv_*`` are what a rank waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe.engine import (
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
)

from deepspeed_pulse.ir.program import Step
from deepspeed_pulse.ir.schedule import FORWARDS, Direction

RECEIVING = {Direction.FORWARD: PIPE_RECV_INPUT_TIMER, Direction.BACKWARD: PIPE_RECV_GRAD_TIMER}
RECEIVING[Direction.EXTRA] = RECEIVING[Direction.FORWARD]
SENDING = {Direction.FORWARD: PIPE_SEND_OUTPUT_TIMER, Direction.BACKWARD: PIPE_SEND_GRAD_TIMER}
SENDING[Direction.EXTRA] = SENDING[Direction.FORWARD]


class Breakdown:
    """The timers of an engine; each method times what runs inside its ``with``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._enabled = bool(engine.wall_clock_breakdown())
        self.of_steps = self if self._enabled else None
        """For what the runtime does; None where nothing is to be timed."""

    def receiving(self, step: Step) -> Any:
        return self._timed([RECEIVING[step.receives[0].direction]] if step.receives else [])

    def computing(self, step: Step) -> Any:
        return self._timed(self._engine.engine_timers.forward_timers if step.action.op in FORWARDS else [])

    def sending(self, step: Step) -> Any:
        return self._timed([SENDING[step.sends[0].direction]] if step.sends else [])

    def drawing(self) -> Any:
        return self._timed([BATCH_INPUT_TIMER])

    def reducing(self) -> Any:
        return self._timed(self._engine.engine_timers.backward_reduce_timers)

    @contextmanager
    def _timed(self, names: list[str]) -> Iterator[None]:
        running = [self._engine.timers(name) for name in names] if self._enabled else []
        for timer in running:
            timer.start()
        try:
            yield
        finally:
            for timer in running:
                timer.stop()
