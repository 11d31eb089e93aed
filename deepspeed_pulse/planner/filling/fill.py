"""Frozen parts in a plan's idle time: several ways are tried, the simulator says which is best.

Each way puts layers into the ranks' idle time (:mod:`greedy`) and lets results travel (:mod:`hand_overs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deepspeed_pulse.errors import InfeasibleError, PlanError
from deepspeed_pulse.ir.fill import Fill, FrozenPart, in_order, is_read
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.planner.filling.assignment import MOST_COLUMNS, Assignment, gaps_of
from deepspeed_pulse.planner.filling.greedy import MOST_OPEN, Filler, Preference, Runs, latest_starts
from deepspeed_pulse.planner.filling.hand_overs import with_hand_overs
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import run, simulate, still_optimal, summarize

_PREFERENCES = (
    Preference(),
    Preference(left=0.3),
    Preference(fit=0.0, left=1.0),
    Preference(here=0.5),
    Preference(left=0.3, here=0.5),
)
_TARGETS = 6
"""Ends of the step that are tried, by halves."""

_QUICK = 3
"""As many preferences and ends where no time is given."""


@dataclass(frozen=True, kw_only=True)
class FillResult:
    """A fill with the figures of its step."""

    fill: Fill
    estimate: Estimate

    @property
    def key(self) -> tuple[float, float]:
        """Sorts fills, the best first."""
        return self.estimate.step_ms, self.estimate.makespan_ms


def fill_plan(plan: Plan, job: Job, *, solver_seconds: float) -> Plan:
    """The plan with the job's frozen work for the next step's batch in its idle time.

    ``solver_seconds``: for HiGHS, where the problem is small enough for it; 0: less of the greedy, nothing else.

    Raises:
        PlanError: the parts do not fit the model.
        InfeasibleError: no rank has the memory that a part needs.
    """
    problem = Problem(replace(plan, fill=None), job.profile, job.cluster)
    best = _Ways(problem, _checked(job.frozen, plan), job.limit_bytes).best(solver_seconds)
    return still_optimal(replace(plan, fill=best.fill, estimate=best.estimate))


def fill_behind(plan: Plan, job: Job) -> Plan:
    """The plan with the job's frozen work after each rank's last action, more of it where ranks end early.

    For rows that run into one another: what idle time they have is at their ends, and ranks that meet within a row
    wait for nothing there.

    Raises:
        PlanError, InfeasibleError: as for :func:`fill_plan`.
    """
    problem = Problem(replace(plan, fill=None), job.profile, job.cluster)
    return _Ways(problem, _checked(job.frozen, plan), job.limit_bytes).behind()


def most_bytes(parts: Sequence[FrozenPart], microbatches: int) -> int:
    """What parts never exceed on a rank that reads all that they give and runs microbatches in one piece."""
    return sum(_most_bytes(part, microbatches) + 2 * microbatches * part.output_bytes for part in parts)


def _checked(parts: Sequence[FrozenPart], plan: Plan) -> tuple[FrozenPart, ...]:
    for part in parts:
        outside = [layer for layer in part.targets if layer >= plan.num_layers]
        if outside:
            raise PlanError(
                f"frozen part {part.name!r}: expected targets below the model's {plan.num_layers} layers, found "
                f"{outside[0]}"
            )
        if not is_read(part, parts):
            raise PlanError(
                f"frozen part {part.name!r}: neither a layer of the model (targets) nor a frozen part (needs) reads "
                "it; name its readers or leave it out"
            )
        strange = [rank for rank in part.ranks or () if rank >= plan.pipeline_ranks]
        if strange:
            raise PlanError(
                f"frozen part {part.name!r}: ranks: expected pipeline ranks below {plan.pipeline_ranks}, found "
                f"{strange[0]}"
            )
    return in_order(parts)


class _Ways:
    """Everything that is tried for one plan."""

    def __init__(self, problem: Problem, parts: tuple[FrozenPart, ...], cap: int) -> None:
        self._problem, self._parts, self._cap = problem, parts, cap
        timeline = run(problem, problem.plan.schedule)
        self._pipeline = summarize(problem, timeline)
        self._starts = {span.work: span.start_ms for span in timeline.spans}
        self._ends = [max(span.end_ms for span in timeline.spans_of(rank)) for rank in range(problem.num_ranks)]
        self._allowed = allowed_ranks(problem, parts, self._pipeline.peak_bytes, cap)

    def best(self, seconds: float) -> FillResult:
        """The fill with the shortest step that keeps to the memory."""
        self._tastes, targets = (_PREFERENCES, _TARGETS) if seconds > 0 else (_PREFERENCES[:_QUICK], _QUICK)
        first = self._scored(self._in_one_piece(()), "up front")  # what filling has to beat
        shortest = self._pipeline.makespan_ms
        found = [first, *self._greedy(self._starts)]
        longest = min(filled.estimate.makespan_ms for filled in found)
        for _ in range(targets):
            if longest <= shortest * (1 + 1e-3):
                break
            target = (shortest + longest) / 2
            some = list(self._greedy(latest_starts(self._problem, target)))
            found += some
            reached = min(filled.estimate.makespan_ms for filled in some)
            if reached <= target * (1 + 1e-6):
                longest = target
            else:
                shortest = target
        best = self._fitting(found)
        return self._fitting([best, *self._assigned(best, seconds)])

    def _assigned(self, greedy: FillResult, seconds: float) -> Iterator[FillResult]:
        """What HiGHS makes of the gaps that the actions leave, with their times without and with greedy's work."""
        least = min(layer.forward_ms for part in self._parts for layer in part.layers)
        upper_ms = greedy.estimate.makespan_ms
        for plan in (self._problem.plan, replace(self._problem.plan, fill=greedy.fill)):
            gaps = gaps_of(simulate(plan, self._problem.profile, self._problem.cluster), least)
            program = Assignment(self._problem, self._parts, self._allowed, gaps, upper_ms)
            if seconds <= 0 or program.num_columns > MOST_COLUMNS:
                continue
            runs = program.solve(seconds / 2)
            if runs is not None:
                yield self._scored(runs, "assignment")

    def _fitting(self, found: Sequence[FillResult]) -> FillResult:
        fits = [filled for filled in found if max(filled.estimate.peak_bytes) <= self._cap]
        if not fits:
            needed = min(max(filled.estimate.peak_bytes) for filled in found)
            raise InfeasibleError(
                f"frozen parts: a rank needs {needed / 1e9:.3f} GB with them, {self._cap / 1e9:.3f} GB are allowed; "
                "raise the memory limit, use more ranks or smaller microbatches",
                needed_bytes=needed,
            )
        return min(fits, key=lambda filled: filled.key)

    def _greedy(self, latest: Mapping[Action, float]) -> Iterator[FillResult]:
        for preference in self._tastes:
            runs = Filler(self._problem, self._parts, self._allowed, latest, preference).fill()
            yield self._scored(runs, "greedy")

    def _in_one_piece(self, begin_ms: Sequence[float]) -> Runs:
        """Without actions between, from when each rank has time."""
        alone = self._problem.with_plan(replace(self._problem.plan, schedule=((),) * self._problem.num_ranks))
        return Filler(alone, self._parts, self._allowed, {}, Preference(fit=0.0, left=1.0), begin_ms).fill()

    def behind(self) -> Plan:
        """The plan with all of it after the last actions."""
        plan = self._problem.plan
        runs = self._in_one_piece(self._ends)
        runs = tuple(
            tuple(replace(filling, position=len(actions)) for filling in row)
            for row, actions in zip(runs, plan.schedule, strict=True)
        )
        best = self._fitting([self._scored(runs, "behind")])
        return replace(plan, fill=best.fill, estimate=best.estimate)

    def _scored(self, runs: Runs, solver: str) -> FillResult:
        fill = with_hand_overs(self._problem, self._parts, runs, solver)
        problem = self._problem.with_plan(replace(self._problem.plan, fill=fill))
        return FillResult(fill=fill, estimate=summarize(problem, run(problem, problem.plan.schedule)))


def allowed_ranks(
    problem: Problem, parts: Sequence[FrozenPart], peaks: Sequence[int], cap: int
) -> dict[str, tuple[int, ...]]:
    """Per part, the ranks with room for its weights, what its layers need to run, and its results.

    Raises:
        InfeasibleError: a part has none.
    """
    microbatches = problem.plan.microbatches
    free = [cap - peak for peak in peaks]
    for part in parts:
        for rank in problem.plan.readers_of(part):
            free[rank] -= 2 * microbatches * part.output_bytes
    found: dict[str, tuple[int, ...]] = {}
    for part in sorted(parts, key=lambda part: -part.forward_ms):
        need = _most_bytes(part, microbatches)
        allowed = range(problem.num_ranks) if part.ranks is None else part.ranks
        fitting = [r for r in allowed if free[r] >= need]
        if not fitting:
            most = max(free[r] for r in allowed)
            raise InfeasibleError(
                f"frozen part {part.name!r} needs {need / 1e9:.3f} GB on a rank that runs it; beside the model's own "
                f"{most / 1e9:.3f} GB of {cap / 1e9:.3f} GB are left at best; raise the memory limit, use more ranks "
                "or smaller microbatches",
                needed_bytes=cap - most + need,
            )
        for rank in fitting:
            free[rank] -= need
        found[part.name] = tuple(fitting)
    return found


def _most_bytes(part: FrozenPart, microbatches: int) -> int:
    """What a rank that runs the part in one piece never exceeds: weights, a layer at work, results perhaps not taken.

    With some room for shares begun. How much of what it has handed on lies there is known when a way is scored: what
    does not fit then is not taken.
    """
    begun = (MOST_OPEN + 2) * max(layer.output_bytes for layer in part.layers)
    working = max(layer.activation_bytes for layer in part.layers)
    return part.param_bytes + working + begun + microbatches * part.output_bytes
