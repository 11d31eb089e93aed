"""What is live on each rank over time: activations and received tensors, state apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from deepspeed_pulse.ir.channels import MIN_SLOTS, Traffic, known_hand_overs, traffic_of
from deepspeed_pulse.ir.dependencies import Result, result_of, results_needed
from deepspeed_pulse.ir.fill import Fill, FrozenWork
from deepspeed_pulse.ir.program import HIDDEN, Message
from deepspeed_pulse.ir.schedule import FORWARDS, OP_RULES, Action, Direction, Op, Schedule
from deepspeed_pulse.ir.timeline import Span, Timeline, Transfer
from deepspeed_pulse.planner.problem import Problem

Interval = tuple[float, float, int]
"""From ms, until ms, bytes."""

Curve = tuple[tuple[float, int], ...]


def memory_over_time(problem: Problem, timeline: Timeline) -> tuple[Curve, ...]:
    """Per rank, (ms, bytes) at every change; of a step among others alike where the problem's plan carries actions.

    * A stage's activations live from the start of its ``F`` to the end of its ``B`` (of its ``W`` when split, and then
      with all that its layers read from one another); they include what it stashes, so a value that stays on its rank
      adds nothing.
    * The workspace of a stage's layers lives while one of its actions runs.
    * What a stage's backward recomputes lives while its ``B`` runs (from its ``I`` to the end of its ``W``), as do
      gradients that its ``I`` keeps for its ``W``.
    * The gradient of a named value lives from the end of the first backward that reads the value on the rank to the end
      of its producer's, or of the last that reads it where the value came from another rank; that of a hidden state
      that stays on the rank until the backward that takes it.
    * A message's receive buffer lives from when the receive is posted, ahead of its arrival
      (:class:`~deepspeed_pulse.ir.channels.Traffic`), until the action that reads it starts; a named value until the
      end of its last consumer's backward on the rank, or until it was sent on where none reads it.
    * A stage's output that was sent, as far as its activations do not keep it, a gradient, and a named value that was
      sent on live until the rank knows that its peer has them. A named value of the rank itself counts among the
      activations of its stage.
    * A stage's output that stays on its rank, as far as its activations do not keep it, lives until the next stage's
      ``F`` starts.
    * Of an extra forward: a hidden state and a named value that stay on the rank until the last extra forward that
      reads them ends; an estimate until the last forward that reads it does.

    Without a backward (forward only) things live until their last reader's ``F`` ends.

    What a frozen layer needs lives while it runs, its result on a rank until it was used there and the rank knows that
    all have it to whom it was handed over; on a rank that receives it from when that is posted. Of a part's last result
    there are two where it is read: this step's until its last reader's backward and the rank's last forward of the
    microbatch have ended, the next step's until the end.
    """
    intervals: list[list[Interval]] = [[] for _ in range(problem.num_ranks)]
    for rank, _, interval in _every_interval(problem, timeline):
        intervals[rank].append(interval)
    return tuple(_curve(row) for row in intervals)


def _every_interval(problem: Problem, timeline: Timeline) -> Iterator[tuple[int, str, Interval]]:
    """:func:`_intervals`, of steps alike where the plan carries actions from one to the next."""
    carried: Collection[Action] = ()
    if problem.plan.carries:
        carried = problem.carried(_schedule(problem, timeline))
    known_ms = {} if problem.plan.fill is None else _known_ms(problem, timeline, problem.plan.fill)
    if not carried:
        row_ms = timeline.start_ms, timeline.start_ms + timeline.makespan_ms
        yield from _intervals(problem, timeline, known_ms, row_ms)
        return
    period_ms = max([timeline.makespan_ms, *(t.arrive_ms for t in timeline.transfers)])
    isolated = _isolated(timeline, carried, period_ms)
    for rank, kind, interval in _intervals(problem, isolated, known_ms, (0.0, period_ms)):
        yield from ((rank, kind, part) for part in _folded(interval, period_ms))


def _schedule(problem: Problem, timeline: Timeline) -> Schedule:
    return tuple(tuple(span.work for span in timeline.spans_of(rank)) for rank in range(problem.num_ranks))


def _known_ms(problem: Problem, timeline: Timeline, fill: Fill) -> dict[Result, float]:
    """Of results that were handed over, by where they are then, when the sender knows that they are."""
    ends: dict[tuple[int, FrozenWork], float] = {(span.rank, span.work): span.end_ms for span in timeline.frozen}
    ends.update(((carried.source_rank, carried.message), carried.leave_ms) for carried in timeline.carried)
    found: dict[Result, float] = {}
    for rank, known in enumerate(known_hand_overs(problem.lower(_schedule(problem, timeline)), fill)):
        actions = timeline.spans_of(rank)
        for when, works in known.items():
            if not isinstance(when, int):
                found.update((result_of(rank, work), ends[rank, when]) for work in works)
            elif when <= len(actions):  # else nothing comes before the step's end
                found.update((result_of(rank, work), actions[when - 1].end_ms) for work in works)
    return found


def _isolated(timeline: Timeline, carried: Collection[Action], period_ms: float) -> Timeline:
    """One step with what it carries over where that runs: in the next one."""
    late = {(a.stage, OP_RULES[a.op].way, a.microbatch) for a in carried}

    def moved(span: Span[Action]) -> Span[Action]:
        shift = period_ms if span.work in carried else 0.0
        return replace(span, start_ms=span.start_ms + shift, end_ms=span.end_ms + shift)

    def sent(transfer: Transfer[Message]) -> Transfer[Message]:
        m = transfer.message
        shift = period_ms if (m.source_stage, m.direction, m.microbatch) in late else 0.0
        return replace(transfer, leave_ms=transfer.leave_ms + shift, arrive_ms=transfer.arrive_ms + shift)

    spans = sorted(map(moved, timeline.spans), key=lambda span: span.start_ms)
    return replace(timeline, spans=tuple(spans), transfers=tuple(map(sent, timeline.transfers)))


def _folded(interval: Interval, period_ms: float) -> Iterator[Interval]:
    """What steps alike have at a time, each beginning a period after the one before."""
    start, end, size = interval
    if not period_ms:  # nothing takes time
        return
    for number in range(int(start // period_ms), int(end // period_ms) + 1):
        shift = number * period_ms
        first, last = max(start - shift, 0.0), min(end - shift, period_ms)
        if last > first:
            yield first, last, size


def parts_at_peak(problem: Problem, timeline: Timeline) -> tuple[dict[str, int], ...]:
    """Per rank, what is live when most is, by kind (:data:`~deepspeed_pulse.ir.run.MEMORY_PARTS`), state apart."""
    peaks = [max(curve, key=lambda change: change[1], default=(0.0, 0))[0] for curve in timeline.memory]
    found: list[dict[str, int]] = [{} for _ in peaks]
    for rank, kind, (start, end, size) in _every_interval(problem, timeline):
        if start <= peaks[rank] < end:
            found[rank][kind] = found[rank].get(kind, 0) + size
    return tuple(found)


def _intervals(
    problem: Problem, timeline: Timeline, known_ms: Mapping[Result, float], row_ms: tuple[float, float]
) -> Iterator[tuple[int, str, Interval]]:
    """(rank, kind, interval) of everything that is live for a time.

    ``known_ms``: see :func:`_known_ms`; ``row_ms``: when the ranks' rows begin and end.
    """
    life = _Life(problem, timeline.spans)
    in_halves = {(s.work.stage, s.work.microbatch) for s in timeline.spans if s.work.op is Op.INPUT_GRAD}
    for span in timeline.spans:
        stage, m, start = span.work.stage, span.work.microbatch, span.start_ms
        held = problem.held_in_actions(stage, split=span.work.op in (Op.INPUT_GRAD, Op.WEIGHT_GRAD))
        backward = held.weights if span.work.op is Op.WEIGHT_GRAD else held.workspace
        working = held.forward if span.work.op in FORWARDS else backward
        yield span.rank, "workspace", (start, span.end_ms, working)
        if span.work.op is Op.FORWARD:
            cut = problem.held_in_actions(stage, split=True).cut if (stage, m) in in_halves else 0
            yield span.rank, "activations", (start, life.end_ms[stage, m], problem.costs.activation_bytes[stage] + cut)
            if (unkept := problem.costs.unkept_bytes[stage]) and (until := life.read_here_ms(stage, m)) is not None:
                yield span.rank, "received", (span.end_ms, until, unkept)
        elif span.work.op is Op.EXTRA_FORWARD:
            for size, until in life.extra(stage, m):
                yield span.rank, "received", (start, until, size)
        elif span.work.op is not Op.WEIGHT_GRAD:
            yield span.rank, "recomputed", (start, life.end_ms[stage, m], held.recomputed)
            if held.late:
                yield span.rank, "gradients", (start, life.end_ms[stage, m], held.late)
    rows: list[list[Span[Action]]] = [[] for _ in range(problem.num_ranks)]
    for span in timeline.spans:
        rows[span.rank].append(span)
    traffic = traffic_of(tuple(tuple(problem.step(span.work) for span in row) for row in rows), problem.placement)
    posted, released = _posted_ms(traffic, timeline, life), _released_ms(traffic, rows)
    end = timeline.start_ms + timeline.makespan_ms
    for transfer in timeline.transfers:
        message, size = transfer.message, transfer.num_bytes
        yield transfer.target_rank, "received", (posted[message], life.received_until(transfer), size)
        if unkept := _unkept_bytes(problem, transfer):
            yield transfer.source_rank, "sent", (life.sent_ms[message], released.get(message, end), unkept)
    for rank, interval in _waiting_gradients(problem, life):
        yield rank, "gradients", interval
    for rank, interval in _frozen_intervals(problem, timeline, life, known_ms, row_ms):
        yield rank, "frozen", interval


def _unkept_bytes(problem: Problem, transfer: Transfer[Message]) -> int:
    """What nothing but the message keeps: of an extra forward, and of a gradient, all."""
    message = transfer.message
    if message.direction is not Direction.FORWARD:
        return transfer.num_bytes
    if message.name == HIDDEN:
        return problem.costs.unkept_bytes[message.source_stage]
    return transfer.num_bytes if problem.passed_on(message.name, message.source_stage) else 0


def _released_ms(traffic: Traffic, rows: Sequence[Sequence[Span[Action]]]) -> dict[Message, float]:
    """When a rank knows that its peer has what it sent; what it never knows is left out."""
    return {
        message: span.start_ms
        for row, steps in zip(rows, traffic.releases, strict=True)
        for span, messages in zip(row, steps, strict=True)
        for message in messages
    }


def _posted_ms(traffic: Traffic, timeline: Timeline, life: _Life) -> dict[Message, float]:
    """When each message's receive is posted: a channel's first ones with the step, then one whenever one was read."""
    found: dict[Message, float] = {}
    for channel, messages in traffic.channels.items():
        read = [life.read_ms[m] for m in messages]
        found.update(zip(messages, _posted(read, traffic.slots[channel], timeline.start_ms), strict=True))
    return found


def _posted(read_ms: Sequence[float], slots: int, start_ms: float) -> list[float]:
    """When receives of one channel are posted that are read at these times."""
    freed = [start_ms] * slots + sorted(read_ms)
    return [min(free, read) for free, read in zip(freed, read_ms, strict=False)]


def _waiting_gradients(problem: Problem, life: _Life) -> Iterator[tuple[int, Interval]]:
    placement = problem.placement
    steps = ((stage, placement.before(stage)) for stage in range(problem.num_stages))
    taken = {
        (stage, before): problem.costs.output_bytes[before]
        for stage, before in steps
        if before is not None and placement[stage] == placement[before]
    }
    for (stage, before), size in taken.items():
        for m, (_, end) in life.backwards[stage].items():
            yield placement[stage], (end, life.backwards[before][m][0], size)
    for value in problem.values_with_gradient():
        source = problem.plan.stage_of(value.source)
        for rank in range(problem.num_ranks):
            readers = [stage for stage in problem.consumer_stages(value.name, rank) if stage != source]
            for m in life.backwards[readers[0]] if readers else ():
                ends = [life.backwards[stage][m][1] for stage in readers]
                until = life.backwards[source][m][1] if placement[source] == rank else max(ends)
                yield rank, (min(ends), until, value.bytes)


def _frozen_intervals(
    problem: Problem,
    timeline: Timeline,
    life: _Life,
    known_ms: Mapping[Result, float],
    row_ms: tuple[float, float],
) -> Iterator[tuple[int, Interval]]:
    fill = problem.plan.fill
    if fill is None:
        return
    begin, end = row_ms
    readers = {part.name: problem.plan.readers_of(part) for part in fill.parts}
    for span in timeline.frozen:
        layers = fill.part(span.work.part).layers[span.work.first : span.work.end]
        yield span.rank, (span.start_ms, span.end_ms, max(layer.activation_bytes for layer in layers))
    read_ms, needed_ms = _frozen_reads(fill, timeline, known_ms, end)
    there_ms = {result_of(span.rank, span.work): span.end_ms for span in timeline.frozen}
    channels: dict[tuple[int, int], list[Result]] = defaultdict(list)
    for c in timeline.carried:
        channels[c.source_rank, c.target_rank].append(result_of(c.source_rank, c.message))
    for results in channels.values():
        read = [read_ms.get(result, end) for result in results]
        there_ms.update(zip(results, _posted(read, MIN_SLOTS, begin), strict=True))
    for result, start in there_ms.items():
        layers = fill.part(result.part).layers
        kept = result.done == len(layers) and result.rank in readers[result.part]
        until = end if kept else needed_ms.get(result, start)
        yield result.rank, (start, until, layers[result.done - 1].output_bytes)
    for part in fill.parts:
        for rank, stages in readers[part.name].items():
            for m in range(problem.plan.microbatches):
                until = max(life.read_on_ms[rank, m], *(life.end_ms[stage, m] for stage in stages))
                yield rank, (begin, until, part.output_bytes)


def _frozen_reads(
    fill: Fill, timeline: Timeline, known_ms: Mapping[Result, float], end_ms: float
) -> tuple[dict[Result, float], dict[Result, float]]:
    """When frozen results are first read on their rank in the step, and until when it needs them for that."""
    first: dict[Result, float] = {}
    last: dict[Result, float] = {}

    def add(result: Result, start: float, until: float) -> None:
        first[result] = min(first.get(result, start), start)
        last[result] = max(last.get(result, until), until)

    for span in timeline.frozen:
        for result in results_needed(span.rank, span.work, fill):
            add(result, span.start_ms, span.end_ms)
    for carried in timeline.carried:
        (result,) = results_needed(carried.source_rank, carried.message, fill)
        over = known_ms.get(result_of(carried.source_rank, carried.message), end_ms)
        add(result, carried.leave_ms, over)
    return first, last


class _Life:
    """When the activations of a stage and microbatch are freed."""

    def __init__(self, problem: Problem, spans: Sequence[Span[Action]]) -> None:
        self._problem = problem
        self.read_ms = {m: span.start_ms for span in spans for m in problem.step(span.work).receives}
        self.sent_ms = {m: span.end_ms for span in spans for m in problem.step(span.work).sends}
        self._forward_ms = {
            (span.work.stage, span.work.microbatch): span.end_ms for span in spans if span.work.op is Op.FORWARD
        }
        self._extra_ms = {
            (span.work.stage, span.work.microbatch): span.end_ms for span in spans if span.work.op is Op.EXTRA_FORWARD
        }
        self.read_on_ms: dict[tuple[int, int], float] = {}
        """By rank and microbatch, when the last of its data was read."""
        for (stage, m), end_ms in self._forward_ms.items():
            place = problem.placement[stage], m
            self.read_on_ms[place] = max(self.read_on_ms.get(place, 0.0), end_ms)
        self._begin_ms = {
            (span.work.stage, span.work.microbatch): span.start_ms for span in spans if span.work.op is Op.FORWARD
        }
        self.end_ms: dict[tuple[int, int], float] = {}
        self.backwards: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        """By stage and microbatch, when one starts and ends; of a split one, the half that gives gradients of what the
        stage read."""
        for span in spans:
            stage, m = span.work.stage, span.work.microbatch
            self.end_ms[stage, m] = max(self.end_ms.get((stage, m), 0.0), span.end_ms)
            if span.work.op in (Op.BACKWARD, Op.INPUT_GRAD):
                self.backwards[stage][m] = span.start_ms, span.end_ms

    def read_here_ms(self, stage: int, m: int) -> float | None:
        """When the forward starts that reads a stage's output on its own rank; None: none does."""
        after, placement = self._problem.placement.after(stage), self._problem.placement
        if after is None or placement[after] != placement[stage]:
            return None
        return self._begin_ms.get((after, m))

    def extra(self, stage: int, m: int) -> Iterator[tuple[int, float]]:
        """Bytes that a stage's extra forward leaves on its rank, and until when they are there."""
        problem, rank = self._problem, self._problem.placement[stage]
        after = problem.placement.after(stage)
        if after is None:
            yield problem.costs.output_bytes[stage], max(self._extra_ms[stage, m], self._estimate_ms(stage, rank, m))
        elif problem.placement[after] == rank:
            yield problem.costs.output_bytes[stage], self._extra_ms[after, m]
        for name in problem.made_in(stage):
            readers = [reader for reader in problem.consumer_stages(name, rank) if reader != stage]
            if readers:
                yield problem.value_bytes(name), max(self._extra_ms[reader, m] for reader in readers)

    def _estimate_ms(self, source: int, rank: int, m: int) -> float:
        """When the last forward of a rank that reads an estimate ends; 0: none does."""
        stages = self._problem.estimate_readers(source, rank)
        return max((self._forward_ms[stage, m] for stage in stages), default=0.0)

    def received_until(self, transfer: Transfer[Message]) -> float:
        message = transfer.message
        if message.direction is Direction.EXTRA and message.name != HIDDEN:
            return self._extra_until(transfer)
        if message.direction is Direction.BACKWARD or message.name == HIDDEN:
            return self.read_ms[message]
        rank, m = transfer.target_rank, message.microbatch
        readers = self._problem.consumer_stages(message.name, rank)
        if not readers:
            return self._forward_ms[self._problem.last_sender(message.name, rank), m]
        return max(self.end_ms[stage, m] for stage in readers)

    def _extra_until(self, transfer: Transfer[Message]) -> float:
        message, rank, m = transfer.message, transfer.target_rank, transfer.message.microbatch
        if self._problem.is_estimate(message):
            return self._estimate_ms(message.source_stage, rank, m)
        readers = self._problem.consumer_stages(message.name, rank)
        last = readers or (self._problem.last_sender(message.name, rank),)
        return max(self._extra_ms[stage, m] for stage in last)


def _curve(intervals: Iterable[Interval]) -> Curve:
    """Sum of intervals at every change; at one time what ends goes before what begins."""
    changes: dict[float, list[int]] = {}
    for start, end, size in intervals:
        if size and end > start:
            changes.setdefault(start, []).append(size)
            changes.setdefault(end, []).append(-size)
    live, curve = 0, []
    for time in sorted(changes):
        live += sum(changes[time])
        curve.append((time, live))
    return tuple(curve)
