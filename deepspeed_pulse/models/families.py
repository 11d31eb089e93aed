"""Which module knows which diffusers model."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from torch import nn

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import ConfigError, GraphError

Granularity = Literal["block", "fine"]

FAMILIES = {
    "HunyuanDiT2DModel": "hunyuan_dit",
    "UViTModel": "uvit",
    "UNet2DConditionModel": "unet",
    "UNet2DModel": "unet",
    "UniDiffuserModel": "unidiffuser",
}
"""Class of the model to the module of this package whose ``to_layers`` takes it."""


def to_layers(model: nn.Module, *, granularity: Granularity = "block", **what_the_batch_has: Any) -> list[Declared]:
    """The layer list of a model; its modules and weights are the model's own, not copies.

    Args:
        model: of one of the classes in :data:`FAMILIES`, or derived from one.
        granularity: ``"block"``: the finest units at which a single hidden state flows;
            ``"fine"``: transformer blocks are cut further, attention and MLP apart.
        what_the_batch_has: optional batch entries, for example ``attention_mask=True``; the
            module of each family documents its own.

    Entries of nested dicts have dotted names: ``added_cond_kwargs.text_embeds``.

    Raises:
        GraphError: the model is of another kind, or has parts that layers cannot express.
    """
    if granularity not in ("block", "fine"):
        raise ConfigError(f'granularity: expected "block" or "fine", found {granularity!r}')
    for kind in type(model).__mro__:
        if kind.__name__ in FAMILIES:
            family = importlib.import_module(f"deepspeed_pulse.models.{FAMILIES[kind.__name__]}")
            return family.to_layers(model, granularity=granularity, **what_the_batch_has)
    raise GraphError(
        f"to_layers() takes one of {', '.join(FAMILIES)}, found {type(model).__name__}; "
        "for another model write the layer list yourself: spec(module, stash=..., pop=..., name=...) "
        "for each layer, in forward order"
    )
