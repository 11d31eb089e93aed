"""Small transformers with the structure of the published ones, and batches as their training scripts have them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import HunyuanDiT2DModel, UniDiffuserModel
from support.small_models import prepared
from torch import Tensor

from deepspeed_pulse.models.uvit import UViTModel

Batch = dict[str, Any]


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mask(*lengths: int, of: int) -> Tensor:
    """1 for the first tokens of every sample, 0 for its padding."""
    return (torch.arange(of) < torch.tensor(lengths)[:, None]).long()


def small_hunyuan_dit(**overrides: Any) -> HunyuanDiT2DModel:
    """HunyuanDiT 1.2 with 8 blocks, 3 of them with skips; ``use_style_cond_and_image_meta_size=True`` makes it 1.1."""
    config = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 8,
        "hidden_size": 64,
        "num_layers": 8,
        "cross_attention_dim": 32,
        "cross_attention_dim_t5": 24,
        "pooled_projection_dim": 32,
        "text_len": 5,
        "text_len_t5": 6,
        "use_style_cond_and_image_meta_size": False,
    }
    return prepared(HunyuanDiT2DModel, {**config, **overrides})


def hunyuan_dit_batch(*, size: tuple[int, int] = (8, 8), sizes_and_style: bool = False) -> Batch:
    """Both texts are padded; ``sizes_and_style`` is what 1.1 reads too."""
    num_patches = size[0] * size[1] // 4
    batch = {
        "hidden_states": _normal(1, 2, 4, *size),
        "timestep": torch.tensor([3.0, 700.0]),
        "encoder_hidden_states": _normal(2, 2, 5, 32),
        "text_embedding_mask": _mask(3, 5, of=5),
        "encoder_hidden_states_t5": _normal(3, 2, 6, 24),
        "text_embedding_mask_t5": _mask(6, 2, of=6),
        "image_rotary_emb": (_normal(4, num_patches, 16), _normal(5, num_patches, 16)),
    }
    if sizes_and_style:
        meta = torch.tensor([[1024.0, 768, 1024, 1024, 0, 0], [512, 512, 1024, 1024, 16, 32]])
        batch |= {"image_meta_size": meta, "style": torch.zeros(2, dtype=torch.long)}
    return batch


def small_uvit(**overrides: Any) -> UViTModel:
    """A class-conditional U-ViT with 3 + 1 + 3 blocks."""
    config = {"sample_size": 8, "hidden_size": 64, "num_layers": 6, "num_attention_heads": 4, "num_classes": 11}
    return prepared(UViTModel, {**config, **overrides})


def uvit_batch(*, text_dim: int | None = None) -> Batch:
    batch = {
        "sample": _normal(1, 2, 4, 8, 8),
        "timestep": torch.tensor([3, 700]),
        "class_labels": torch.tensor([1, 5]),
    }
    return batch | ({"encoder_hidden_states": _normal(2, 2, 5, text_dim)} if text_dim else {})


def small_unidiffuser(**overrides: Any) -> UniDiffuserModel:
    """UniDiffuser with 3 + 1 + 3 blocks; ``use_data_type_embedding=True`` makes it version 1."""
    config = {
        "text_dim": 12,
        "clip_img_dim": 20,
        "num_text_tokens": 5,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 6,
        "sample_size": 8,
        "patch_size": 2,
        "activation_fn": "gelu",
    }
    return prepared(UniDiffuserModel, {**config, **overrides})


def unidiffuser_batch() -> Batch:
    return {
        "latent_image_embeds": _normal(1, 2, 4, 8, 8),
        "image_embeds": _normal(2, 2, 1, 20),
        "prompt_embeds": _normal(3, 2, 5, 12),
        "timestep_img": torch.tensor([3, 700]),
        "timestep_text": torch.tensor([40, 5]),
    }
