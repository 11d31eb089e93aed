"""What a run measured beside what was planned (file format ``pulse-run/1``), for ``ds_pulse report``.

Pure data, small: the plan, the planned timeline, and the steps that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from deepspeed_pulse.errors import FileError, PulseError
from deepspeed_pulse.ir.codec import File, Form, check_keys, read
from deepspeed_pulse.ir.fields import MAX_NUMBER, Fields
from deepspeed_pulse.ir.fill import FrozenRun, parse_work
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import AnySpan, Span, Timeline

RUN_FILE = "pulse_run.json"
"""Its name beside checkpoints; beside a trace it has the trace's name and the suffix ``.run.json``."""


MEMORY_PARTS = (
    "state",
    "activations",
    "received",
    "sent",
    "recomputed",
    "gradients",
    "workspace",
    "frozen",
    "communicators",
    "step",
)
"""What a rank's memory holds: weights with gradients and optimizer state, what forwards keep for backward, what was
received and is not used up, what was sent and perhaps not taken, what a backward recomputes, gradients that wait for a
backward or in copies for their sum, what a layer works with, frozen parts with their results, what NCCL or HCCL
keep for their communicators, which no allocator of torch's sees, and what the optimizer's step makes and drops."""


def bytes_by_kind(channels: Mapping[str, int]) -> dict[str, int]:
    """Bytes by channel (``value:down.3``) added up by kind (``value``); every kind is there."""
    found = {"hidden": 0, "hidden_grad": 0, "value": 0, "value_grad": 0}
    for name, sent in channels.items():
        found[name.partition(":")[0]] += sent
    return found


def _spans_to_list(timeline: Timeline) -> list[list[Any]]:
    """``[rank, "2F0", start, end, waited]`` per action, ms with 4 digits (0.1 microseconds); frozen work likewise."""
    spans = [(s.rank, str(s.work), s.start_ms, s.end_ms, s.waited_ms) for s in timeline.every_span]
    return [[rank, text, *(round(ms, 4) for ms in times)] for rank, text, *times in spans]


def _read_sent(fields: Fields, name: str) -> dict[str, int]:
    sent = fields.raw(name)
    known = bytes_by_kind({})
    if not isinstance(sent, dict) or any(name.partition(":")[0] not in known for name in sent):
        raise fields.error(name, f"an object whose names are {', '.join(known)} (values with :NAME)")
    counted = fields.object(name)
    return {name: counted.integer(name) for name in sent}


def _read_parts(fields: Fields, name: str) -> dict[str, int]:
    parts = fields.object(name)
    parts.check_keys(MEMORY_PARTS)
    return {part: parts.integer(part) for part in MEMORY_PARTS if parts.has(part)}


_BYTES = {"type": "integer", "minimum": 0}
_PARTS = {"type": "object", "propertyNames": {"enum": list(MEMORY_PARTS)}, "additionalProperties": _BYTES}
_SENT = {
    "type": "object",
    "propertyNames": {"pattern": "^(hidden|hidden_grad|value|value_grad)(:|$)"},
    "additionalProperties": _BYTES,
}
_MS = {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
_SPANS = {
    "description": 'lists of [rank, action, start_ms, end_ms, waited_ms] like [0, "2F0", 0.0, 1.5, 0.0]',
    "type": "array",
    "items": {
        "type": "array",
        "prefixItems": [_BYTES, {"type": "string"}, *(_MS for _ in range(3))],
        "minItems": 5,
        "maxItems": 5,
    },
    "minItems": 1,
}

Parts = Annotated[Mapping[str, int], Form(read=_read_parts, schema=_PARTS)]
Signed = Annotated[float, Form(minimum=-MAX_NUMBER)]


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one pipeline rank counted in a step. Bytes; ms. ``p2p_bytes`` by channel, as in ``pulse_stats``.

    ``peak_parts``: what ``peak_live_bytes`` was made of, by :data:`MEMORY_PARTS`; what is absent was nothing.
    """

    p2p_bytes: Annotated[Mapping[str, int], Form(read=_read_sent, schema=_SENT)]
    local_value_bytes: int
    peak_live_bytes: int
    idle_ms: float
    peak_parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One step as it ran. ``step``: its number, from 1; ``step_ms``: all of ``train_batch`` on the first rank."""

    step: int
    step_ms: float
    ranks: tuple[RankFigures, ...]
    timeline: Annotated[Timeline, Form(key="spans", write=_spans_to_list, schema=_SPANS)]

    def check_form(self, fields: Fields) -> None:
        if len(self.ranks) != self.timeline.num_ranks:
            raise fields.error("ranks", f"figures of each of the {self.timeline.num_ranks} ranks")

    @property
    def p2p_bytes(self) -> dict[str, int]:
        """Bytes sent by all ranks together, by kind: ``hidden``, ``hidden_grad``, ``value``, ``value_grad``."""
        found: dict[str, int] = {}
        for rank in self.ranks:
            for kind, sent in bytes_by_kind(rank.p2p_bytes).items():
                found[kind] = found.get(kind, 0) + sent
        return found


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """A rank's peak, planned and counted, each by :data:`MEMORY_PARTS`; bytes."""

    planned: Parts
    measured: Parts

    @property
    def planned_bytes(self) -> int:
        return sum(self.planned.values())

    @property
    def measured_bytes(self) -> int:
        return sum(self.measured.values())

    @property
    def share(self) -> float:
        """Of the planned peak; 0.2 is 20 % more."""
        return self.measured_bytes / self.planned_bytes - 1.0 if self.planned_bytes else 0.0

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Measured minus planned of every part, what explains most of the difference first."""
        found = {name: self.measured.get(name, 0) - self.planned.get(name, 0) for name in MEMORY_PARTS}
        sign = 1 if self.measured_bytes >= self.planned_bytes else -1
        return tuple(sorted(found.items(), key=lambda part: -sign * part[1]))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Why a measured step took longer than the planned one; ms, negative for shorter.

    The five parts add up to ``measured_ms - planned_ms``. ``layers_ms``: actions took longer than the profile says,
    ``frozen_ms``: frozen work between them did.
    ``pauses_ms``: between two actions a rank did nothing although nothing was missing, for longer than its messages are
    planned to keep it; ``mean_pause_ms`` is all of such a pause. ``messages_ms``: ranks waited longer for messages than
    that explains. ``outside_ms``: before the first action and after the last one.
    ``stage``: the one whose actions exceed the profile most, with forward plus backward of a microbatch.
    ``memory``: per pipeline rank; empty where it was not counted.
    """

    planned_ms: float
    measured_ms: float
    layers_ms: Signed
    pauses_ms: Signed
    messages_ms: Signed
    outside_ms: Signed
    stage: int
    stage_planned_ms: float
    stage_measured_ms: float
    mean_pause_ms: float
    frozen_ms: Signed = 0.0
    memory: tuple[RankMemory, ...] = ()

    @property
    def share(self) -> float:
        """Of the planned step; 0.2 is 20 % longer."""
        return self.measured_ms / self.planned_ms - 1.0 if self.planned_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Run(File):
    """Contents of a file ``pulse-run/1``.

    ``layers``: their names. ``costs``: where its layer costs came from. ``planned``: None where those are no times,
    and then there is no ``difference`` either; that is of the last measured step.
    """

    FORMATS = ("pulse-run/1",)
    WHAT = "run"

    plan: Plan
    layers: tuple[str, ...]
    costs: str
    planned: Annotated[Timeline | None, Form(write=_spans_to_list, schema=_SPANS)]
    steps: tuple[MeasuredStep, ...]
    difference: Difference | None

    @classmethod
    def from_fields(cls, fields: Fields) -> Run:
        check_keys(cls, fields)
        plan = Plan.from_fields(fields.object("plan"))
        names = fields.items("layers")
        if len(names) != plan.num_layers or not all(isinstance(name, str) for name in names):
            raise fields.error("layers", f"the names of the plan's {plan.num_layers} layers")
        planned = _read_spans(fields, "planned", plan, fields.where) if fields.has("planned") else None
        steps = fields.objects("steps", lambda step: _read_step(step, plan, fields.where))
        return read(cls, fields, plan=plan, layers=tuple(names), planned=planned, steps=steps)


def _read_spans(fields: Fields, name: str, plan: Plan, where: str) -> Timeline:
    spans = [_read_span(item, plan, f"{where}: {name}[{i}]") for i, item in enumerate(fields.items(name))]
    found = Timeline.of(plan.pipeline_ranks, spans)
    if not found.spans:
        raise fields.error(name, "at least one action")
    return found


def _read_span(item: Any, plan: Plan, where: str) -> AnySpan:
    wrong = FileError(f'{where}: expected [rank, action, start_ms, end_ms, waited_ms] like [0, "2F0", 0.0, 1.5, 0.0]')
    if not isinstance(item, list) or len(item) != 5 or not isinstance(item[1], str):
        raise wrong
    rank, text, *times = item
    numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in (rank, *times))
    if not numbers or isinstance(rank, float) or rank not in range(plan.pipeline_ranks):
        raise wrong
    start, end, waited = times
    if max(map(abs, times)) > MAX_NUMBER or end < start:
        found = ", ".join(f"{ms:.6g}" if abs(ms) <= MAX_NUMBER else "more" for ms in times)
        expected = f"times of at most {MAX_NUMBER:g} ms, the end not before the start"
        raise FileError(f"{where}: expected {expected}, found {found}")
    try:
        if plan.fill is not None and "@" in text:
            work = parse_work(text)
            if not isinstance(work, FrozenRun):
                raise FileError(f"expected layers of a frozen part such as 'latents[0:5]@3', found {text!r}")
            return Span(rank=rank, work=work, start_ms=start, end_ms=end)
        action = Action.parse(text)
    except PulseError as problem:
        raise FileError(f"{where}: {problem}") from None
    if action.stage not in plan.stages_of(rank):
        raise FileError(f"{where}: expected an action of rank {rank} (stages {plan.stages_of(rank)}), found {text}")
    return Span(rank=rank, work=action, start_ms=start, end_ms=end, waited_ms=waited)


def _read_step(fields: Fields, plan: Plan, where: str) -> MeasuredStep:
    check_keys(MeasuredStep, fields)
    return read(MeasuredStep, fields, timeline=_read_spans(fields, "spans", plan, where))
