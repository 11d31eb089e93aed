"""Everything that is wrong with a plan, at once, with the place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from deepspeed_pulse.errors import PlanError, did_you_mean, first_of
from deepspeed_pulse.ir import carried
from deepspeed_pulse.ir.channels import make_traffic
from deepspeed_pulse.ir.dependencies import walk
from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.plan import Plan, Route, stage_of
from deepspeed_pulse.ir.program import Step, lower
from deepspeed_pulse.ir.schedule import OP_RULES, SPLIT, WHOLE, Action, Op
from deepspeed_pulse.planner.checks.frozen import fill_problems
from deepspeed_pulse.planner.checks.rendezvous import rendezvous_problems

_SHOWN = 4
"""Actions listed of one kind of violation on one rank; the rest is counted."""


def violations(plan: Plan, *, num_layers: int, values: Sequence[NamedValue]) -> list[str]:
    """Every violation, one line each; empty for a sound plan. ``values`` are the model's stashed values."""
    found = list(_shape(plan, num_layers))
    if found:
        return found
    one = carried.isolated(plan)
    found += _routes(plan, values)
    found += [line for lines, _ in _schedule_problems(one).values() for line in lines]
    _, stuck = walk(lower(one), plan.placement)
    found += [f"deadlock: {entry}" for entry in stuck]
    found = found or rendezvous_problems(one, make_traffic(one))
    found = found or ([] if one is plan else list(_rolling_problems(plan)))
    return found or fill_problems(plan)


def _rolling_problems(plan: Plan) -> Iterator[str]:
    """Of a plan whose steps run into one another: of whole rows, and of the first and the last ones."""
    found = list(carried.problems(plan))
    if found:
        yield from found
        return
    for part in carried.Part:
        _, stuck = walk(carried.program_of(plan, part), plan.placement)
        if stuck:
            yield from (f"deadlock: {entry}" for entry in stuck)
            return
        yield from rendezvous_problems(plan, make_traffic(plan, part))
    yield from carried.meeting_problems(plan)


def check(plan: Plan, *, num_layers: int, values: Sequence[NamedValue]) -> None:
    """Raise a :class:`PlanError` that lists all violations and shows the rows of the ranks at fault.

    In the rows ``>>2F0<<`` marks an action at fault.
    """
    found = violations(plan, num_layers=num_layers, values=values)
    if found:
        text = "the plan cannot run:\n  " + "\n  ".join(found)
        raise PlanError("\n".join([text, *marked_rows(plan)]))


def marked_rows(plan: Plan, also: Mapping[int, set[int]] | None = None) -> list[str]:
    """Rows of the ranks at fault, with actions at fault as ``>>2F0<<``; ``also``: further positions, per rank."""
    if any(_shape(plan, plan.boundaries[-1] if plan.boundaries else 0)):
        return []
    wanted = {rank: {plan.schedule[rank][i] for i in positions} for rank, positions in (also or {}).items()}
    plan = carried.isolated(plan)
    marked = {rank: set(at) for rank, (_, at) in _schedule_problems(plan).items()}
    for rank, actions in wanted.items():
        marked.setdefault(rank, set()).update(plan.schedule[rank].index(action) for action in actions)
    _, stuck = walk(lower(plan), plan.placement)
    for entry in stuck:
        assert isinstance(entry.item, Step)
        marked.setdefault(entry.rank, set()).add(plan.schedule[entry.rank].index(entry.item.action))
    return [
        f"rank {rank}: " + " ".join(f">>{a}<<" if i in marked[rank] else str(a) for i, a in enumerate(row))
        for rank, row in enumerate(plan.schedule)
        if rank in marked
    ]


def _shape(plan: Plan, num_layers: int) -> Iterator[str]:
    bounds, ranks = plan.boundaries, plan.pipeline_ranks
    if not bounds or bounds[-1] != num_layers:
        last = bounds[-1] if bounds else 0
        yield f"boundaries: the plan cuts {last} layers, the model has {num_layers}; it was made for another model"
    if len(bounds) != plan.num_stages + 1:
        yield f"boundaries: expected {plan.num_stages + 1} for {plan.num_stages} stages, found {len(bounds)}"
    if bounds and bounds[0] != 0:
        yield f"boundaries: the first stage starts at layer {bounds[0]}, expected 0"
    for stage, (first, end) in enumerate(pairwise(bounds)):
        if end <= first:
            yield f"boundaries: stage {stage} has no layer: it starts at {first} and ends before {end}"
    strange = sorted({rank for rank in plan.placement if not 0 <= rank < ranks})
    if strange:
        yield f"placement: rank {', '.join(map(str, strange))} is not one of the {ranks} pipeline ranks"
    idle = sorted(set(range(ranks)) - set(plan.placement))
    if idle:
        yield f"placement: rank {', '.join(map(str, idle))} holds no stage"
    if len(plan.schedule) != ranks:
        yield f"schedule: expected one row for each of the {ranks} ranks, found {len(plan.schedule)}"
    strange_layers = [i for i in plan.recompute if not 0 <= i < num_layers]
    if strange_layers:
        yield f"recompute: the model has layers 0..{num_layers - 1}, found {', '.join(map(str, strange_layers))}"
    for route in plan.routes:
        if any(not 0 <= s < plan.num_stages for s in (route.source_stage, *(s for hop in route.hops for s in hop))):
            yield f"route {route.name!r}: names a stage outside 0..{plan.num_stages - 1}"


def _schedule_problems(plan: Plan) -> dict[int, tuple[list[str], list[int]]]:
    """Per rank at fault: lines, and positions in its row."""
    found = {rank: _Row(plan, rank).problems() for rank in range(plan.pipeline_ranks)}
    return {rank: (lines, marked) for rank, (lines, marked) in found.items() if lines}


class _Row:
    """The actions of one rank, checked against what the rank has to do."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.row = plan, rank, plan.schedule[rank]
        self.first = {action: i for i, action in reversed(list(enumerate(self.row)))}

    def problems(self) -> tuple[list[str], list[int]]:
        lines, marked = [], []
        for found in map(list, (self._strange(), self._twice(), self._missing(), self._too_early(), self._unordered())):
            for kind in dict.fromkeys(kind for kind, _, _ in found):
                texts = [text for this, text, _ in found if this == kind]
                lines.append(f"schedule of rank {self.rank}: {kind} {first_of(texts, _SHOWN)}")
            marked += [position for _, _, position in found if position is not None]
        return lines, marked

    def _strange(self) -> Iterator[tuple[str, str, int | None]]:
        for i, a in enumerate(self.row):
            if a.stage >= self.plan.num_stages:
                yield f"there is no such stage (0..{self.plan.num_stages - 1}):", str(a), i
            elif self.plan.placement[a.stage] != self.rank:
                yield f"stage {a.stage} belongs to rank {self.plan.placement[a.stage]}:", str(a), i
            elif a.microbatch >= self.plan.microbatches:
                yield f"there is no such microbatch (0..{self.plan.microbatches - 1}):", str(a), i
            elif a.op is Op.EXTRA_FORWARD and a.microbatch not in self.plan.extra_forwards(a.stage):
                yield "its microbatch is not self-conditioned:", str(a), i

    def _twice(self) -> Iterator[tuple[str, str, int | None]]:
        count = Counter(self.row)
        for i, a in enumerate(self.row):
            if self.first[a] != i:
                yield "runs more than once:", f"{a} ({count[a]} times)", i

    def _missing(self) -> Iterator[tuple[str, str, int | None]]:
        for stage in self.plan.stages_of(self.rank):
            for extra in (Action(stage, Op.EXTRA_FORWARD, m) for m in self.plan.extra_forwards(stage)):
                if extra not in self.first:
                    yield "never runs:", str(extra), None
            for m in range(self.plan.microbatches):
                forward, full, inputs, weights = (Action(stage, op, m) for op in (*WHOLE, *SPLIT[1:]))
                halves = [a for a in (inputs, weights) if a in self.first]
                if forward not in self.first:
                    yield "never runs:", str(forward), None
                if full in self.first and halves:
                    yield "runs both whole and in halves:", f"{full} and {halves[0]}", self.first[halves[0]]
                elif full not in self.first and not halves:
                    yield "never runs:", str(full), None
                elif full not in self.first and len(halves) == 1:
                    yield "never runs:", str(weights if halves[0] == inputs else inputs), None

    def _too_early(self) -> Iterator[tuple[str, str, int | None]]:
        for a, i in self.first.items():
            before = OP_RULES[a.op].after
            if before is not None:
                needed = Action(a.stage, before, a.microbatch)
                if self.first.get(needed, -1) > i:
                    yield "runs before what it needs:", f"{a} before {needed}", i

    def _unordered(self) -> Iterator[tuple[str, str, int | None]]:
        last: dict[tuple[int, Op], Action] = {}
        for i, a in enumerate(self.row):
            earlier = last.get((a.stage, a.op))
            if earlier is not None and earlier.microbatch > a.microbatch:
                yield "microbatches are not in order within a stage:", f"{earlier} before {a}", i
            last[a.stage, a.op] = a


def _routes(plan: Plan, values: Sequence[NamedValue]) -> Iterator[str]:
    known = {value.name: value for value in values if value.source is not None}
    seen: set[str] = set()
    for route in plan.routes:
        if route.name in seen:
            yield f"route {route.name!r}: listed twice"
        elif route.name not in known:
            yield f"route {route.name!r}: the model has no such value{did_you_mean(route.name, known)}"
        else:
            yield from _Travel(plan, known[route.name]).problems(route)
        seen.add(route.name)
    for name in (name for name in known if name not in seen):
        yield from _Travel(plan, known[name]).problems(None)


class _Travel:
    """One value's way over the ranks."""

    def __init__(self, plan: Plan, value: NamedValue) -> None:
        assert value.source is not None
        self.plan, self.value = plan, value
        self.source = stage_of(plan.boundaries, value.source)
        self.consumers: dict[int, int] = {}
        """Rank to its first consuming stage."""
        for target in sorted(value.targets):
            stage = stage_of(plan.boundaries, target)
            self.consumers.setdefault(plan.placement[stage], stage)

    def problems(self, route: Route | None) -> Iterator[str]:
        place = f"route {self.value.name!r}"
        hops = route.hops if route else ()
        if route and route.source_stage != self.source:
            yield f"{place}: starts at stage {route.source_stage}, its producer is in stage {self.source}"
        arrived = {self.plan.placement[self.source]: self.source}
        for start, end in hops:
            yield from self._hop(place, start, end, arrived)
        for rank, stage in sorted(self.consumers.items()):
            if rank not in arrived:
                yield f"{place}: never reaches rank {rank}, whose stage {stage} reads it"
            elif arrived[rank] > stage:
                yield f"{place}: reaches rank {rank} at stage {arrived[rank]}, after its stage {stage} reads it"
        used = {self.plan.placement[self.source], *self.consumers, *(self.plan.placement[a] for a, _ in hops)}
        for rank in sorted(arrived.keys() - used):
            yield f"{place}: goes to rank {rank}, which neither reads it nor passes it on"

    def _hop(self, place: str, start: int, end: int, arrived: dict[int, int]) -> Iterator[str]:
        here, there = self.plan.placement[start], self.plan.placement[end]
        hop = f"{place}: hop {start} -> {end}"
        if arrived.get(here, self.plan.num_stages) > start:
            yield f"{hop} starts where the value is not: rank {here} does not hold it at stage {start}"
        if end <= start:
            yield f"{hop} runs backwards; a value travels to later stages only"
        if there in arrived:
            yield f"{hop} visits rank {there} a second time; it holds the value already"
        arrived.setdefault(there, end)
