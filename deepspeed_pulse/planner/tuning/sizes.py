"""One model at several microbatch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.profile import LayerCost, Profile


class Sizes:
    """Profiles of one model by microbatch size.

    Where only one is given, multiples of its size are scaled from it: times and sizes of tensors in proportion. A
    device is rarely slower per sample with larger microbatches, so what is scaled is on the safe side; smaller ones
    than measured would not be, and are not made up.

    Raises:
        ConfigError: the profiles are of different models or dtypes, or two have one size.
    """

    def __init__(self, profiles: Sequence[Profile]) -> None:
        if not profiles:
            raise ConfigError("profiles: expected at least one profile, found none")
        for other in profiles[1:]:
            _check_same_model(profiles[0], other)
        self._given = {profile.microbatch_size: profile for profile in profiles}
        self.in_proportion = len(profiles) == 1
        """All costs are one profile's, times a number."""
        if len(self._given) < len(profiles):
            found = ", ".join(str(profile.microbatch_size) for profile in profiles)
            raise ConfigError(f"profiles: expected one for each microbatch size, found sizes {found}")

    @property
    def smallest(self) -> Profile:
        return self._given[min(self._given)]

    def dividing(self, share: int) -> tuple[int, ...]:
        """Microbatch sizes to try for so many samples: those given, or multiples of one, that the share is made of."""
        first = self.smallest.microbatch_size
        sizes = range(first, share + 1, first) if self.in_proportion else sorted(self._given)
        return tuple(size for size in sizes if share % size == 0)

    def has(self, size: int) -> bool:
        """A profile was given for the size, or the one that was given can be scaled to it."""
        return size in self._given or (self.in_proportion and size % self.smallest.microbatch_size == 0)

    @property
    def described(self) -> str:
        """Which there are, in words."""
        if self.in_proportion:
            return f"there is one for {self.smallest.microbatch_size}, which stands for its multiples"
        return f"there are some for {', '.join(map(str, sorted(self._given)))}"

    def at(self, size: int) -> Profile:
        """The profile for a microbatch size that there is (:meth:`has`); a scaled one says so as its device."""
        if size not in self._given:
            self._given[size] = scaled(self.smallest, size)
        return self._given[size]


def scaled(profile: Profile, size: int) -> Profile:
    """The profile in proportion for a multiple of its microbatch size."""
    times, rest = divmod(size, profile.microbatch_size)
    assert times and not rest
    return replace(
        profile,
        device=f"{profile.device}, scaled from microbatches of {profile.microbatch_size}",
        microbatch_size=size,
        layers=tuple(_scaled(layer, times) for layer in profile.layers),
        skips=tuple(replace(skip, bytes=skip.bytes * times) for skip in profile.skips),
    )


def _scaled(layer: LayerCost, times: int) -> LayerCost:
    return replace(
        layer,
        forward_ms=layer.forward_ms * times,
        backward_ms=layer.backward_ms * times,
        weight_grad_ms=None if layer.weight_grad_ms is None else layer.weight_grad_ms * times,
        input_grad_ms=None if layer.input_grad_ms is None else layer.input_grad_ms * times,
        activation_bytes=layer.activation_bytes * times,
        workspace_bytes=layer.workspace_bytes * times,
        forward_workspace_bytes=_times(layer.forward_workspace_bytes, times),
        rerun_bytes=_times(layer.rerun_bytes, times),
        rerun_workspace_bytes=_times(layer.rerun_workspace_bytes, times),
        late_bytes=layer.late_bytes * times,
        halves_workspace_bytes=layer.halves_workspace_bytes * times,
        weight_workspace_bytes=_times(layer.weight_workspace_bytes, times),
        output_bytes=layer.output_bytes * times,
        unkept_output_bytes=_times(layer.unkept_output_bytes, times),
    )


def _times(size: int | None, times: int) -> int | None:
    return None if size is None else size * times


def _check_same_model(first: Profile, other: Profile) -> None:
    theirs = _facts(other)
    for what, here in _facts(first).items():
        there = theirs[what]
        if here != there:
            shown = f": {here} and {there}" if len(f"{here}{there}") < 80 else ""
            raise ConfigError(
                f"profiles: expected one model at several microbatch sizes, found two ({first.name!r} of "
                f"{first.microbatch_size}, {other.name!r} of {other.microbatch_size}) that differ in {what}{shown}"
            )


def _facts(profile: Profile) -> dict[str, object]:
    return {
        "dtype": profile.dtype,
        "number of layers": profile.num_layers,
        "layers' parameters": [(layer.param_bytes, layer.frozen_bytes) for layer in profile.layers],
        "named values": [(skip.name, skip.source, skip.target, skip.gradient) for skip in profile.skips],
    }
