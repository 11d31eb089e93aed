"""The plan of one placement: cut, ordered, filled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, backbone_stages, make_routes
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.buckets import fitting_bucket_bytes
from deepspeed_pulse.planner.cost import optimizer_ms
from deepspeed_pulse.planner.ideal import ideal_ms
from deepspeed_pulse.planner.job import Job, Progress, SearchOptions
from deepspeed_pulse.planner.links import Links
from deepspeed_pulse.planner.making.ordered import ordered
from deepspeed_pulse.planner.partition.cuts import partition
from deepspeed_pulse.planner.partition.descent import Moves, between, descent, nearby
from deepspeed_pulse.planner.partition.joint import joint_partition
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.recompute import with_recompute
from deepspeed_pulse.planner.reduction import least_reduction_ms
from deepspeed_pulse.planner.schedules.heuristics import halves_tried
from deepspeed_pulse.planner.simulator import busiest_ms, least_step_ms, slowest_optimizer_ms, step_ms

WORTH_CHANGING = 0.99
"""Of the step of a wave or a linear placement, what other placements may take at most: they have more actions and
messages, and a simulation does not count all that those cost."""

_WORTH_MOVING = 0.999
"""Of the step with the partitioner's own cuts, what others may take at most: among equals, what keeps skips local."""

_MAY_MOVE = 1.02
"""Times as long as it may, a step with cuts that were not moved yet."""

_WORTH_PARTING = 0.95
"""The same for cuts that send skips which a wave could keep, where it was asked for by name, or hosts send messages
themselves: how these share cores and a link is more than plans know. A wave of 8 ranks that parted skips for 2.5 % took
14 % longer over slow links."""

_FEW = 4
"""Microbatches per rank up to which cuts are tried that count fill and drain, and placements that shorten both. By the
bound of ``planner/ideal.py`` even cuts of fine layers take up to 1.18 times the best there are at two of them, 1.11 at
four and 1.06 at eight; a wave's own fill and drain are 7 % of a step at two of them and 2 % at four."""

_QUICK = 512
"""Ranks times microbatches whose orders take about a second; beyond, half as many per rank are few."""

_FILLINGS = (1, 2)
"""Times the microbatches that fill and drain are spread over: all of them count, or half, as some idle time is left
anyway."""

_SEVERAL_FILLINGS = (1, 2, 10)
"""The same where cuts come from a local search; the last hardly counts them."""

_MANY_FORWARDS = 300
"""Above, one of the cuts that count fill and drain is ordered; else so many as there are fillings."""

_MOVES: dict[Moves, int] = {nearby: 64, between: 16}
"""Ways to move cuts, and up to how many stages: that many bounds take a second or two."""

_NEARLY_FITS = 1.5
"""Times the memory that there is, what the partitioner's cuts may need for others to be looked for."""

_HIDDEN = 1.02
"""Step over makespan up to which what comes after the last action does not count."""

_SHARES = (0.5, 1.0)
"""Of the time to reduce a layer's gradients and to step its parameters, what counts as work of its backward where cuts
weigh that."""


class TooSlow(InfeasibleError):
    """No order of the cuts keeps to ``within_ms``.

    ``bound_ms``: none of these cuts is shorter; ``any_cuts``: none of any others either.
    """

    def __init__(self, bound_ms: float, *, any_cuts: bool = False) -> None:
        super().__init__(f"a step takes at least {bound_ms:.6g} ms")
        self.bound_ms, self.any_cuts = bound_ms, any_cuts


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes a job's plan for one placement.

    ``recompute``: the layers that run again in backward, ascending. ``moves``: whether its cuts are :meth:`moved`.
    """

    job: Job
    options: SearchOptions
    recompute: tuple[int, ...] = ()
    moves: bool = True
    progress: Progress | None = None

    def plan(self, placement: Placement) -> Plan:
        """The best of what :meth:`plans` finds; a better order of its cuts is searched for where that is asked for."""
        quick = self.quick()
        plans = quick.plans(placement)
        best = quick.best(plans) if self.options.waves == 1 else plans[0]  # to move cuts of several waves takes seconds
        return self.order(best) if self.options.solver_seconds else best

    def plans(self, placement: Placement) -> list[Plan]:
        """With the partitioner's cuts, or with others where known orders of those are faster.

        Where skips that are sent count, the second sends more of them than the first and is faster. Unless an order of
        the partitioner's cuts does not fit, no cuts were moved.
        """
        own = self.cut(placement, self.job.profile)
        try:
            return self._made(own)
        except TooSlow as reason:
            free = replace(self, recompute=()) if self.job.recompute == "auto" else self
            ideal_ms = free._ideal_ms(placement, reduction_ms=self._least_reduction_ms)
            if ideal_ms > self.options.within_ms:
                raise TooSlow(ideal_ms, any_cuts=True) from reason
            raise
        except InfeasibleError as reason:
            return [self._leaner(own, reason)]

    def best(self, plans: Sequence[Plan]) -> Plan:
        """The first, or one that sends skips which that keeps, if it is worth that once cuts of both are moved."""
        kept, *parted = [self.moved(plan) if self.moves else plan for plan in plans]
        return next((plan for plan in parted if step_ms(plan) <= _WORTH_PARTING * step_ms(kept)), kept)

    def _leaner(self, own: Plan, reason: InfeasibleError) -> Plan:
        """With cuts moved until an order of them fits: the partitioner counts neither messages nor waiting gradients.

        Raises ``reason`` where none is found.
        """
        job, needed = self.job, reason.needed_bytes
        settled, many = self.options.boundaries or job.profile.backbones, own.num_stages * job.microbatches
        if settled or needed is None or needed > _NEARLY_FITS * job.limit_bytes or many > _MANY_FORWARDS:
            raise reason
        orders: dict[tuple[int, ...], Plan] = {}

        @cache
        def missing_bytes(cuts: tuple[int, ...]) -> float:
            try:
                orders[cuts] = self.order(self._of(cuts, own.placement))
            except InfeasibleError as problem:
                return math.inf if problem.needed_bytes is None else max(1, problem.needed_bytes - job.limit_bytes)
            return 0.0

        frugal = self.cut(own.placement, job.profile, memory_bytes=1)
        for cuts in dict.fromkeys((own.boundaries, frugal.boundaries)):
            found = descent(missing_bytes, cuts, nearby)[1]
            if found in orders:
                return self.moved(orders[found]) if self.moves else orders[found]
        raise reason

    def _made(self, own: Plan) -> list[Plan]:
        others = self._weighs or self._may_part(own) or self._fills
        # cuts of several waves or backbones take seconds to find
        settled = self.options.boundaries or self.options.waves > 1 or self.job.profile.backbones
        if settled or not others:
            return [self.order(self._promising(own, self.options.within_ms))]
        return self._fastest_cuts(own)

    def rival(self, placement: Placement, within_ms: float) -> Plan | None:
        """A plan of known orders for several waves or a loop, if one is so fast; few of their cuts are looked at."""
        within_ms = min(within_ms, self.options.within_ms)
        if self._ideal_ms(placement) > within_ms:
            return None
        fillings = [times * self.job.microbatches for times in _SEVERAL_FILLINGS]
        cut = [self.cut(placement, self.job.profile, filling=filling) for filling in fillings]
        best: Plan | None = None
        for plan in self._promising_first({plan.boundaries: plan for plan in cut}):
            if self._bound_ms(plan) > within_ms:
                break
            try:
                found = self.quick().order(plan)
            except InfeasibleError:
                continue
            if step_ms(found) <= _MAY_MOVE * within_ms:
                found = self.quick().moved(found)
            if step_ms(found) <= within_ms:
                best, within_ms = found, step_ms(found)
        return best

    def _fastest_cuts(self, own: Plan) -> list[Plan]:
        """Of the partitioner's cuts and their rivals, the fastest that sends no more skips, and one that does."""
        limit_ms = self.options.within_ms
        found: dict[bool, Plan] = {}
        most = {False: limit_ms, True: limit_ms}
        too_slow: list[tuple[float, Plan]] = []
        try:
            found[False] = self.order(self._promising(own, limit_ms))
        except TooSlow as reason:
            too_slow.append((reason.bound_ms, own))
        first = found.get(False)
        if first is not None:
            worth = {False: _WORTH_MOVING, True: _WORTH_PARTING}
            most = {parts: min(limit_ms, share * step_ms(first)) for parts, share in worth.items()}
        for rival in self._rivals(first or own, most[False]):
            parts = first is not None and self._parts_more(rival, first)
            try:
                plan = self.order(self._promising(rival, most[parts]))
            except TooSlow as reason:
                too_slow.append((reason.bound_ms, rival))
            except InfeasibleError:  # its memory; the partitioner's cuts fit, or are too slow
                continue
            else:
                if step_ms(plan) <= most[parts]:
                    found[parts], most[parts] = plan, step_ms(plan)
        if not found:
            found[False] = self.order(self._just_too_slow(*min(too_slow, key=lambda one: one[0])))
        return [found[parts] for parts in sorted(found)]

    def _just_too_slow(self, bound_ms: float, plan: Plan) -> Plan:
        """The plan with its cuts moved to where its bound is within what a step may take, if that is near."""
        if not self.moves or not self._may_move or bound_ms > _MAY_MOVE * self.options.within_ms:
            raise TooSlow(bound_ms)
        for moves, most in _MOVES.items():
            if plan.num_stages <= most:
                plan = self._of(self._lowered(plan, moves, plan), plan.placement)
        return self._promising(plan, self.options.within_ms)

    def moved(self, best: Plan) -> Plan:
        """With cuts moved to where the bound is smaller, again and again while known orders of them are faster.

        The partitioner's cuts know of fill and drain, but not of a rank that waits for its first backward. Where skips
        sent count, a wave sends no more of them than before. Cuts with a tolerance stay as they are: they give time for
        bytes.
        """
        if not self._may_move:
            return best
        first, tried = best, {best.boundaries}
        ways = every = [moves for moves, most in _MOVES.items() if best.num_stages <= most]
        while ways:
            moves, *ways = ways
            cuts = self._lowered(best, moves, first)
            if cuts in tried:
                continue
            tried.add(cuts)
            most = min(self.options.within_ms, _WORTH_MOVING * step_ms(best))
            try:
                found = self.order(self._promising(self._of(cuts, best.placement), most))
            except InfeasibleError:
                continue
            if step_ms(found) <= most:
                best, ways = found, every
        return best

    def _lowered(self, plan: Plan, moves: Moves, first: Plan) -> tuple[int, ...]:
        """The plan's cuts moved until no move makes the bound smaller."""

        @cache
        def bound_ms(cuts: tuple[int, ...]) -> float:
            moved = self._of(cuts, plan.placement)
            return math.inf if self._parts_more(moved, first) else round(self._bound_ms(moved), 9)

        return descent(bound_ms, plan.boundaries, moves)[1]

    @property
    def _may_move(self) -> bool:
        return self._fills and not (self.options.boundaries or self.options.tolerance or self.job.profile.backbones)

    @property
    def _fills(self) -> bool:
        """Fill and drain are a share of the step that other cuts may lower."""
        return are_few(self.job.microbatches, self.job.pipeline_ranks)

    @property
    def _weighs(self) -> bool:
        """What a rank's parameters take after its last action depends on the cuts."""
        return self.job.data_parallel > 1 or self.job.profile.optimizer_ms_per_gb > 0

    def _may_part(self, own: Plan) -> bool:
        return self.options.parts_skips and bool(self.job.profile.skips) and own.waves > 0

    def _promising(self, plan: Plan, within_ms: float) -> Plan:
        if within_ms < math.inf:
            bound_ms = self._bound_ms(plan)
            if bound_ms > within_ms:
                raise TooSlow(bound_ms)
        return plan

    def _rivals(self, own: Plan, within_ms: float) -> list[Plan]:
        """Cuts by other views of the profile, if any could be as fast as that; parameters are weighed where their
        reduction and step add to the order of ``own``. Then those that count fill and drain, the most promising."""
        if self._ideal_ms(own.placement, reduction_ms=self._least_reduction_ms) > within_ms:
            return []
        estimated = own.estimate
        hidden = estimated is not None and estimated.step_ms <= _HIDDEN * estimated.makespan_ms
        views = _other_views(self.job, skipless=self._may_part(own), weighed=self._weighs and not hidden)
        plans = {plan.boundaries: plan for plan in (self.cut(own.placement, view) for view in views)}
        plans |= {plan.boundaries: plan for plan in self._filling(own) if plan.boundaries not in plans}
        return [plan for cuts, plan in plans.items() if cuts != own.boundaries]

    @property
    def _least_reduction_ms(self) -> float:
        """Of all gradients, whichever ranks have them."""
        return least_reduction_ms(self.job.profile, self.job.cluster, self.job.grid)

    def _ideal_ms(self, placement: Placement, *, reduction_ms: float = 0.0) -> float:
        """No cuts have a shorter step."""
        job, profile = self.job, with_recompute(self.job.profile, self.recompute)
        found = ideal_ms(
            profile,
            placement,
            job.microbatches,
            reduction_ms=reduction_ms,
            split=self._halves,
            apart=self.options.backbone_steps != "together",
        )
        return found + optimizer_ms(profile, profile.param_bytes // job.pipeline_ranks, job.rules, job.data_parallel)

    def _parts_more(self, rival: Plan, own: Plan) -> bool:
        """Whether it sends skips that the other keeps, where that has to be worth it."""
        links = self.job.cluster.intra_node, self.job.cluster.inter_node
        if own.waves == 0 or (self.options.parts_skips and not any(link.overhead_us for link in links)):
            return False
        sent, others = ({route.name for route in plan.routes if route.hops} for plan in (own, rival))
        return not others <= sent

    @property
    def _halves(self) -> bool:
        """Backwards may run in halves."""
        return halves_tried(self.options, self.job.profile)[-1]

    def _filling(self, own: Plan) -> list[Plan]:
        """Cuts that count fill and drain, with skips and without regard to them; those with the smallest bounds."""
        if not self._fills:
            return []
        views = [self.job.profile, *_other_views(self.job, skipless=self._may_part(own), weighed=False)]
        fillings = [times * self.job.microbatches for times in _FILLINGS]
        cut = [self.cut(own.placement, view, filling=filling) for view in views for filling in fillings]
        plans = {plan.boundaries: plan for plan in cut if plan.boundaries != own.boundaries}
        return self._promising_first(plans)

    def _promising_first(self, plans: dict[tuple[int, ...], Plan]) -> list[Plan]:
        """Those with the smallest bounds, so many as may be ordered."""
        ranked = sorted(plans.values(), key=self._bound_ms)
        many = ranked[0].num_stages * self.job.microbatches > _MANY_FORWARDS if ranked else False
        return ranked[: 1 if many else len(_FILLINGS)]

    def _bound_ms(self, plan: Plan) -> float:
        problem = Problem(plan, self.job.profile, self.job.cluster)
        if plan.backbones and self.options.backbone_steps != "together":
            # steps that run into one another need not fill and drain
            return busiest_ms(problem) + slowest_optimizer_ms(problem)
        return least_step_ms(problem, split=self._halves)

    def quick(self) -> Maker:
        """The same without a search."""
        return replace(self.within(0.0), progress=None)

    def within(self, seconds: float) -> Maker:
        """The same with so much time for a search."""
        return replace(self, options=replace(self.options, solver_seconds=seconds))

    def order(self, plan: Plan) -> Plan:
        """The plan with the best order of its cuts, and frozen work in the time that leaves idle."""
        return ordered(plan, self.job, self.options, self.progress)

    def cut(self, placement: Placement, view: Profile, *, filling: int = 0, memory_bytes: int | None = None) -> Plan:
        """Without an order; cut as a view of the profile asks for, fill and drain spread over so many microbatches.

        ``memory_bytes``: of a rank; None: the job's.
        """
        viewed = replace(self.job, profile=_with_extra(with_recompute(view, self.recompute), self.job))
        viewed = viewed if memory_bytes is None else replace(viewed, memory_bytes=memory_bytes)
        tolerance = self.options.tolerance
        if self.options.boundaries:
            cuts = tuple(self.options.boundaries)
        elif view.backbones:
            cuts = joint_partition(viewed, placement, tolerance=tolerance)
        else:
            cuts = partition(viewed, placement, tolerance=tolerance, filling=filling)
        return self._of(cuts, placement)

    def _of(self, cuts: tuple[int, ...], placement: Placement) -> Plan:
        """Cuts of the job, without an order."""
        plan = Plan(
            pipeline_ranks=self.job.pipeline_ranks,
            data_parallel=self.job.data_parallel,
            microbatches=self.job.microbatches,
            microbatch_size=self.job.profile.microbatch_size,
            boundaries=cuts,
            placement=placement,
            backbones=backbone_stages(self.job.profile.backbones, placement),
            schedule=((),) * self.job.pipeline_ranks,
            routes=make_routes(cuts, placement, self.job.profile.values),
            recompute=self.recompute,
            layout=self.job.layout,
            rules=self.job.rules,
            conditioning=tuple(self.job.conditioning),
        )
        if plan.data_parallel == 1 or not plan.rules.reduce_early:
            return plan
        problem = Problem(plan, self.job.profile, self.job.cluster)
        size = fitting_bucket_bytes(problem.costs, problem.links, placement, plan.microbatches)
        return replace(plan, bucket_bytes=size)


def are_few(microbatches: int, ranks: int) -> bool:
    """So few that fill and drain are a share of the step that other cuts and placements may lower."""
    per_rank = _FEW if ranks * microbatches <= _QUICK else _FEW // 2
    return ranks > 1 and 1 < microbatches <= per_rank * ranks


def _other_views(job: Job, *, skipless: bool, weighed: bool) -> list[Profile]:
    """Views of a job's profile that bring other cuts than the profile itself.

    ``skipless``: also a balance of time and hidden states alone, which fast links want; skips go where that sends them.
    ``weighed``: also, of all views, cuts that weigh what each rank has to reduce over its data-parallel peers, and to
    step.
    """
    views = [job.profile]
    if skipless:
        views.append(replace(job.profile, skips=()))
    if weighed:
        views += [_with_parameters(view, job, share) for view in views for share in _SHARES]
    return views[1:]


def _with_extra(profile: Profile, job: Job) -> Profile:
    """Where some microbatches run a layer's forward twice, it takes as much longer on average."""
    layers = list(profile.layers)
    for one in job.conditioning:
        first, end = next((p.layers for p in profile.backbones if one.layers[0] < p.layers[1]), (0, len(layers)))
        factor = 1.0 + one.count(job.microbatches) / job.microbatches
        layers[first:end] = [replace(x, forward_ms=factor * x.forward_ms) for x in layers[first:end]]
    return replace(profile, layers=tuple(layers)) if job.conditioning else profile


def _with_parameters(profile: Profile, job: Job, share: float) -> Profile:
    links = Links(job.cluster, job.grid)
    slowest = max(links.least_reduction_ms(rank, 10**9) for rank in range(job.pipeline_ranks))
    stepped = optimizer_ms(profile, 10**9, job.rules, job.data_parallel)
    ms_per_byte = share * (slowest + stepped) / 1e9 / job.microbatches
    layers = (replace(x, backward_ms=x.backward_ms + ms_per_byte * x.param_bytes) for x in profile.layers)
    return replace(profile, layers=tuple(layers))
