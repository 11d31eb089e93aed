"""Numbers, sizes and ranges as a person reads them, the same in every table and picture."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.fill import Fill
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.ir.units import gigabytes as gigabytes

_SHOWN = 8
"""Names in a line; the rest is counted."""

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


def shortened(name: str, letters: int = 34) -> str:
    """The end of a long name, which tells layers apart better than its beginning.

    >>> shortened("down_blocks.0.resnets.1", 12)
    '…0.resnets.1'
    """
    return name if len(name) <= letters else "…" + name[1 - letters :]


def count(number: int) -> str:
    """``860``, ``12.3k``, ``865M``, ``1.73B``: three digits.

    >>> [count(n) for n in (860, 12_345, 865_000_000, 1_730_000_000)]
    ['860', '12.3k', '865M', '1.73B']
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def megabytes(num_bytes: float) -> str:
    """``0 MB``, ``0.25 MB``, ``13.6 MB``: MB of 1e6 bytes, three digits.

    >>> [megabytes(n) for n in (0, 250_000, 13_611_000, 916_640_000)]
    ['0 MB', '0.25 MB', '13.6 MB', '917 MB']
    """
    return f"{num_bytes / 1e6:.3g} MB" if num_bytes < 999.5e6 else f"{num_bytes / 1e6:.0f} MB"


def counted(number: int, noun: str, several: str | None = None) -> str:
    """``1 rank``, ``4 ranks``; ``several``: where an s is not enough."""
    return f"{number} {noun if number == 1 else several or noun + 's'}"


def milliseconds(ms: float) -> str:
    """``0.52 ms``, ``59.7 ms``, ``1.32 s``."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s" if ms < 1e6 else f"{ms / 1000:.0f} s"
    return f"{ms:.3g} ms"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def schedule(name: str) -> str:
    """A schedule's name; "wave" stands for an order that runs on any placement.

    >>> schedule("wave"), schedule("1f1b")
    ('wave (list scheduling)', '1f1b')
    """
    return "wave (list scheduling)" if name == "wave" else name


def search_result(plan: Plan) -> str | None:
    """What a search made of the best generator's order; None where none ran.

    ``the search did not improve on dualpipev (step 230 ms)``,
    ``the search shortened the step of dualpipev, the best generator, by 9.4 %: 64.2 ms to 58.1 ms``.
    """
    solver, estimate = plan.solver, plan.estimate
    if solver is None or estimate is None or solver.generator is None or solver.generator_step_ms is None:
        return None
    before, after = solver.generator_step_ms, estimate.step_ms
    if after < before * (1 - 1e-9):
        share = f"{100 * (1 - after / before):.2g} %"
        return (
            f"the search shortened the step of {solver.generator}, the best generator, by {share}: "
            f"{before:.6g} ms to {after:.6g} ms"
        )
    other = "" if solver.name == solver.generator else "; its order is no longer and fits a little better"
    return f"the search did not improve on {solver.generator} (step {before:.6g} ms){other}"


def stage_layers(plan: Plan, stage: int, names: Sequence[str] | None = None) -> str:
    """``4-6 (down.1 .. mid)``: indices of a stage's layers, and the names of its first and last."""
    layers = plan.stage_layers(stage)
    first, last = layers[0], layers[-1]
    if first == last:
        return str(first) if names is None else f"{first} ({shortened(names[first])})"
    named = "" if names is None else f" ({shortened(names[first])} .. {shortened(names[last])})"
    return f"{first}-{last}{named}"


def without_backbones(plan: Plan, names: Sequence[str] | None) -> Sequence[str] | None:
    """Names of layers as their own backbone calls them: ``base.mid`` of ``base`` is ``mid``."""
    if names is None or not plan.backbones:
        return names
    owners = [plan.backbones[plan.placement.backbone_of(plan.stage_of(index))].name for index in range(len(names))]
    return [name.removeprefix(f"{owner}.") for name, owner in zip(names, owners, strict=True)]


def recomputed(plan: Plan, names: Sequence[str] | None = None) -> str | None:
    """``recomputed in backward: 3 of 46 layers (down.0, down.1, mid)``; None where nothing is."""
    if not plan.recompute:
        return None
    listed = _listed([str(i) if names is None else names[i] for i in plan.recompute])
    return f"recomputed in backward: {len(plan.recompute)} of {plan.num_layers} layers ({listed})"


def summed(plan: Plan) -> str | None:
    """``gradients summed in buckets of 0.25 MB``; None where these are of the usual size, or nothing is summed so."""
    if plan.data_parallel == 1 or plan.bucket_bytes == BUCKET_BYTES:
        return None
    return f"gradients summed in buckets of {megabytes(plan.bucket_bytes)}"


def sent_values(plan: Plan) -> str | None:
    """``sent between ranks: 2 of 13 named values (skip3, skip4)``; None where all stay."""
    sent = [route.name for route in plan.routes if route.hops]
    return f"sent between ranks: {len(sent)} of {len(plan.routes)} named values ({_listed(sent)})" if sent else None


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])


def filled(fill: Fill, microbatches: int) -> str:
    """``frozen in idle time, for the next step: latents, text (76.8 ms of work on 4 ranks, by greedy)``."""
    names = ", ".join(part.name for part in fill.parts)
    ranks = sum(bool(fill.runs_of(rank)) for rank in range(len(fill.rows)))
    solver = "" if fill.solver is None else f", by {fill.solver}"
    work = milliseconds(fill.work_ms(microbatches))
    return f"frozen in idle time, for the next step: {names} ({work} of work on {counted(ranks, 'rank')}{solver})"


def param_counts(profile: Profile) -> tuple[int, ...]:
    """Parameters of each layer, from its bytes and the profile's dtype."""
    size = _ELEMENT_BYTES.get(profile.dtype, 4)
    return tuple((layer.param_bytes + layer.frozen_bytes) // size for layer in profile.layers)


def profile_title(profile: Profile) -> str:
    return f"{profile.name}: {profile.num_layers} layers, {profile.dtype}, microbatches of {profile.microbatch_size}"


def profile_times(profile: Profile) -> str:
    forward = sum(layer.forward_ms for layer in profile.layers)
    backward = sum(layer.backward_ms for layer in profile.layers)
    return f"forward {milliseconds(forward)}, backward {milliseconds(backward)}"


def summary(timeline: Timeline) -> str:
    """Makespan and bubble ratio on one line."""
    return f"makespan {milliseconds(timeline.makespan_ms)}, bubble {percent(timeline.bubble_ratio)}"
