"""When a rank's work ran in a step, as its device says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from deepspeed_pulse.ir.timeline import Span, Work
from deepspeed_pulse.runtime.protocols import Device


class Stopwatch(Generic[Work]):
    """Has the device mark a pipeline rank's work of one step, and says afterwards when it was done.

    Nothing is waited for before :attr:`spans` or :attr:`idle_ms` is asked for.
    """

    def __init__(self, rank: int, device: Device) -> None:
        self._rank, self._device = rank, device
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.works: list[Work] = []
        """What was given to the device so far."""
        self._waits_before: list[int] = []
        """Per work, how many waits were over when it began."""
        self._waits: list[tuple[Any, Any]] = []
        self._runs: list[tuple[Any, Any]] = []
        self._found: tuple[list[Span[Work]], float] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The device waits for messages."""
        self._found = None
        start = self._device.mark()
        yield
        self._waits.append((start, self._device.mark()))

    @contextmanager
    def running(self, work: Work) -> Iterator[None]:
        """The device runs ``work``, for which it waited since the work before."""
        self._found = None
        start = self._device.mark()
        yield
        self.works.append(work)
        self._waits_before.append(len(self._waits))
        self._runs.append((start, self._device.mark()))

    @property
    def spans(self) -> list[Span[Work]]:
        """What ran, on the host's clock. Waits until the device has done it."""
        return self._result()[0]

    @property
    def idle_ms(self) -> float:
        """How long the device waited for messages. Waits until it has done its work."""
        return self._result()[1]

    def _result(self) -> tuple[list[Span[Work]], float]:
        if self._found is None:
            marks = [mark for pair in (*self._waits, *self._runs) for mark in pair]
            times = self._device.times_ms(marks)
            pairs = list(zip(times[::2], times[1::2], strict=True))
            waits = [end - start for start, end in pairs[: len(self._waits)]]
            spans = [
                Span(rank=self._rank, work=work, start_ms=start, end_ms=end, waited_ms=sum(waits[first:last]))
                for work, (start, end), (first, last) in zip(
                    self.works, pairs[len(waits) :], itertools.pairwise([0, *self._waits_before]), strict=True
                )
            ]
            self._found = spans, sum(waits)
        return self._found
