"""P=64, M=256: how long generator, simulator and validator take, and whether the search still finds something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from bounds import Bound
from cases import Case, blank, cluster, costs

from deepspeed_pulse.planner import Job, SearchOptions, check
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.listing import Prefer, list_schedule
from deepspeed_pulse.planner.schedules.templates import dualpipev
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.planner.simulator import run, summarize
from deepspeed_pulse.report.words import search_result

PARTS_SECONDS = 20.0


def measure(seconds: float) -> list[Bound]:
    case = Case(name="large", ranks=64, microbatches=256, seconds=seconds, seed=0)
    return [*parts(case), searched(case)]


def parts(case: Case) -> Iterator[Bound]:
    """A closed form, and the list that is built action by action."""
    for name in ("dualpipev", "wave"):
        began = time.perf_counter()
        problem = Problem(blank(case), costs(case), cluster(case))
        if name == "dualpipev":
            order = dualpipev(case.ranks, case.microbatches)
        else:
            order = list_schedule(problem, case.microbatches, prefer=Prefer.FIRST_HOME)
        figures = summarize(problem, run(problem, order))
        check(replace(blank(case), schedule=order), num_layers=2 * case.ranks, values=())
        took = time.perf_counter() - began
        yield Bound(
            promise=f"P={case.ranks} M={case.microbatches}, {name}: generator, simulator and validator under "
            f"{PARTS_SECONDS:g} s",
            figure=f"{took:.1f} s (makespan {figures.makespan_ms:.2f})",
            met=took < PARTS_SECONDS,
        )


def searched(case: Case) -> Bound:
    """Met when the plan says what became of the search, and it is no worse than where it started."""
    found = synthesize(
        blank(case), Job.of(blank(case), costs(case), cluster(case)), SearchOptions(solver_seconds=case.seconds)
    )
    assert found.estimate is not None and found.solver is not None
    said, start = search_result(found), found.solver.generator_step_ms
    return Bound(
        promise=f"P={case.ranks} M={case.microbatches}: {case.seconds:g} s of search improve on the best generator or "
        "say that they did not",
        figure=f"{said}; bound {found.estimate.lower_bound_ms:.6g} ms",
        met=said is not None and start is not None and found.estimate.step_ms <= start * (1 + 1e-9),
    )
