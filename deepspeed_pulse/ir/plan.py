"""A Plan: where the layer list is cut, which rank holds which stage, in which order each rank works.

Pure data (file format ``pulse-plan/2``; a ``pulse-plan/1``, which lacks rules, is read too). Whoever runs a plan never
imports whoever made it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from deepspeed_pulse.errors import FileError, PulseError
from deepspeed_pulse.ir.backbones import BackboneLayers, BackboneStages, check_parts
from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.codec import Count, File, Form
from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.fields import Fields
from deepspeed_pulse.ir.fill import Fill, FrozenPart
from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.layout import Grid, Layout
from deepspeed_pulse.ir.placement import Kind, Placement
from deepspeed_pulse.ir.rules import PLAIN, Rules
from deepspeed_pulse.ir.schedule import ACTION, Action, Schedule, format_schedule

_SCHEDULE = {
    "description": "per rank, its actions in order: stage, operation, microbatch",
    "type": "array",
    "items": {"type": "array", "items": {"type": "string", "pattern": f"^{ACTION.pattern}$"}},
}


def _read_schedule(fields: Fields, name: str) -> Schedule:
    rows = []
    for rank, row in enumerate(fields.items(name)):
        if not isinstance(row, list):
            raise fields.error(name, "a list of action lists, one per rank")
        try:
            rows.append(tuple(Action.parse(text) for text in row))
        except PulseError as problem:
            raise FileError(f"{fields.where}: {name}[{rank}]: {problem}") from None
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The sends one named value needs, as (from_stage, to_stage); none: it stays on its rank."""

    name: str
    source_stage: int
    hops: Annotated[tuple[tuple[int, int], ...], Form(required=True, expected="a list of [from_stage, to_stage]")] = ()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The simulator's figures for a plan. Times in ms, sizes in bytes.

    ``lower_bound_ms``: no order of the same cuts has a shorter makespan, with backwards in halves where the profile has
    these, too. ``optimizer_ms``: the part of ``step_ms`` that the optimizer's step takes; 0 where the profile does not
    know.
    """

    makespan_ms: float
    step_ms: float
    lower_bound_ms: float
    gap: Annotated[float, Form(minimum=-1.0)]
    bubble_ratio: Annotated[float, Form(minimum=-1.0)]
    peak_bytes: tuple[int, ...]
    p2p_bytes_per_microbatch: int
    samples_per_second: float
    optimizer_ms: Annotated[float, Form(left_out=True)] = 0.0

    @property
    def summed_ms(self) -> float:
        """How long a step takes until the optimizer's: what orders of the same cuts differ in."""
        return self.step_ms - self.optimizer_ms

    @property
    def hides_sums(self) -> bool:
        """No gradients are summed behind the last action."""
        return self.step_ms <= self.makespan_ms + self.optimizer_ms  # the sum that step_ms is then, to the bit


@dataclass(frozen=True, kw_only=True)
class Solver:
    """How the schedule was found: the generator or model, and whether it is proven optimal.

    ``generator`` and ``generator_step_ms``: the best generator that fits, which a search started from; None where no
    search ran.
    """

    name: str
    optimal: bool = False
    seed: int = 0
    generator: str | None = None
    generator_step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(File):
    """Contents of a plan's file. ``boundaries`` has one entry more than ``placement``.

    ``rules``: of the job that it was made for; its times and memory are simulated by them.
    ``bucket_bytes``: of parameters whose gradients are summed together; left out where it is ``BUCKET_BYTES``.

    ``recompute``: layers that run their forward again in backward instead of keeping activations, ascending; the file
    leaves the field out where there are none. ``layout``: how ranks are numbered; the file leaves upstream's own out.
    ``fill``: frozen work in idle time; left out where there is none.
    ``backbones``: stages of each where there are several; each begins at a stage of its own.
    ``conditioning``: which microbatches run an extra forward first; left out where none does.
    """

    FORMATS = ("pulse-plan/2", "pulse-plan/1")
    WHAT = "plan"

    pipeline_ranks: Count
    data_parallel: Count
    microbatches: Count
    microbatch_size: Count
    boundaries: Annotated[tuple[int, ...], Form(after="waves")]
    placement: Placement
    backbones: Annotated[tuple[BackboneStages, ...], Form(left_out=True)] = ()
    schedule: Annotated[Schedule, Form(read=_read_schedule, write=format_schedule, schema=_SCHEDULE)]
    routes: Annotated[tuple[Route, ...], Form(required=True)] = ()
    recompute: Annotated[tuple[int, ...], Form(left_out=True)] = ()
    layout: Annotated[Layout, Form(left_out=True)] = Layout.PIPE_MAJOR
    rules: Rules = PLAIN
    bucket_bytes: Annotated[int, Form(minimum=1, left_out=True)] = BUCKET_BYTES
    fill: Annotated[Fill | None, Form(left_out=True)] = None
    conditioning: Annotated[tuple[SelfConditioned, ...], Form(left_out=True, key="self_conditioning")] = ()
    profile_fingerprint: Annotated[str | None, Form(place=-1)] = None
    estimate: Estimate | None = None
    solver: Solver | None = None

    def __post_init__(self) -> None:
        starts = [part.stages[0] for part in self.backbones] or [0]
        object.__setattr__(self, "placement", Placement(self.placement, starts))

    @property
    def waves(self) -> int:
        """:attr:`Placement.waves`; the file names them, too."""
        return self.placement.waves

    @property
    def figures(self) -> Estimate:
        """The estimate of a plan that has one."""
        assert self.estimate is not None
        return self.estimate

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
        return stage_of(self.boundaries, layer)

    def rank_of_layer(self, layer: int) -> int:
        return self.placement[self.stage_of(layer)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self.placement.stages_of(rank)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """All layer indices on a rank, ascending."""
        return tuple(layer for stage in self.stages_of(rank) for layer in self.stage_layers(stage))

    def backbone_name(self, stage: int) -> str | None:
        """The backbone that a stage belongs to; None where there is one."""
        return self.backbones[self.placement.backbone_of(stage)].name if self.backbones else None

    @property
    def carries(self) -> bool:
        """Some backbone carries actions over to the next step."""
        return any(part.carried for part in self.backbones)

    def readers_of(self, part: FrozenPart) -> dict[int, tuple[int, ...]]:
        """Ranks whose layers read a frozen part's result, with the stages that do."""
        found: dict[int, set[int]] = {}
        for layer in part.targets:
            stage = self.stage_of(layer)
            found.setdefault(self.placement[stage], set()).add(stage)
        return {rank: tuple(sorted(stages)) for rank, stages in sorted(found.items())}

    def estimate_stages(self, conditioned: SelfConditioned) -> tuple[int, tuple[int, ...]]:
        """The stage whose extra forward gives a backbone's estimate, and of each rank that reads it the first."""
        readers: dict[int, int] = {}
        for stage in map(self.stage_of, conditioned.layers):
            readers.setdefault(self.placement[stage], stage)
        backbone = self.placement.backbones[self.placement.backbone_of(self.stage_of(conditioned.layers[0]))]
        return backbone[-1], tuple(sorted(readers.values()))

    def extra_forwards(self, stage: int) -> tuple[int, ...]:
        """Microbatches that run an extra forward of a stage."""
        backbone = self.placement.backbone_of(stage)
        for one in self.conditioning:
            if self.placement.backbone_of(self.stage_of(one.layers[0])) == backbone:
                return one.microbatches
        return ()

    def check_form(self, fields: Fields) -> None:
        """Its form only; ``planner.checks`` checks what it says."""
        if self.fill is not None and len(self.fill.rows) != self.pipeline_ranks:
            expected = f"a list of frozen work for each of the {self.pipeline_ranks} pipeline ranks"
            raise fields.object("fill").error("rows", expected)
        stages, bounds = self.num_stages, self.boundaries
        if self.pipeline_ranks > stages or set(self.placement) != set(range(self.pipeline_ranks)):
            raise fields.error("placement", f"every rank 0..{self.pipeline_ranks - 1} at least once and no other")
        if fields.integer("waves") != self.waves and self.placement.kind in (Kind.LINEAR, Kind.WAVE):
            placement = f"{self.placement.name} placement {list(self.placement)}"
            raise fields.error("waves", f"{self.waves} for the {placement}")
        parts = self.backbones
        check_parts(fields, "backbones", [p.stages for p in parts], [p.name for p in parts], stages)
        if any(part.carried and len(part.carried) != self.pipeline_ranks for part in parts):
            raise fields.error("backbones", f"carried actions of each of the {self.pipeline_ranks} ranks, or none")
        if len(bounds) != stages + 1:
            raise fields.error("boundaries", f"{stages + 1} layer indices for {stages} stages")
        if bounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise fields.error("boundaries", "strictly increasing layer indices that start at 0")
        if len(self.schedule) != self.pipeline_ranks:
            raise fields.error("schedule", f"one list of actions for each of the {self.pipeline_ranks} ranks")
        longest = max(map(len, self.schedule))
        if self.microbatches > longest:
            row = "the number of actions in the schedule's longest row"
            raise fields.error("microbatches", f"at most {longest}, {row}")
        if self.estimate is not None and len(self.estimate.peak_bytes) != self.pipeline_ranks:
            raise fields.error("estimate", f"peak_bytes for each of the {self.pipeline_ranks} ranks")
        if any(a >= b for a, b in itertools.pairwise((*self.recompute, self.num_layers))):
            raise fields.error("recompute", f"layer indices below {self.num_layers}, ascending, each once")
        if len({route.name for route in self.routes}) != len(self.routes):
            raise fields.error("routes", "each name at most once")
        if self.conditioning:
            self._check_conditioning(fields)

    def _check_conditioning(self, fields: Fields) -> None:
        owners: list[int] = []
        for one in self.conditioning:
            if one.layers[-1] >= self.num_layers or any(m >= self.microbatches for m in one.microbatches):
                limits = f"layers below {self.num_layers} and microbatches below {self.microbatches}"
                raise fields.error("self_conditioning", limits)
            found = {self.placement.backbone_of(self.stage_of(layer)) for layer in one.layers}
            if len(found) > 1 or found & set(owners):
                raise fields.error("self_conditioning", "one entry of a backbone, which layers of that backbone pop")
            owners += found
        rows = sorted((set(one.microbatches) for one in self.conditioning), key=len)
        if any(not a <= b for a, b in itertools.pairwise(rows)):
            raise fields.error("self_conditioning", "microbatches of one backbone among those of the next larger one")


def backbone_stages(layers: Sequence[BackboneLayers], placement: Placement) -> tuple[BackboneStages, ...]:
    """The backbones of a plan with that placement."""
    return tuple(
        BackboneStages(name=part.name, stages=(stages.start, stages.stop))
        for part, stages in zip(layers, placement.backbones if layers else (), strict=True)
    )


def make_routes(boundaries: Sequence[int], placement: Sequence[int], values: Sequence[NamedValue]) -> tuple[Route, ...]:
    """One route a value under given cuts and placement; no hops where all its consumers share the producer's rank.

    A value travels from one visited rank to the next in stage order, beside the hidden state, and visits a rank at
    most once. Batch entries (no source) are read on every rank and have no route.
    """
    routes = []
    for value in values:
        if value.source is not None:
            source = holder = stage_of(boundaries, value.source)
            holders, hops = {placement[source]}, []
            for stage in sorted({stage_of(boundaries, target) for target in value.targets}):
                if placement[stage] not in holders:
                    hops.append((holder, stage))
                    holders.add(placement[stage])
                    holder = stage
            routes.append(Route(name=value.name, source_stage=source, hops=tuple(hops)))
    return tuple(routes)


def stage_of(boundaries: Sequence[int], layer: int) -> int:
    """Stage that holds a layer."""
    return bisect_right(boundaries, layer) - 1
