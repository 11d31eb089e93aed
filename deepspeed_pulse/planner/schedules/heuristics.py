"""Known schedules as generators: a problem and a number of microbatches give an order per rank.

============  ==============  ========  =================================================
name          placement       backward  source
============  ==============  ========  =================================================
gpipe         any             either    all forwards, then all backwards (arXiv 1811.06965)
1f1b          linear          whole     warm-up, then one forward, one backward
interleaved   loop            whole     the same over several stages a rank
wave          any             either    earliest start first (PULSE, arXiv 2606.19163)
dualpipev     V               either    see ``templates``
zbv           V               split     see ``templates``
vhalf, vmin   V               split     see ``templates``
mixed         several         either    see ``several``
sequential    several         either    one backbone after the other
============  ==============  ========  =================================================

Split: ``I`` and ``W`` instead of ``B``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from deepspeed_pulse.errors import ConfigError, InfeasibleError, did_you_mean
from deepspeed_pulse.ir.placement import Kind, Placement
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.schedule import Action, Op, Schedule, backward, forward
from deepspeed_pulse.planner.job import SearchOptions
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules import several, templates
from deepspeed_pulse.planner.schedules.listing import Cap, Extra, Prefer, list_schedule

Caps = tuple[Cap | None, ...]

_MANY_ACTIONS = 1500
"""Above so many forwards, fewer orders are tried: planning stays within seconds."""

_HUGE = 10_000
"""Above so many forwards, one order for each memory cap and two without."""


def one_f_one_b(problem: Problem, microbatches: int) -> Schedule:
    """Rank r runs P-1-r forwards ahead, then one forward, one backward in turn; linear placement."""
    ranks = problem.num_ranks
    rows = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - 1 - rank)
        row = [forward(rank, m) for m in range(ahead)]
        for m in range(ahead, microbatches):
            row += [forward(rank, m), backward(rank, m - ahead)]
        row += [backward(rank, m) for m in range(microbatches - ahead, microbatches)]
        rows.append(tuple(row))
    return tuple(rows)


def forward_only(placement: Placement, microbatches: int, extra: Sequence[Collection[int]] = ()) -> Schedule:
    """Forwards for evaluation, any placement: by ``stage + microbatch``, later stages first, in each backbone.

    Every action follows what it waits for in this one global order, so no rank can deadlock. ``extra``: of each
    backbone, the microbatches that run an extra forward; its microbatches come as many later as it has stages.
    """
    every: list[tuple[int, Action]] = []
    for p, some in itertools.zip_longest(placement.backbones, extra, fillvalue=()):
        later = len(p) if some else 0
        every += [(at + m + later, forward(s, m)) for at, s in enumerate(p) for m in range(microbatches)]
        every += [(at + m, Action(s, Op.EXTRA_FORWARD, m)) for at, s in enumerate(p) for m in some]
    order = [action for _, action in sorted(every, key=lambda one: (one[0], -one[1].stage))]
    return tuple(tuple(a for a in order if placement[a.stage] == rank) for rank in range(placement.num_ranks))


def count_cap(problem: Problem, half_stages: int) -> Cap:
    """At most so many (stage, microbatch) pairs in flight on a rank."""
    weights, limits = (1.0,) * problem.num_stages, (float(half_stages),) * problem.num_ranks
    return Cap(weights=weights, limits=limits, unit="stages in flight")


def byte_cap(problem: Problem, limits: tuple[float, ...]) -> Cap:
    """At most so many bytes of activations and received named values on each rank."""
    weights = [problem.costs.activation_bytes[s] + problem.received_bytes(s) for s in range(problem.num_stages)]
    return Cap(weights=tuple(map(float, weights)), limits=limits)


Orders = Iterator[Callable[[], Schedule]]


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A named schedule: where it fits, and the orders it offers under memory caps to try, most frugal first.

    ``orders`` takes the problem, the caps, and whether backward is split.
    """

    fits: Callable[[Placement], bool]
    orders: Callable[[Problem, Caps, bool], Orders]
    needs_split: bool = False


def _gpipe_orders(problem: Problem, caps: Caps, split: bool) -> Orders:
    yield Listing(problem=problem, prefer=Prefer.ALL_FORWARDS, cap=None, split=split)


def _1f1b_orders(problem: Problem, caps: Caps, split: bool) -> Orders:
    yield lambda: one_f_one_b(problem, problem.plan.microbatches)


def _interleaved_orders(problem: Problem, caps: Caps, split: bool) -> Orders:
    yield lambda: templates.interleaved(problem.num_ranks, _stages_a_rank(problem), problem.plan.microbatches)


def _dualpipev_orders(problem: Problem, caps: Caps, split: bool) -> Orders:
    order = templates.dualpipev(problem.num_ranks, problem.plan.microbatches)
    yield lambda: order
    if split:
        yield from _filled(problem, order, 2 * problem.num_ranks + 1, caps)


def _zbv_orders(problem: Problem, caps: Caps, split: bool) -> Orders:
    order = templates.zbv(problem.num_ranks, problem.plan.microbatches)
    yield lambda: order
    yield from _filled(problem, order, 2 * problem.num_ranks, caps)


def _block_orders(block: templates.Block) -> Callable[[Problem, Caps, bool], Orders]:
    def orders(problem: Problem, caps: Caps, split: bool) -> Orders:
        order = block.schedule(problem.num_ranks, problem.plan.microbatches)
        peak = templates.peak_in_flight(order)
        for count in (peak, peak + 1, peak + 2):
            yield from _filled(problem, order, count, caps)

    return orders


def _filled(problem: Problem, order: Schedule, count: int, caps: Caps) -> Orders:
    """The order with each ``W`` where its rank would wait, or where a cap needs it."""
    inputs = templates.without_weights(order)
    for cap in (count_cap(problem, count), *(cap for cap in caps if cap)):
        yield Listing(problem=problem, prefer=Prefer.BACKWARD, cap=cap, split=True, order=inputs)


def _wave_orders(problem: Problem, caps: Caps, split: bool) -> Orders:
    """Counts in flight from half of 1F1B's upwards, with both preferences; then the memory caps, or none."""
    held, microbatches = _stages_a_rank(problem), problem.plan.microbatches
    forwards = problem.num_stages * microbatches
    eighths = (4, 6, 8, 9, 10, 12, 16) if forwards <= _MANY_ACTIONS else (8, 12) if forwards <= _HUGE else ()
    counts = sorted({max(held, problem.num_ranks * held * n // 8) for n in eighths})
    limits = [count_cap(problem, count) for count in counts if count < microbatches * held]
    for cap in (*limits, *caps):
        several = [Prefer.BACKWARD, Prefer.FORWARD, *([] if cap else [Prefer.FIRST_HOME])]
        for prefer in several if forwards <= _HUGE else several[:1] if cap else several[1:]:
            for extra in Extra if problem.extra_actions else (Extra.LAST,):
                yield Listing(problem=problem, prefer=prefer, cap=cap, extra=extra)
                if split:
                    yield Listing(problem=problem, prefer=prefer, cap=cap, split=True, extra=extra)


def frugal_orders(problem: Problem, cap: Cap, split: bool) -> list[Schedule]:
    """Lists under shares of a cap, the most frugal first."""
    found = []
    for eighths in range(2, 9):
        limits = tuple(limit * eighths / 8 for limit in cap.limits)
        for prefer in (Prefer.FORWARD, Prefer.BACKWARD):
            with contextlib.suppress(InfeasibleError):
                part = Cap(weights=cap.weights, limits=limits, unit=cap.unit)
                found.append(list_schedule(problem, problem.plan.microbatches, prefer=prefer, cap=part, split=split))
    return list(dict.fromkeys(found))


def _stages_a_rank(problem: Problem) -> int:
    return max(len(problem.plan.stages_of(rank)) for rank in range(problem.num_ranks))


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A list schedule that can be made; those of one problem that are equal make the same order."""

    problem: Problem = field(compare=False)
    prefer: Prefer
    cap: Cap | None
    split: bool = False
    order: Schedule | None = None
    extra: Extra = Extra.LAST

    def __call__(self) -> Schedule:
        return list_schedule(
            self.problem,
            self.problem.plan.microbatches,
            prefer=self.prefer,
            cap=self.cap,
            split=self.split,
            order=self.order,
            extra=self.extra,
        )


GENERATORS: dict[str, Generator] = {
    "1f1b": Generator(fits=lambda placement: placement.kind is Kind.LINEAR, orders=_1f1b_orders),
    "interleaved": Generator(fits=lambda placement: placement.is_loop, orders=_interleaved_orders),
    "wave": Generator(fits=lambda placement: True, orders=_wave_orders),
    "dualpipev": Generator(fits=lambda placement: placement.is_v, orders=_dualpipev_orders),
    "zbv": Generator(fits=lambda placement: placement.is_v, orders=_zbv_orders, needs_split=True),
    "vhalf": Generator(fits=lambda placement: placement.is_v, orders=_block_orders(templates.V_HALF), needs_split=True),
    "vmin": Generator(fits=lambda placement: placement.is_v, orders=_block_orders(templates.V_MIN), needs_split=True),
    "mixed": Generator(fits=lambda placement: len(placement.starts) > 1, orders=several.mixed_orders),
    "sequential": Generator(fits=lambda placement: len(placement.starts) > 1, orders=several.sequential_orders),
    "gpipe": Generator(fits=lambda placement: True, orders=_gpipe_orders),
}


def halves_tried(options: SearchOptions, profile: Profile) -> tuple[bool, ...]:
    """Backwards that are whole, in halves, or both."""
    if options.split_backward is not None:
        return (options.split_backward,)
    if options.schedule in GENERATORS and GENERATORS[options.schedule].needs_split:
        return (True,)
    return (False, True) if profile.knows_halves else (False,)


def not_available(schedule: str) -> str:
    """Of a name that no generator has, in words."""
    names = ", ".join(GENERATORS)
    return f'schedule {schedule!r} is not available{did_you_mean(schedule, GENERATORS)}; available: "auto", {names}'


def generators_for(schedule: str, placement: Placement, *, split: bool = False) -> dict[str, Generator]:
    """The generators that ``schedule`` ("auto" or a name) allows on a placement, with backward split or not.

    Raises:
        ConfigError: the name is not available or does not fit; lists those that do.
    """
    fitting = {name: g for name, g in GENERATORS.items() if g.fits(placement) and (split or not g.needs_split)}
    place = f"placement {placement.name} of {placement.num_ranks} ranks"
    if schedule == "auto":
        return fitting
    if schedule not in GENERATORS:
        raise ConfigError(f"{not_available(schedule)}; those that fit {place}: {', '.join(fitting)}")
    if schedule not in fitting:
        needs = " without split backward" if GENERATORS[schedule].fits(placement) else ""
        raise ConfigError(f"schedule {schedule!r} does not fit {place}{needs}; those that do: {', '.join(fitting)}")
    return {schedule: GENERATORS[schedule]}
