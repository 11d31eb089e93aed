"""What frozen parts cost: the planner's view of encoders that run beside a model (file format ``pulse-frozen/1``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.fields import Fields, read_file, read_json, write_json
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart, check_parts, part_with

FORMAT = "pulse-frozen/1"


@dataclass(frozen=True, kw_only=True)
class FrozenParts:
    """Frozen parts of a model on one device.

    ``parts``: bytes are a sample's; ``forward_ms`` of a layer is 0 there. ``forward_ms``: per part and layer, ms by
    microbatch size.
    """

    name: str
    device: str
    dtype: str
    parts: tuple[FrozenPart, ...]
    forward_ms: tuple[tuple[Mapping[int, float], ...], ...]

    def at(self, size: int) -> tuple[FrozenPart, ...]:
        """The parts for microbatches of ``size`` samples.

        Where a layer was not timed at that size, its time is that of the largest smaller size in proportion: a device
        is rarely slower per sample with more of them.

        Raises:
            FileError: a layer was timed with larger microbatches only.
        """
        return tuple(
            FrozenPart(
                name=part.name,
                needs=part.needs,
                targets=part.targets,
                ranks=part.ranks,
                layers=tuple(
                    FrozenLayer(
                        name=layer.name,
                        forward_ms=_time(times, size, f"{self.name}: part {part.name!r}, layer {layer.name!r}"),
                        param_bytes=layer.param_bytes,
                        output_bytes=size * layer.output_bytes,
                        activation_bytes=size * layer.activation_bytes,
                    )
                    for layer, times in zip(part.layers, all_times, strict=True)
                ),
            )
            for part, all_times in zip(self.parts, self.forward_ms, strict=True)
        )

    def to_json(self) -> str:
        return write_json(
            {
                "format": FORMAT,
                "name": self.name,
                "device": self.device,
                "dtype": self.dtype,
                "parts": [_part_dict(part, times) for part, times in zip(self.parts, self.forward_ms, strict=True)],
            }
        )

    @classmethod
    def from_json(cls, text: str, where: str = "frozen parts") -> FrozenParts:
        """Read frozen parts; a :class:`FileError` names ``where`` and the field that is wrong."""
        fields = read_json(text, where, FORMAT)
        fields.done(("format", "name", "device", "dtype", "parts"))
        pairs = fields.objects("parts", _read_part)
        parts = tuple(part for part, _ in pairs)
        check_parts(parts, fields)
        return cls(
            name=fields.text("name"),
            device=fields.text("device"),
            dtype=fields.text("dtype"),
            parts=parts,
            forward_ms=tuple(times for _, times in pairs),
        )

    @classmethod
    def load(cls, path: str | Path) -> FrozenParts:
        return cls.from_json(read_file(path), str(path))


def _time(times: Mapping[int, float], size: int, where: str) -> float:
    smaller = [known for known in times if known <= size]
    if not smaller:
        sizes = ", ".join(map(str, sorted(times)))
        raise FileError(f"{where}: expected a time for microbatches of {size} or fewer samples, found sizes {sizes}")
    return times[max(smaller)] * size / max(smaller)


def _part_dict(part: FrozenPart, all_times: tuple[Mapping[int, float], ...]) -> dict[str, Any]:
    return {
        "name": part.name,
        "needs": list(part.needs),
        "targets": list(part.targets),
        **({} if part.ranks is None else {"ranks": list(part.ranks)}),
        "layers": [
            {
                "name": layer.name,
                "forward_ms": {str(size): ms for size, ms in sorted(times.items())},
                "param_bytes": layer.param_bytes,
                "output_bytes": layer.output_bytes,
                "activation_bytes": layer.activation_bytes,
            }
            for layer, times in zip(part.layers, all_times, strict=True)
        ],
    }


def _read_part(fields: Fields) -> tuple[FrozenPart, tuple[Mapping[int, float], ...]]:
    pairs = fields.objects("layers", _read_layer)
    return part_with(fields, tuple(layer for layer, _ in pairs)), tuple(times for _, times in pairs)


def _read_layer(fields: Fields) -> tuple[FrozenLayer, Mapping[int, float]]:
    fields.done(FrozenLayer.__dataclass_fields__)
    found = fields.raw("forward_ms")
    sizes = [size for size in found if _is_size(size)] if isinstance(found, dict) else []
    if not sizes or len(sizes) != len(found):
        raise fields.error("forward_ms", 'an object of ms by microbatch size, like {"1": 2.5, "4": 8.0}')
    numbers = fields.object("forward_ms")
    layer = FrozenLayer(
        name=fields.text("name"),
        forward_ms=0.0,
        param_bytes=fields.integer("param_bytes"),
        output_bytes=fields.integer("output_bytes"),
        activation_bytes=fields.integer("activation_bytes"),
    )
    return layer, {int(size): numbers.number(size) for size in sizes}


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9 and not text.startswith("0")
