"""Layers that run again in backward instead of keeping what they saved: less memory, more time.

A recomputed layer keeps its input and what it stashes. Its backward runs its forward once more, and holds what that
saves for as long as it needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Held, LayerCost, Profile
from deepspeed_pulse.planner.cost import input_grad_ms, weight_grad_ms

CHOICES = ("none", "all", "auto")


def recomputed_layers(profile: Profile, choice: str | Sequence[int | str]) -> tuple[int, ...]:
    """Indices of the layers that ``choice`` names: "none", "all", or a list of indices and names.

    Raises:
        ConfigError: a layer that the profile does not have, or a name that several have.
    """
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise ConfigError(
                f"recompute: expected one of {', '.join(CHOICES)} or a list of layers, found {choice!r}"
                f"{did_you_mean(choice, CHOICES)}"
            )
        return tuple(range(profile.num_layers)) if choice == "all" else ()
    names = [layer.name for layer in profile.layers]
    return tuple(sorted({_index(names, layer) for layer in choice}))


def _index(names: list[str], layer: int | str) -> int:
    if isinstance(layer, str) and layer not in names and layer.isascii() and layer.isdigit() and len(layer) < 10:
        layer = int(layer)
    if isinstance(layer, str):
        if (count := names.count(layer)) != 1:
            raise ConfigError(f"recompute: {count} layers are called {layer!r}{did_you_mean(layer, names)}")
        return names.index(layer)
    if not 0 <= layer < len(names):
        raise ConfigError(f"recompute: expected layer indices 0..{len(names) - 1}, found {layer}")
    return layer


def with_recompute(profile: Profile, layers: Collection[int]) -> Profile:
    """The profile as it is when ``layers`` are recomputed."""
    if not layers:
        return profile
    kept, stash, again = _kept_bytes(profile), {value.source for value in profile.values}, frozenset(layers)
    changed = (
        _recomputed(x, kept[index], index in stash) if index in again else x for index, x in enumerate(profile.layers)
    )
    return replace(profile, layers=tuple(changed))


def _recomputed(layer: LayerCost, kept: int, stashes: bool) -> LayerCost:
    backward, inputs = layer.backward_ms + layer.forward_ms, input_grad_ms(layer) + layer.forward_ms
    return replace(
        layer,
        backward_ms=backward,
        weight_grad_ms=weight_grad_ms(layer),  # of the backward alone, not of the forward in it
        input_grad_ms=inputs,
        activation_bytes=kept,
        unkept_output_bytes=layer.unkept_output_bytes if stashes else None,
    )


def _kept_bytes(profile: Profile) -> list[int]:
    """Per layer, its input (unknown and left out for the first of a backbone) and what it stashes."""
    kept = [_read_bytes(profile, index) for index in range(profile.num_layers)]
    for value in profile.values:
        kept[value.source] += value.bytes
    return kept


def _read_bytes(profile: Profile, layer: int) -> int:
    """What a layer reads of the one before; 0 for the first of the model, or of a backbone."""
    first = {0, *(part.layers[0] for part in profile.backbones)}
    return 0 if layer in first else profile.layers[layer - 1].output_bytes


def held_in_actions(
    profile: Profile, plan: Plan, *, split: bool = False, interval: int = 1, fresh: bool = False
) -> tuple[Held, ...]:
    """Per stage, when it holds most: one run of ``interval`` recomputed layers after another, or a layer that is kept.

    With ``split`` the weight half needs the activations of all layers. ``fresh``: a backward makes gradients of weights
    where none are, so that what layers free is taken by what they make.
    """
    found, recomputed = [], frozenset(plan.recompute)
    for stage in range(plan.num_stages):
        own = plan.stage_layers(stage)
        layers = [profile.layers[i] for i in own]
        freed = [0 if i in recomputed else profile.layers[i].activation_bytes for i in own]
        made = [x.param_bytes if fresh else 0 for x in layers]
        left = [size - more for size, more in zip(freed, made, strict=True)]
        works = [x.workspace_bytes + more for x, more in zip(layers, made, strict=True)]
        beyond = dict(zip(own, _beyond(works, left), strict=True))
        again = [i for i in own if i in recomputed]
        runs = [again[a:b] for a, b in _runs(again, interval)]
        forward = _forward_workspace(profile, own, runs)
        held = [Held(_made_again([profile.layers[i] for i in run]), max(beyond[i] for i in run)) for run in runs]
        if split:
            late, most = _late_bytes(layers)
            cut = _cut_bytes(profile, own, recomputed)
            left = [size + x.late_bytes for size, x in zip(left, layers, strict=True)]
            works = [
                _or(x.weight_workspace_bytes, x.workspace_bytes) + more for x, more in zip(layers, made, strict=True)
            ]
            weights = max(_beyond(works, left))
            remade = sum(run.recomputed for run in held)
            found.append(Held(remade, most - late, forward, late=late, cut=cut, weights=weights))
        else:
            kept = Held(0, max((size for i, size in beyond.items() if i not in recomputed), default=0))
            most_held = max([*held, kept], key=lambda one: one.recomputed + one.workspace)
            found.append(replace(most_held, forward=forward))
    return tuple(found)


def _forward_workspace(profile: Profile, own: Sequence[int], runs: Sequence[Sequence[int]]) -> int:
    """What a stage's forward works with at most, beyond what it keeps; ``runs``: of layers that run again.

    These keep what the first one of each run reads.
    """
    layers = [profile.layers[i] for i in own]
    working = [_or(x.forward_workspace_bytes, x.workspace_bytes) for x in layers]
    kept = [x.activation_bytes for x in layers]
    for run in runs:
        for i in run:
            at, read = i - own[0], _read_bytes(profile, i)
            working[at] = _or(layers[at].rerun_workspace_bytes, working[at]) + (0 if i == run[0] else read)
            kept[at] = read if i == run[0] else 0
    return max(_beyond(working, kept))


def _beyond(workspace: Sequence[int], freed: Sequence[int]) -> list[int]:
    """What layers of a stage work with beyond what all of them keep.

    When a layer's backward runs, what later ones kept is free already, and its workspace takes that room first; in
    forward they have not kept it yet.
    """
    later = reversed(list(accumulate(reversed(freed[1:]), initial=0)))
    return [max(0, size - room) for size, room in zip(workspace, later, strict=True)]


def _or(size: int | None, otherwise: int) -> int:
    return otherwise if size is None else size


def _late_bytes(layers: Sequence[LayerCost]) -> tuple[int, int]:
    """What the input halves of a stage's layers keep in the end, and what is held at most on the way there.

    They run from the last layer to the first: while one works, those before it have kept nothing yet.
    """
    late = most = 0
    for layer in reversed(layers):
        late += layer.late_bytes
        most = max(most, late + layer.halves_workspace_bytes)
    return late, most


def _cut_bytes(profile: Profile, own: Sequence[int], recomputed: Collection[int]) -> int:
    """Outputs that layers of a stage read from one another and do not keep for backward, where that was measured."""
    total = 0
    for i in own[1:]:
        layer = profile.layers[i]
        if layer.rerun_bytes is not None and i not in recomputed:
            total += max(0, profile.layers[i - 1].output_bytes - (layer.activation_bytes - layer.rerun_bytes))
    return total


def _made_again(run: Sequence[LayerCost]) -> int:
    """What the forwards of one run keep, without what is there already: what its first layer read."""
    first = run[0].activation_bytes if run[0].rerun_bytes is None else run[0].rerun_bytes
    return first + sum(layer.activation_bytes for layer in run[1:])


def _runs(layers: Sequence[int], interval: int) -> Iterator[tuple[int, int]]:
    """Positions of at most ``interval`` layers that follow one another."""
    start = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end] != layers[end - 1] + 1 or end - start == interval:
            yield start, end
            start = end


def cheapest_first(profile: Profile) -> list[int]:
    """Layers worth recomputing, those that free most bytes for a millisecond of forward first."""
    kept = _kept_bytes(profile)
    freed = {i: layer.activation_bytes - kept[i] for i, layer in enumerate(profile.layers)}
    worth = [i for i, size in freed.items() if size > 0]
    return sorted(worth, key=lambda i: (profile.layers[i].forward_ms / freed[i], i))
