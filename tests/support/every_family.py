"""A small model of every family that ``to_layers`` takes, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support import small_controlnet as pair
from support import small_models as unets
from support import small_transformers as small
from torch import nn

from deepspeed_pulse.models import to_layers

FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "AudioLDM2UNet2DConditionModel": (unets.small_audioldm2, unets.audio_entries),
    "CogVideoXTransformer3DModel": (small.small_cogvideox, small.cogvideox_batch),
    "FluxTransformer2DModel": (small.small_flux, small.flux_batch),
    "HunyuanDiT2DModel": (small.small_hunyuan_dit, small.hunyuan_dit_batch),
    "HunyuanVideoTransformer3DModel": (small.small_hunyuan_video, small.hunyuan_video_batch),
    "Kandinsky3UNet": (unets.small_kandinsky3, unets.kandinsky_entries),
    "PixArtTransformer2DModel": (small.small_pixart, small.pixart_batch),
    "SD3Transformer2DModel": (small.small_sd3, small.sd3_batch),
    "UNet2DConditionModel": (
        lambda: unets.small_sdxl_unet(transformer_layers_per_block=1),
        unets.sdxl_entries,
    ),
    "UNet2DModel": (unets.small_unet, unets.pixel_entries),
    "UNet3DConditionModel": (unets.small_unet_3d, unets.video_entries),
    "UNetMotionModel": (unets.small_motion_unet, unets.motion_entries),
    "UNetSpatioTemporalConditionModel": (unets.small_svd_unet, unets.svd_entries),
    "UViTModel": (small.small_uvit, small.uvit_batch),
    "UniDiffuserModel": (small.small_unidiffuser, small.unidiffuser_batch),
    "WanTransformer3DModel": (small.small_wan, small.wan_batch),
    "UNet2DConditionModel with ControlNetModel": (pair.both, pair.entries),
}
"""Class of the model to what makes one and what makes a batch for it."""

GRANULARITIES = ("block", "fine")


def layers_of(model: Any, granularity: str) -> list[Any]:
    """The layer list of any of them; the pair of U-Net and ControlNet is one list."""
    if isinstance(model, pair.Both):
        return pair.layers_of(model, granularity=granularity)
    masks = {"encoder_attention_mask_1": True} if type(model).__name__.endswith("AudioLDM2UNet2DConditionModel") else {}
    return to_layers(model, granularity=granularity, **masks)


def forward(model: Any, batch: dict[str, Any]) -> Any:
    """The model's own forward."""
    output = model(**batch) if "prompt_embeds" in batch else model(**batch, return_dict=False)
    return output if len(output) > 1 else output[0]
