"""The whole model in one process, for sampling while the ranks train.

unet = gather_model(engine)  # every rank calls it
if engine.global_rank == 0:
    images = DDPMPipeline(unet=unet, scheduler=scheduler).to(engine.device)(batch_size=4).images
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError, GraphError
from deepspeed_pulse.models.families import construct
from deepspeed_pulse.models.units import Adapted, Origin, processors_of, without_wrapper
from deepspeed_pulse.models.weights.shards import Part, gather
from deepspeed_pulse.models.weights.skeleton import Skeleton

if TYPE_CHECKING:
    from deepspeed_pulse.models.weights.ema import EMA

WHAT = "gather_model()"


def gather_model(
    engine: Any,
    *,
    dtype: torch.dtype | None = None,
    ema: EMA | None = None,
    model_class: type[nn.Module] | None = None,
    backbone: str | None = None,
    build: Callable[[], nn.Module] | None = None,
) -> Any:
    """The trained model on the CPU of global rank 0, in evaluation mode; None on the other ranks.

    A collective call: every rank makes it. Weights are copies: training may go on. LoRA adapters are on the model,
    with the scales that they had when the list was made. The other ranks wait for rank 0 at their next step, and no
    longer than ``timeout_seconds``. A model too large for one rank is sampled by all of them, with
    ``engine.eval_batch``.

    Args:
        engine: trains a list that ``to_layers``, ``from_pretrained`` or ``from_config`` made.
        dtype: of the floating-point weights, as for :func:`.save_pretrained`.
        ema: averages in place of the weights, in the dtype of those.
        model_class: which model, when the list was made of two (a U-Net and its ControlNet).
        backbone: which backbone, where the engine trains several.
        build: makes such a model, without adapters; called on global rank 0. Needed for one that is none of diffusers',
            whose config says how it is made.

    Raises:
        ConfigError: the layer list was not made from a model or layers of it were left out; nothing says how the model
            is made; it is quantized, has several adapters, or parts or attention processors that a new one has not; on
            every rank.
    """
    part = Part.asked(engine, WHAT, model_class, backbone, dtype=dtype, ema=ema)
    origin = part.origin
    if several := next((part.configs for part in origin.adapted if len(part.configs) > 1), None):
        raise ConfigError(
            f"{WHAT}: expected one adapter at most, found {', '.join(several)}; write them with save_lora()"
        )
    engine.module.ranks.decide_on_first(lambda: _check_can_be_made(origin, build), WHAT)  # which alone needs build=
    weights, tables = part.own_tensors(engine, {}), part.own_tables(engine)
    floats = {
        key: tensor.dtype if dtype is None else origin.dtype_of(key, dtype)
        for key, tensor in (weights | tables).items()
        if tensor.is_floating_point()
    }
    averages = {} if ema is None else ema.averages_of(backbone)
    tensors = engine.module.ranks.together(lambda: part.own_tensors(engine, averages) | tables, WHAT)
    found = gather(engine, tensors, keys=origin.state_keys, dtypes=floats)
    made: list[Any] = []

    def make() -> None:
        with torch.random.fork_rng(devices=[]):  # the first rank's layers draw as if nobody had sampled
            made.append(_model(origin, found, build))

    engine.module.ranks.decide_on_first(make, WHAT)
    return made[0] if made else None


def _check_can_be_made(origin: Origin, build: Any) -> None:
    if origin.is_quantized:
        raise ConfigError(
            f"{WHAT}: this {origin.model_class.__name__} is quantized, and quantized weights are loaded by the library "
            "that made them only; write what trains with save_lora(), and load that into the model as you have loaded "
            "it here (model.load_lora_adapter(folder)), or sample with engine.eval_batch"
        )
    if build is None and not origin.is_of_diffusers:
        raise ConfigError(
            f"{WHAT}: nothing says how a {origin.model_class.__name__} is made; pass build=, a function that returns a "
            "new one, or write the weights with save_pretrained()"
        )


def _model(origin: Origin, tensors: dict[str, Tensor], build: Callable[[], nn.Module] | None) -> Any:
    model: Any = _new(origin) if build is None else _built(build)
    source = "of the config" if build is None else "that build= returns"
    for part in origin.adapted:
        _adapt(model, part, source)
    shared = _shared(model)
    expected = {key: tensor.shape for key, tensor in model.state_dict().items()}
    there = {key: tensors[key].shape for key in origin.state_keys}
    if other := next((key for key in expected | there if expected.get(key) != there.get(key)), None):
        raise ConfigError(
            f"{WHAT}: the {type(model).__name__} {source} has other parts than the one that trains, the first is "
            f"{other}; pass build=, a function that returns one like it"
        )
    _check_processors(origin, model, source)
    for path, scales in origin.scales.items():
        model.get_submodule(path).scaling.update(scales)
    model.load_state_dict({key: tensors[key] for key in origin.state_keys}, assign=True)
    for name, buffer in [*model.named_buffers()]:
        if name in tensors and name not in there and buffer.shape == tensors[name].shape:
            _put(model, name, tensors[name])
    for name, first in shared.items():
        _put(model, name, model.get_parameter(first))
    return model.eval().requires_grad_(False)


def _adapt(model: nn.Module, adapted: Adapted, source: str) -> None:
    """Put the adapters on that the model, or this part of it, has where it trains; their weights come later."""
    from peft import inject_adapter_in_model

    try:
        part: Any = model.get_submodule(adapted.name)
    except AttributeError:
        raise ConfigError(
            f"{WHAT}: expected a part {adapted.name}, which has adapters, found none in the {type(model).__name__} "
            f"{source}; pass build=, a function that returns one like the model that trains"
        ) from None
    for name, config in adapted.configs.items():
        bare = copy.copy(config)  # none of its weights are computed from the model's, which are not there yet
        if hasattr(bare, "init_lora_weights"):
            bare.init_lora_weights = False
        if hasattr(part, "add_adapter"):
            part.add_adapter(bare, name)
        else:
            inject_adapter_in_model(bare, part, name)
        part.peft_config[name] = config


def _check_processors(origin: Origin, model: nn.Module, source: str) -> None:
    """Diffusers' own compute the same in several ways; what a user has written computes something else."""
    new = processors_of(model)
    for path, kind in origin.processors.items():
        other = new.get(path, type(None))
        if _named(other) != _named(kind) and not (_is_of_diffusers(kind) and _is_of_diffusers(other)):
            raise ConfigError(
                f"{WHAT}: expected the processor {kind.__name__} at {path}, as in the model that trains, found "
                f"{other.__name__} in the {type(model).__name__} {source}; pass build=, a function that returns one "
                "with the processors set (set_attn_processor)"
            )


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_of_diffusers(kind: type) -> bool:
    return _named(kind).startswith("diffusers.")


def _new(origin: Origin) -> Any:
    """A new diffusers model, its weights not there where that can be."""

    def make() -> Any:
        return construct(origin.model_class, json.loads(origin.config_json), WHAT)

    try:
        return Skeleton(make).model
    except GraphError:  # one parameter under two names
        return make()


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    """A new model of the user's."""
    with torch.device("cpu"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{WHAT}: build=: expected a function that returns a module, found {type(model).__name__}")
    return without_wrapper(model)


def _shared(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, each with the first."""
    first: dict[nn.Parameter, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        first.setdefault(parameter, name)
    return {name: first[parameter] for name, parameter in named if first[parameter] != name}


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """In the place of a parameter or buffer."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)
