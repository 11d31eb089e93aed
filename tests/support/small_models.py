"""Small diffusers models with the structure of the published ones, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    Kandinsky3UNet,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)
from torch import Tensor, nn

Entries = dict[str, Tensor]


def small_sd_unet(*, kind: type[UNet2DConditionModel] = UNet2DConditionModel, **overrides: Any) -> UNet2DConditionModel:
    """Stable Diffusion's 46 layers and 12 skips, 16x16 latents, under 4 M parameters."""
    config = {
        "sample_size": 16,
        "block_out_channels": (32, 64, 64, 64),
        "layers_per_block": 2,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
    }
    return prepared(kind, {**config, **overrides})


def small_sdxl_unet(**overrides: Any) -> UNet2DConditionModel:
    """SDXL's three levels, uneven transformer depths and added text and size conditions."""
    config = {
        "sample_size": 16,
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": (2, 4, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    }
    return prepared(UNet2DConditionModel, {**config, **overrides})


def small_unet(**overrides: Any) -> UNet2DModel:
    """A class-conditional pixel U-Net with attention at the inner two of three levels."""
    config = {
        "sample_size": 16,
        "block_out_channels": (32, 32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 16,
        "num_class_embeds": 5,
    }
    return prepared(UNet2DModel, {**config, **overrides})


def small_audioldm2(**overrides: Any) -> nn.Module:
    """Four transformers after each resnet: pixels, first text, pixels, second text."""
    from diffusers import AudioLDM2UNet2DConditionModel

    config = {
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": ((None, 24, None, 32),) * 2,
        "attention_head_dim": 4,
        "class_embed_type": "simple_projection",
        "projection_class_embeddings_input_dim": 9,
        "class_embeddings_concat": True,
    }
    return prepared(AudioLDM2UNet2DConditionModel, {**config, **overrides})


def small_svd_unet(**overrides: Any) -> nn.Module:
    """Stable Video Diffusion's parts at two levels."""
    config = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "num_attention_heads": (2, 4),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 3 * 8,
    }
    return prepared(UNetSpatioTemporalConditionModel, {**config, **overrides})


def small_unet_3d(**overrides: Any) -> nn.Module:
    """Text to video at two levels."""
    config = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
    }
    # Dropout of temporal convolutions draws different numbers in another order of layers.
    return prepared(UNet3DConditionModel, {**config, **overrides}).eval()


def small_motion_unet(**overrides: Any) -> nn.Module:
    """AnimateDiff at two levels."""
    config = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "num_attention_heads": 4,
        "motion_num_attention_heads": 4,
        "motion_max_seq_length": 8,
    }
    return prepared(UNetMotionModel, {**config, **overrides})


def small_kandinsky3(**overrides: Any) -> nn.Module:
    """Kandinsky 3's four levels with two resnet pairs a block."""
    config = {
        "time_embedding_dim": 32,
        "groups": 4,
        "attention_head_dim": 8,
        "layers_per_block": 2,
        "block_out_channels": (16, 32, 32, 32),
        "cross_attention_dim": 32,
        "encoder_hid_dim": 24,
    }
    return prepared(Kandinsky3UNet, {**config, **overrides})


def small_controlnet(**overrides: Any) -> nn.Module:
    """The ControlNet of :func:`small_controlled_unet`."""
    config = {
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "conditioning_embedding_out_channels": (4, 8, 8, 8),
    }
    return prepared(ControlNetModel, {**config, **overrides})


def small_controlled_unet(**overrides: Any) -> UNet2DConditionModel:
    """A U-Net of three levels."""
    config = {
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
    }
    return small_sd_unet(**{**config, **overrides})


def prepared(kind: type[nn.Module], config: dict[str, Any]) -> Any:
    """A model with seeded weights, none of them all zero: a zero parameter hides wrong wiring."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(**config)
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                nn.init.normal_(parameter, std=0.05)
    return model


def sd_entries(*, size: tuple[int, int] = (16, 16), batch_size: int = 2) -> Entries:
    """Batch entries of :func:`small_sd_unet`."""
    generator = torch.Generator().manual_seed(1)
    return {
        "sample": torch.randn(batch_size, 4, *size, generator=generator),
        "timestep": torch.randint(1000, (batch_size,), generator=generator),
        "encoder_hidden_states": torch.randn(batch_size, 7, 32, generator=generator),
    }


def sdxl_entries(*, batch_size: int = 2) -> dict[str, Any]:
    """Batch entries of :func:`small_sdxl_unet`."""
    generator = torch.Generator().manual_seed(2)
    added = {
        "text_embeds": torch.randn(batch_size, 32, generator=generator),
        "time_ids": torch.randint(512, (batch_size, 6), generator=generator).float(),
    }
    return {**sd_entries(batch_size=batch_size), "added_cond_kwargs": added}


def audio_entries(*, size: tuple[int, int] = (16, 16)) -> Entries:
    """Batch entries of :func:`small_audioldm2`, the second text with a mask."""
    generator = torch.Generator().manual_seed(4)
    return {
        "sample": torch.randn(2, 4, *size, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "class_labels": torch.randn(2, 9, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
        "encoder_hidden_states_1": torch.randn(2, 7, 32, generator=generator),
        "encoder_attention_mask_1": torch.tensor([[1] * 7, [1] * 3 + [0] * 4]),
    }


def kandinsky_entries(*, size: tuple[int, int] = (16, 8)) -> Entries:
    """Batch entries of :func:`small_kandinsky3`."""
    generator = torch.Generator().manual_seed(7)
    return {
        "sample": torch.randn(2, 4, *size, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "encoder_hidden_states": torch.randn(2, 7, 24, generator=generator),
        "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 3 + [0] * 4]),
    }


def video_entries(*, size: tuple[int, int] = (8, 8), frames: int = 3) -> Entries:
    """Batch entries of :func:`small_unet_3d`."""
    generator = torch.Generator().manual_seed(5)
    return {
        "sample": torch.randn(2, 4, frames, *size, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=generator),
    }


def motion_entries(*, size: tuple[int, int] = (8, 8), frames: int = 3) -> Entries:
    """Batch entries of :func:`small_motion_unet`: a row of text for each frame, left to the model's caller."""
    batch = video_entries(size=size, frames=frames)
    return {**batch, "encoder_hidden_states": batch["encoder_hidden_states"].repeat_interleave(frames, dim=0)}


def svd_entries(*, size: tuple[int, int] = (8, 8), frames: int = 3) -> Entries:
    """Batch entries of :func:`small_svd_unet`: noisy frames beside the first frame.

    Two tokens of image embedding: with one, as published, softmax is 1 whatever query and key are.
    """
    generator = torch.Generator().manual_seed(6)
    return {
        "sample": torch.randn(2, frames, 8, *size, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "encoder_hidden_states": torch.randn(2, 2, 32, generator=generator),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02], [7.0, 64.0, 0.1]]),
    }


def pixel_entries(*, batch_size: int = 2) -> Entries:
    """Batch entries of :func:`small_unet`."""
    generator = torch.Generator().manual_seed(3)
    return {
        "sample": torch.randn(batch_size, 3, 16, 16, generator=generator),
        "timestep": torch.randint(1000, (batch_size,), generator=generator),
        "class_labels": torch.randint(5, (batch_size,), generator=generator),
    }
