"""A batch for a model, by the sizes in its config: what a training script would hand it, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.catalogue import example_transformers as transformers
from deepspeed_pulse.models.catalogue import example_unets as unets
from deepspeed_pulse.models.catalogue.example_shapes import Shapes

EXAMPLES: dict[str, Callable[[Shapes], dict[str, Any]]] = {
    "AudioLDM2UNet2DConditionModel": unets.audioldm2,
    "CogVideoXTransformer3DModel": transformers.cogvideox,
    "FluxTransformer2DModel": transformers.flux,
    "HunyuanDiT2DModel": transformers.hunyuan_dit,
    "HunyuanVideoTransformer3DModel": transformers.hunyuan_video,
    "Kandinsky3UNet": unets.kandinsky3,
    "PixArtTransformer2DModel": transformers.pixart,
    "SD3Transformer2DModel": transformers.sd3,
    "UNet2DConditionModel": unets.unet_2d_condition,
    "UNet2DModel": unets.unet_2d,
    "UNet3DConditionModel": unets.unet_3d,
    "UNetMotionModel": unets.unet_motion,
    "UNetSpatioTemporalConditionModel": unets.stable_video,
    "UViTModel": transformers.uvit,
    "UniDiffuserModel": transformers.unidiffuser,
    "WanTransformer3DModel": transformers.wan,
}
"""Class of the model to the arguments of its ``forward``."""


def example_batch(model: nn.Module, *, microbatch_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the model's ``forward``; the first is the first layer's input.

    Raises :class:`GraphError` for a model whose arguments are not known here.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in EXAMPLES:
            return EXAMPLES[kind.__name__](Shapes(model, microbatch_size, dtype))
    raise GraphError(
        f"no example batch is known for {type(model).__name__}, only for {', '.join(EXAMPLES)}; "
        "write a function that returns a layer list and an example batch and give it as package.module:function"
    )
