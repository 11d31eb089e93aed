"""``AudioLDM2UNet2DConditionModel`` as a layer list: a U-Net whose resnets are followed by several transformers.

Where ``config.cross_attention_dim`` lists up to four widths, each resnet has as many transformers: one without a width
attends to the pixels alone, the first two of the others read ``encoder_hidden_states``, the rest
``encoder_hidden_states_1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import DownBlock2D, UpBlock2D
from diffusers.models.upsampling import Upsample2D
from diffusers.pipelines.audioldm2 import modeling_audioldm2 as blocks
from torch import nn

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.problems import unknown_blocks
from deepspeed_pulse.models.unets.unet_2d import CLIP_TOKENS, classes
from deepspeed_pulse.models.unets.walk import Layers, Walk
from deepspeed_pulse.models.units import refuse

BLOCKS = {
    "down": (DownBlock2D, blocks.CrossAttnDownBlock2D),
    "mid": (blocks.UNetMidBlock2DCrossAttn,),
    "up": (UpBlock2D, blocks.CrossAttnUpBlock2D),
}
PARTS = {
    "resnets": (ResnetBlock2D,),
    "attentions": (Transformer2DModel,),
    "downsamplers": (Downsample2D,),
    "upsamplers": (Upsample2D,),
}

TAKES_APART = (
    blocks.AudioLDM2UNet2DConditionModel,
    *chain(*BLOCKS.values()),
    Transformer2DModel,
    BasicTransformerBlock,
)
SOUND_TOKENS = 8
"""Of the language model that is read beside the text encoder."""


def to_layers(
    model: Any,
    *,
    granularity: str = "block",
    encoder_hidden_states_1: bool = True,
    attention_mask: bool = False,
    encoder_attention_mask: bool = False,
    encoder_attention_mask_1: bool = False,
    timestep_cond: bool = False,
    upsample_size: bool | None = None,
) -> list[Declared]:
    """The layer list of an ``AudioLDM2UNet2DConditionModel``; modules and weights are the model's own.

    The first layer's input is ``sample``. Batch entries that the layers pop: ``timestep``; ``class_labels`` when the
    model embeds classes; ``encoder_hidden_states``; ``encoder_hidden_states_1`` unless the batch is said to have none
    (transformers that would read it then read the first). ``attention_mask``, ``encoder_attention_mask``,
    ``encoder_attention_mask_1`` (1 = keep) and ``timestep_cond`` say that the batch has these optional entries too.

    ``granularity="fine"`` and ``upsample_size`` as for ``UNet2DConditionModel``.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    refuse(model, unknown_blocks(model, **BLOCKS, parts=PARTS, plain_parts={"attentions": (Attention,)}))
    masks = {"encoder_attention_mask": encoder_attention_mask, "encoder_attention_mask_1": encoder_attention_mask_1}
    walk = AudioLdm2Walk(
        model,
        granularity=granularity,
        upsample_size=upsample_size,
        timestep_cond=timestep_cond,
        masks=("attention_mask",) if attention_mask else (),
    )
    walk.second_text = encoder_hidden_states_1
    walk.text_masks = tuple(name for name, wanted in masks.items() if wanted)
    return walk.layers()


class AudioLdm2Walk(Walk):
    """Several transformers after each resnet."""

    second_text = True
    text_masks: tuple[str, ...] = ()

    def row_after(self, block: nn.Module, index: int) -> Iterator[str]:
        per_resnet = len(getattr(block, "cross_attention_dim", ()))
        first = index * per_resnet
        yield from (
            f"attentions.{i}" for i in range(first, min(first + per_resnet, len(getattr(block, "attentions", ()))))
        )

    def transformer(self, path: str) -> Layers:
        block_path, _, index = path.rpartition(".attentions.")
        widths = self.model.get_submodule(block_path).cross_attention_dim
        which = int(index) % len(widths)
        given = {name: name for name in self.masks}
        if widths[which] is not None:
            second = which > 1
            given["encoder_hidden_states"] = f"encoder_hidden_states{'_1' if second and self.second_text else ''}"
            mask = f"encoder_attention_mask{'_1' if second else ''}"
            if mask in self.text_masks:
                given["encoder_attention_mask"] = mask
        return self.transformer_reading(path, given)


def example(shapes: Shapes) -> dict[str, Any]:
    """What training scripts hand the model."""
    config = shapes.config
    widths = config.cross_attention_dim if isinstance(config.cross_attention_dim, int) else None
    texts = [widths] if widths else [width for width in config.cross_attention_dim[0] if width is not None]
    batch = {
        "sample": shapes.numbers(config.in_channels, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(SOUND_TOKENS, texts[0]),
        "encoder_hidden_states_1": shapes.numbers(CLIP_TOKENS, texts[-1]),
    }
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = classes(shapes)
    return batch
