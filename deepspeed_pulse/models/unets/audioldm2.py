"""``AudioLDM2UNet2DConditionModel`` as a layer list: a U-Net whose resnets are followed by several transformers.

Where ``config.cross_attention_dim`` lists up to four widths, each resnet has as many transformers: one without a width
attends to the pixels alone, the first two of the others read ``encoder_hidden_states``, the rest
``encoder_hidden_states_1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from diffusers.models.unets.unet_2d_blocks import DownBlock2D, UpBlock2D
from diffusers.pipelines.audioldm2 import modeling_audioldm2 as blocks
from torch import nn

from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.tokens import TRANSFORMERS
from deepspeed_pulse.models.unets.unet_2d import CLIP_TOKENS, classes
from deepspeed_pulse.models.unets.walk import Layers, Walk, unknown_blocks, unknown_condition
from deepspeed_pulse.models.units import Origin, refuse, same

BLOCKS = {
    "down": (DownBlock2D, blocks.CrossAttnDownBlock2D),
    "mid": (blocks.UNetMidBlock2DCrossAttn,),
    "up": (UpBlock2D, blocks.CrossAttnUpBlock2D),
}
TAKES_APART = (blocks.AudioLDM2UNet2DConditionModel, *chain(*BLOCKS.values()), *TRANSFORMERS)
SOUND_TOKENS = 8
"""Of the language model that is read beside the text encoder."""


def to_layers(
    model: Any,
    origin: Origin,
    *,
    fine: bool,
    encoder_hidden_states_1: bool = True,
    attention_mask: bool = False,
    encoder_attention_mask: bool = False,
    encoder_attention_mask_1: bool = False,
    timestep_cond: bool = False,
    upsample_size: bool | None = None,
) -> Layers:
    """The layers of an ``AudioLDM2UNet2DConditionModel``.

    The first layer's input is ``sample``. Batch entries that the layers pop: ``timestep``; ``class_labels`` when the
    model embeds classes; ``encoder_hidden_states``; ``encoder_hidden_states_1`` unless the batch is said to have none
    (transformers that would read it then read the first). ``attention_mask``, ``encoder_attention_mask``,
    ``encoder_attention_mask_1`` (1 = keep) and ``timestep_cond`` say that the batch has these optional entries too.
    ``granularity="fine"`` and ``upsample_size`` as for ``UNet2DConditionModel``.
    """
    refuse(model, (*unknown_condition(model, timestep_cond), *unknown_blocks(model, **BLOCKS)))
    masks = {
        "attention_mask": attention_mask,
        "encoder_attention_mask": encoder_attention_mask,
        "encoder_attention_mask_1": encoder_attention_mask_1,
    }
    asked = tuple(name for name, wanted in masks.items() if wanted)
    walk = AudioLdm2Walk(
        model, origin, fine=fine, upsample_size=upsample_size, timestep_cond=timestep_cond, masks=asked
    )
    walk.second_text = encoder_hidden_states_1
    return walk.layers()


class AudioLdm2Walk(Walk):
    """Several transformers after each resnet."""

    second_text = True

    def row_after(self, block: nn.Module, index: int) -> Iterator[str]:
        per_resnet = len(getattr(block, "cross_attention_dim", ()))
        paths = [f"attentions.{i}" for i in range(len(getattr(block, "attentions", ())))]
        yield from paths[index * per_resnet :][:per_resnet]

    def given(self, path: str) -> dict[str, str]:
        block_path, _, index = path.rpartition(".attentions.")
        widths = self.model.get_submodule(block_path).cross_attention_dim
        which = int(index) % len(widths)
        given = same(*(name for name in self.masks if name == "attention_mask"))
        if widths[which] is not None:
            second = which > 1
            given["encoder_hidden_states"] = f"encoder_hidden_states{'_1' if second and self.second_text else ''}"
            mask = f"encoder_attention_mask{'_1' if second else ''}"
            if mask in self.masks:
                given["encoder_attention_mask"] = mask
        return given


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    widths = config.cross_attention_dim
    texts = [widths] if isinstance(widths, int) else [width for width in widths[0] if width is not None]
    batch = {
        "sample": shapes.numbers(config.in_channels, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(SOUND_TOKENS, texts[0]),
        "encoder_hidden_states_1": shapes.numbers(CLIP_TOKENS, texts[-1]),
    }
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = classes(shapes)
    return batch
