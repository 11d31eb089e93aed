"""Batches for the models of :mod:`support.every_family`, at three sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.zoo import Batch, latents, mask, n, pooled, video, whole

SIZES = ((2, 8, 5), (3, 16, 7), (1, 12, 4))
"""Samples, side of the latents, text tokens. Those whose positions are learned keep a side or a number of tokens."""


def _patches(b: int, side: int, t: int) -> Batch:
    rows, columns = torch.meshgrid(*2 * [torch.arange(side / 2)], indexing="ij")
    count = rows.numel()
    return {
        "hidden_states": n(b, count, 8),
        "encoder_hidden_states": n(b, t, 24),
        "pooled_projections": n(b, 20),
        "timestep": torch.rand(b),
        "txt_ids": torch.zeros(t, 3),
        "img_ids": torch.stack([torch.zeros(count), rows.flatten(), columns.flatten()], dim=1),
    }


def _unet(b: int, side: int, t: int, *, text: int = 32) -> Batch:
    return {"sample": n(b, 4, side, side), "timestep": whole(b), "encoder_hidden_states": n(b, t, text)}


FAMILY_BATCHES: dict[str, Callable[[int, int, int], Batch]] = {
    "AudioLDM2UNet2DConditionModel": lambda b, s, t: {
        **_unet(b, s, t, text=24),
        "class_labels": n(b, 9),
        "encoder_hidden_states_1": n(b, t + 2, 32),
        "encoder_attention_mask_1": mask(b, t + 2),
    },
    "CogVideoXTransformer3DModel": lambda b, s, t: {
        "hidden_states": n(b, 4, 4, 8, 12),
        "encoder_hidden_states": n(b, 5, 24),
        "timestep": whole(b),
    },
    "FluxTransformer2DModel": _patches,
    "HunyuanDiT2DModel": lambda b, s, t: {
        **latents(b, s, 5),
        "timestep": whole(b).float(),
        "text_embedding_mask": mask(b, 5),
        "encoder_hidden_states_t5": n(b, 6, 24),
        "text_embedding_mask_t5": mask(b, 6),
        "image_rotary_emb": (n(s * s // 4, 16), n(s * s // 4, 16)),
    },
    "HunyuanVideoTransformer3DModel": lambda b, s, t: {
        **pooled(video(b, s, t, text=24), b, 20),
        "encoder_attention_mask": mask(b, t),
        "guidance": 1000 * torch.rand(b),
    },
    "Kandinsky3UNet": lambda b, s, t: {**_unet(b, 2 * s, t, text=24), "encoder_attention_mask": mask(b, t)},
    "PixArtTransformer2DModel": lambda b, s, t: latents(b, s, t, text=24),
    "SD3Transformer2DModel": lambda b, s, t: pooled(latents(b, s, t, text=24), b, 20),
    "UNet2DConditionModel": lambda b, s, t: {
        **_unet(b, s, t),
        "added_cond_kwargs": {"text_embeds": n(b, 32), "time_ids": torch.randint(512, (b, 6)).float()},
    },
    "UNet2DModel": lambda b, s, t: {
        "sample": n(b, 3, s, s),
        "timestep": whole(b),
        "class_labels": torch.randint(5, (b,)),
    },
    "UNet3DConditionModel": lambda b, s, t: {**_unet(b, s, t), "sample": n(b, 4, 3, s, s)},
    "UNetMotionModel": lambda b, s, t: {
        "sample": n(b, 4, 3, s, s),
        "timestep": whole(b),
        "encoder_hidden_states": n(3 * b, t, 32),
    },
    "UNetSpatioTemporalConditionModel": lambda b, s, t: {
        "sample": n(b, 3, 8, s, s),
        "timestep": whole(b),
        "encoder_hidden_states": n(b, 2, 32),
        "added_time_ids": n(b, 3).abs(),
    },
    "UViTModel": lambda b, s, t: {
        "sample": n(b, 4, 8, 8),
        "timestep": whole(b),
        "class_labels": torch.randint(11, (b,)),
    },
    "UniDiffuserModel": lambda b, s, t: {
        "latent_image_embeds": n(b, 4, 8, 8),
        "image_embeds": n(b, 1, 20),
        "prompt_embeds": n(b, 5, 12),
        "timestep_img": whole(b),
        "timestep_text": whole(b),
    },
    "WanTransformer3DModel": lambda b, s, t: video(b, s, t, text=24),
}


def batches_of(kind: str) -> list[Batch]:
    """One for each size."""
    torch.manual_seed(1)
    return [FAMILY_BATCHES[kind](*size) for size in SIZES]
