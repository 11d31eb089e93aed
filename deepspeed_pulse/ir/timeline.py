"""A schedule with times: what the simulator predicts and what the engine measures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from deepspeed_pulse.ir.fill import FrozenRun, HandOver
from deepspeed_pulse.ir.program import Message
from deepspeed_pulse.ir.schedule import Action

Work = TypeVar("Work", bound=Action | FrozenRun)
Sent = TypeVar("Sent", bound=Message | HandOver)


# spans and transfers are not frozen: planning makes millions of them, and a frozen one takes thrice as long


@dataclass(slots=True, kw_only=True)
class Span(Generic[Work]):
    """An action, or layers of a frozen part, while it runs on a pipeline rank; ms since the first action of the step.

    ``waited_ms``: how long the rank waited for the action's messages before; measured timelines only.
    """

    rank: int
    work: Work
    start_ms: float
    end_ms: float
    waited_ms: float = 0.0


AnySpan = Span[Action] | Span[FrozenRun]


@dataclass(slots=True, kw_only=True)
class Transfer(Generic[Sent]):
    """A message, or a frozen part's result, on its way between pipeline ranks; ms since the step's first action."""

    message: Sent
    source_rank: int
    target_rank: int
    leave_ms: float
    arrive_ms: float
    num_bytes: int


AnyTransfer = Transfer[Message] | Transfer[HandOver]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A stage's gradients while they are summed over data-parallel peers; ms since the first action of the step."""

    rank: int
    stage: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All spans of a step (per rank in time order), transfers, and memory per rank.

    ``memory``: per rank, (ms, bytes) at every change, activations and buffers only. ``frozen``, ``carried``: work for
    the next step in the idle time of this one, and its results' ways. ``reductions``: simulated timelines only.
    """

    num_ranks: int
    spans: tuple[Span[Action], ...]
    transfers: tuple[Transfer[Message], ...] = ()
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    frozen: tuple[Span[FrozenRun], ...] = ()
    carried: tuple[Transfer[HandOver], ...] = ()
    reductions: tuple[Reduction, ...] = ()

    @classmethod
    def of(cls, num_ranks: int, spans: Iterable[AnySpan]) -> Timeline:
        """What ran on so many ranks."""
        every = list(spans)
        return cls(
            num_ranks=num_ranks,
            spans=tuple(span for span in every if isinstance(span.work, Action)),
            frozen=tuple(span for span in every if isinstance(span.work, FrozenRun)),
        )

    @property
    def every_span(self) -> tuple[AnySpan, ...]:
        """Actions and frozen work."""
        return (*self.spans, *self.frozen)

    @property
    def every_transfer(self) -> tuple[AnyTransfer, ...]:
        """Messages and frozen results."""
        return (*self.transfers, *self.carried)

    @cached_property
    def start_ms(self) -> float:
        """Of the first action, frozen work included."""
        return min(start for start, _ in self.intervals())

    def intervals(self, rank: int | None = None) -> list[tuple[float, float]]:
        """From when until when ranks (or one of them) work, frozen work included."""
        return [(s.start_ms, s.end_ms) for s in self.every_span if rank in (None, s.rank)]

    @cached_property
    def makespan_ms(self) -> float:
        """First action to last; frozen work and its last message included."""
        ends = [end for _, end in self.intervals()]
        return max([*ends, *(carried.arrive_ms for carried in self.carried)]) - self.start_ms

    def spans_of(self, rank: int) -> tuple[Span[Action], ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    def frozen_of(self, rank: int) -> tuple[Span[FrozenRun], ...]:
        return tuple(span for span in self.frozen if span.rank == rank)

    def pauses_ms(self) -> dict[Action, float]:
        """After each action but a rank's last, how long its rank neither worked nor waited for a message."""
        found: dict[Action, float] = {}
        for rank in range(self.num_ranks):
            frozen = self.frozen_of(rank)
            for span, following in itertools.pairwise(self.spans_of(rank)):
                between = (f for f in frozen if span.end_ms <= f.start_ms < following.start_ms)
                worked = sum(f.end_ms - f.start_ms for f in between)
                found[span.work] = max(0.0, following.start_ms - span.end_ms - following.waited_ms - worked)
        return found

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (ranks * makespan)."""
        busy = sum(end - start for start, end in self.intervals())
        return 1.0 - busy / (self.num_ranks * self.makespan_ms) if self.makespan_ms else 0.0
