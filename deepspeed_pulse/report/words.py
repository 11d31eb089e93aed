"""Numbers, sizes and ranges as a person reads them, the same in every table and picture."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.timeline import Timeline

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


def count(number: int) -> str:
    """``860``, ``12.3k``, ``865M``, ``1.73B``: three digits.

    >>> [count(n) for n in (860, 12_345, 865_000_000, 1_730_000_000)]
    ['860', '12.3k', '865M', '1.73B']
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def gigabytes(num_bytes: float) -> str:
    """GB of 1e9 bytes; small sizes keep three digits."""
    gb = num_bytes / 1e9
    return f"{gb:.2f}" if gb >= 0.1 or gb == 0 else f"{gb:.2g}"


def milliseconds(ms: float) -> str:
    """``0.52 ms``, ``59.7 ms``, ``1.32 s``."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s" if ms < 1e6 else f"{ms / 1000:.0f} s"
    return f"{ms:.3g} ms"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def indices(values: Sequence[int]) -> str:
    """Ascending indices with runs joined.

    >>> indices((0, 1, 2, 7))
    '0-2, 7'
    """
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def layer_ranges(plan: Plan, rank: int, names: Sequence[str] | None = None) -> str:
    """Layers of a rank, one run per stage, with the name of each run's first and last layer."""
    runs = []
    for stage in plan.stages_of(rank):
        layers = plan.stage_layers(stage)
        text = indices(layers)
        if names is not None:
            first, last = names[layers[0]], names[layers[-1]]
            text += f" ({first})" if first == last else f" ({first} .. {last})"
        runs.append(text)
    return "\n".join(runs)


def param_counts(profile: Profile) -> tuple[int, ...]:
    """Parameters of each layer, from its bytes and the profile's dtype."""
    size = _ELEMENT_BYTES.get(profile.dtype, 4)
    return tuple(layer.param_bytes // size for layer in profile.layers)


def summary(timeline: Timeline) -> str:
    """Makespan and bubble ratio on one line."""
    return f"makespan {milliseconds(timeline.makespan_ms)}, bubble {percent(timeline.bubble_ratio)}"
