"""What each layer costs, for the planner, where that is known without measuring: from a profile file, or by weights."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime import utils as upstream_utils
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.collectives import told_as
from deepspeed_pulse.engine.specs import TiedCall, type_name, unwrap
from deepspeed_pulse.errors import ConfigError, GraphError
from deepspeed_pulse.ir.backbones import BackboneLayers
from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.rules import PLAIN, Rules
from deepspeed_pulse.runtime.state import frozen_bytes, param_bytes

NO_DEVICE = "none"
"""Device of a profile whose times are only weights."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the planner is asked for: the module's view of the job."""

    graph: Graph
    layers: Sequence[Any]
    backbones: tuple[BackboneLayers, ...] = ()
    """Where there are several."""
    pulse: PulseConfig
    pipeline_ranks: int
    data_parallel: int
    microbatches: int
    microbatch_size: int
    partition_method: str | Sequence[int | str]
    example: tuple[Any, dict[str, Any]] | None
    device: torch.device
    recompute: str | Sequence[int] = "auto"
    rules: Rules = PLAIN
    layout: Layout = Layout.PIPE_MAJOR
    dtype: torch.dtype | None = None
    """What parameters are cast to before they train (bf16, fp16); None: they stay as they are built."""
    buffer_dtype: torch.dtype | None = None
    """The same of buffers."""
    frozen: tuple[FrozenPart, ...] = ()
    """Parts that encode the next step's batch, with their costs."""
    has_frozen: bool = False
    """True where there are such parts, their costs known or not."""
    conditioning: tuple[SelfConditioned, ...] = ()
    """Of self-conditioned backbones."""


def known_profile(request: PlanRequest) -> tuple[Profile | None, str]:
    """The costs of a job that need no measuring, and how they were found; None: they are to be measured."""
    method = request.partition_method
    if request.pulse.profile != "auto":
        profile = Profile.load(request.pulse.profile)
        problem = next(misfits(request, profile), None)
        if problem is not None:
            raise ConfigError(f'{request.pulse.profile}: {problem}; profile this model, or set "profile": "auto"')
        return profile, f"profile {request.pulse.profile}"
    if method != "profile" and isinstance(method, str):
        return _weighted(request, _method_weights(request, method)), f"partition_method {method!r}"
    if request.example is None:
        weights = _method_weights(request, "parameters")
        return _weighted(request, weights), "parameter counts (give example_batch or a profile for better ones)"
    return None, "measured on example_batch"


def misfits(request: PlanRequest, profile: Profile) -> Iterator[str]:
    """What says that a profile is another model's: the plan cuts, routes and fills memory by what is in it."""
    if profile.num_layers != len(request.layers):
        yield f"expected costs of {len(request.layers)} layers as the model has, found {profile.num_layers}"
        return
    if profile.backbones != request.backbones:
        both = (request.backbones, profile.backbones)
        have, other = (", ".join(part.name for part in one) or "one" for one in both)
        yield f"expected costs of the backbones {have}, found of {other}"
        return
    here = {(v.name, v.source, target) for v in request.graph.values for target in v.targets}
    found = {(skip.name, skip.source, skip.target) for skip in profile.skips}
    for name, source, target in sorted(here ^ found):
        who = "model" if (name, source, target) in here else "profile"
        yield (
            f"expected the named values of the model, found another model's: only the {who} has {name!r} from layer "
            f"{source} to layer {target}"
        )
    for index, (layer, cost) in enumerate(zip(request.layers, profile.layers, strict=True)):
        name = request.graph.layers[index].name
        if name != cost.name:
            yield f"expected costs of layer {index} {name!r} as the model has, found {cost.name!r}"
        sizes = _possible_bytes(layer, profile.dtype)
        if (cost.param_bytes, cost.frozen_bytes) not in sizes:
            (trained, frozen) = sizes[-1]
            yield (
                f"layer {name}: expected {trained} bytes of parameters that train and {frozen} of frozen ones as the "
                f"model has, found {cost.param_bytes} and {cost.frozen_bytes}"
            )


def _possible_bytes(layer: Any, dtype: str) -> list[tuple[int, int]]:
    """Bytes of parameters, trained and frozen, as the layer is; before that, when cast to ``dtype`` before training."""
    parameters = parameters_of(layer)
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        return [(param_bytes(parameters), frozen_bytes(parameters))]
    cast = [
        torch.empty(p.shape, dtype=wanted, device="meta", requires_grad=p.requires_grad) if p.is_floating_point() else p
        for p in parameters
    ]
    return [(param_bytes(found), frozen_bytes(found)) for found in (cast, parameters)]


def _method_weights(request: PlanRequest, method: str) -> list[int]:
    kind = method.lower()
    if kind == "uniform":
        return [1] * len(request.layers)
    if kind == "parameters":
        return [max(count, 1) for count in parameter_counts(request.layers)]
    if kind.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        found = [bool(pattern.search(type_name(layer))) for layer in request.layers]
        if not any(found):
            types = ", ".join(sorted({type_name(layer) for layer in request.layers}))
            raise ConfigError(f"partition_method {method!r} matches no layer; layers are of types {types}")
        return [1000 if hit else 1 for hit in found]
    expected = "'profile', 'uniform', 'parameters', 'type:REGEX' or a list of cuts"
    raise ConfigError(f"partition_method: expected {expected}, found {method!r}")


def upstream_cuts(request: PlanRequest) -> tuple[int, ...] | None:
    """Where upstream's class cuts by one of its methods; None for "profile", or where a rank would have no layer."""
    method, ranks, layers = str(request.partition_method), request.pipeline_ranks, request.layers
    if method == "profile":
        return None
    weighed = _method_weights(request, method)  # or says which methods there are
    if method.lower() == "uniform":
        found = upstream_utils.partition_uniform(num_items=len(layers), num_parts=ranks)
    else:
        weights = [int(weight > 1) for weight in weighed]
        if method.lower() == "parameters":
            weights = [sum(p.numel() for p in parameters_of(layer) if p.requires_grad) for layer in layers]
        found = upstream_utils.partition_balanced(weights=weights, num_parts=ranks)
    cuts = tuple(int(cut) for cut in found)
    return cuts if all(a < b for a, b in itertools.pairwise(cuts)) else None


def parameter_counts(layers: Sequence[Any]) -> list[int]:
    """Parameters of each layer, trainable or not; layers to be built are built on the meta device."""
    return [sum(p.numel() for p in parameters_of(layer)) for layer in layers]


def parameters_of(layer: Any) -> list[torch.Tensor]:
    """Of a layer of the list; one to be built is built on the meta device."""
    found = stand_in(layer)
    return list(found.parameters()) if isinstance(found, torch.nn.Module) else []


def stand_in(layer: Any) -> Any:
    """The module or function of a layer of the list; one to be built is built on the meta device."""
    bare = unwrap(layer)
    if not isinstance(bare, upstream.LayerSpec):
        return bare
    with suppress(KeyError, TypeError):
        return _stand_ins[bare]
    told = told_as(GraphError, f"a layer {type_name(layer)} cannot be built: ")
    with told, torch.device("meta"), torch.random.fork_rng(devices=[]):
        found = bare.build()
    with suppress(TypeError):  # a class of the user's that cannot be a key
        _stand_ins[bare] = found
    return found


_stand_ins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By layer to be built; the start of a job asks for each some five times."""


def _weighted(request: PlanRequest, weights: Sequence[int]) -> Profile:
    """A profile whose forward times are weights (backward twice as long)."""
    largest = max(weights)
    held = [parameters_of(layer) for layer in request.layers]
    costs = tuple(
        LayerCost(
            name=layer.name,
            forward_ms=weight / largest,
            backward_ms=2 * weight / largest,
            param_bytes=param_bytes(parameters),
            frozen_bytes=frozen_bytes(parameters),
            activation_bytes=0,
            output_bytes=0,
        )
        for layer, weight, parameters in zip(request.graph.layers, weights, held, strict=True)
    )
    return Profile(
        name="weights",
        device=NO_DEVICE,
        dtype="float32",
        microbatch_size=request.microbatch_size,
        layers=costs,
        skips=skips_of(request.graph, {}),
        backbones=request.backbones,
    )


def skips_of(graph: Graph, value_bytes: dict[str, tuple[int, bool]]) -> tuple[Skip, ...]:
    """Skips of a graph; unknown sizes count one byte, so that collocation still matters."""
    found = []
    for value in graph.values:
        size, gradient = value_bytes.get(value.name, (1, True))
        source = int(value.source or 0)
        found += [Skip(name=value.name, source=source, target=t, bytes=size, gradient=gradient) for t in value.targets]
    return tuple(found)


def built(layer: Any) -> Callable[..., Any]:
    """The module or function that a layer of the list stands for."""
    bare: Any = unwrap(layer)
    if not isinstance(bare, upstream.LayerSpec):
        return bare  # type: ignore[no-any-return]
    module: torch.nn.Module = bare.build()
    forward_fn = getattr(bare, "forward_fn", None)
    return module if forward_fn is None else TiedCall(module, forward_fn)
