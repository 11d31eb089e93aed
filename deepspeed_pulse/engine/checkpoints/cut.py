"""Where a parameter's numbers lie in a flat buffer, and with which replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_pulse.engine.gradients.placeholders import is_placeholder

_ALIGNMENT = 2
"""Upstream cuts flat buffers at multiples of so many numbers."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the flat buffer of a parameter group was cut over replicas: in order, into parts of one length.

    Attributes:
        spans: where each parameter lies in the buffer.
        length: numbers in a part.
    """

    spans: dict[str, range]
    length: int

    @classmethod
    def of(cls, group: Sequence[str], replicas: int, sizes: Mapping[str, int]) -> Cut | None:
        """None where this run does not know the size of a parameter."""
        spans: dict[str, range] = {}
        total = 0
        for name in group:
            if name not in sizes and not is_placeholder(name):
                return None
            spans[name] = range(total, total + (1 if is_placeholder(name) else sizes[name]))
            total = spans[name].stop
        return cls(spans=spans, length=-(-total // (replicas * _ALIGNMENT)) * _ALIGNMENT)

    def replicas(self, name: str, part: range) -> range:
        """Those that hold some of a part of a parameter, which is not empty."""
        span = self.spans[name][part.start : part.stop]
        return range(span[0] // self.length, span[-1] // self.length + 1)

    def held(self, name: str, replica: int) -> tuple[range, int]:
        """Which numbers of a parameter a replica holds, and where they begin in its part of the buffer."""
        span, begin = self.spans[name], replica * self.length
        found = common(span, range(begin, begin + self.length))
        return range(found.start - span.start, found.stop - span.start), found.start - begin


def common(one: range, other: range) -> range:
    """What two ranges have in common; an empty one where that is nothing."""
    return range(max(one.start, other.start), min(one.stop, other.stop))
