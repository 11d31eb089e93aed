"""The one discrete-event simulator: every plan's times and memory come from here.

An action starts when its rank is free and its messages have arrived. A message leaves when its producer ends,
occupies its directed link for bytes/bandwidth after the messages before it, and arrives latency later; transfers
do not occupy the ranks. Where the cluster says that a rank has one port, all its messages and gradients follow one
another through it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.dependencies import Item, Result, ordered, result_of, results_needed
from deepspeed_pulse.ir.fill import Fill, FrozenRun, FrozenWork, HandOver
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.program import Message, Step
from deepspeed_pulse.ir.schedule import Action, Op, Schedule
from deepspeed_pulse.ir.timeline import Reduction, Sent, Span, Timeline, Transfer
from deepspeed_pulse.planner.bounds import lower_bound_ms
from deepspeed_pulse.planner.cost import state_bytes
from deepspeed_pulse.planner.links import Ports
from deepspeed_pulse.planner.memory import memory_over_time
from deepspeed_pulse.planner.problem import Problem


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """Times (ms) of a plan's actions and messages, and live bytes per rank.

    Raises:
        PlanError: the plan is another model's, or its order deadlocks; says per rank where it is stuck.
    """
    return run(Problem(plan, profile, cluster), plan.schedule)


def estimate(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """All figures of a plan. The optimizer step counts as 0 ms; gradient reduction is what is not hidden.

    ``peak_bytes`` includes weights, gradients and optimizer state, of which the optimizer's part is divided by the
    data-parallel degree where the plan's rules say so (ZeRO-1).
    """
    problem = Problem(plan, profile, cluster)
    return summarize(problem, run(problem, plan.schedule))


def run(
    problem: Problem,
    schedule: Schedule,
    *,
    durations: Mapping[Action, float] | None = None,
) -> Timeline:
    """Simulate an order on a problem, whatever schedule its plan has.

    Args:
        durations: ms of every action, where they are not the profile's.
    """
    clock = _Clock(problem, schedule, durations)
    for rank, item in ordered(problem.lower(schedule), problem.placement, problem.plan.fill):
        clock.run(rank, item)
    clock.reduce_rest()
    found = Timeline(
        num_ranks=problem.num_ranks,
        spans=tuple(clock.spans),
        transfers=tuple(clock.transfers),
        frozen=tuple(clock.frozen),
        carried=tuple(clock.carried),
        reductions=tuple(clock.reductions),
    )
    return replace(found, memory=memory_over_time(problem, found))


class _Clock:
    """Times of steps that come in a feasible order."""

    def __init__(self, problem: Problem, schedule: Schedule, durations: Mapping[Action, float] | None) -> None:
        self.problem = problem
        self._duration_ms = problem.duration_ms if durations is None else durations.__getitem__
        self.spans: list[Span[Action]] = []
        self.transfers: list[Transfer[Message]] = []
        self.frozen: list[Span[FrozenRun]] = []
        self.carried: list[Transfer[HandOver]] = []
        self.reductions: list[Reduction] = []
        self._rank_free = [0.0] * problem.num_ranks
        self._ports = Ports(problem.links)
        self._arrived: dict[Message, float] = {}
        self._ready: dict[Result, float] = {}
        """When frozen results are on a rank."""
        self._backwards = _count_backwards(schedule) if problem.plan.data_parallel > 1 else {}
        """Per stage, how many are still to come."""
        self._unreduced: list[tuple[int, int]] = []
        """(rank, stage) whose gradients are there and wait for the rank's last action."""

    def run(self, rank: int, item: Item) -> None:
        if isinstance(item, Step):
            self._compute(rank, item)
        elif isinstance(item, FrozenRun):
            self._run_frozen(rank, item)
        else:
            self._hand_over(rank, item)

    def _compute(self, rank: int, step: Step) -> None:
        start = self._rank_free[rank]
        for message in step.receives:
            start = max(start, self._arrived[message])
        end = start + self._duration_ms(step.action)
        self._rank_free[rank] = end
        self.spans.append(Span(rank=rank, work=step.action, start_ms=start, end_ms=end))
        for message in step.sends:
            self._send(message, end)
        if self._backwards and step.action.op is not Op.FORWARD:
            self._count_down(rank, step.action.stage, end)

    def _run_frozen(self, rank: int, run: FrozenRun) -> None:
        start = self._frozen_ready(rank, run)
        end = self._rank_free[rank] = start + self._fill.duration_ms(run)
        self._ready[result_of(rank, run)] = end
        self.frozen.append(Span(rank=rank, work=run, start_ms=start, end_ms=end))

    def _hand_over(self, rank: int, work: HandOver) -> None:
        """It leaves when the rank comes to it, and occupies the link as messages do."""
        size = self._fill.num_bytes(work)
        leave, arrive = self._ports.send(rank, work.target_rank, size, self._frozen_ready(rank, work))
        self._ready[result_of(rank, work)] = arrive
        self.carried.append(_transfer(work, rank, work.target_rank, leave, arrive, size))

    def _frozen_ready(self, rank: int, work: FrozenWork) -> float:
        """The rank is free and holds what the work reads."""
        needed = (self._ready[result] for result in results_needed(rank, work, self._fill))
        return max([self._rank_free[rank], *needed])

    @property
    def _fill(self) -> Fill:
        assert self.problem.plan.fill is not None
        return self.problem.plan.fill

    def _send(self, message: Message, ready: float) -> None:
        source, target = self.problem.link_of(message)
        size = self.problem.num_bytes(message)
        leave, arrive = self._ports.send(source, target, size, ready)
        self._arrived[message] = arrive
        self.transfers.append(_transfer(message, source, target, leave, arrive, size))

    def _count_down(self, rank: int, stage: int, end: float) -> None:
        """A backward is done: behind a stage's last one come its gradients, now or when the rank has nothing to do."""
        self._backwards[stage] -= 1
        if not self._backwards[stage]:
            if self.problem.rules.reduce_early:
                self._reduce(rank, stage, end)
            else:
                self._unreduced.append((rank, stage))

    def reduce_rest(self) -> None:
        """What was not reduced early; after all else."""
        for rank, stage in self._unreduced:
            self._reduce(rank, stage, self._rank_free[rank])

    def _reduce(self, rank: int, stage: int, ready: float) -> None:
        """With a sharded optimizer, gradients that are not summed early are only scattered: half of an all-reduce."""
        problem = self.problem
        share = 0.5 if problem.rules.shards_optimizer and not problem.rules.reduce_early else 1.0
        start, end = self._ports.occupy(problem.links.sums_port(rank), ready, share * reduction_ms(problem, stage))
        self.reductions.append(Reduction(rank=rank, stage=stage, start_ms=start, end_ms=end))


def _transfer(
    message: Sent, source: int, target: int, leave_ms: float, arrive_ms: float, num_bytes: int
) -> Transfer[Sent]:
    return Transfer(
        message=message,
        source_rank=source,
        target_rank=target,
        leave_ms=leave_ms,
        arrive_ms=arrive_ms,
        num_bytes=num_bytes,
    )


def _count_backwards(schedule: Schedule) -> Counter[int]:
    return Counter(action.stage for row in schedule for action in row if action.op is not Op.FORWARD)


def summarize(problem: Problem, timeline: Timeline) -> Estimate:
    """The figures of a simulated step."""
    plan = problem.plan
    makespan = timeline.makespan_ms
    microbatches = 1 + max(span.work.microbatch for span in timeline.spans)
    split = any(span.work.op is Op.WEIGHT_GRAD for span in timeline.spans)
    bound = max(lower_bound_ms(problem, microbatches, split=split), _even_share_ms(timeline))
    step_ms = max(makespan, _reduction_end_ms(problem, timeline))
    samples = plan.microbatch_size * microbatches * plan.data_parallel
    return Estimate(
        makespan_ms=makespan,
        step_ms=step_ms,
        lower_bound_ms=bound,
        gap=_gap(makespan, bound),
        bubble_ratio=timeline.bubble_ratio,
        peak_bytes=peak_bytes(problem, timeline),
        p2p_bytes_per_microbatch=_sent_bytes(timeline),
        samples_per_second=1e3 * samples / step_ms if step_ms > 0 else 0.0,
    )


def _even_share_ms(timeline: Timeline) -> float:
    """With frozen work no order is shorter than all work divided by the ranks; 0 without."""
    if not timeline.frozen:
        return 0.0
    return sum(end - start for start, end in timeline.intervals()) / timeline.num_ranks


def _sent_bytes(timeline: Timeline) -> int:
    """For the first microbatch, frozen results included."""
    messages = sum(t.num_bytes for t in timeline.transfers if t.message.microbatch == 0)
    return messages + sum(c.num_bytes for c in timeline.carried if c.message.microbatch == 0)


def _gap(makespan: float, bound: float) -> float:
    gap = makespan / bound - 1.0 if bound > 0 else 0.0
    return 0.0 if abs(gap) < 1e-12 else gap


def peak_bytes(problem: Problem, timeline: Timeline) -> tuple[int, ...]:
    """Per rank: state and the largest sum of what is live at one time."""
    peaks = [max((live for _, live in row), default=0) for row in timeline.memory]
    return tuple(peak + rank_state_bytes(problem, rank) for rank, peak in enumerate(peaks))


def rank_state_bytes(problem: Problem, rank: int) -> int:
    """Weights, gradients and optimizer state of a rank's stages, and weights of the frozen layers it runs."""
    params = sum(problem.costs.param_bytes[stage] for stage in problem.plan.stages_of(rank))
    shards = problem.rules.shards(problem.plan.data_parallel)
    fill = problem.plan.fill
    return state_bytes(problem.profile, params, shards=shards) + (0 if fill is None else fill.param_bytes(rank))


def _reduction_end_ms(problem: Problem, timeline: Timeline) -> float:
    """When the last rank holds its new weights, the optimizer's own time not counted; 0 without peers.

    With a sharded optimizer the rank's weights are gathered after its step, half of an all-reduce.
    """
    ends: dict[int, float] = defaultdict(float)
    gather: dict[int, float] = defaultdict(float)
    for reduction in timeline.reductions:
        ends[reduction.rank] = max(ends[reduction.rank], reduction.end_ms)
        if problem.rules.shards_optimizer:
            gather[reduction.rank] += 0.5 * reduction_ms(problem, reduction.stage)
    return max((end + gather[rank] for rank, end in ends.items()), default=0.0)


def least_step_ms(problem: Problem) -> float:
    """No order has a shorter step: :func:`lower_bound_ms`, and for each rank what must come before its reductions.

    The last backward of a stage comes after all its rank's forwards of earlier stages and after all work of its own
    and later ones; gradients of the stage and of the earlier ones are reduced after that.
    """
    costs, microbatches = problem.costs, problem.plan.microbatches
    found = lower_bound_ms(problem, microbatches)
    for rank in range(problem.num_ranks if problem.plan.data_parallel > 1 else 0):
        stages = problem.plan.stages_of(rank)
        for at, stage in enumerate(stages):
            work = sum(costs.work_ms(s) for s in stages[at:]) + sum(costs.forward_ms[s] for s in stages[:at])
            reduced = sum(reduction_ms(problem, s) for s in stages if s <= stage)
            found = max(found, microbatches * work + reduced)
    return found


def reduction_ms(problem: Problem, stage: int) -> float:
    """Ring all-reduce of a stage's gradients over its data-parallel peers."""
    return problem.links.reduction_ms(problem.placement[stage], problem.costs.param_bytes[stage])
