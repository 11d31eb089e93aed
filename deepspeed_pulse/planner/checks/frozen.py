"""Everything that is wrong with a plan's frozen work, at once, with the place."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from deepspeed_pulse.errors import did_you_mean, first_of
from deepspeed_pulse.ir.carried import Part, carried_actions, fill_of, program_of
from deepspeed_pulse.ir.dependencies import Result, result_of, results_read, walk
from deepspeed_pulse.ir.fill import Fill, FrozenRun, HandOver, is_read
from deepspeed_pulse.ir.plan import Plan

_SHOWN = 4
"""Places listed of one kind of violation; the rest is counted."""


def fill_problems(plan: Plan) -> list[str]:
    """Every violation of the plan's ``fill``, one line each; empty without one. The rest of the plan is sound."""
    fill = plan.fill
    if fill is None:
        return []
    found = [*_parts(plan, fill), *_places(plan, fill)] or [*_cover(plan, fill), *_results(plan, fill)]
    if found:
        return found
    for rows in (Part.WHOLE, Part.FIRST) if carried_actions(plan) else (Part.WHOLE,):
        _, stuck = walk(program_of(plan, rows), plan.placement, fill_of(plan, rows))
        if stuck:
            return [f"deadlock: {waiting}" for waiting in stuck]
    return []


def _parts(plan: Plan, fill: Fill) -> Iterator[str]:
    for part in fill.parts:
        for layer in part.targets:
            if layer >= plan.num_layers:
                yield f"fill: part {part.name!r} has target {layer}, the model has layers 0..{plan.num_layers - 1}"
        if not is_read(part, fill.parts):
            yield f"fill: nobody reads part {part.name!r}: it has no targets and no part needs it"


def _places(plan: Plan, fill: Fill) -> Iterator[str]:
    known = {part.name: part for part in fill.parts}
    for rank, row in enumerate(fill.rows):
        for position, work in ((filling.position, filling.work) for filling in row):
            place = f"fill of rank {rank}: {work}"
            part = known.get(work.part)
            if part is None:
                yield f"{place}: there is no such part{did_you_mean(work.part, known)}"
                continue
            if position > len(plan.schedule[rank]):
                yield f"{place}: position {position} is after the row's end {len(plan.schedule[rank])}"
            if work.microbatch >= plan.microbatches:
                yield f"{place}: there is no such microbatch (0..{plan.microbatches - 1})"
            count = len(part.layers)
            if isinstance(work, FrozenRun):
                if not work.first < work.end <= count:
                    yield f"{place}: expected layers first < end <= {count}"
                if part.ranks is not None and rank not in part.ranks:
                    yield f"{place}: the part may run on ranks {', '.join(map(str, part.ranks))} only"
            elif not 0 < work.done <= count:
                yield f"{place}: the part has layers 1..{count} whose result could travel"
            elif work.target_rank == rank or work.target_rank >= plan.pipeline_ranks:
                yield f"{place}: expected another of the {plan.pipeline_ranks} pipeline ranks"


def _cover(plan: Plan, fill: Fill) -> Iterator[str]:
    """Each layer of each part once for each microbatch."""
    runs = Counter(
        (work.part, work.microbatch, layer)
        for rank in range(plan.pipeline_ranks)
        for work in fill.runs_of(rank)
        for layer in range(work.first, work.end)
    )
    for part in fill.parts:
        places = itertools.product(range(plan.microbatches), range(len(part.layers)))
        times = [(f"[{layer}]@{m}", runs[part.name, m, layer]) for m, layer in places]
        never = [place for place, count in times if not count]
        twice = [place for place, count in times if count > 1]
        for kind, found in (("never runs", never), ("runs more than once", twice)):
            if found:
                yield f"fill: part {part.name!r}: {kind}: layer {first_of(found, _SHOWN)}"


def _results(plan: Plan, fill: Fill) -> Iterator[str]:
    """Nothing arrives where it is already, or where nothing reads it; every part's result arrives where it is read."""
    works = [(rank, filling.work) for rank, row in enumerate(fill.rows) for filling in row]
    given = Counter(result_of(rank, work) for rank, work in works)
    for result, count in given.items():
        if count > 1:
            yield f"fill: {result} is made or sent there {count} times"
    read = results_read(fill)
    for part in fill.parts:
        for rank in plan.readers_of(part):
            results = [Result(part.name, len(part.layers), m, rank) for m in range(plan.microbatches)]
            read.update(results)
            missing = [result.microbatch for result in results if not given[result]]
            if missing:
                yield (
                    f"fill: rank {rank} reads part {part.name!r} and never gets it for microbatch "
                    f"{', '.join(map(str, missing[:_SHOWN]))}"
                )
    for rank, work in works:
        if isinstance(work, HandOver) and result_of(rank, work) not in read:
            yield f"fill of rank {rank}: {work}: nothing on rank {work.target_rank} reads it"
