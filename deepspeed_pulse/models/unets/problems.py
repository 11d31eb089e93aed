"""What of a U-Net layers cannot express, found before it is taken apart and told all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

Kinds = tuple[type[nn.Module], ...]

PARTS: Mapping[str, Kinds] = {
    "resnets": (ResnetBlock2D,),
    "attentions": (Transformer2DModel,),
    "downsamplers": (Downsample2D,),
    "upsamplers": (Upsample2D,),
}
"""Lists of modules in a block, and the kinds of modules in them where a family has no others."""

PLAIN_PARTS: Mapping[str, Kinds] = {"attentions": (Attention,)}
"""What is different in blocks without cross attention."""


def unknown_values(config: Any, handled: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Keys of a config whose value is not one of those handled; the first is that of configs without the key."""
    for key, values in handled.items():
        found = getattr(config, key, values[0])
        if found not in values:
            yield f"config.{key} is {found!r}, supported: {', '.join(repr(value) for value in values)}"


def unknown_blocks(model: Any, *, down: Kinds, mid: Kinds, up: Kinds, **parts: Kinds) -> Iterator[str]:
    """Blocks of another kind, blocks with FreeU on, and parts of another kind within known blocks.

    ``parts``: where a family's are not those of :data:`PARTS`.
    """
    for path, block, kinds in _blocks(model, down, mid, up):
        if not isinstance(block, kinds):
            yield f"{path} is a {type(block).__name__}, supported: {_names(kinds)}"
        elif any(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2")):
            yield f"{path} has FreeU enabled; call model.disable_freeu() (it is for sampling)"
        else:
            crosses = getattr(block, "has_cross_attention", False)
            yield from _unknown_parts(path, block, {**PARTS, **parts, **({} if crosses else PLAIN_PARTS)})


def _blocks(model: Any, down: Kinds, mid: Kinds, up: Kinds) -> Iterator[tuple[str, nn.Module, Kinds]]:
    yield from ((f"down_blocks.{index}", block, down) for index, block in enumerate(model.down_blocks))
    if model.mid_block is not None:
        yield "mid_block", model.mid_block, mid
    yield from ((f"up_blocks.{index}", block, up) for index, block in enumerate(getattr(model, "up_blocks", ())))


def _unknown_parts(path: str, block: nn.Module, parts: Mapping[str, Kinds]) -> Iterator[str]:
    for group, known in parts.items():
        for index, part in enumerate(getattr(block, group, None) or ()):
            at = f"{path}.{group}.{index}"
            if part is not None and not isinstance(part, known):
                yield f"{at} is a {type(part).__name__}, supported: {_names(known)}"
            elif getattr(part, "spatial_norm", None) is not None:
                yield f"{at} has a spatial norm, which reads the time embedding; supported: attention without"


def _names(kinds: Kinds) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
