"""The front door: a Plan from a profile. Used by the engine and the command line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import ConfigError, InfeasibleError, did_you_mean
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import describe_placement, linear_placement, loop_placement, wave_placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.schedule import Schedule
from deepspeed_pulse.planner.cache import kept, plan_file
from deepspeed_pulse.planner.filling.fill import fill_plan
from deepspeed_pulse.planner.ideal import ideal_ms
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.partition.cuts import partition, require_layers
from deepspeed_pulse.planner.partition.views import other_views
from deepspeed_pulse.planner.recompute import cheapest_first, recomputed_layers, with_recompute
from deepspeed_pulse.planner.routes import make_routes, named_values
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS, forward_only, generators_for
from deepspeed_pulse.planner.search.synthesize import Progress, synthesize
from deepspeed_pulse.planner.simulate import estimate, least_step_ms, reduction_ms

Placement = tuple[int, ...]
_NOT_OPTIONS = ("profile", "cluster", "progress", "frozen")
_UNLIMITED = 2**62
_SHARES = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Of the layers worth recomputing, how many are tried in search of the fastest plan."""
_WORTH_CHANGING = 0.95
"""Of the step with the partitioner's own cuts, what others may take at most: a simulation does not count everything."""
_HIDDEN = 1.02
"""Step over makespan up to which gradients count as reduced behind other work."""

PLACEMENTS = ("auto", "wave", "linear")

MOST_STAGES = 10_000
MOST_FORWARDS = 500_000
"""Stages times microbatches of an order that is made in minutes and a few GB."""


class TooSlow(InfeasibleError):
    """No order of the cuts keeps to ``within_ms``. ``bound_ms``: none is shorter. ``cuts``: their boundaries."""

    def __init__(self, bound_ms: float, cuts: tuple[int, ...]) -> None:
        super().__init__(f"a step takes at least {bound_ms:.6g} ms")
        self.bound_ms, self.cuts = bound_ms, cuts


def make_plan(
    profile: Profile,
    *,
    cluster: Cluster,
    pipeline_ranks: int,
    microbatches: int,
    data_parallel: int = 1,
    placement: str = "auto",
    waves: int = 1,
    boundaries: Sequence[int] | None = None,
    schedule: str = "auto",
    memory_bytes: int | None = None,
    split_backward: bool = False,
    solver_seconds: float = 30.0,
    seed: int = 0,
    tolerance: float = 0.0,
    progress: Progress | None = None,
    recompute: str | Sequence[int | str] = "none",
    shard_optimizer: bool = False,
    layout: Layout = Layout.PIPE_MAJOR,
    frozen: Sequence[FrozenPart] = (),
    within_ms: float = math.inf,
    part_skips: bool | None = None,
    plan_cache: str | Path | None = None,
) -> Plan:
    """Cuts, order, routes and estimate for a model on ``pipeline_ranks`` x ``data_parallel`` ranks of a cluster.

    Args:
        placement: "wave", "linear", or "auto": the one that is faster in simulation, the wave among equals.
        boundaries: explicit cuts, 0 and the layer count included; "auto" placement then follows from their number.
        schedule: "auto" or a generator's name.
        memory_bytes: cap on a rank's ``peak_bytes``; None takes the cluster's ``memory_bytes``.
        tolerance: share of the largest load that may be given up for fewer bytes between ranks.
        progress: told the best makespan and the lower bound, in ms, whenever an order was found.
        split_backward: the order may run backward as ``I`` and ``W``.
        recompute: layers that run again in backward: "none", "all", a list of indices and names, or "auto": none if
            that fits the memory, else those that free most for their time, where that is faster than other cuts.
        shard_optimizer: data-parallel peers share the optimizer state (ZeRO-1): less memory, and weights are gathered
            at the end of a step.
        layout: how global ranks are numbered, which decides what crosses nodes.
        frozen: parts that encode the next step's batch in idle time, for the profile's microbatch size.
        within_ms: give up on cuts as soon as it is clear that no order of them has a step as short as that.
        part_skips: cuts of a wave may also send skips that could stay, for a better balance, where that is well faster
            in known orders. None: if ``placement`` is "auto".
        plan_cache: folder in which plans that took time to solve are kept by content.

    Raises:
        ConfigError: an argument is unusable.
        InfeasibleError: too few layers or too little memory; says what would be needed.
        TooSlow: cuts that fit the memory are slower than ``within_ms``.
    """
    _check_counts(pipeline_ranks=pipeline_ranks, microbatches=microbatches, data_parallel=data_parallel, waves=waves)
    _check_cluster(cluster, pipeline_ranks * data_parallel)
    _check_stages(profile, pipeline_ranks, waves)
    places = _placements(profile, placement, pipeline_ranks, waves, boundaries, schedule, split_backward)
    _check_forwards(max(map(len, places)), microbatches)
    request = _Request(
        profile=profile,
        cluster=cluster,
        pipeline_ranks=pipeline_ranks,
        microbatches=microbatches,
        data_parallel=data_parallel,
        waves=waves,
        boundaries=None if boundaries is None else tuple(boundaries),
        schedule=schedule,
        memory_bytes=cluster.memory_bytes if memory_bytes is None else memory_bytes,
        split_backward=split_backward,
        solver_seconds=solver_seconds / len(places),
        seed=seed,
        tolerance=tolerance,
        progress=progress,
        recompute=recomputed_layers(profile, recompute),
        recompute_more=recompute == "auto",
        shard_optimizer=shard_optimizer,
        layout=layout,
        frozen=tuple(frozen),
        within_ms=within_ms,
        part_skips=placement == "auto" if part_skips is None else part_skips,
    )
    if plan_cache is None or solver_seconds <= 0:
        return _best(request, places)
    options = {name: value for name, value in vars(request).items() if name not in _NOT_OPTIONS}
    if request.frozen:
        options["frozen"] = [asdict(part) for part in request.frozen]
    path = plan_file(plan_cache, profile, cluster, places=places, **options)
    return kept(path, lambda: _best(request, places))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of :func:`make_plan`, placement apart."""

    profile: Profile
    cluster: Cluster
    pipeline_ranks: int
    microbatches: int
    data_parallel: int
    waves: int
    boundaries: tuple[int, ...] | None
    schedule: str
    memory_bytes: int
    split_backward: bool
    solver_seconds: float
    seed: int
    tolerance: float
    progress: Progress | None
    recompute: tuple[int, ...]
    recompute_more: bool
    shard_optimizer: bool
    layout: Layout
    frozen: tuple[FrozenPart, ...]
    within_ms: float
    part_skips: bool

    def plan(self, placement: Placement) -> Plan:
        """With the partitioner's cuts, or with others where known orders of those are well faster."""
        own = self._cut(placement, self.profile)
        others = self.data_parallel > 1 or self._may_part(own)
        if self.boundaries or self.waves > 1 or not others:  # cuts of several waves take seconds to find
            return self.order(self._promising(own, self.within_ms))
        known = self.quick()._fastest_cuts(own)
        return self.order(known) if self.solver_seconds else known

    def _fastest_cuts(self, own: Plan) -> Plan:
        """Ordered; of the partitioner's cuts and their rivals."""
        best: Plan | None = None
        most, too_slow = self.within_ms, []
        try:
            best = self.order(self._promising(own, most))
            most = min(most, _WORTH_CHANGING * _step_ms(best))
        except TooSlow as problem:
            too_slow.append(problem)
        for rival in self._rivals(best or own, most):
            try:
                found = self.order(self._promising(rival, most))
            except TooSlow as problem:
                too_slow.append(problem)
            except InfeasibleError:  # its memory; the partitioner's cuts fit, or are too slow
                continue
            else:
                if _step_ms(found) <= most:
                    best, most = found, _step_ms(found)
        if best is None:
            raise min(too_slow, key=lambda problem: problem.bound_ms)
        return best

    def _may_part(self, own: Plan) -> bool:
        return self.part_skips and bool(self.profile.skips) and own.waves > 0

    def _promising(self, plan: Plan, within_ms: float) -> Plan:
        if within_ms < math.inf:
            bound_ms = least_step_ms(Instance(plan, self.profile, self.cluster))
            if bound_ms > within_ms:
                raise TooSlow(bound_ms, plan.boundaries)
        return plan

    def _rivals(self, own: Plan, within_ms: float) -> list[Plan]:
        """Cuts by other views of the profile, if any could be as fast as that; gradients are weighed where the order of
        ``own`` does not hide their reduction."""
        instance = Instance(own, self.profile, self.cluster)
        reduced = sum(reduction_ms(instance, stage) for stage in range(own.num_stages))
        profile = with_recompute(self.profile, self.recompute)
        if ideal_ms(profile, own.placement, self.microbatches, reduction_ms=reduced) > within_ms:
            return []
        estimated = own.estimate
        hidden = estimated is not None and estimated.step_ms <= _HIDDEN * estimated.makespan_ms
        views = other_views(
            self.profile,
            self.cluster,
            own.grid,
            self.microbatches,
            skipless=self._may_part(own),
            weighed=self.data_parallel > 1 and not hidden,
        )
        plans = {plan.boundaries: plan for plan in (self._cut(own.placement, view) for view in views)}
        return [plan for cuts, plan in plans.items() if cuts != own.boundaries]

    def quick(self, **changes: Any) -> _Request:
        """The same without a search."""
        return replace(self, solver_seconds=0.0, progress=None, **changes)

    def order(self, plan: Plan) -> Plan:
        """The plan with the best order of its cuts, and frozen work in the time that leaves idle."""
        if not self.frozen:
            return self._ordered(plan, self.memory_bytes)
        plan = replace(plan, fill=None)
        try:
            return self._filled(self._ordered(plan, self.memory_bytes))
        except InfeasibleError as problem:
            if problem.needed_bytes is None:
                raise
            spare = self.memory_bytes - (problem.needed_bytes - self.memory_bytes)
            if spare <= 0:
                raise
        return self._filled(self._ordered(plan, spare))

    def _filled(self, plan: Plan) -> Plan:
        return fill_plan(
            plan,
            self.profile,
            self.cluster,
            self.frozen,
            memory_bytes=self.memory_bytes,
            solver_seconds=self.solver_seconds / 2,
            shard_optimizer=self.shard_optimizer,
        )

    def _ordered(self, plan: Plan, memory_bytes: int) -> Plan:
        return synthesize(
            plan,
            self.profile,
            cluster=self.cluster,
            schedule=self.schedule,
            memory_bytes=memory_bytes,
            split_backward=self.split_backward,
            solver_seconds=self.solver_seconds,
            seed=self.seed,
            progress=self.progress,
            shard_optimizer=self.shard_optimizer,
        )

    def _cut(self, placement: Placement, view: Profile) -> Plan:
        """Without an order; cut as a view of the profile asks for."""
        cuts = self.boundaries or partition(
            with_recompute(view, self.recompute),
            placement,
            cluster=self.cluster,
            microbatches=self.microbatches,
            memory_bytes=self.memory_bytes,
            data_parallel=self.data_parallel,
            tolerance=self.tolerance,
            layout=self.layout,
            shard_optimizer=self.shard_optimizer,
        )
        return Plan(
            pipeline_ranks=self.pipeline_ranks,
            data_parallel=self.data_parallel,
            microbatches=self.microbatches,
            microbatch_size=self.profile.microbatch_size,
            waves=0 if describe_placement(placement) == "linear" else self.waves,
            boundaries=cuts,
            placement=placement,
            schedule=((),) * self.pipeline_ranks,
            routes=make_routes(cuts, placement, named_values(self.profile)),
            recompute=self.recompute,
            layout=self.layout,
        )


def _best(request: _Request, places: Sequence[Placement]) -> Plan:
    """The fastest plan; where memory binds and it may, one that recomputes layers if that is faster than other cuts."""
    if not request.recompute_more or _fits_freely(request, places):
        return _fastest(request, places)
    layers = cheapest_first(request.profile)
    found: list[Plan] = []
    problems: list[InfeasibleError] = []
    for count in sorted({round(share * len(layers)) for share in _SHARES}):
        try:
            plan = _fastest(request.quick(recompute=tuple(sorted(layers[:count]))), places)
        except InfeasibleError as reason:
            problems.append(reason)
        else:
            found.append(_without_spare(plan, request))
    if not found:
        raise _joined(problems, f"{problems[0]}; recomputing layers in backward does not help enough")
    lean = min(found, key=lambda plan: (_step_ms(plan), len(plan.recompute)))
    try:
        return min(lean, request.order(lean), key=_step_ms) if lean.recompute else _fastest(request, places)
    except InfeasibleError:  # the order fits by what other layers freed: keep it
        return lean


def _fits_freely(request: _Request, places: Sequence[Placement]) -> bool:
    """Memory does not bind: the plan that ignores it fits."""
    try:
        estimated = _fastest(request.quick(memory_bytes=_UNLIMITED), places).estimate
    except TooSlow:
        return False
    assert estimated is not None
    return max(estimated.peak_bytes) <= request.memory_bytes


def _without_spare(plan: Plan, request: _Request) -> Plan:
    """Recompute only what this order needs; the longest forwards are dropped first."""
    return _dropped(plan, request, sorted(plan.recompute, key=lambda i: -request.profile.layers[i].forward_ms))


def _dropped(plan: Plan, request: _Request, layers: Sequence[int]) -> Plan:
    """Without those of some layers, one by one in order, that memory allows to keep; by halves, which is the same."""
    if not layers:
        return plan
    fewer = replace(plan, recompute=tuple(i for i in plan.recompute if i not in layers))
    estimated = estimate(fewer, request.profile, request.cluster, shard_optimizer=request.shard_optimizer)
    if max(estimated.peak_bytes) <= request.memory_bytes:
        return replace(fewer, estimate=estimated)
    half = len(layers) // 2
    return _dropped(_dropped(plan, request, layers[:half]), request, layers[half:]) if half else plan


def _fastest(request: _Request, places: Sequence[Placement]) -> Plan:
    """The plan with the shortest step, the first among equals; an error only when no placement is feasible."""
    best: Plan | None = None
    problems: list[InfeasibleError] = []
    for place in places:
        try:
            plan = request.plan(place)
        except InfeasibleError as problem:
            problems.append(problem)
            continue
        if best is None or _step_ms(plan) < _step_ms(best) * (1 - 1e-9):
            best = plan
    if best is None:
        named = zip(places, problems, strict=True)
        raise _joined(problems, "\n".join(f"{describe_placement(place)} placement: {text}" for place, text in named))
    return best


def _joined(problems: Sequence[InfeasibleError], text: str) -> InfeasibleError:
    """One error for several: too slow, if any of them is."""
    slow = [problem for problem in problems if isinstance(problem, TooSlow)]
    if slow:
        return min(slow, key=lambda problem: problem.bound_ms)
    needed = [problem.needed_bytes for problem in problems if problem.needed_bytes is not None]
    return InfeasibleError(text, needed_bytes=min(needed, default=None))


def _step_ms(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_ms


def reorder(
    plan: Plan,
    profile: Profile,
    *,
    cluster: Cluster,
    microbatches: int,
    schedule: str = "auto",
    memory_bytes: int | None = None,
    split_backward: bool = False,
    solver_seconds: float = 30.0,
    seed: int = 0,
    shard_optimizer: bool = False,
) -> Plan:
    """The same cuts, placement, routes and frozen parts with another number of microbatches."""
    _check_counts(microbatches=microbatches)
    _check_forwards(plan.num_stages, microbatches)
    found = synthesize(
        replace(plan, microbatches=microbatches, fill=None),
        profile,
        cluster=cluster,
        schedule=schedule,
        memory_bytes=cluster.memory_bytes if memory_bytes is None else memory_bytes,
        split_backward=split_backward,
        solver_seconds=solver_seconds,
        seed=seed,
        shard_optimizer=shard_optimizer,
    )
    if plan.fill is None:
        return found
    return fill_plan(
        found,
        profile,
        cluster,
        plan.fill.parts,
        memory_bytes=memory_bytes,
        solver_seconds=solver_seconds / 2,
        shard_optimizer=shard_optimizer,
    )


def forward_schedule(plan: Plan, microbatches: int) -> Schedule:
    """Forwards only, for evaluation; deadlock-free on any placement."""
    _check_counts(microbatches=microbatches)
    return forward_only(plan.placement, microbatches)


def _placements(
    profile: Profile,
    placement: str,
    ranks: int,
    waves: int,
    boundaries: Sequence[int] | None,
    schedule: str,
    split_backward: bool,
) -> list[Placement]:
    """What to try, the preferred first. Raises when nothing can work."""
    if placement not in PLACEMENTS:
        expected = ", ".join(PLACEMENTS)
        raise ConfigError(
            f"placement: expected one of {expected}, found {placement!r}{did_you_mean(placement, PLACEMENTS)}"
        )
    wave, linear = wave_placement(ranks, waves), linear_placement(ranks)
    places = {"wave": [wave], "linear": [linear], "auto": [wave, linear]}[placement]
    if placement == "auto" and schedule == "interleaved":
        places = [loop_placement(ranks, 2 * waves)]
    if boundaries is not None:
        places = _that_fit_boundaries(profile, places, boundaries)
    if placement == "auto":
        places = _that_fit_schedule(places, schedule)
        enough = [place for place in places if profile.num_layers >= len(place)]
        places = enough or places[-1:]
    for place in places:
        require_layers(profile, place)
        generators_for(schedule, place, split=split_backward)
    return places


def _that_fit_schedule(places: list[Placement], schedule: str) -> list[Placement]:
    if schedule not in GENERATORS:
        return places
    return [place for place in places if GENERATORS[schedule].fits(place)] or places


def _that_fit_boundaries(profile: Profile, places: list[Placement], boundaries: Sequence[int]) -> list[Placement]:
    cuts = list(boundaries)
    if not cuts or cuts[0] != 0 or cuts[-1] != profile.num_layers or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise ConfigError(
            f"boundaries: expected strictly increasing layer indices from 0 to the layer count {profile.num_layers}, "
            f"found {cuts}"
        )
    fitting = [place for place in places if len(place) == len(cuts) - 1]
    if not fitting:
        expected = " or ".join(f"{len(place) - 1} ({describe_placement(place)} placement)" for place in places)
        raise ConfigError(f"boundaries: expected {expected} inner cuts, found {len(cuts) - 2}: {cuts[1:-1]}")
    return fitting


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}: expected an integer >= 1, found {count!r}")


def _check_stages(profile: Profile, ranks: int, waves: int) -> None:
    """Before a placement that large is built; fewer stages than that are compared with the layers."""
    if 2 * ranks * waves > MOST_STAGES:
        raise InfeasibleError(
            f"{ranks} pipeline ranks with {waves} waves have {2 * ranks * waves} stages and need as many layers, the "
            f"model {profile.name!r} has {profile.num_layers}; at most {MOST_STAGES} stages are planned"
        )


def _check_forwards(stages: int, microbatches: int) -> None:
    if stages * microbatches > MOST_FORWARDS:
        raise ConfigError(
            f"microbatches: {microbatches} of {stages} stages are {stages * microbatches} forwards, at most "
            f"{MOST_FORWARDS} are planned; use at most {MOST_FORWARDS // stages} microbatches a step, larger ones or "
            "more data-parallel pipelines"
        )


def _check_cluster(cluster: Cluster, num_ranks: int) -> None:
    if num_ranks > cluster.num_ranks:
        raise ConfigError(
            f"pipeline ranks x data-parallel = {num_ranks} ranks, the cluster {cluster.name!r} has {cluster.num_ranks} "
            f"({cluster.nodes} nodes of {cluster.ranks_per_node}); use fewer ranks or another cluster file"
        )
