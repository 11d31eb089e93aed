"""Making the plan of a module: rank 0 measures, plans and checks, all ranks receive the same.

The only place of the engine that imports the planner.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.specs import unwrap
from deepspeed_pulse.errors import ConfigError, PlanError, PulseError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.schedule import Op, Schedule
from deepspeed_pulse.planner import make as planner
from deepspeed_pulse.planner.cost import default_cluster
from deepspeed_pulse.planner.validate import check
from deepspeed_pulse.runtime.profiler import measure_layers

GIGABYTE = 10**9

NO_DEVICE = "none"
"""Device of a profile whose times are only weights."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the planner is asked for: the module's view of the job."""

    graph: Graph
    layers: Sequence[Any]
    pulse: PulseConfig
    pipeline_ranks: int
    data_parallel: int
    microbatches: int
    microbatch_size: int
    partition_method: str | Sequence[int | str]
    example: tuple[Any, dict[str, Any]] | None
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, the costs it was made for, and how they were found."""

    plan: Plan
    profile: Profile | None
    cluster: Cluster | None
    costs: str

    @property
    def measured(self) -> bool:
        """True when costs are times, so that predicted times mean something."""
        return self.profile is not None and self.profile.device != NO_DEVICE


def agree(make: Callable[[], Any]) -> Any:
    """Run ``make`` on rank 0; every rank gets its result, or raises the same error."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [make()]
        except PulseError as problem:
            outcome = [problem]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], PulseError):
        raise outcome[0]
    return outcome[0]


def make_planned(request: PlanRequest) -> Planned:
    """The plan for a request: the user's own, one from the cache, or a new one."""
    if request.pulse.plan is not None:
        return Planned(plan=_given_plan(request), profile=None, cluster=None, costs=f"plan file {request.pulse.plan}")
    profile, costs = _profile(request)
    cluster = _cluster(request)
    plan = planner.make_plan(
        profile,
        cluster=cluster,
        pipeline_ranks=request.pipeline_ranks,
        microbatches=request.microbatches,
        data_parallel=request.data_parallel,
        placement=request.pulse.placement,
        waves=int(request.pulse.waves),
        boundaries=_explicit_cuts(request),
        schedule=request.pulse.schedule,
        memory_bytes=_memory_bytes(request),
        solver_seconds=request.pulse.solver_seconds,
    )
    return Planned(plan=plan, profile=profile, cluster=cluster, costs=costs)


def reorder(planned: Planned, pulse: PulseConfig, microbatches: int) -> Plan:
    """The same cuts with another number of microbatches."""
    plan = planned.plan
    if planned.profile is None or planned.cluster is None:
        raise ConfigError(
            f"the plan {pulse.plan} is for {plan.microbatches} microbatches, the engine runs {microbatches}: set "
            f'gradient_accumulation_steps to {plan.microbatches} or remove "plan" from the "pulse" block'
        )
    return planner.reorder(
        plan,
        planned.profile,
        cluster=planned.cluster,
        microbatches=microbatches,
        schedule=pulse.schedule,
        solver_seconds=pulse.solver_seconds,
    )


def forward_schedule(plan: Plan, microbatches: int) -> Schedule:
    """Order of forwards for evaluation."""
    return planner.forward_schedule(plan, microbatches)


def _given_plan(request: PlanRequest) -> Plan:
    path = str(request.pulse.plan)
    plan = Plan.load(path)
    expected = {
        "pipeline_ranks": request.pipeline_ranks,
        "data_parallel": request.data_parallel,
        "microbatches": request.microbatches,
    }
    for name, value in expected.items():
        if getattr(plan, name) != value:
            raise PlanError(
                f"{path}: field {name!r}: expected {value} as this job runs, found {getattr(plan, name)}; plan anew "
                "with ds_pulse plan, or change the job"
            )
    if any(action.op in (Op.INPUT_GRAD, Op.WEIGHT_GRAD) for row in plan.schedule for action in row):
        raise PlanError(f"{path}: the schedule splits backward into I and W, which the engine cannot run yet; use B")
    check(plan, num_layers=len(request.graph.layers), values=request.graph.values)
    return plan


def _explicit_cuts(request: PlanRequest) -> tuple[int, ...] | None:
    method = request.partition_method
    if isinstance(method, str):
        return None
    cuts = tuple(cut if isinstance(cut, int) else request.graph.index_of(cut) for cut in method)
    return (0, *cuts, len(request.layers))


def _memory_bytes(request: PlanRequest) -> int | None:
    if request.pulse.memory_gb != "auto":
        return int(float(request.pulse.memory_gb) * GIGABYTE)
    if request.device.type == "cpu":
        return None
    return int(get_accelerator().total_memory())


def _cluster(request: PlanRequest) -> Cluster:
    if request.pulse.cluster != "auto":
        return Cluster.load(request.pulse.cluster)
    return default_cluster(request.pipeline_ranks * request.data_parallel, _memory_bytes(request) or 2**50)


# -- costs -----------------------------------------------------------------------------------


def _profile(request: PlanRequest) -> tuple[Profile, str]:
    method = request.partition_method
    if request.pulse.profile != "auto":
        profile = Profile.load(request.pulse.profile)
        if profile.num_layers != len(request.layers):
            raise ConfigError(
                f"{request.pulse.profile}: expected costs of {len(request.layers)} layers as the model has, found "
                f'{profile.num_layers}; profile this model, or set "profile": "auto"'
            )
        return profile, f"profile {request.pulse.profile}"
    if method != "profile" and isinstance(method, str):
        return _weighted(request, _method_weights(request, method)), f"partition_method {method!r}"
    if request.example is None:
        counts = [max(count, 1) for count in parameter_counts(request.layers)]
        return _weighted(request, counts), "parameter counts (give example_batch or a profile for better ones)"
    return _cached(request, lambda: _measured(request)), "measured on example_batch"


def _method_weights(request: PlanRequest, method: str) -> list[int]:
    kind = method.lower()
    if kind == "uniform":
        return [1] * len(request.layers)
    if kind == "parameters":
        return [max(count, 1) for count in parameter_counts(request.layers)]
    if kind.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        found = [bool(pattern.search(_type_name(layer))) for layer in request.layers]
        if not any(found):
            raise ConfigError(
                f"partition_method {method!r} matches no layer; layers are of types "
                f"{', '.join(sorted({_type_name(layer) for layer in request.layers}))}"
            )
        return [1000 if hit else 1 for hit in found]
    raise ConfigError(
        "partition_method: expected 'profile', 'uniform', 'parameters', 'type:REGEX' or a list of cuts, "
        f"found {method!r}"
    )


def _type_name(layer: Any) -> str:
    bare = unwrap(layer)
    if isinstance(bare, upstream.LayerSpec):
        return str(bare.typename.__name__)
    return str(getattr(bare, "__name__", type(bare).__name__))


def parameter_counts(layers: Sequence[Any]) -> list[int]:
    """Parameters of each layer, trainable or not; layers to be built are built on the meta device."""
    return [sum(p.numel() for p in _parameters(layer)) for layer in layers]


def _parameters(layer: Any) -> list[torch.Tensor]:
    bare = unwrap(layer)
    if isinstance(bare, upstream.LayerSpec):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            bare = bare.build()
    return list(bare.parameters()) if isinstance(bare, torch.nn.Module) else []


def _weighted(request: PlanRequest, weights: Sequence[int]) -> Profile:
    """A profile whose forward times are weights (backward twice as long)."""
    largest = max(weights)
    param_bytes = [sum(p.numel() * p.element_size() for p in _parameters(layer)) for layer in request.layers]
    return Profile(
        name="weights",
        device=NO_DEVICE,
        dtype="float32",
        microbatch_size=request.microbatch_size,
        layers=tuple(
            LayerCost(
                name=layer.name,
                forward_ms=weight / largest,
                backward_ms=2 * weight / largest,
                param_bytes=size,
                activation_bytes=0,
                output_bytes=0,
            )
            for layer, weight, size in zip(request.graph.layers, weights, param_bytes, strict=True)
        ),
        skips=skips_of(request.graph, {}),
    )


def skips_of(graph: Graph, value_bytes: dict[str, tuple[int, bool]]) -> tuple[Skip, ...]:
    """Skips of a graph; unknown sizes count one byte, so that collocation still matters."""
    return tuple(
        Skip(
            name=value.name,
            source=int(value.source or 0),
            target=target,
            bytes=value_bytes.get(value.name, (1, True))[0],
            gradient=value_bytes.get(value.name, (1, True))[1],
        )
        for value in graph.values
        for target in value.targets
    )


def _measured(request: PlanRequest) -> Profile:
    assert request.example is not None
    inputs, entries = request.example
    measured = measure_layers(
        request.graph,
        [lambda i=i: _built(request, i) for i in range(len(request.layers))],
        inputs,
        entries,
        request.device,
    )
    return Profile(
        name="measured",
        device=str(get_accelerator().device_name() if request.device.type != "cpu" else "cpu"),
        dtype=measured.dtype,
        microbatch_size=request.microbatch_size,
        layers=measured.layers,
        skips=skips_of(request.graph, measured.value_bytes),
    )


def _built(request: PlanRequest, index: int) -> Callable[..., Any]:
    bare = unwrap(request.layers[index])
    if isinstance(bare, upstream.LayerSpec):
        built = bare.build()
        forward_fn = getattr(bare, "forward_fn", None)
        if forward_fn is not None:
            return TiedCall(built, forward_fn)
        return built
    return bare


class TiedCall:
    """A tied module with the ``forward_fn`` of one of its layers; saves and loads the module's state."""

    def __init__(self, module: torch.nn.Module, forward_fn: Callable[..., Any]) -> None:
        self.module, self._forward_fn = module, forward_fn

    def __call__(self, *args: Any) -> Any:
        return self._forward_fn(self.module, *args)

    def to(self, device: torch.device) -> TiedCall:
        self.module.to(device)
        return self

    def parameters(self) -> Any:
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        return self.module.load_state_dict(state, strict=strict)


# -- cache -----------------------------------------------------------------------------------


def _cached(request: PlanRequest, make: Callable[[], Profile]) -> Profile:
    """A measured profile is kept by content: the same job finds the same profile, so the same plan."""
    if request.pulse.plan_cache is None:
        return make()
    folder = Path(request.pulse.plan_cache)
    path = folder / f"profile-{_key(request)}.json"
    if path.exists():
        return Profile.load(path)
    profile = make()
    folder.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(profile.to_json(), encoding="utf-8")
    beside.replace(path)
    return profile


def _key(request: PlanRequest) -> str:
    assert request.example is not None
    inputs, entries = request.example
    described = {
        "layers": [(layer.name, layer.stash, layer.pop) for layer in request.graph.layers],
        "shapes": [[list(p.shape) for p in _parameters(layer)] for layer in request.layers],
        "batch": {name: _described(value) for name, value in {"": inputs, **entries}.items()},
        "device": request.device.type,
        "threads": torch.get_num_threads(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, (tuple, list)):
        return [_described(item) for item in value]
    return repr(value)


def with_schedule(plan: Plan, schedule: Schedule, microbatches: int) -> Plan:
    """The plan with another order, for example of forwards only."""
    return replace(plan, schedule=schedule, microbatches=microbatches, estimate=None, solver=None)
