"""The one discrete-event simulator: every plan's times and memory come from here.

An action starts when its rank is free and its messages have arrived. A message leaves when its producer ends,
occupies its directed link for bytes/bandwidth after the messages before it, and arrives latency later; transfers
do not occupy the ranks. Where the cluster says that a rank has one port, all its messages and gradients follow one
another through it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed_pulse.ir.carried import in_step_order
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.dependencies import Item, Result, ordered, result_of, results_needed, results_read
from deepspeed_pulse.ir.fill import Fill, FrozenRun, FrozenWork, HandOver
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.program import Message, Step
from deepspeed_pulse.ir.schedule import FORWARDS, Action, Op, Schedule
from deepspeed_pulse.ir.timeline import Reduction, Sent, Span, Timeline, Transfer
from deepspeed_pulse.planner.bounds import lower_bound_ms
from deepspeed_pulse.planner.buckets import behind_ms
from deepspeed_pulse.planner.cost import optimizer_ms, state_bytes, step_bytes
from deepspeed_pulse.planner.links import Ports, Way
from deepspeed_pulse.planner.memory import memory_over_time
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.reduction import gathered_share, pieces, reduction_ms, summed_share

Durations = Mapping[Any, float]
"""ms by action, by :class:`~deepspeed_pulse.ir.fill.FrozenRun`, and by :class:`~deepspeed_pulse.ir.fill.HandOver`: what
that costs each of its ends."""


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """Times (ms) of a plan's actions and messages, and live bytes per rank.

    Raises:
        PlanError: the plan is another model's, or its order deadlocks; says per rank where it is stuck.
    """
    return run(Problem(plan, profile, cluster), plan.schedule)


def estimate(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """All figures of a plan. The optimizer's step comes after the last reduction; of that, what is not hidden counts.

    ``peak_bytes`` includes weights, gradients and optimizer state, of which the optimizer's part is divided by the
    data-parallel degree where the plan's rules say so (ZeRO-1).
    """
    problem = Problem(plan, profile, cluster)
    return summarize(problem, run(problem, plan.schedule))


def run(problem: Problem, schedule: Schedule, *, durations: Durations | None = None) -> Timeline:
    """Simulate an order on a problem, whatever schedule its plan has.

    Where the problem's plan carries actions over, it is a step among others alike.

    ``durations``: ms of every action, and of frozen work, where they are not as planned.
    """
    return with_memory(problem, times(problem, schedule, durations=durations))


def with_memory(problem: Problem, timeline: Timeline) -> Timeline:
    """What :func:`times` found, with what is live."""
    return replace(timeline, memory=memory_over_time(problem, timeline))


def times(problem: Problem, schedule: Schedule, *, durations: Durations | None = None) -> Timeline:
    """:func:`run`, without what is live: a third of its time."""
    late = problem.carried(schedule)
    clock = _Clock(problem, schedule, durations, late)
    for rank, item in ordered(problem.lower(schedule), problem.placement, problem.plan.fill):
        clock.run(rank, item)
    for rank, stage in clock.unreduced:
        clock.reduce(rank, stage, clock.rank_free[rank])
    return Timeline(
        num_ranks=problem.num_ranks,
        spans=tuple(clock.spans),
        transfers=tuple(clock.transfers),
        frozen=tuple(clock.frozen),
        carried=tuple(clock.carried),
        reductions=tuple(clock.reductions),
    )


class _Clock:
    """Times of steps that come in a feasible order."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        durations: Durations | None,
        carried: Collection[Action] = (),
    ) -> None:
        self.problem = problem
        self._duration_ms = problem.duration_ms if durations is None else durations.__getitem__
        self._given_ms: Durations = durations or {}
        self.spans: list[Span[Action]] = []
        self.transfers: list[Transfer[Message]] = []
        self.frozen: list[Span[FrozenRun]] = []
        self.carried: list[Transfer[HandOver]] = []
        self.reductions: list[Reduction] = []
        self.rank_free = [0.0] * problem.num_ranks
        self._ports = Ports()
        self._arrived: dict[Message, float] = {}
        self._ready: dict[Result, float] = {}
        """When frozen results are on a rank."""
        self._untaken: dict[Result, float] = {}
        """Of those that come from another rank and were not read yet, what taking them costs."""
        self._read_in_step = set() if problem.plan.fill is None else results_read(problem.plan.fill)
        self._last_backwards: set[Action] = set()
        """Of each stage; empty without data-parallel peers."""
        if problem.plan.data_parallel > 1:
            rows = in_step_order(schedule, carried)
            last = {a.stage: a for row in rows for a in row if a.op not in FORWARDS}
            self._last_backwards.update(last.values())
        self.unreduced: list[tuple[int, int]] = []
        """(rank, stage) whose gradients are there and wait for the rank's last action."""

    def run(self, rank: int, item: Item) -> None:
        if isinstance(item, Step):
            self._compute(rank, item)
        else:
            self._run_frozen(rank, item)

    def _compute(self, rank: int, step: Step) -> None:
        if step.action.op is Op.LANDING:
            return
        start = max([self.rank_free[rank], *(self._arrived[message] for message in step.receives)])
        end = self.rank_free[rank] = start + self._duration_ms(step.action)
        self.spans.append(Span(rank=rank, work=step.action, start_ms=start, end_ms=end))
        leaving = self._leaving(rank, step.action, start, end)
        sums = [self._sum(rank, *piece) for piece in leaving[:-1]]
        for message in step.sends:
            self.transfers.append(self._sent(message, self.problem.way(message), end))
            self._arrived[message] = self.transfers[-1].arrive_ms
        sums += [self._sum(rank, *piece) for piece in leaving[-1:]]
        if sums:
            (begin, _), (_, over) = sums[0], sums[-1]
            self.reductions.append(Reduction(rank=rank, stage=step.action.stage, start_ms=begin, end_ms=over))

    def _run_frozen(self, rank: int, work: FrozenWork) -> None:
        """It starts when the rank is free and holds what the work reads; hand-overs occupy links as messages do.

        A hand-over keeps its sender from other work, and its receiver before what reads it first; what nothing reads
        before the next step is there so much later.
        """
        fill = self.problem.plan.fill
        assert fill is not None
        needed = results_needed(rank, work, fill)
        start = max([self.rank_free[rank], *(self._ready[result] for result in needed)])
        start += sum(self._untaken.pop(result, 0.0) for result in needed)
        if isinstance(work, HandOver):
            end = self._hand_over(rank, work, start, fill)
        else:
            end = self.rank_free[rank] = start + self._given_ms.get(work, fill.duration_ms(work))
            self.frozen.append(Span(rank=rank, work=work, start_ms=start, end_ms=end))
        self._ready[result_of(rank, work)] = end

    def _hand_over(self, rank: int, work: HandOver, start: float, fill: Fill) -> float:
        """When the result is there."""
        links, result = self.problem.links, result_of(rank, work)
        overhead = self._given_ms.get(work, links.between(rank, work.target_rank).overhead_ms)
        self.rank_free[rank] = start + overhead
        way = links.way(rank, work.target_rank, fill.num_bytes(work))
        transfer = self._sent(work, way, self.rank_free[rank])
        self.carried.append(transfer)
        if result in self._read_in_step:
            self._untaken[result] = overhead
        else:
            transfer.arrive_ms += overhead
        return transfer.arrive_ms

    def _sent(self, message: Sent, way: Way, ready: float) -> Transfer[Sent]:
        leave, arrive = self._ports.send(way, ready)
        return Transfer(
            message=message,
            source_rank=way.source,
            target_rank=way.target,
            leave_ms=leave,
            arrive_ms=arrive,
            num_bytes=way.num_bytes,
        )

    def _sum(self, rank: int, ready: float, ms: float) -> tuple[float, float]:
        """From when until when a rank sums over its peers."""
        return self._ports.occupy(self.problem.links.sums_port(rank), ready, ms)

    def _leaving(self, rank: int, action: Action, start: float, end: float) -> Sequence[tuple[float, float]]:
        """Gradients that leave with an action: those of a stage with its last backward, unless all leave at the end."""
        if action not in self._last_backwards:
            return ()
        if self.problem.rules.reduce_early:
            return pieces(self.problem, action.stage, start, end)
        self.unreduced.append((rank, action.stage))
        return ()

    def reduce(self, rank: int, stage: int, ready: float) -> None:
        """After the rank's last action; a sharded optimizer only scatters gradients: half of an all-reduce."""
        problem = self.problem
        start, end = self._sum(rank, ready, summed_share(problem.rules) * reduction_ms(problem, stage))
        self.reductions.append(Reduction(rank=rank, stage=stage, start_ms=start, end_ms=end))


def summarize(problem: Problem, timeline: Timeline) -> Estimate:
    """The figures of a simulated step."""
    plan = problem.plan
    step_ms, makespan = step_and_makespan_ms(problem, timeline)
    microbatches = 1 + max(span.work.microbatch for span in timeline.spans)
    in_halves = any(span.work.op is Op.WEIGHT_GRAD for span in timeline.spans)
    bound = lower_bound_ms(problem, microbatches, split=in_halves or problem.profile.knows_halves)
    if plan.carries:
        bound = busiest_ms(problem)
    if timeline.frozen:  # no order is then shorter than all work divided by the ranks, backwards whole
        frozen = sum(span.end_ms - span.start_ms for span in timeline.frozen)
        work = frozen + sum(problem.least_ms(span.work) for span in timeline.spans)
        bound = max(bound, work / timeline.num_ranks)
    gap = makespan / bound - 1.0 if bound > 0 else 0.0
    sent = [(t.message, t.num_bytes) for t in timeline.transfers] + [(c.message, c.num_bytes) for c in timeline.carried]
    # microbatches with an extra forward send more than others, and not all are encoded on one rank: a mean then
    per_microbatch = sum(size for m, size in sent if m.microbatch == 0)
    if plan.conditioning or timeline.carried:
        per_microbatch = round(sum(size for _, size in sent) / microbatches)
    samples = plan.microbatch_size * microbatches * plan.data_parallel
    return Estimate(
        makespan_ms=makespan,
        step_ms=step_ms,
        lower_bound_ms=bound,
        gap=0.0 if abs(gap) < 1e-12 else gap,
        bubble_ratio=timeline.bubble_ratio,
        peak_bytes=peak_bytes(problem, timeline),
        p2p_bytes_per_microbatch=per_microbatch,
        samples_per_second=1e3 * samples / step_ms if step_ms > 0 else 0.0,
        optimizer_ms=slowest_optimizer_ms(problem),
    )


def step_ms(plan: Plan) -> float:
    """What plans are compared by."""
    return plan.figures.step_ms


def step_and_makespan_ms(problem: Problem, timeline: Timeline) -> tuple[float, float]:
    """How long a step takes with what is reduced at its end and the optimizer's, and without."""
    makespan = timeline.makespan_ms
    if problem.plan.carries:  # what the next step reads lands before this one ends
        makespan = max([makespan, *(t.arrive_ms for t in timeline.transfers)])
    return max(makespan, _reduction_end_ms(problem, timeline)) + slowest_optimizer_ms(problem), makespan


def slowest_optimizer_ms(problem: Problem) -> float:
    """How long all ranks step their parameters: as long as the one that has most.

    They begin together, as gradients are clipped by their norm (DeepSpeed's default, and always so with bf16), which no
    rank knows before the last sum.
    """
    plan, params = problem.plan, [0] * problem.num_ranks
    for stage, rank in enumerate(problem.placement):
        params[rank] += problem.costs.param_bytes[stage]
    return optimizer_ms(problem.profile, max(params), problem.rules, plan.data_parallel)


def busiest_ms(problem: Problem) -> float:
    """Work of the rank that has most: no steady state is shorter."""
    work = [0.0] * problem.num_ranks
    for stage, rank in enumerate(problem.placement):
        work[rank] += problem.plan.microbatches * problem.costs.work_ms(stage)
    for action in problem.extra_actions:
        work[problem.placement[action.stage]] += problem.duration_ms(action)
    return max(work)


def peak_bytes(problem: Problem, timeline: Timeline) -> tuple[int, ...]:
    """Per rank, what it holds at its peak."""
    peaks = [max((live for _, live in row), default=0) for row in timeline.memory]
    return tuple(sum(at_peak(problem, rank, {"live": live}).values()) for rank, live in enumerate(peaks))


def at_peak(problem: Problem, rank: int, live: Mapping[str, int]) -> dict[str, int]:
    """Bytes that a rank holds at its peak, by :data:`~deepspeed_pulse.ir.run.MEMORY_PARTS`.

    What is always there, and the most that is ``live`` at one time or the optimizer's step, whichever is more; beside
    that lie results of frozen parts for the next step. A backbone that makes steps of its own makes them while
    activations of others are live.
    """
    step = {"step": rank_step_bytes(problem, rank)}
    if encoded := problem.encoded_bytes(rank):
        step["frozen"] = encoded
    parts = {**live, **step} if problem.plan.carries else max(live, step, key=lambda held: sum(held.values()))
    return {**always_held(problem, rank), **parts}


def always_held(problem: Problem, rank: int) -> dict[str, int]:
    """Bytes that a rank holds through the whole step, by :data:`~deepspeed_pulse.ir.run.MEMORY_PARTS`."""
    found = {"state": rank_state_bytes(problem, rank), "communicators": problem.communicator_bytes(rank)}
    return {part: size for part, size in found.items() if size}


def rank_state_bytes(problem: Problem, rank: int) -> int:
    """Weights, gradients and optimizer state of a rank's stages, and weights of the frozen layers it runs."""
    stages = problem.plan.stages_of(rank)
    params, frozen = (
        sum(sizes[s] for s in stages) for sizes in (problem.costs.param_bytes, problem.costs.frozen_bytes)
    )
    state = state_bytes(problem.profile, params, problem.rules, problem.plan.data_parallel)
    return state + frozen + (0 if problem.plan.fill is None else problem.plan.fill.param_bytes(rank))


def rank_step_bytes(problem: Problem, rank: int) -> int:
    """What the optimizer's step holds beside the state; of backbones that step apart, the largest one's."""
    plan, params = problem.plan, defaultdict[int, int](int)
    for stage in plan.stages_of(rank):
        params[problem.placement.backbone_of(stage) if plan.carries else 0] += problem.costs.param_bytes[stage]
    return step_bytes(problem.profile, max(params.values(), default=0), problem.rules, plan.data_parallel)


def still_optimal(plan: Plan) -> Plan:
    """The plan with what is so of its proof: not all that was added to it, or left out, keeps its order the best."""
    if plan.solver is None or plan.estimate is None or not plan.solver.optimal:
        return plan
    reached = plan.estimate.makespan_ms <= plan.estimate.lower_bound_ms * (1 + 1e-9)
    return replace(plan, solver=replace(plan.solver, optimal=reached))


def _reduction_end_ms(problem: Problem, timeline: Timeline) -> float:
    """When the last rank would hold its new weights if the optimizer took no time; 0 without peers.

    Where peers share optimizer state, the rank's weights are gathered after its step, half of an all-reduce.
    """
    ends, gather = defaultdict[int, float](float), defaultdict[int, float](float)
    gathered = gathered_share(problem.profile, problem.rules, problem.plan.data_parallel)
    for reduction in timeline.reductions:
        ends[reduction.rank] = max(ends[reduction.rank], reduction.end_ms)
        if gathered:
            gather[reduction.rank] += gathered * reduction_ms(problem, reduction.stage)
    return max((end + gather[rank] for rank, end in ends.items()), default=0.0)


def least_step_ms(problem: Problem, *, split: bool = False) -> float:
    """No order has a shorter step: :func:`lower_bound_ms`, and for each rank what must come before its reductions.

    The last backward of a stage comes after all its rank's forwards of earlier stages and after all work of its own
    and later ones, weights' halves apart; gradients of the earlier stages are reduced after that, and of its own what
    does not leave while it runs. The latter comes after its own weights' halves, too, which may run when the earlier
    stages' gradients are on their way. All of them are stages of its backbone. Then the optimizer steps.
    """
    costs, microbatches = problem.costs, problem.plan.microbatches
    found = lower_bound_ms(problem, microbatches, split=split)
    for rank in range(problem.num_ranks if problem.plan.data_parallel > 1 else 0):
        stages = problem.plan.stages_of(rank)
        for stage in stages:
            alike = [s for s in stages if problem.placement.backbone_of(s) == problem.placement.backbone_of(stage)]
            before, after = [s for s in alike if s < stage], [s for s in alike if s > stage]
            later = sum(costs.work_ms(s) - (costs.weight_grad_ms[s] if split else 0.0) for s in after)
            work = costs.work_ms(stage) + later + sum(costs.forward_ms[s] for s in before)
            own = reduction_ms(problem, stage)
            if problem.rules.reduce_early:
                own = behind_ms(problem.buckets[stage], costs.backward_ms[stage])
            others = sum(reduction_ms(problem, s) for s in before)
            weights = costs.weight_grad_ms[stage] if split and before else 0.0
            found = max(found, microbatches * work + own, microbatches * (work - weights) + own + others)
    return found + slowest_optimizer_ms(problem)
