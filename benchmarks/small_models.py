"""Real models, small: for benchmarks that compute on this machine."""

from __future__ import annotations

from diffusers import UNet2DConditionModel


def small_unet(*, sample_size: int, width: int = 32) -> UNet2DConditionModel:
    """Stable Diffusion's 46 layers and 12 skips, ``width`` channels wide outside and twice that inside."""
    return UNet2DConditionModel(
        sample_size=sample_size,
        block_out_channels=(width, *(2 * width,) * 3),
        layers_per_block=2,
        norm_num_groups=8,
        cross_attention_dim=width,
        attention_head_dim=width // 8,
    )
