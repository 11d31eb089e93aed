"""What plans are asked for, and the plan of one placement: cut, ordered, filled."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import describe_placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.routes import make_routes
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner.filling.fill import fill_plan
from deepspeed_pulse.planner.ideal import ideal_ms
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.making.places import Placement
from deepspeed_pulse.planner.partition.cuts import partition
from deepspeed_pulse.planner.partition.views import other_views
from deepspeed_pulse.planner.recompute import with_recompute
from deepspeed_pulse.planner.routes import named_values
from deepspeed_pulse.planner.search.synthesize import Progress, synthesize
from deepspeed_pulse.planner.simulate import least_step_ms, reduction_ms

_WORTH_CHANGING = 0.95
"""Of the step with the partitioner's own cuts, what others may take at most: a simulation does not count everything."""
_HIDDEN = 1.02
"""Step over makespan up to which gradients count as reduced behind other work."""


class TooSlow(InfeasibleError):
    """No order of the cuts keeps to ``within_ms``. ``bound_ms``: none is shorter. ``cuts``: their boundaries."""

    def __init__(self, bound_ms: float, cuts: tuple[int, ...]) -> None:
        super().__init__(f"a step takes at least {bound_ms:.6g} ms")
        self.bound_ms, self.cuts = bound_ms, cuts


@dataclass(frozen=True, kw_only=True)
class Request:
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
    rules: Rules
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
            most = min(most, _WORTH_CHANGING * step_ms(best))
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
                if step_ms(found) <= most:
                    best, most = found, step_ms(found)
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

    def quick(self, **changes: Any) -> Request:
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
            shards=self.rules.shards(self.data_parallel),
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
            rules=self.rules,
        )


def step_ms(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_ms
