"""A Plan: where the layer list is cut, which rank holds which stage, in which order each rank works.

Pure data (file format ``pulse-plan/2``; a ``pulse-plan/1``, which lacks rules, is read too). Whoever runs a plan never
imports whoever made it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import FileError, PulseError
from deepspeed_pulse.ir.fields import Fields, read_file, read_json, write_json
from deepspeed_pulse.ir.fill import Fill, FrozenPart, read_fill
from deepspeed_pulse.ir.layout import Grid, Layout
from deepspeed_pulse.ir.placement import stages_of
from deepspeed_pulse.ir.rules import PLAIN, Rules
from deepspeed_pulse.ir.schedule import Action, Schedule, format_schedule

FORMAT = "pulse-plan/2"
FORMATS = (FORMAT, "pulse-plan/1")
"""Those that are read."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """The sends one named value needs, as (from_stage, to_stage); none: it stays on its rank."""

    name: str
    source_stage: int
    hops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The simulator's figures for a plan. Times in ms, sizes in bytes."""

    makespan_ms: float
    step_ms: float
    lower_bound_ms: float
    gap: float
    bubble_ratio: float
    peak_bytes: tuple[int, ...]
    p2p_bytes_per_microbatch: int
    samples_per_second: float


@dataclass(frozen=True, kw_only=True)
class Solver:
    """How the schedule was found: the generator or model, and whether it is proven optimal.

    ``generator`` and ``generator_step_ms``: the best generator that fits, which a search started from; None where no
    search ran.
    """

    name: str
    optimal: bool
    seed: int = 0
    generator: str | None = None
    generator_step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Contents of a plan's file. ``boundaries`` has one entry more than ``placement``.

    ``rules``: of the job that it was made for; its times and memory are simulated by them.

    ``recompute``: layers that run their forward again in backward instead of keeping activations, ascending; the file
    leaves the field out where there are none. ``layout``: how ranks are numbered; the file leaves upstream's own out.
    ``fill``: frozen work in idle time; left out where there is none.
    """

    pipeline_ranks: int
    data_parallel: int
    microbatches: int
    microbatch_size: int
    waves: int
    boundaries: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: Schedule
    routes: tuple[Route, ...] = ()
    recompute: tuple[int, ...] = ()
    layout: Layout = Layout.PIPE_MAJOR
    rules: Rules = PLAIN
    fill: Fill | None = None
    profile_fingerprint: str | None = None
    estimate: Estimate | None = None
    solver: Solver | None = None

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    @property
    def grid(self) -> Grid:
        return Grid(pipeline_ranks=self.pipeline_ranks, data_parallel=self.data_parallel, layout=self.layout)

    def stage_layers(self, stage: int) -> range:
        """Layer indices of a stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def stage_of(self, layer: int) -> int:
        """Stage that holds a layer."""
        return bisect_right(self.boundaries, layer) - 1

    def rank_of_layer(self, layer: int) -> int:
        return self.placement[self.stage_of(layer)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(self.placement, rank)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """All layer indices on a rank, ascending."""
        return tuple(layer for stage in self.stages_of(rank) for layer in self.stage_layers(stage))

    def readers_of(self, part: FrozenPart) -> dict[int, tuple[int, ...]]:
        """Ranks whose layers read a frozen part's result, with the stages that do."""
        found: dict[int, set[int]] = {}
        for layer in part.targets:
            stage = self.stage_of(layer)
            found.setdefault(self.placement[stage], set()).add(stage)
        return {rank: tuple(sorted(stages)) for rank, stages in sorted(found.items())}

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "profile_fingerprint": self.profile_fingerprint,
            "pipeline_ranks": self.pipeline_ranks,
            "data_parallel": self.data_parallel,
            "microbatches": self.microbatches,
            "microbatch_size": self.microbatch_size,
            "waves": self.waves,
            "boundaries": list(self.boundaries),
            "placement": list(self.placement),
            "schedule": [list(row) for row in format_schedule(self.schedule)],
            "routes": [
                {"name": r.name, "source_stage": r.source_stage, "hops": [list(hop) for hop in r.hops]}
                for r in self.routes
            ],
            **({"recompute": list(self.recompute)} if self.recompute else {}),
            **({"layout": self.layout.value} if self.layout is not Layout.PIPE_MAJOR else {}),
            "rules": self.rules.to_dict(),
            **({"fill": self.fill.to_dict()} if self.fill is not None else {}),
            "estimate": None if self.estimate is None else asdict(self.estimate),
            "solver": None if self.solver is None else asdict(self.solver),
        }

    def to_json(self) -> str:
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan. Checks its form only; ``planner.validate`` checks what it says."""
        fields = read_json(text, where, *FORMATS)
        fields.done(("format", *(f for f in cls.__dataclass_fields__)))
        plan = cls(
            pipeline_ranks=fields.integer("pipeline_ranks", minimum=1),
            data_parallel=fields.integer("data_parallel", minimum=1),
            microbatches=fields.integer("microbatches", minimum=1),
            microbatch_size=fields.integer("microbatch_size", minimum=1),
            waves=fields.integer("waves"),
            boundaries=fields.integers("boundaries"),
            placement=fields.integers("placement"),
            schedule=_read_schedule(fields, where),
            routes=fields.objects("routes", _read_route),
            recompute=fields.integers("recompute") if fields.has("recompute") else (),
            layout=_read_layout(fields) if fields.has("layout") else Layout.PIPE_MAJOR,
            rules=Rules.read(fields.object("rules")) if fields.has("rules") else PLAIN,
            fill=_read_fill(fields) if fields.has("fill") else None,
            profile_fingerprint=fields.text("profile_fingerprint") if fields.has("profile_fingerprint") else None,
            estimate=_read_estimate(fields.object("estimate")) if fields.has("estimate") else None,
            solver=_read_solver(fields.object("solver")) if fields.has("solver") else None,
        )
        _check_form(plan, fields)
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_json(read_file(path), str(path))


def _check_form(plan: Plan, fields: Fields) -> None:
    stages, bounds = plan.num_stages, plan.boundaries
    if plan.pipeline_ranks > stages or set(plan.placement) != set(range(plan.pipeline_ranks)):
        raise fields.error("placement", f"every rank 0..{plan.pipeline_ranks - 1} at least once and no other")
    if len(bounds) != stages + 1:
        raise fields.error("boundaries", f"{stages + 1} layer indices for {stages} stages")
    if bounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise fields.error("boundaries", "strictly increasing layer indices that start at 0")
    if len(plan.schedule) != plan.pipeline_ranks:
        raise fields.error("schedule", f"one list of actions for each of the {plan.pipeline_ranks} ranks")
    longest = max(map(len, plan.schedule))
    if plan.microbatches > longest:
        raise fields.error("microbatches", f"at most {longest}, the number of actions in the schedule's longest row")
    if plan.estimate is not None and len(plan.estimate.peak_bytes) != plan.pipeline_ranks:
        raise fields.error("estimate", f"peak_bytes for each of the {plan.pipeline_ranks} ranks")
    last = -1
    for layer in plan.recompute:
        if not last < layer < plan.num_layers:
            raise fields.error("recompute", f"layer indices below {plan.num_layers}, ascending, each once")
        last = layer
    if len({route.name for route in plan.routes}) != len(plan.routes):
        raise fields.error("routes", "each name at most once")


def _read_fill(fields: Fields) -> Fill:
    return read_fill(fields.object("fill"), fields.integer("pipeline_ranks", minimum=1))


def _read_layout(fields: Fields) -> Layout:
    try:
        return Layout(fields.text("layout"))
    except ValueError:
        raise fields.error("layout", " or ".join(repr(layout.value) for layout in Layout)) from None


def _read_schedule(fields: Fields, where: str) -> Schedule:
    rows = []
    for rank, row in enumerate(fields.items("schedule")):
        if not isinstance(row, list):
            raise fields.error("schedule", "a list of action lists, one per rank")
        try:
            rows.append(tuple(Action.parse(text) for text in row))
        except PulseError as problem:
            raise FileError(f"{where}: schedule[{rank}]: {problem}") from None
    return tuple(rows)


def _read_route(fields: Fields) -> Route:
    fields.done(("name", "source_stage", "hops"))
    hops = []
    for hop in fields.items("hops"):
        integers = isinstance(hop, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in hop)
        if not integers or len(hop) != 2:
            raise fields.error("hops", "a list of [from_stage, to_stage]")
        hops.append((hop[0], hop[1]))
    return Route(name=fields.text("name"), source_stage=fields.integer("source_stage"), hops=tuple(hops))


def _read_estimate(fields: Fields) -> Estimate:
    fields.done(Estimate.__dataclass_fields__)
    return Estimate(
        makespan_ms=fields.number("makespan_ms"),
        step_ms=fields.number("step_ms"),
        lower_bound_ms=fields.number("lower_bound_ms"),
        gap=fields.number("gap", minimum=-1.0),
        bubble_ratio=fields.number("bubble_ratio", minimum=-1.0),
        peak_bytes=fields.integers("peak_bytes"),
        p2p_bytes_per_microbatch=fields.integer("p2p_bytes_per_microbatch"),
        samples_per_second=fields.number("samples_per_second"),
    )


def _read_solver(fields: Fields) -> Solver:
    fields.done(Solver.__dataclass_fields__)
    return Solver(
        name=fields.text("name"),
        optimal=fields.flag("optimal", default=False),
        seed=fields.integer("seed") if fields.has("seed") else 0,
        generator=fields.text("generator") if fields.has("generator") else None,
        generator_step_ms=fields.number("generator_step_ms") if fields.has("generator_step_ms") else None,
    )
