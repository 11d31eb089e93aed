"""What each layer costs: the planner's only view of a model (file format ``pulse-profile/1``)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.backbones import BackboneLayers, check_parts
from deepspeed_pulse.ir.codec import Count, File, Form
from deepspeed_pulse.ir.fields import Fields
from deepspeed_pulse.ir.graph import NamedValue

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Of trained weights; a frozen base may be in 8 bit."""


def is_16_bit(dtype: str) -> bool:
    """Weights whose optimizer keeps fp32 master weights."""
    return dtype in ("float16", "bfloat16")


def state_factor(dtype: str) -> int:
    """k of "state = k * param_bytes": weights, gradients, fp32 master and two Adam moments."""
    return 8 if is_16_bit(dtype) else 4


def optimizer_factor(dtype: str, *, zero: bool) -> int:
    """The optimizer's part of k. DeepSpeed's ZeRO keeps master weights beside weights in float32 too."""
    factor = state_factor(dtype)
    return factor - (1 if zero and not is_16_bit(dtype) else 2)


def adam_ms_per_gb(dtype: str, memory_gb_per_s: float) -> float:
    """How long Adam takes to step 10^9 bytes of parameters, by what passes through memory.

    Gradients are read, weights and two moments read and written; in 16 bit these are in fp32, and weights are written
    once more. So for a byte of parameters it is 7 bytes, or 15.
    """
    return 1e3 * (15 if is_16_bit(dtype) else 7) / memory_gb_per_s


BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's ``reduce_bucket_size`` where a config names none: ZeRO sums gradients by as many, or by all there are."""


def bucket_bytes(dtype: str, elements: int = BUCKET_ELEMENTS) -> int:
    """Of a full bucket of ZeRO's, which is there from the first backward to the end of the step's sums."""
    return elements * (2 if is_16_bit(dtype) else 4)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Times in ms and sizes in bytes of one layer for one microbatch.

    ``param_bytes``: of trained parameters, which have gradients and optimizer state. ``frozen_bytes``: of others.
    ``activation_bytes``: kept from forward to backward, stashed values included.
    ``unkept_output_bytes``: of its output, what is not among these; where it is left out, all of it.
    ``rerun_bytes``: of ``activation_bytes``, what a forward that runs again in backward makes anew, if it was measured:
    neither what the layer reads nor what it only stashes.
    ``rerun_workspace_bytes``: what its first forward, which keeps nothing, holds at most beyond what it stashes; where
    it is left out, what a forward works with.
    ``workspace_bytes``: what a backward holds at most beyond ``activation_bytes`` while it runs, if it was measured.
    ``forward_workspace_bytes``: the same of a forward; where it is left out, as much.
    ``late_bytes``: gradients that the first half of a backward in two halves keeps for the second, if it was measured.
    ``halves_workspace_bytes``: what the first half holds at most beyond those and ``activation_bytes``, if it was
    measured.
    ``weight_workspace_bytes``: the same of the second half; where it is left out, ``workspace_bytes``.
    ``weight_grad_ms``: the part of ``backward_ms`` that computes weight gradients, if known.
    ``input_grad_ms``: what the other half of a backward in two halves takes, if it was measured; where it is left out,
    the rest of ``backward_ms``.
    ``spread``: (longest - shortest) / median of the times that were measured, if they were.
    """

    name: str
    forward_ms: float
    backward_ms: float
    weight_grad_ms: Annotated[float | None, Form(left_out=True, place=1)] = None
    input_grad_ms: Annotated[float | None, Form(left_out=True, place=1)] = None
    param_bytes: int
    frozen_bytes: Annotated[int, Form(left_out=True, place=1)] = 0
    activation_bytes: int
    output_bytes: int
    unkept_output_bytes: Annotated[int | None, Form(left_out=True, place=1)] = None
    workspace_bytes: Annotated[int, Form(left_out=True, place=1)] = 0
    forward_workspace_bytes: Annotated[int | None, Form(left_out=True, place=1)] = None
    rerun_bytes: Annotated[int | None, Form(left_out=True, place=1)] = None
    rerun_workspace_bytes: Annotated[int | None, Form(left_out=True, place=1)] = None
    late_bytes: Annotated[int, Form(left_out=True, place=1)] = 0
    halves_workspace_bytes: Annotated[int, Form(left_out=True, place=1)] = 0
    weight_workspace_bytes: Annotated[int | None, Form(left_out=True, place=1)] = None
    spread: Annotated[float | None, Form(left_out=True, place=1)] = None

    def check_form(self, fields: Fields) -> None:
        if self.weight_grad_ms is not None and self.weight_grad_ms > self.backward_ms:
            raise fields.error("weight_grad_ms", f"at most backward_ms = {self.backward_ms:g}")
        if self.input_grad_ms is not None:
            self._check_halves(fields, self.input_grad_ms)

    def _check_halves(self, fields: Fields, input_grad_ms: float) -> None:
        if self.weight_grad_ms is None:
            raise fields.error("input_grad_ms", "weight_grad_ms beside it")
        rest = self.backward_ms - self.weight_grad_ms
        if input_grad_ms < rest * (1 - 1e-9):
            raise fields.error("input_grad_ms", f"at least backward_ms - weight_grad_ms = {rest:g}")


@dataclass(frozen=True)
class Held:
    """What a stage's actions hold while they run, in bytes: backward of layers that run again, and to work with.

    ``forward``: what its forward works with.
    Where backward runs in halves, ``workspace`` is the first one's, ``weights`` the second one's; ``late``: gradients
    that the first keeps for the second; ``cut``: what its layers read from one another and kept for no other reason,
    from the forward on.
    """

    recomputed: int = 0
    workspace: int = 0
    forward: int = 0
    late: int = 0
    cut: int = 0
    weights: int = 0


@dataclass(frozen=True, kw_only=True)
class Skip:
    """One producer-consumer pair of a named value; several consumers share the ``name``."""

    name: str
    source: int
    target: int
    bytes: int
    gradient: bool = True


@dataclass(frozen=True, kw_only=True)
class Value(NamedValue):
    """A named value of a profile with all its consumers; ``bytes`` one way. Its gradient goes back the same hops."""

    source: int
    bytes: int
    gradient: bool

    @property
    def both_ways(self) -> float:
        """Bytes of one hop, forward and backward."""
        return self.bytes * (2.0 if self.gradient else 1.0)


@dataclass(frozen=True, kw_only=True)
class Profile(File):
    """Costs of a model's layers and its skips, for one microbatch size on one device.

    ``backbones``: where there are several, the layers of each; no skip passes between two. ``microbatch_size`` is the
    first one's. ``optimizer_ms_per_gb``: how long the optimizer's step of 10^9 bytes of trained parameters takes, if it
    was measured.
    """

    FORMATS = ("pulse-profile/1",)
    WHAT = "profile"

    name: str
    device: str
    dtype: str
    microbatch_size: Count
    layers: Annotated[tuple[LayerCost, ...], Form(some="layer")]
    skips: Annotated[tuple[Skip, ...], Form(required=True)] = ()
    backbones: Annotated[tuple[BackboneLayers, ...], Form(left_out=True)] = ()
    optimizer_ms_per_gb: Annotated[float, Form(left_out=True)] = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def param_bytes(self) -> int:
        """Of the trained parameters of all layers."""
        return sum(layer.param_bytes for layer in self.layers)

    @property
    def frozen_bytes(self) -> int:
        """Of the frozen parameters of all layers."""
        return sum(layer.frozen_bytes for layer in self.layers)

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The skips, those of one name joined, in order of first appearance."""
        joined: dict[str, list[Skip]] = {}
        for skip in self.skips:
            joined.setdefault(skip.name, []).append(skip)
        return tuple(
            Value(
                name=name,
                source=skips[0].source,
                targets=tuple(sorted(skip.target for skip in skips)),
                bytes=skips[0].bytes,
                gradient=skips[0].gradient,
            )
            for name, skips in joined.items()
        )

    @property
    def knows_halves(self) -> bool:
        """It was measured what a backward in two halves takes."""
        return all(layer.input_grad_ms is not None for layer in self.layers)

    @property
    def state_factor(self) -> int:
        """:func:`state_factor` of the profile's dtype."""
        return state_factor(self.dtype)

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def part(self, index: int) -> Profile:
        """Of one of several backbones alone; skips keep their names."""
        start, end = self.backbones[index].layers
        inside = [
            replace(s, source=s.source - start, target=s.target - start) for s in self.skips if start <= s.source < end
        ]
        return replace(
            self, name=self.backbones[index].name, layers=self.layers[start:end], skips=tuple(inside), backbones=()
        )

    def check_form(self, fields: Fields) -> None:
        if self.dtype not in DTYPES and not self.dtype.startswith("float8"):  # other names would plan fp32's state
            raise fields.error("dtype", f"torch's name of a floating type, one of {', '.join(DTYPES)}")
        parts = self.backbones
        check_parts(fields, "backbones", [p.layers for p in parts], [p.name for p in parts], self.num_layers)
        owners = [index for index, part in enumerate(parts) for _ in range(*part.layers)]
        first: dict[str, Skip] = {}
        seen: set[tuple[str, int]] = set()
        for index, skip in enumerate(self.skips):
            place = f"{fields.where}: skips[{index}] ({skip.name})"
            if not skip.name:
                raise FileError(f"{place}: field 'name': expected a name, found ''")
            if skip.target >= self.num_layers:
                raise FileError(
                    f"{place}: field 'target': expected a layer index below {self.num_layers}, found {skip.target}"
                )
            if skip.target <= skip.source:
                raise FileError(
                    f"{place}: a skip runs forward: expected target > source = {skip.source}, found {skip.target}"
                )
            if owners and owners[skip.source] != owners[skip.target]:
                raise FileError(f"{place}: expected a skip within one backbone, found one between two")
            known = first.setdefault(skip.name, skip)
            if (known.source, known.bytes, known.gradient) != (skip.source, skip.bytes, skip.gradient):
                expected, found = (f"{s.source}, {s.bytes}, {s.gradient}" for s in (known, skip))
                told = "entries of one name share source, bytes and gradient"
                raise FileError(f"{place}: {told}: expected {expected}, found {found}")
            if (skip.name, skip.target) in seen:
                raise FileError(f"{place}: target {skip.target} is listed twice")
            seen.add((skip.name, skip.target))
