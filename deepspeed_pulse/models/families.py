"""Which module knows which diffusers model."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from deepspeed_pulse.engine.sharing.patched import check_patched
from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import ConfigError, FileError, GraphError, did_you_mean
from deepspeed_pulse.models.bypassed import check_bypassed, check_modes, check_switches
from deepspeed_pulse.models.entries import NOT_ENTRIES, set_entry_rules
from deepspeed_pulse.models.units import Origin, check_cover, without_wrapper

Granularity = Literal["block", "fine"]
Blocks = Literal["auto"] | Sequence[str]
Glue = Sequence[Callable[..., Any] | str]
PlanCache = str | os.PathLike[str] | None

FAMILIES = {
    "AudioLDM2UNet2DConditionModel": "unets.audioldm2",
    "CogVideoXTransformer3DModel": "transformers.cogvideox",
    "FluxTransformer2DModel": "transformers.flux",
    "HunyuanDiT2DModel": "transformers.hunyuan_dit",
    "HunyuanVideoTransformer3DModel": "transformers.hunyuan_video",
    "Kandinsky3UNet": "unets.kandinsky3",
    "PixArtTransformer2DModel": "transformers.pixart",
    "SD3Transformer2DModel": "transformers.sd3",
    "UNet2DConditionModel": "unets.unet_2d",
    "UNet2DModel": "unets.unet_2d",
    "UNet3DConditionModel": "unets.unet_3d",
    "UNetMotionModel": "unets.unet_motion",
    "UNetSpatioTemporalConditionModel": "unets.unet_spatio_temporal",
    "UViTModel": "transformers.uvit",
    "UniDiffuserModel": "transformers.unidiffuser",
    "WanTransformer3DModel": "transformers.wan",
}
"""Class of the model to the module of this package that knows it.

Its ``to_layers(model, origin, *, fine, ...)`` gives the layers (``fine``: ``granularity="fine"``; the rest are optional
batch entries), its ``TAKES_APART`` names the classes that they stand in for, its ``example`` makes a batch.
"""


def class_of(config: Mapping[str, Any], where: str, *, traced: bool = False) -> Any:
    """The class that a config names, of diffusers or of this package; ``where`` names the config in errors.

    ``traced``: the model is to be traced, so any class of diffusers will do.
    """
    name = config.get("_class_name")
    if name not in FAMILIES:
        import diffusers

        found = getattr(diffusers, str(name), None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            if traced:
                return found
            raise FileError(
                f"{where}: no family knows a {name}, so it is traced: pass example_batch= to from_pretrained() or "
                "from_config(), a dict of the arguments of its forward; for ds_pulse profile write a function that "
                "returns to_layers(model, example_batch=batch) and the batch, and give it as package.module:function"
            )
        raise FileError(
            f"{where}: expected one of {', '.join(FAMILIES)} in _class_name, found {name}"
            f"{did_you_mean(str(name), FAMILIES)}"
        )
    return _known(str(name))


def _known(name: str) -> Any:
    import diffusers  # takes seconds, which a list of the user's own need not wait for

    return getattr(diffusers, name, None) or getattr(_family(name), name)


def _family(name: str) -> Any:
    return importlib.import_module(f"deepspeed_pulse.models.{FAMILIES[name]}")


def construct(kind: Any, config: Mapping[str, Any], where: str) -> Any:
    """A new model of a diffusers class; what its constructor raises becomes a :class:`FileError`."""
    if config.get("quantization_config") is not None:
        raise FileError(
            f"{where}: expected no quantization_config: only the library that made quantized weights loads them; load "
            "the model with it, put adapters on, and make the list with to_layers(model)"
        )
    try:
        return kind.from_config(dict(config))
    except Exception as problem:  # whatever the model's constructor raises for the values it finds
        raise FileError(
            f"{where}: {kind.__name__} refuses the config: {type(problem).__name__}: {problem}"
        ) from problem


def to_layers(
    model: nn.Module,
    *,
    granularity: Granularity = "block",
    example_batch: Any = None,
    blocks: Blocks = "auto",
    trace: bool = False,
    glue: Glue = (),
    plan_cache: PlanCache = None,
    **what_the_batch_has: Any,
) -> list[Declared]:
    """The layer list of a model; its modules and weights are the model's own, not copies.

    A model of a class in :data:`FAMILIES`, or derived from one, is cut by code written for it. Any other is traced: its
    own forward runs once, without numbers, and is cut between its blocks (docs/any_model.md).

    Args:
        model: any module; its weights may be on the meta device.
        example_batch: for a model that is traced: a dict of the arguments of its forward, the one that the first layer
            gets first; or a tensor; or a batch ``(inputs, labels)``. Its shapes are looked at, not its numbers.
        blocks: for a model that is traced: paths of the modules, or of containers of modules, to be layers, each kept
            whole; ``"auto"`` takes what stands in the model's lists of blocks.
        trace: trace a model of a known family too.
        glue: for a model that is traced: functions of its code, or their names ``"package.module:function"``. Each call
            of one between blocks is kept whole, so it may read the numbers in tensors.
        plan_cache: for a model that is traced: a folder, as in the "pulse" block. A trace that took a second is kept
            there by content; one process of a machine traces, the others read.
        granularity: ``"block"``: the finest units at which a single hidden state flows;
            ``"fine"``: transformer blocks are cut further, attention and MLP apart.
        what_the_batch_has: optional batch entries, for example ``attention_mask=True``; the
            module of each family documents its own.

    Entries of nested dicts have dotted names: ``added_cond_kwargs.text_embeds``.

    Raises :class:`GraphError` when the model is of another kind, or has parts or switches that layers cannot express.
    Warns when the model's blocks are set to recompute activations, which layers bypass.
    """
    if granularity not in ("block", "fine"):
        raise ConfigError(f'granularity: expected "block" or "fine", found {granularity!r}')
    if not isinstance(model, nn.Module):
        raise GraphError(f"to_layers() takes a model (a torch.nn.Module), found {type(model).__name__}")
    model = without_wrapper(model)
    check_patched([("", model)])
    found = family_of(model)
    if found is None or trace:
        how = {"blocks": blocks, "fine": granularity == "fine", "glue": glue, "plan_cache": plan_cache}
        return _traced(model, example_batch, how, what_the_batch_has)
    for name, value, default in (("blocks", blocks, "auto"), ("glue", glue, ()), ("plan_cache", plan_cache, None)):
        if value != default:
            raise GraphError(
                f"{name}= is for models that are traced; {found[0].__name__} has a family: leave it out, or pass "
                "trace=True too"
            )
    kind, family = found
    _check_names(kind.__name__, family.to_layers, what_the_batch_has)
    check_switches(model)
    origin = Origin.of(model)
    layers: list[Declared] = list(family.to_layers(model, origin, fine=granularity == "fine", **what_the_batch_has))
    check_cover(layers, origin)
    check_bypassed(model, layers, family.TAKES_APART)
    check_modes(model, layers)
    set_entry_rules(model, kind, layers, family.to_layers)
    return layers


def _traced(model: nn.Module, example_batch: Any, how: Mapping[str, Any], options: Mapping[str, Any]) -> list[Declared]:
    from deepspeed_pulse.models.traced.layers import traced_layers  # which needs much of torch that families do not

    name = type(model).__name__
    if example_batch is None:
        raise GraphError(
            f"to_layers() knows no family for {name}, so it traces its forward, and needs to know what that is called "
            "with: pass example_batch=, a dict of the arguments of forward (the one that the first layer gets first), "
            "with tensors of the shapes to train with"
        )
    if options:
        raise GraphError(
            f"to_layers() of a {name} that is traced reads from example_batch what the batch has; found the option "
            f"{next(iter(options))!r}, which is for families: leave it out"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise GraphError(f"to_layers() of a scripted model ({name}): there is no code to trace; pass the model itself")
    check_switches(model)
    origin = Origin.of(model)
    return traced_layers(model, origin, example_batch, **how)


def family_of(model: nn.Module) -> tuple[type[nn.Module], Any] | None:
    """Which known class a model has or is derived from, and the module that knows it."""
    for kind in type(model).__mro__:
        if kind.__name__ in FAMILIES and kind is _known(kind.__name__):
            return kind, _family(kind.__name__)
    return None


def _check_names(kind: str, take: Callable[..., Any], given: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(take).parameters if name not in ("model", "origin", "fine")]
    for name in given:
        if name not in known:
            hint = f": {NOT_ENTRIES[name]}" if name in NOT_ENTRIES else did_you_mean(name, known)
            raise GraphError(f"to_layers() of a {kind} takes {', '.join(known)}; found {name!r}{hint}")
