"""The small SD-like U-Net (46 layers, 12 skips) as a layer list with batches, on 16x16 latents; and a small U-ViT."""

from __future__ import annotations

from typing import Any

import torch
from support.small_models import small_sd_unet


def unet_layers() -> list[Any]:
    """A new instance with the same weights every time."""
    from deepspeed_pulse.models import to_layers

    torch.manual_seed(0)
    return to_layers(small_sd_unet(sample_size=16))


def unet_batch(step: int, microbatch: int, data_index: int, size: int = 2) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    inputs = {
        "sample": torch.randn(size, 4, 16, 16, generator=generator),
        "timestep": torch.randint(0, 1000, (size,), generator=generator),
        "encoder_hidden_states": torch.randn(size, 5, 32, generator=generator),
    }
    return inputs, torch.randn(size, 4, 16, 16, generator=generator)


def uvit_layers() -> list[Any]:
    """A class-conditional U-ViT on 8x8 latents: a new instance with the same weights every time."""
    from support.small_transformers import small_uvit

    from deepspeed_pulse.models import to_layers

    torch.manual_seed(0)
    return to_layers(small_uvit())


def uvit_batch(step: int, microbatch: int, data_index: int, size: int = 2) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    inputs = {
        "sample": torch.randn(size, 4, 8, 8, generator=generator),
        "timestep": torch.randint(0, 1000, (size,), generator=generator),
        "class_labels": torch.randint(0, 11, (size,), generator=generator),
    }
    return inputs, torch.randn(size, 4, 8, 8, generator=generator)
