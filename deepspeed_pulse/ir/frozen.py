"""What frozen parts cost: the planner's view of encoders that run beside a model (file format ``pulse-frozen/1``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.codec import File, Form
from deepspeed_pulse.ir.fields import Fields
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart, Part, check_parts

_TIMES = {
    "type": "object",
    "minProperties": 1,
    "patternProperties": {"^[1-9][0-9]{0,7}$": {"type": "number", "minimum": 0}},
    "additionalProperties": False,
}
"""ms by microbatch size."""


def _read_times(fields: Fields, name: str) -> Mapping[int, float]:
    found = fields.raw(name)
    if not isinstance(found, dict) or not found or not all(map(re.compile("[1-9][0-9]{0,7}").fullmatch, found)):
        raise fields.error(name, 'an object of ms by microbatch size, like {"1": 2.5, "4": 8.0}')
    numbers = fields.object(name)
    return {int(size): numbers.number(size) for size in found}


def _write_times(times: Mapping[int, float]) -> Mapping[str, float]:
    return {str(size): ms for size, ms in sorted(times.items())}


@dataclass(frozen=True, kw_only=True)
class TimedLayer:
    """A frozen layer: ms by microbatch size; bytes of its weights, of a sample's result and of what it needs to run."""

    name: str
    forward_ms: Annotated[Mapping[int, float], Form(read=_read_times, write=_write_times, schema=_TIMES)]
    param_bytes: int
    output_bytes: int
    activation_bytes: int

    def at(self, size: int, where: str) -> FrozenLayer:
        known = max((known for known in self.forward_ms if known <= size), default=None)
        if known is None:
            raise FileError(
                f"{where}, layer {self.name!r}: expected a time for microbatches of {size} or fewer samples, found "
                f"sizes {', '.join(map(str, sorted(self.forward_ms)))}"
            )
        return FrozenLayer(
            name=self.name,
            forward_ms=self.forward_ms[known] * size / known,
            param_bytes=self.param_bytes,
            output_bytes=size * self.output_bytes,
            activation_bytes=size * self.activation_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class TimedPart(Part):
    """A part whose layers were timed at several microbatch sizes."""

    layers: Annotated[tuple[TimedLayer, ...], Form(some="layer")]

    def at(self, size: int, where: str) -> FrozenPart:
        layers = tuple(layer.at(size, f"{where}: part {self.name!r}") for layer in self.layers)
        return FrozenPart(name=self.name, needs=self.needs, targets=self.targets, ranks=self.ranks, layers=layers)


@dataclass(frozen=True, kw_only=True)
class FrozenParts(File):
    """Frozen parts of a model on one device."""

    FORMATS = ("pulse-frozen/1",)
    WHAT = "frozen parts"

    name: str
    device: str
    dtype: str
    parts: tuple[TimedPart, ...]

    def check_form(self, fields: Fields) -> None:
        check_parts(self.parts, fields)

    def at(self, size: int) -> tuple[FrozenPart, ...]:
        """The parts for microbatches of ``size`` samples.

        Where a layer was not timed at that size, its time is that of the largest smaller size in proportion: a device
        is rarely slower per sample with more of them. Raises FileError when a layer was timed with larger ones only.
        """
        return tuple(part.at(size, self.name) for part in self.parts)
