"""Small jobs of every kind and what the planner answers to each, kept in ``answers.json``.

A change that is not meant to change results must leave that file as it is; one that is meant to shows there which
answers it changes. It is written anew by

    PYTHONPATH=tests python tests/planner/answers.py

once ``PLANNER_VERSION`` (``planner/cache.py``) is raised: else plans that users keep would be taken for the new ones.

Nothing here ends by the clock: searches have few steps and all the time they want. Times are eighths of a millisecond,
which add up without rounding, so an answer is the same on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from toys import costly, layer, plan, profile, skip

from deepspeed_pulse.errors import InfeasibleError, PulseError
from deepspeed_pulse.ir.choice import Constraints, Trial
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.frozen import FrozenParts, TimedLayer, TimedPart
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.ir.schedule import Op, Schedule
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, make_plan, simulate, tune
from deepspeed_pulse.planner.bounds import lower_bound_ms
from deepspeed_pulse.planner.cache import PLANNER_VERSION
from deepspeed_pulse.planner.explain import explain
from deepspeed_pulse.planner.filling import fill
from deepspeed_pulse.planner.ideal import ideal_ms
from deepspeed_pulse.planner.memory import parts_at_peak
from deepspeed_pulse.planner.partition import cuts
from deepspeed_pulse.planner.partition.cut_costs import CutCosts
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS, byte_cap, count_cap, forward_only, frugal_orders
from deepspeed_pulse.planner.schedules.listing import Prefer, list_schedule
from deepspeed_pulse.planner.schedules.unroll import unrolled
from deepspeed_pulse.planner.search import improve
from deepspeed_pulse.planner.search.net import Net
from deepspeed_pulse.planner.search.order_model import count_pairs
from deepspeed_pulse.planner.search.paths import Paths
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.planner.search.tabu import Search
from deepspeed_pulse.planner.search.windows import stash_rows, window_model, windows
from deepspeed_pulse.planner.simulator import least_step_ms, run

FILE = Path(__file__).with_name("answers.json")
VERSION = "PLANNER_VERSION"
"""The planner's that gave the answers in the file."""
UNHURRIED = 1e6
"""Seconds that no search here comes near to."""

BYTES = 125_000
"""An eighth of a millisecond on a link of 1 GB/s."""

Answer = Any
CASES: dict[str, Callable[[], Answer]] = {}


def case(*seeds: int) -> Callable[[Callable[[random.Random], Answer]], Callable[[random.Random], Answer]]:
    """Register a function once for each seed of what it draws; those that would take long are left out."""

    def register(make: Callable[[random.Random], Answer]) -> Callable[[random.Random], Answer]:
        for seed in seeds:
            CASES[f"{make.__name__} {seed}"] = partial(_seeded, make, seed)
        return make

    return register


def _seeded(make: Callable[[random.Random], Answer], seed: int) -> Answer:
    return make(random.Random(seed))


# -- what is asked -------------------------------------------------------------------------------


def model(rng: random.Random, num_layers: int, *, crossing: bool = False, several: bool = False) -> Profile:
    """Uneven layers with nested skips; some that cross others, and a value that several layers read."""
    split, works = rng.random() < 0.5, rng.random() < 0.3
    layers = [
        layer(
            rng.randint(2, 20) / 8,
            rng.randint(4, 40) / 8,
            rng.randint(0, 30) * BYTES,
            rng.randint(1, 20) * BYTES,
            rng.randint(1, 6) * BYTES,
            weight_grad_ms=rng.randint(1, 4) / 8 if split else None,
            workspace_bytes=rng.randint(0, 12) * BYTES if works else 0,
        )
        for _ in range(num_layers)
    ]
    skips, first, last = [], 0, num_layers - 1
    while first < last - 1:
        if rng.random() < 0.7:
            skips.append(skip(f"s{first}", first, last, rng.randint(1, 8) * BYTES, rng.random() < 0.8))
        first, last = first + rng.randint(0, 1), last - rng.randint(1, 2)
    for number in range(3 if crossing and num_layers > 4 else 0):
        source = rng.randrange(num_layers - 2)
        skips.append(skip(f"x{number}", source, rng.randrange(source + 1, num_layers), rng.randint(1, 8) * BYTES))
    if several:
        skips += [skip("t", 0, target, BYTES) for target in range(1, num_layers, 2)]
    first_of = {one.name: one for one in reversed(skips)}  # entries of one name share bytes and gradient
    skips = [replace(first_of[one.name], target=one.target) for one in skips]
    return replace(profile(layers, skips), dtype=rng.choice(["float32", "bfloat16"]))


def machines(rng: random.Random, ranks: int) -> Cluster:
    """Fast, slow, far apart, with one port, with messages that keep the ranks busy."""
    kind = rng.randrange(5)
    fast, slow = Link(bandwidth_gb_per_s=16.0, latency_us=0.0), Link(bandwidth_gb_per_s=1.0, latency_us=125.0)
    kinds = [
        (fast, fast),
        (slow, slow),
        (fast, slow),
        (replace(slow, one_port=True),) * 2,
        (replace(fast, overhead_us=125.0), replace(slow, overhead_us=250.0, bus_gb_per_s=0.5)),
    ]
    near, far = kinds[kind]
    nodes = 2 if ranks % 2 == 0 else 1
    return Cluster(
        name="toy", nodes=nodes, ranks_per_node=ranks // nodes, memory_bytes=10**12, intra_node=near, inter_node=far
    )


def pipeline(rng: random.Random, **more: Any) -> Job:
    """Any job without frozen parts; ``more``: attributes that are settled."""
    ranks, group = more.pop("pipeline_ranks", None) or rng.choice([1, 2, 2, 3, 4, 4]), rng.choice([1, 1, 2, 4])
    costs = model(rng, rng.randint(2 * ranks, 2 * ranks + 8), crossing=rng.random() < 0.4, several=rng.random() < 0.4)
    job = Job(
        profile=costs,
        cluster=machines(rng, ranks * group),
        pipeline_ranks=ranks,
        microbatches=rng.choice([1, 2, 3, 4, 5, 6]),
        data_parallel=group,
        layout=rng.choice(list(Layout)),
        rules=Rules(zero_stage=rng.randint(0, 1), reduce_early=rng.random() < 0.6),
    )
    return replace(job, **more)


def tightened(rng: random.Random, job: Job, options: SearchOptions, shares: Sequence[float]) -> Job:
    """With a share of the memory that the plan takes which has plenty."""
    share = rng.choice(shares)
    free = make_plan(replace(job, recompute="none"), replace(options, within_ms=float("inf")))
    assert free.estimate is not None
    return replace(job, memory_bytes=int(share * max(free.estimate.peak_bytes)))


def encoders(rng: random.Random, num_layers: int) -> list[FrozenPart]:
    """One or two frozen parts; the second may need the first."""

    def part(name: str, count: int, **more: Any) -> FrozenPart:
        layers = tuple(
            FrozenLayer(
                name=str(i),
                forward_ms=rng.randint(1, 12) / 8,
                param_bytes=rng.randint(1, 9) * BYTES,
                output_bytes=rng.randint(1, 6) * BYTES,
                activation_bytes=rng.randint(1, 9) * BYTES,
            )
            for i in range(count)
        )
        return FrozenPart(name=name, layers=layers, **more)

    first = part("latents", rng.randint(1, 5), targets=(0,))
    needs = ("latents",) if rng.random() < 0.4 else ()
    second = part("text", rng.randint(1, 4), targets=tuple(sorted(rng.sample(range(num_layers), 2))), needs=needs)
    return [first, second][: rng.randint(1, 2)]


def timed(parts: Sequence[FrozenPart]) -> FrozenParts:
    """The same for every microbatch size."""

    def part(one: FrozenPart) -> TimedPart:
        layers = tuple(TimedLayer(**vars(x) | {"forward_ms": {1: x.forward_ms}}) for x in one.layers)
        return TimedPart(name=one.name, needs=one.needs, targets=one.targets, layers=layers)

    return FrozenParts(name="toy", device="none", dtype="float32", parts=tuple(map(part, parts)))


@contextlib.contextmanager
def short_searches(rounds: list[int] | None = None) -> Iterator[None]:
    """Few steps a round, and small windows for HiGHS. ``rounds``: gets the steps of each round."""

    class Counted(Search):
        def run(self, steps: int, deadline: float) -> bool:
            if rounds is not None:
                rounds.append(steps)
            return super().run(steps, deadline)

    with (
        mock.patch.multiple(improve, _NODES_A_ROUND=1_000, Search=Counted),
        mock.patch("deepspeed_pulse.planner.search.windows.MAX_PAIRS", 40),
        mock.patch.multiple("deepspeed_pulse.planner.search.synthesize", MAX_BINARIES=40, _FEW=1),
    ):
        yield


# -- what is answered ----------------------------------------------------------------------------


def digest(value: object) -> str:
    """Short for what is too long to read."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:8]


def order(rows: Schedule) -> str:
    return digest("\n".join(" ".join(map(str, row)) for row in rows))


def number(value: float) -> float:
    """Without the last digits, which a solver may leave different."""
    return float(f"{value:.7g}")


def planned(made: Plan) -> Answer:
    found, solver = made.estimate, made.solver
    assert found is not None
    told = {
        "cuts": " ".join(map(str, made.boundaries)),
        "placement": f"{made.placement.name} of {len(made.placement)} stages",
        "order": order(made.schedule),
        "by": solver and (solver.name + (", optimal" if solver.optimal else "")),
        "step_ms": number(found.step_ms),
        "makespan_ms": number(found.makespan_ms),
        "bound_ms": number(found.lower_bound_ms),
        "idle": number(found.bubble_ratio),
        "peak_bytes": " ".join(map(str, found.peak_bytes)),
        "sent_bytes": found.p2p_bytes_per_microbatch,
    }
    if made.recompute:
        told["recompute"] = " ".join(map(str, made.recompute))
    if made.fill is not None:
        told |= {"fill": digest(made.fill.rows), "filled_by": made.fill.solver}
    return told


def attempted(make: Callable[[], Plan]) -> Answer:
    """The plan, or why there is none."""
    try:
        return planned(make())
    except InfeasibleError as problem:
        return {"error": problem.text, "needed_bytes": problem.needed_bytes}


# -- plans ---------------------------------------------------------------------------------------


@case(*range(16), *range(17, 40))
def plans(rng: random.Random) -> Answer:
    """The front door without a search: placements, waves, schedules, memory, recomputation, rules."""
    job = pipeline(rng, recompute=rng.choice(["none", "none", "auto", "all"]))
    several = job.profile.num_layers >= 4 * job.pipeline_ranks and rng.random() < 0.5
    options = SearchOptions(
        placement=rng.choice(["auto", "auto", "wave", "linear"]),
        waves=2 if several else 1,
        split_backward=rng.random() < 0.3,
        solver_seconds=0.0,
        tolerance=rng.choice([0.0, 0.0, 0.1]),
        part_skips=rng.choice([None, True]),
    )
    if rng.random() < 0.7:
        job = tightened(rng, job, options, [0.95, 0.85, 0.75, 0.6])
    return attempted(lambda: make_plan(job, options))


@case(*range(12))
def frugal_plans(rng: random.Random) -> Answer:
    """Large activations in little memory: what is recomputed, and what an error says would do."""
    job = pipeline(rng, recompute="auto", data_parallel=1)
    options = SearchOptions(solver_seconds=0.0)
    layers = (replace(x, activation_bytes=8 * x.activation_bytes) for x in job.profile.layers)
    job = replace(job, cluster=machines(rng, job.pipeline_ranks), profile=replace(job.profile, layers=tuple(layers)))
    job = tightened(rng, job, options, [0.9, 0.75, 0.6, 0.5, 0.4])
    return attempted(lambda: make_plan(job, options))


@case(*range(8))
def replicas(rng: random.Random) -> Answer:
    """Heavy weights that are summed over peers: cuts may weigh that."""
    job = pipeline(rng, data_parallel=2, pipeline_ranks=rng.choice([2, 4]))
    layers = (replace(x, param_bytes=rng.choice([1, 30]) * x.param_bytes) for x in job.profile.layers)
    slow = Link(bandwidth_gb_per_s=4.0, latency_us=0.0)
    boxes = replace(machines(rng, 2 * job.pipeline_ranks), intra_node=slow, inter_node=slow)
    job = replace(job, cluster=boxes, profile=replace(job.profile, layers=tuple(layers)))
    return attempted(lambda: make_plan(job, SearchOptions(solver_seconds=0.0)))


# -- cuts ----------------------------------------------------------------------------------------


def _cut(job: Job, placement: Placement, tolerance: float) -> Answer:
    found = cuts.best_partition(CutCosts(job, placement), microbatches=job.microbatches, tolerance=tolerance)
    return {"cuts": " ".join(map(str, found.cuts)), "bound_ms": number(found.bound_ms), **asdict(found.score)} | (
        {} if found.exact else {"exact": False}
    )


@case(*range(13))
def cut_lists(rng: random.Random) -> Answer:
    """Longer models than plans have here; one placement after the other, memory from plenty to too little."""
    ranks = rng.choice([2, 3, 4])
    costs = model(rng, rng.randint(17, 22), crossing=rng.random() < 0.6, several=rng.random() < 0.5)
    job = Job(profile=costs, cluster=machines(rng, ranks), pipeline_ranks=ranks, microbatches=rng.choice([2, 8]))
    total = sum(costs.state_factor * x.param_bytes + 3 * x.activation_bytes for x in costs.layers)
    few_layers = rng.random() < 0.5
    found = {}
    with mock.patch.multiple(cuts, _EVALUATIONS=150, _ENUMERABLE=500, _MOST_LAYERS=10 if few_layers else 100):
        for share, tolerance in ((9.0, 0.0), (9.0, 0.1), (1.3, 0.0), (0.7, 0.0)):
            limited = replace(job, memory_bytes=int(share * total / ranks))
            loop = Placement.loop(ranks, 2)
            for placement in (Placement.wave(ranks), Placement.linear(ranks), Placement.wave(ranks, 2), loop):
                if len(placement) <= 12 or not tolerance:
                    name = f"{placement.name} of {len(placement)}, memory {share:g}, tolerance {tolerance:g}"
                    found[name] = _cut(limited, placement, tolerance)
    return found


# -- orders --------------------------------------------------------------------------------------


@case(2, 3, 4)
def schedules(rng: random.Random) -> Answer:
    """Every generator with whole and split backward, with and without a cap of bytes."""
    ranks = rng.randint(2, 5)
    found: dict[str, str] = {}
    for placement in (Placement.wave(ranks), Placement.linear(ranks), Placement.loop(ranks, 2)):
        costs = model(rng, len(placement), several=True)
        boxes = machines(rng, ranks)
        for microbatches, (name, generator) in itertools.product((1, 2, 5, 8), GENERATORS.items()):
            problem = Problem(plan(placement, microbatches, of=costs), costs, boxes)
            weights = byte_cap(problem, ()).weights
            single = [sum(weights[s] for s in problem.plan.stages_of(rank)) for rank in range(ranks)]
            caps = (None, byte_cap(problem, tuple(2.5 * one for one in single)))
            for split in (False, True):
                if generator.fits(placement) and (split or not generator.needs_split):
                    made = [_order_or_none(make) for make in generator.orders(problem, caps, split)]
                    found[f"{placement.name} {name} {'split ' * split}{microbatches}"] = digest(made)
        few = Problem(plan(placement, 6, of=costs), costs, boxes)
        cap = count_cap(few, 3 * len(placement) // ranks)
        found[f"{placement.name} frugal"] = digest([order(rows) for rows in frugal_orders(few, cap, False)])
        found[f"{placement.name} forward only"] = order(forward_only(placement, 5))
    return found


def _order_or_none(make: Callable[[], Schedule]) -> str | None:
    try:
        return order(make())
    except InfeasibleError:
        return None


@case(*range(6))
def unrolling(rng: random.Random) -> Answer:
    """Orders for few microbatches, repeated for many."""
    placement = Placement.wave(rng.choice([2, 3]))
    costs, boxes = model(rng, len(placement)), machines(rng, placement.num_ranks)
    problem = Problem(plan(placement, 9, of=costs), costs, boxes)
    rows = list_schedule(problem, 9, prefer=rng.choice([Prefer.FORWARD, Prefer.BACKWARD]), cap=count_cap(problem, 6))
    starts = {span.work: span.start_ms for span in run(problem, rows).spans}
    return {str(count): [order(found) for found in unrolled(rows, starts, count)] for count in (10, 14, 23)}


@case(*range(12))
def tabu_walks(rng: random.Random) -> Answer:
    """Where a search is after so many steps, its best order, and the windows of that."""
    ranks, microbatches = rng.choice([(1, 20), (2, 14), (3, 8), (4, 5)])
    placement = rng.choice([Placement.wave(ranks), Placement.linear(ranks)])
    costs, boxes = model(rng, len(placement), several=True), machines(rng, ranks)
    problem, split = Problem(plan(placement, microbatches, of=costs), costs, boxes), rng.random() < 0.3
    cap = count_cap(problem, rng.choice([4, 6, 8])) if rng.random() < 0.6 else None
    start = list_schedule(problem, microbatches, cap=cap, split=split)
    finish = tuple(rng.randint(0, 20) / 8 for _ in placement)
    after = dict.fromkeys((Op.BACKWARD, Op.WEIGHT_GRAD), finish)
    net = Net(problem, microbatches, split=split, finish_ms=after)
    search = Search(net, cap, net.rows(start), seed=rng.randrange(100), target_ms=0.0)
    found: dict[str, Answer] = {"start_ms": search.best_ms}
    for steps in (100, 500):
        search.run(steps, float("inf"))
        found[f"after {search.step} steps"] = {"best_ms": search.best_ms, "now": order(net.schedule(search.rows))}
    paths = Paths(net, search.best_rows)
    spans = windows(paths)
    found["windows"] = " ".join(str(len(window)) for window in spans)
    window = window_model(paths, spans[len(spans) // 2])
    found["model"] = {
        "open pairs": len(window.pairs),
        "rows": digest(sorted((str(terms), number(low)) for terms, low in window.rows())),
        "stash": digest(
            [(str(terms), number(low)) for terms, low in stash_rows(window, paths, search.change, search.limits)]
        ),
    }
    return found


@case(*range(6))
def walks_between_halves_and_whole(rng: random.Random) -> Answer:
    """The same where halves take longer than a whole backward."""
    ranks, microbatches = rng.choice([(1, 8), (2, 7), (3, 5)])
    placement = rng.choice([Placement.wave(ranks), Placement.linear(ranks)])
    costs, boxes = costly(model(rng, len(placement), several=True), 1.25), machines(rng, ranks)
    problem = Problem(plan(placement, microbatches, of=costs), costs, boxes)
    net = Net(problem, microbatches, split=True)
    start = list_schedule(problem, microbatches, split=True)
    search = Search(net, None, net.rows(start), seed=rng.randrange(100), target_ms=0.0)
    search.run(300, float("inf"))
    spans = windows(Paths(net, search.best_rows))
    return {
        "best_ms": search.best_ms,
        "now": order(net.schedule(search.rows)),
        "windows": " ".join(str(len(window)) for window in spans),
    }


@case(*range(5), 6, 7, 10)
def searched_orders(rng: random.Random) -> Answer:
    """What a search makes of a plan in its rounds, windows and exact models included."""
    job = pipeline(rng, pipeline_ranks=rng.choice([2, 2, 3]), microbatches=rng.choice([2, 3, 5, 7]))
    options = SearchOptions(
        placement=rng.choice(["wave", "linear"]), split_backward=rng.random() < 0.3, solver_seconds=0.0
    )
    if rng.random() < 0.5:
        job = tightened(rng, job, options, [0.95, 0.85])
    rounds: list[int] = []
    told: list[float] = []
    try:
        start = make_plan(job, options)
    except InfeasibleError:
        return None
    with short_searches(rounds):
        options = replace(options, solver_seconds=UNHURRIED, seed=rng.randrange(9))
        made = synthesize(start, job, options, lambda best, bound: told.append(best))
    pairs = count_pairs(Problem(start, job.profile, job.cluster), job.microbatches)
    return planned(made) | {"orders": len(told), "rounds": digest(rounds), "steps": sum(rounds), "pairs": pairs}


# -- frozen work ---------------------------------------------------------------------------------


@case(*range(24))
def fills(rng: random.Random) -> Answer:
    """Every way that is tried to put encoders into idle time, and the best."""
    job = pipeline(rng, microbatches=rng.choice([1, 2, 4, 6]))
    made = make_plan(job, SearchOptions(solver_seconds=0.0))
    job = Job.of(made, job.profile, job.cluster, frozen=encoders(rng, job.profile.num_layers))
    if rng.random() < 0.5:
        assert made.estimate is not None
        room = sum(part.param_bytes + 9 * part.output_bytes for part in job.frozen)
        job = replace(job, memory_bytes=max(made.estimate.peak_bytes) + rng.choice([room, room // 2]))
    tried: list[float] = []
    scored = fill._Ways._scored

    def noted(ways: fill._Ways, runs: Any, solver: str) -> fill.FillResult:
        found = scored(ways, runs, solver)
        if solver != "assignment":
            tried.append(number(found.estimate.makespan_ms))
        return found

    # HiGHS has to end by itself: only small programs, and few.
    seconds = UNHURRIED if rng.random() < 0.5 else 0.0
    with mock.patch.object(fill._Ways, "_scored", noted), mock.patch.object(fill, "MOST_COLUMNS", 60):
        found = attempted(lambda: fill.fill_plan(made, job, solver_seconds=seconds))
    return found | {"tried_ms": " ".join(f"{one:g}" for one in tried)}


@case(*range(4))
def filled_plans(rng: random.Random) -> Answer:
    """The front door with encoders in little memory."""
    job = pipeline(rng, data_parallel=1, pipeline_ranks=2, cluster=machines(rng, 2))
    job = replace(job, frozen=encoders(rng, job.profile.num_layers))
    options = SearchOptions(solver_seconds=0.0)
    return attempted(lambda: make_plan(tightened(rng, job, options, [0.95, 0.85]), options))


# -- choices -------------------------------------------------------------------------------------


def _trial(trial: Trial) -> str:
    choice = trial.choice
    name = f"P={choice.pipeline_ranks} G={choice.data_parallel} W={choice.waves} b={choice.microbatch_size}"
    what = f"{name} ZeRO-{choice.zero_stage} {choice.layout.value}: {trial.verdict.value}"
    found = [f"{trial.samples_per_second:.6g} samples/s"] if trial.samples_per_second else []
    found += [f"{trial.needed_bytes} bytes"] if trial.needed_bytes else []
    found += [f"order {order(trial.plan.schedule)}"] if trial.plan else []
    return ", ".join([what, *found, trial.reason]).rstrip(", ")


@case(*range(7), 8, 9, *range(11, 16))
def choices(rng: random.Random) -> Answer:
    """The tuner over all ways to run a batch, in its order: some searched, with encoders, or in too little memory."""
    costs = model(rng, rng.randint(4, 10), several=rng.random() < 0.3)
    costs = replace(
        costs, layers=tuple(replace(x, param_bytes=rng.choice([1, 9]) * x.param_bytes) for x in costs.layers)
    )
    profiles = [costs]
    if rng.random() < 0.3:
        faster = (replace(x, forward_ms=1.5 * x.forward_ms, backward_ms=1.5 * x.backward_ms) for x in costs.layers)
        profiles.append(replace(costs, microbatch_size=2, layers=tuple(faster)))
    total = sum(costs.state_factor * x.param_bytes + 4 * x.activation_bytes for x in costs.layers)
    frozen = timed(encoders(rng, costs.num_layers)) if rng.random() < 0.3 else None
    job = OpenJob(
        profiles=profiles,
        cluster=machines(rng, rng.choice([2, 4])),
        global_batch=rng.choice([4, 8]),
        memory_bytes=int(total * rng.choice([0.1, 0.3, 0.5, 0.7, 9.0])),
        given=rng.choice(
            [
                Constraints(),
                Constraints(),
                Constraints(zero_stage=0),
                Constraints(recompute=(), waves=(0, 1)),
                Constraints(pipeline_ranks=2, reduce_early=False),
                Constraints(schedule="wave", microbatch_size=1),
            ]
        ),
        frozen=frozen,
    )
    seconds, exhaustive = (UNHURRIED if rng.random() < 0.3 else 0.0), rng.random() < 0.3
    done: list[str] = []
    try:
        with short_searches(), mock.patch.object(fill, "MOST_COLUMNS", 0):
            found = tune(
                job,
                solver_seconds=seconds,
                exhaustive=exhaustive,
                progress=lambda at, of, best: done.append(f"{at}/{of} {best:.6g}"),
            )
    except PulseError as problem:
        return {"error": problem.text, "needed_bytes": getattr(problem, "needed_bytes", None)}
    return {"trials": [_trial(trial) for trial in found.trials], "progress": ", ".join(done)}


# -- figures -------------------------------------------------------------------------------------


@case(*range(16))
def figures(rng: random.Random) -> Answer:
    """A simulated step in detail: bounds, memory over time by its parts, and a measured step explained."""
    job = pipeline(rng, recompute=rng.choice(["none", "all", (0, 1)]))
    split = rng.random() < 0.4
    made = make_plan(job, SearchOptions(solver_seconds=0.0, split_backward=split))
    problem = Problem(made, job.profile, job.cluster)
    timeline = simulate(made, job.profile, job.cluster)
    slower = {span.work: span.end_ms - span.start_ms + rng.choice([0, 0, 2]) / 8 for span in timeline.spans}
    measured = _with_waits(run(problem, made.schedule, durations=slower), rng)
    step_ms = measured.makespan_ms + 0.5
    peaks = [{"state": 10**6, "activations": BYTES * rank} for rank in range(job.pipeline_ranks)]
    told = explain(made, job.profile, job.cluster, measured, step_ms=step_ms, peaks=peaks)
    memory = {"parts": list(map(dict, parts_at_peak(problem, timeline))), "curves": digest(timeline.memory)}
    bounds = {
        "whole": number(lower_bound_ms(problem, job.microbatches)),
        "split": number(lower_bound_ms(problem, job.microbatches, split=True)),
        "step": number(least_step_ms(problem)),
        "ideal": number(ideal_ms(job.profile, made.placement, job.microbatches)),
        "ideal with reduction": number(ideal_ms(job.profile, made.placement, job.microbatches, reduction_ms=40.0)),
    }
    differs = {name: number(value) for name, value in asdict(told).items() if isinstance(value, float)}
    return planned(made) | {"memory": memory, "bounds_ms": bounds, "stage": told.stage, "explained": differs}


def _with_waits(timeline: Timeline, rng: random.Random) -> Timeline:
    """As the engine measures: of what a rank did not work, most it waited."""
    spans, free = [], [0.0] * timeline.num_ranks
    for span in timeline.spans:
        idle = span.start_ms - free[span.rank]
        spans.append(replace(span, waited_ms=max(0.0, idle - rng.choice([0, 0, 1]) / 8)))
        free[span.rank] = span.end_ms
    return replace(timeline, spans=tuple(spans))


def write() -> None:
    """Ask everything anew; answers that changed are kept of a newer planner only."""
    kept = json.loads(FILE.read_text())
    found = json.loads(json.dumps({name: make() for name, make in CASES.items()}))
    changed = [name for name in kept.keys() & found.keys() if kept[name] != found[name]]
    if changed and kept[VERSION] == PLANNER_VERSION:
        raise SystemExit(f"{len(changed)} answers changed ({min(changed)}, ...): raise PLANNER_VERSION first")
    FILE.write_text(json.dumps({VERSION: PLANNER_VERSION, **found}, indent=1) + "\n")


if __name__ == "__main__":
    write()
