"""Instances that are scheduled, and what comes out: makespan, bound, and the generators under the same simulator.

Half-stage units: a stage's forward takes 1, its backward 2.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.planner import Job, SearchOptions, check
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import generators_for
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.planner.simulator import run, summarize

STASH, HIDDEN = 1000, 10
INSTANT = Link(bandwidth_gb_per_s=1e9, latency_us=0.0)
CAPPED_SEEDS = 5
"""Of problems under a cap with backward in halves: they take most of the time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a problem, the seconds it may take, and the makespan it should reach (None: it is only compared)."""

    name: str
    ranks: int
    microbatches: int
    seconds: float
    cap: int | None = None
    split: bool = False
    seed: int | None = None
    share: float = 0.0
    """Of a forward, that a message takes."""

    target: float | None = None

    @property
    def sizes(self) -> str:
        messages = f", messages {100 * self.share:g} %" if self.share else ""
        cap = "no cap" if self.cap is None else f"cap {self.cap}"
        return f"P={self.ranks} M={self.microbatches}, {cap}{messages}"

    @property
    def link(self) -> Link:
        """Half of what a message takes is latency, half bandwidth."""
        if not self.share:
            return INSTANT
        return Link(bandwidth_gb_per_s=HIDDEN / (self.share / 2 * 1e-3) / 1e9, latency_us=self.share / 2 * 1e3)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``seconds``: until the search ended; ``found_after``: until it had the order that it ended with."""

    case: Case
    generators: dict[str, float]
    makespan: float
    bound: float
    peak: int
    by: str
    seconds: float
    found_after: float

    @property
    def gap(self) -> float:
        return max(0.0, self.makespan / self.bound - 1)

    @property
    def reached(self) -> bool:
        return self.case.target is None or self.makespan <= self.case.target + 1e-6

    @property
    def never_worse(self) -> bool:
        return self.makespan <= min(self.generators.values()) * (1 + 1e-9)

    def cells(self) -> list[str]:
        case = self.case
        others = ", ".join(f"{name} {span:.2f}" for name, span in sorted(self.generators.items(), key=lambda e: e[1]))
        return [
            case.name + ("" if case.seed is None else f", seed {case.seed}"),
            f"{100 * case.share:g} %" if case.share else "",
            f"{case.ranks}, {case.microbatches}",
            "" if case.cap is None else str(case.cap),
            "" if case.target is None else f"{case.target:g}",
            f"**{self.makespan:.2f}**",
            f"{self.bound:.2f}",
            f"{100 * self.gap:.2f} %",
            str(self.peak),
            self.by,
            others,
            f"{self.found_after:.1f} of {self.seconds:.1f}",
            "yes" if self.reached and self.never_worse else "NO",
        ]


COLUMNS = (
    "problem", "messages", "P, M", "cap", "target", "found", "bound", "gap", "peak", "by", "generators that fit",
    "s: found, ended", "met",
)  # fmt: skip


def uncapped(seeds: int) -> Iterator[Case]:
    for ranks, microbatches, bound in ((4, 8, 57), (4, 16, 105), (8, 16, 117), (8, 32, 213)):
        yield Case(name="uniform", ranks=ranks, microbatches=microbatches, seconds=60, target=bound)


def capped(seeds: int) -> Iterator[Case]:
    targets = ((4, 8, 8, 60), (4, 8, 6, 63), (4, 16, 9, 107), (4, 16, 8, 112), (8, 16, 17, 123), (8, 16, 16, 125))
    for ranks, microbatches, cap, target in targets:
        yield Case(name="uniform, capped", ranks=ranks, microbatches=microbatches, seconds=60, cap=cap, target=target)


def split(seeds: int) -> Iterator[Case]:
    for ranks, m, cap, target in ((4, 8, 8, 51), (8, 16, 16, 103), (8, 8, None, 58)):
        yield Case(name="uniform, split", ranks=ranks, microbatches=m, seconds=60, cap=cap, split=True, target=target)


def uneven(seeds: int) -> Iterator[Case]:
    """Stage times x U(0.6, 1.4), one factor a stage."""
    for ranks, microbatches in ((4, 8), (8, 16)):
        for cap, seconds in ((None, 60), (2 * ranks + 1, 20)):
            for seed in range(seeds):
                yield Case(name="uneven", ranks=ranks, microbatches=microbatches, seconds=seconds, cap=cap, seed=seed)


def uneven_split(seeds: int) -> Iterator[Case]:
    """Backward in halves: how near the bound without a cap, and whether a published order is faster under one."""
    for ranks in (4, 8, 16):
        for share in (0.0, 0.05, 0.3):
            one_more = () if share else (2 * ranks + 1,)
            for cap in (None, *one_more, 2 * ranks, 3 * ranks // 2, ranks):
                for seed in range(seeds if cap is None or cap > 2 * ranks else min(seeds, CAPPED_SEEDS)):
                    yield Case(
                        name="uneven, split", ranks=ranks, microbatches=2 * ranks, seconds=15, cap=cap, split=True,
                        seed=seed, share=share,
                    )  # fmt: skip


def messages(seeds: int) -> Iterator[Case]:
    """A message takes 0.3 of a forward."""
    for ranks, m in ((4, 8), (8, 16)):
        for seed in (None, *range(min(seeds, 3))):
            for cap in (None, 2 * ranks + 1):
                yield Case(name="messages", ranks=ranks, microbatches=m, seconds=20, seed=seed, share=0.3, cap=cap)


GROUPS: dict[str, Callable[[int], Iterator[Case]]] = {
    "uncapped": uncapped,
    "capped": capped,
    "split": split,
    "messages": messages,
    "uneven": uneven,
    "uneven_split": uneven_split,
}


def costs(case: Case) -> Profile:
    rng = random.Random(case.seed)
    times = [1.0 if case.seed is None else rng.uniform(0.6, 1.4) for _ in range(2 * case.ranks)]
    layers = tuple(
        LayerCost(
            name=f"stage{i}",
            forward_ms=t,
            backward_ms=2 * t,
            param_bytes=0,
            activation_bytes=STASH,
            output_bytes=HIDDEN if case.share else 0,
        )
        for i, t in enumerate(times)
    )
    return Profile(name="bench", device="none", dtype="float32", microbatch_size=1, layers=layers, skips=())


def blank(case: Case) -> Plan:
    """One layer a stage on a V, nothing scheduled."""
    return Plan(
        pipeline_ranks=case.ranks,
        data_parallel=1,
        microbatches=case.microbatches,
        microbatch_size=1,
        boundaries=tuple(range(2 * case.ranks + 1)),
        placement=Placement.wave(case.ranks),
        schedule=((),) * case.ranks,
    )


def cluster(case: Case) -> Cluster:
    return Cluster(
        name="bench",
        nodes=1,
        ranks_per_node=case.ranks,
        memory_bytes=10**15,
        intra_node=case.link,
        inter_node=case.link,
    )


def limit(case: Case) -> int | None:
    """Hidden states that wait are no stash: with messages there is room for them beside it."""
    if case.cap is None:
        return None
    return case.cap * STASH + (STASH - 1 if case.share else 0)


def generated(case: Case) -> dict[str, float]:
    """The best makespan of each generator whose order fits the cap."""
    memory, problem = limit(case), Problem(blank(case), costs(case), cluster(case))
    found: dict[str, float] = {}
    for name, generator in generators_for("auto", problem.placement, split=case.split).items():
        for order in generator.orders(problem, (None,), case.split):
            try:
                figures = summarize(problem, run(problem, order()))
            except InfeasibleError:
                continue
            if memory is None or max(figures.peak_bytes) <= memory:
                found[name] = min(found.get(name, figures.makespan_ms), figures.makespan_ms)
    return found


def solve(case: Case) -> Row:
    """Synthesise, validate, and compare."""
    profile, began = costs(case), time.perf_counter()
    seen: list[tuple[float, float]] = []
    found = synthesize(
        blank(case),
        Job.of(blank(case), profile, cluster(case), memory_bytes=limit(case)),
        SearchOptions(split_backward=case.split, solver_seconds=case.seconds),
        progress=lambda best, bound: seen.append((best, time.perf_counter() - began)),
    )
    took = time.perf_counter() - began
    check(found, num_layers=profile.num_layers, values=())
    assert found.estimate is not None
    makespan = found.estimate.makespan_ms
    return Row(
        case=case,
        generators=generated(case),
        makespan=makespan,
        bound=found.estimate.lower_bound_ms,
        peak=max(_in_flight(row) for row in found.schedule),
        by=by(found),
        seconds=took,
        found_after=next(at for best, at in seen if best <= makespan * (1 + 1e-9)),
    )


def by(plan: Plan) -> str:
    """``wave``: a generator, with nothing left to search; else what the search made of the best generator."""
    solver, estimate = plan.solver, plan.estimate
    assert solver is not None and estimate is not None
    if solver.generator is None or solver.generator_step_ms is None:
        return f"{solver.name}, {'at the bound' if solver.optimal else 'not searched'}"
    share = 1 - estimate.step_ms / solver.generator_step_ms
    if share > 1e-9:
        return f"{solver.name}, {100 * share:.2g} % below {solver.generator}"
    return f"the search did not improve on {solver.generator}"


def _in_flight(row: tuple[object, ...]) -> int:
    """Most forwards of a rank whose last backward action has not ended."""
    live = peak = 0
    for op in (str(action).strip("0123456789") for action in row):
        live += {"F": 1, "I": 0}.get(op, -1)
        peak = max(peak, live)
    return peak
