"""Profiles of several backbones as the profile of one list."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.backbones import BackboneLayers, value_name
from deepspeed_pulse.ir.profile import Profile


def joined_profile(profiles: Sequence[Profile], names: Sequence[str] | None = None) -> Profile:
    """The profile of several backbones that train together; of one, its own.

    ``names``: of the backbones; left out, the profiles' own.

    Raises:
        ConfigError: two have one name, or they are of different devices or dtypes.
    """
    if len(profiles) == 1:
        return profiles[0]
    names = [profile.name for profile in profiles] if names is None else list(names)
    _check_alike(profiles, names)
    starts = tuple(itertools.accumulate((p.num_layers for p in profiles), initial=0))
    return replace(
        profiles[0],
        name=" + ".join(names),
        layers=tuple(
            replace(layer, name=value_name(name, layer.name))
            for name, profile in zip(names, profiles, strict=True)
            for layer in profile.layers
        ),
        skips=tuple(
            replace(skip, name=value_name(name, skip.name), source=skip.source + start, target=skip.target + start)
            for name, start, profile in zip(names, starts[:-1], profiles, strict=True)
            for skip in profile.skips
        ),
        backbones=tuple(
            BackboneLayers(name=name, layers=(a, b))
            for name, (a, b) in zip(names, itertools.pairwise(starts), strict=True)
        ),
        optimizer_ms_per_gb=_mean_of_bytes(profiles),
    )


def _mean_of_bytes(profiles: Sequence[Profile]) -> float:
    """The optimizer's time for a byte of any of them."""
    num_bytes = sum(profile.param_bytes for profile in profiles)
    return sum(p.optimizer_ms_per_gb * p.param_bytes for p in profiles) / num_bytes if num_bytes else 0.0


def joined_by_size(profiles: Sequence[Profile]) -> list[Profile]:
    """Profiles of one model at several microbatch sizes as they are; of several, by their names, joined at each size.

    Raises:
        ConfigError: backbones have not the same sizes, or what :func:`joined_profile` refuses.
    """
    by_name: dict[str, list[Profile]] = {}
    for profile in profiles:
        by_name.setdefault(profile.name, []).append(profile)
    if len(by_name) < 2:
        return list(profiles)
    sizes = {name: sorted(profile.microbatch_size for profile in own) for name, own in by_name.items()}
    if len({tuple(found) for found in sizes.values()}) > 1 or any(len(set(s)) < len(s) for s in sizes.values()):
        found = "; ".join(f"{name} of {', '.join(map(str, own))}" for name, own in sizes.items())
        raise ConfigError(
            "profiles: expected of each backbone one for each of the same microbatch sizes, found "
            f"{found}; profiles of different names are backbones that train together, those of one model have one name"
        )
    first = next(iter(sizes.values()))
    ordered = [sorted(own, key=lambda profile: profile.microbatch_size) for own in by_name.values()]
    return [joined_profile([own[at] for own in ordered]) for at in range(len(first))]


def _check_alike(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ConfigError(
            f"backbones: expected profiles of different names, found {twice[0]!r} twice; rename one of them"
        )
    first = profiles[0]
    for name, other in zip(names, profiles, strict=True):
        for what in ("device", "dtype"):
            if getattr(other, what) != getattr(first, what):
                raise ConfigError(
                    f"backbones: expected profiles of one {what}, found {getattr(first, what)!r} of {names[0]} and "
                    f"{getattr(other, what)!r} of {name}; measure both alike"
                )
