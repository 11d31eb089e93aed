"""A schedule with times: what the simulator predicts and what the engine measures."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_pulse.ir.program import Message
from deepspeed_pulse.ir.schedule import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action while it runs on a pipeline rank; ms since the first action of the step.

    ``waited_ms``: how long the rank waited for the action's messages before; measured timelines only.
    """

    rank: int
    action: Action
    start_ms: float
    end_ms: float
    waited_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A message on its way between pipeline ranks; ms since the first action of the step."""

    message: Message
    source_rank: int
    target_rank: int
    leave_ms: float
    arrive_ms: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All spans of a step (per rank in time order), transfers, and memory per rank.

    ``memory``: per rank, (ms, bytes) at every change, activations and buffers only.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()

    @property
    def makespan_ms(self) -> float:
        """First action to last."""
        return max(span.end_ms for span in self.spans) - min(span.start_ms for span in self.spans)

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (ranks * makespan)."""
        busy = sum(span.end_ms - span.start_ms for span in self.spans)
        return 1.0 - busy / (self.num_ranks * self.makespan_ms) if self.makespan_ms else 0.0
