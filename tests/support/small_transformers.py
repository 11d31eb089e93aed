"""Small transformers with the structure of the published ones, and batches as their training scripts have them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanVideoTransformer3DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UniDiffuserModel,
    WanTransformer3DModel,
)
from support.small_models import prepared
from torch import Tensor

from deepspeed_pulse.models.transformers.uvit import UViTModel

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


# ---------------------------------------------------------------------- transformers without long skips

_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}


def _timesteps() -> Tensor:
    return torch.tensor([3, 700])


def small_sd3(**overrides: Any) -> SD3Transformer2DModel:
    config = {
        **_HEADS,
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 6,
        "joint_attention_dim": 24,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 20,
        "pos_embed_max_size": 12,
    }
    return prepared(SD3Transformer2DModel, {**config, **overrides})


def sd3_batch() -> Batch:
    return {
        "hidden_states": _normal(1, 2, 4, 8, 12),
        "encoder_hidden_states": _normal(2, 2, 5, 24),
        "pooled_projections": _normal(3, 2, 20),
        "timestep": _timesteps(),
    }


def small_flux(**overrides: Any) -> FluxTransformer2DModel:
    config = {
        **_HEADS,
        "in_channels": 8,
        "num_layers": 2,
        "num_single_layers": 4,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 20,
        "axes_dims_rope": (4, 6, 6),
    }
    return prepared(FluxTransformer2DModel, {**config, **overrides})


def flux_batch(*, guidance: bool = False) -> Batch:
    """3 x 4 packed patches; the ids have no batch dimension."""
    rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij")
    batch = {
        "hidden_states": _normal(1, 2, 12, 8),
        "encoder_hidden_states": _normal(2, 2, 5, 24),
        "pooled_projections": _normal(3, 2, 20),
        "timestep": torch.tensor([0.003, 0.7]),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": torch.stack([torch.zeros(12), rows.flatten(), columns.flatten()], dim=1),
    }
    return batch | ({"guidance": torch.tensor([3.5, 1.0])} if guidance else {})


def small_pixart(**overrides: Any) -> PixArtTransformer2DModel:
    """PixArt-Alpha's conditions need a width that is divisible by three."""
    config = {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "num_layers": 6,
        "cross_attention_dim": 48,
        "sample_size": 8,
        "caption_channels": 24,
        "use_additional_conditions": False,
    }
    return prepared(PixArtTransformer2DModel, {**config, **overrides})


def pixart_batch(*, sizes: bool = False, masks: bool = False) -> Batch:
    batch: Batch = {
        "hidden_states": _normal(1, 2, 4, 8, 12),
        "encoder_hidden_states": _normal(2, 2, 5, 24),
        "timestep": _timesteps(),
    }
    if sizes:
        size = torch.tensor([[64.0, 96.0], [64.0, 64.0]])
        batch["added_cond_kwargs"] = {"resolution": size, "aspect_ratio": torch.tensor([[0.67], [1.0]])}
    if masks:
        batch |= {"encoder_attention_mask": _mask(3, 5, of=5), "attention_mask": _mask(24, 20, of=24)}
    return batch


def small_wan(**overrides: Any) -> WanTransformer3DModel:
    config = {
        **_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 24,
        "freq_dim": 32,
        "ffn_dim": 96,
        "num_layers": 6,
    }
    return prepared(WanTransformer3DModel, {**config, **overrides})


def wan_batch(*, image: bool = False, time_of_tokens: bool = False) -> Batch:
    """3 x 4 x 6 patches. With a picture the model reads 512 text tokens, a number that is written in its attention."""
    generator = torch.Generator().manual_seed(3)
    times = torch.randint(1000, (2, 72), generator=generator) if time_of_tokens else _timesteps()
    batch = {
        "hidden_states": _normal(1, 2, 4, 3, 8, 12),
        "encoder_hidden_states": _normal(2, 2, 512 if image else 5, 24),
        "timestep": times,
    }
    return batch | ({"encoder_hidden_states_image": _normal(4, 2, 6, 20)} if image else {})


def small_hunyuan_video(**overrides: Any) -> HunyuanVideoTransformer3DModel:
    config = {
        **_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_single_layers": 4,
        "num_refiner_layers": 1,
        "text_embed_dim": 24,
        "pooled_projection_dim": 20,
        "rope_axes_dim": (4, 6, 6),
    }
    return prepared(HunyuanVideoTransformer3DModel, {**config, **overrides})


def hunyuan_video_batch(*, guidance: bool = True) -> Batch:
    """3 x 4 x 6 patches."""
    batch = {
        "hidden_states": _normal(1, 2, 4, 3, 8, 12),
        "timestep": _timesteps(),
        "encoder_hidden_states": _normal(2, 2, 5, 24),
        "encoder_attention_mask": _mask(3, 5, of=5),
        "pooled_projections": _normal(3, 2, 20),
    }
    return batch | ({"guidance": torch.tensor([1000.0, 6000.0])} if guidance else {})


def small_cogvideox(**overrides: Any) -> CogVideoXTransformer3DModel:
    """CogVideoX-2b, whose positions are added; ``use_rotary_positional_embeddings=True`` makes it like 5b."""
    config = {
        **_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 32,
        "text_embed_dim": 24,
        "num_layers": 6,
        "sample_width": 12,
        "sample_height": 8,
        "sample_frames": 13,
        "max_text_seq_length": 5,
    }
    return prepared(CogVideoXTransformer3DModel, {**config, **overrides})


def cogvideox_batch(*, rotary_patches: int = 0, offset: bool = False) -> Batch:
    """4 x 4 x 6 patches, 48 when two frames make a patch."""
    batch: Batch = {
        "hidden_states": _normal(1, 2, 4, 4, 8, 12),
        "encoder_hidden_states": _normal(2, 2, 5, 24),
        "timestep": _timesteps(),
    }
    if rotary_patches:
        batch["image_rotary_emb"] = (_normal(3, rotary_patches, 16), _normal(4, rotary_patches, 16))
    return batch | ({"ofs": torch.tensor([2.0, 2.0])} if offset else {})
