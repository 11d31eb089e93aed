"""When the results of frozen work start on their way: at once where this step needs them, else while the link idles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepspeed_pulse.ir.fill import Fill, Filling, FrozenPart, FrozenRun, HandOver
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner.filling.greedy import Runs
from deepspeed_pulse.planner.links import Port
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import run


def with_hand_overs(problem: Problem, parts: Sequence[FrozenPart], runs: Runs, solver: str) -> Fill:
    """Frozen runs with everything that has to travel: between parts, within a part, and to the ranks that read."""
    at_once, later = _needed(problem, parts, runs)
    rows = []
    for rank, row in enumerate(runs):
        works = [(f.position, work) for f in row for work in (f.work, *at_once.get((rank, f.work), ()))]
        rows.append(tuple(Filling(position, work) for position, work in works))
    fill = Fill(parts=tuple(parts), rows=tuple(rows), solver=solver)
    return _while_links_idle(problem, fill, later) if later else fill


def _needed(
    problem: Problem, parts: Sequence[FrozenPart], runs: Runs
) -> tuple[dict[tuple[int, object], list[HandOver]], list[tuple[int, HandOver]]]:
    """Hand-overs behind a run of a rank; and those that only the next step needs, with the rank that sends."""
    by_name = {part.name: part for part in parts}
    every = [(rank, filling.work) for rank, row in enumerate(runs) for filling in row]
    begins = {(w.part, w.microbatch, w.first): rank for rank, w in every if isinstance(w, FrozenRun)}
    wanted: dict[tuple[str, int], set[int]] = defaultdict(set)
    for rank, work in every:
        for name in by_name[work.part].needs:
            wanted[name, work.microbatch].add(rank)
    readers = {part.name: set(problem.plan.readers_of(part)) for part in parts}
    at_once: dict[tuple[int, object], list[HandOver]] = {}
    later: list[tuple[int, HandOver]] = []
    for rank, work in every:
        assert isinstance(work, FrozenRun)
        m, end = work.microbatch, work.end
        whole = end == len(by_name[work.part].layers)
        now = wanted[work.part, m] if whole else {begins[work.part, m, end]}
        at_once[rank, work] = [HandOver(work.part, end, m, target) for target in sorted(now - {rank})]
        if whole:
            later += [(rank, HandOver(work.part, end, m, to)) for to in sorted(readers[work.part] - now - {rank})]
    return at_once, later


def _while_links_idle(problem: Problem, fill: Fill, later: Sequence[tuple[int, HandOver]]) -> Fill:
    """Each goes out at the first place in its rank's row at which no later message has to wait for it."""
    timeline = run(problem.with_plan(replace(problem.plan, fill=fill)), problem.plan.schedule)
    busy = _busy(problem, timeline)
    rows = [list(row) for row in fill.rows]
    made = {(s.work.part, s.work.end, s.work.microbatch): s.end_ms for s in timeline.frozen}
    free = [_free_times(problem, timeline, rank, fill) for rank in range(timeline.num_ranks)]
    for rank, work in sorted(later, key=lambda item: made[item[1].part, item[1].done, item[1].microbatch]):
        way = problem.links.way(rank, work.target_rank, fill.num_bytes(work))
        ready = made[work.part, work.done, work.microbatch]
        last = len(free[rank]) - 1
        for position, time in enumerate(free[rank]):
            if time < ready - 1e-9:
                continue
            if position == last or all(end <= time or start >= time + way.transfer_ms for start, end in busy[way.port]):
                rows[rank].append(Filling(position, work))
                busy[way.port].append((time, time + way.transfer_ms))
                break
    ordered = (tuple(sorted(row, key=lambda filling: filling.position)) for row in rows)
    return replace(fill, rows=tuple(ordered))


def _busy(problem: Problem, timeline: Timeline) -> Mapping[Port, list[tuple[float, float]]]:
    """Per port, from when until when messages leave through it."""
    found: dict[Port, list[tuple[float, float]]] = defaultdict(list)
    for t in timeline.transfers:
        way = problem.way(t.message)
        found[way.port].append((t.leave_ms, t.leave_ms + way.transfer_ms))
    for r in timeline.reductions:
        found[problem.links.sums_port(r.rank)].append((r.start_ms, r.end_ms))
    for c in timeline.carried:
        way = problem.links.way(c.source_rank, c.target_rank, c.num_bytes)
        found[way.port].append((c.leave_ms, c.leave_ms + way.transfer_ms))
    return found


def _free_times(problem: Problem, timeline: Timeline, rank: int, fill: Fill) -> list[float]:
    """Per position in a rank's row, when the rank gets there with its frozen runs there behind it."""
    ends = {span.work: span.end_ms for span in timeline.spans_of(rank)}
    times = [0.0, *(ends[action] for action in problem.plan.schedule[rank])]
    finished = {span.work: span.end_ms for span in timeline.frozen_of(rank)}
    for filling in fill.rows[rank]:
        if isinstance(filling.work, FrozenRun):
            times[filling.position] = max(times[filling.position], finished[filling.work])
    return times
