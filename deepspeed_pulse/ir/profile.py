"""What each layer costs: the planner's only view of a model (file format ``pulse-profile/1``)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.fields import Fields, read_file, read_json, write_json

FORMAT = "pulse-profile/1"
_FOUR_BYTE_STATE, _TWO_BYTE_STATE = 4, 8
_TWO_BYTE_DTYPES = ("float16", "bfloat16")


def state_factor(dtype: str) -> int:
    """k of "state = k * param_bytes": weights, gradients, fp32 master and two Adam moments."""
    return _TWO_BYTE_STATE if dtype in _TWO_BYTE_DTYPES else _FOUR_BYTE_STATE


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Times in ms and sizes in bytes of one layer for one microbatch.

    ``param_bytes``: of trained parameters, and 1/k of those of frozen ones (:func:`state_factor`).
    ``activation_bytes``: kept from forward to backward, stashed values included.
    ``weight_grad_ms``: the part of ``backward_ms`` that computes weight gradients, if known.
    ``spread``: (longest - shortest) / median of the times that were measured, if they were.
    """

    name: str
    forward_ms: float
    backward_ms: float
    param_bytes: int
    activation_bytes: int
    output_bytes: int
    weight_grad_ms: float | None = None
    spread: float | None = None


@dataclass(frozen=True, kw_only=True)
class Skip:
    """One producer-consumer pair of a named value; several consumers share the ``name``."""

    name: str
    source: int
    target: int
    bytes: int
    gradient: bool = True


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of a model's layers and its skips, for one microbatch size on one device."""

    name: str
    device: str
    dtype: str
    microbatch_size: int
    layers: tuple[LayerCost, ...]
    skips: tuple[Skip, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def param_bytes(self) -> int:
        """Of all layers."""
        return sum(layer.param_bytes for layer in self.layers)

    @property
    def state_factor(self) -> int:
        """:func:`state_factor` of the profile's dtype."""
        return state_factor(self.dtype)

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "device": self.device,
            "dtype": self.dtype,
            "microbatch_size": self.microbatch_size,
            "layers": [_layer_dict(layer) for layer in self.layers],
            "skips": [
                {"name": s.name, "source": s.source, "target": s.target, "bytes": s.bytes, "gradient": s.gradient}
                for s in self.skips
            ],
        }

    def to_json(self) -> str:
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str, where: str = "profile") -> Profile:
        """Read a profile; a :class:`FileError` names ``where`` and the field that is wrong."""
        fields = read_json(text, where, FORMAT)
        fields.done(("format", "name", "device", "dtype", "microbatch_size", "layers", "skips"))
        profile = cls(
            name=fields.text("name"),
            device=fields.text("device"),
            dtype=fields.text("dtype"),
            microbatch_size=fields.integer("microbatch_size", minimum=1),
            layers=fields.objects("layers", _read_layer),
            skips=fields.objects("skips", _read_skip),
        )
        if not profile.layers:
            raise fields.error("layers", "at least one layer")
        _check_skips(profile, where)
        return profile

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        return cls.from_json(read_file(path), str(path))


def _layer_dict(layer: LayerCost) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": layer.name,
        "forward_ms": layer.forward_ms,
        "backward_ms": layer.backward_ms,
        "param_bytes": layer.param_bytes,
        "activation_bytes": layer.activation_bytes,
        "output_bytes": layer.output_bytes,
    }
    if layer.weight_grad_ms is not None:
        data["weight_grad_ms"] = layer.weight_grad_ms
    if layer.spread is not None:
        data["spread"] = layer.spread
    return data


def _read_layer(fields: Fields) -> LayerCost:
    fields.done(
        (
            "name",
            "forward_ms",
            "backward_ms",
            "weight_grad_ms",
            "param_bytes",
            "activation_bytes",
            "output_bytes",
            "spread",
        )
    )
    backward_ms = fields.number("backward_ms")
    weight_grad_ms = fields.number("weight_grad_ms") if fields.has("weight_grad_ms") else None
    if weight_grad_ms is not None and weight_grad_ms > backward_ms:
        raise fields.error("weight_grad_ms", f"at most backward_ms = {backward_ms:g}")
    return LayerCost(
        name=fields.text("name"),
        forward_ms=fields.number("forward_ms"),
        backward_ms=backward_ms,
        weight_grad_ms=weight_grad_ms,
        param_bytes=fields.integer("param_bytes"),
        activation_bytes=fields.integer("activation_bytes"),
        output_bytes=fields.integer("output_bytes"),
        spread=fields.number("spread") if fields.has("spread") else None,
    )


def _read_skip(fields: Fields) -> Skip:
    fields.done(("name", "source", "target", "bytes", "gradient"))
    return Skip(
        name=fields.text("name"),
        source=fields.integer("source"),
        target=fields.integer("target"),
        bytes=fields.integer("bytes"),
        gradient=fields.flag("gradient", default=True),
    )


def _check_skips(profile: Profile, where: str) -> None:
    first: dict[str, Skip] = {}
    seen: set[tuple[str, int]] = set()
    for index, skip in enumerate(profile.skips):
        place = f"{where}: skips[{index}] ({skip.name})"
        if skip.target >= profile.num_layers:
            raise FileError(
                f"{place}: field 'target': expected a layer index below {profile.num_layers}, found {skip.target}"
            )
        if skip.target <= skip.source:
            raise FileError(
                f"{place}: a skip runs forward: expected target > source = {skip.source}, found {skip.target}"
            )
        known = first.setdefault(skip.name, skip)
        if (known.source, known.bytes, known.gradient) != (skip.source, skip.bytes, skip.gradient):
            raise FileError(
                f"{place}: entries of one name share source, bytes and gradient: expected "
                f"{known.source}, {known.bytes}, {known.gradient}, found {skip.source}, {skip.bytes}, {skip.gradient}"
            )
        if (skip.name, skip.target) in seen:
            raise FileError(f"{place}: target {skip.target} is listed twice")
        seen.add((skip.name, skip.target))
