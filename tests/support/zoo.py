"""Small models of diffusers classes without a family, each with a batch of a given size, for the tracer.

    model, batch = ZOO["SanaTransformer2DModel"].make(size=0)

``size`` 0 is the example. 1 has more samples and a larger picture, 2 one sample alone and a picture whose half is odd,
where the class takes other sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
SIZES = ((2, 8, 5), (3, 12, 7), (1, 10, 4))
"""Samples, side of the latents, text tokens."""


@dataclass(frozen=True, kw_only=True)
class Animal:
    """A class's small configuration, and a batch from samples, side and text tokens."""

    config: dict[str, Any]
    batch: Callable[[int, int, int], Batch]
    drop: dict[str, Any] = field(default_factory=dict)

    def model(self, name: str) -> Any:
        import diffusers

        kind = getattr(diffusers, name)
        torch.manual_seed(0)
        return filled(kind(**self.config))

    def example(self, size: int = 0) -> Batch:
        torch.manual_seed(size)
        return self.batch(*SIZES[size])


def filled(model: nn.Module) -> nn.Module:
    """Zero and constant weights replaced, so that a wrong wire shows in gradients; in training mode."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.std(unbiased=False) < 1e-6:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.train()


def n(*shape: int) -> Tensor:
    return torch.randn(*shape)


def whole(b: int) -> Tensor:
    return torch.randint(1, 900, (b,))


def mask(b: int, t: int) -> Tensor:
    return (torch.arange(t) < torch.randint(1, t + 1, (b, 1))).long()


def ids(count: int, columns: int = 3) -> Tensor:
    return torch.arange(count)[:, None].expand(count, columns).float().contiguous()


def rotary(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * torch.linspace(1, 0.1, dim)
    return angles.cos(), angles.sin()


def latents(b: int, s: int, t: int, *, channels: int = 4, text: int = 32) -> Batch:
    return {"hidden_states": n(b, channels, s, s), "timestep": whole(b), "encoder_hidden_states": n(b, t, text)}


def video(b: int, s: int, t: int, *, channels: int = 4, text: int = 32, frames: int = 3) -> Batch:
    return {"hidden_states": n(b, channels, frames, s, s), "timestep": whole(b), "encoder_hidden_states": n(b, t, text)}


def tokens(b: int, s: int, t: int, *, channels: int = 8, text: int = 32, columns: int = 3) -> Batch:
    return {
        "hidden_states": n(b, s * s // 4, channels),
        "encoder_hidden_states": n(b, t, text),
        "timestep": torch.rand(b),
        "img_ids": ids(s * s // 4, columns),
        "txt_ids": ids(t, columns),
    }


def pooled(batch: Batch, b: int, width: int = 16) -> Batch:
    return {**batch, "pooled_projections": n(b, width)}


_FLUX = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
_UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
}
_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 3,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": 32,
}
_HUNYUAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
}
_COGVIEW = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 8,
}
_CONTROL = {
    "in_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "attention_head_dim": 4,
    "conditioning_embedding_out_channels": (16, 16, 16, 16),
    **_UNET,
}


def _qwen(b: int, s: int, t: int) -> Batch:
    return {
        "hidden_states": n(b, s * s // 4, 16),
        "encoder_hidden_states": n(b, t, 32),
        "encoder_hidden_states_mask": torch.ones(b, t, dtype=torch.bool),
        "timestep": torch.rand(b),
        "img_shapes": [[(1, s // 2, s // 2)]] * b,
    }


def _sizes(batch: Batch, b: int, s: int) -> Batch:
    size = torch.tensor([[8.0 * s, 8.0 * s]] * b)
    return {**batch, "original_size": size, "target_size": size, "crop_coords": torch.zeros(b, 2)}


def _ltx(b: int, s: int, t: int) -> Batch:
    return {
        "hidden_states": n(b, 2 * s * s // 4, 8),
        "encoder_hidden_states": n(b, t, 32),
        "timestep": whole(b),
        "encoder_attention_mask": mask(b, t),
        "num_frames": 2,
        "height": s // 2,
        "width": s // 2,
    }


ZOO: dict[str, Animal] = {
    "AllegroTransformer3DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 48,
            "num_layers": 3,
            "cross_attention_dim": 96,
            "caption_channels": 32,
            "sample_height": 16,
            "sample_width": 16,
            "sample_frames": 4,
        },
        batch=lambda b, s, t: {
            **video(b, s, t),
            "encoder_hidden_states": n(b, 1, t, 32),
            "encoder_attention_mask": mask(b, t)[:, None].float(),
            "attention_mask": torch.ones(b, 3, s, s),
        },
    ),
    "AnyFlowTransformer3DModel": Animal(
        config=_WAN,
        batch=lambda b, s, t: {
            **video(b, s, t),
            "hidden_states": n(b, 3, 4, s, s),
            "timestep": n(b, 3),
            "r_timestep": n(b, 3),
        },
    ),
    "AuraFlowTransformer2DModel": Animal(
        config={
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 64,
        },
        batch=lambda b, s, t: {**latents(b, s, t), "timestep": torch.rand(b)},
    ),
    "BriaFiboTransformer2DModel": Animal(
        config={**_FLUX, "text_encoder_dim": 16},
        batch=lambda b, s, t: {**tokens(b, s, t), "text_encoder_layers": [n(b, t, 16) for _ in range(4)]},
    ),
    "BriaTransformer2DModel": Animal(config=_FLUX, batch=lambda b, s, t: tokens(b, s, t)),
    "ChromaTransformer2DModel": Animal(
        config={
            **_FLUX,
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 24,
            "approximator_layers": 2,
        },
        batch=lambda b, s, t: tokens(b, s, t),
    ),
    "ChronoEditTransformer3DModel": Animal(config=_WAN, batch=lambda b, s, t: video(b, s, t, frames=2)),
    "CogView3PlusTransformer2DModel": Animal(
        config={**_COGVIEW, "pos_embed_max_size": 16, "sample_size": 16},
        batch=lambda b, s, t: _sizes(latents(b, s, t), b, s),
    ),
    "CogView4Transformer2DModel": Animal(
        config={**_COGVIEW, "rope_axes_dim": (16, 16)}, batch=lambda b, s, t: _sizes(latents(b, s, t), b, s)
    ),
    "ConsisIDTransformer3DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 32,
            "num_layers": 3,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 5,
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 3, 4, 8, 8),
            "encoder_hidden_states": n(b, 5, 32),
            "timestep": whole(b),
        },
    ),
    "ControlNetModel": Animal(
        config=_CONTROL,
        batch=lambda b, s, t: {
            "sample": n(b, 4, s, s),
            "timestep": whole(b),
            "encoder_hidden_states": n(b, t, 32),
            "controlnet_cond": n(b, 3, 8 * s, 8 * s),
        },
    ),
    "DiTTransformer2DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 3,
            "norm_num_groups": 4,
            "sample_size": 8,
            "num_embeds_ada_norm": 1000,
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 4, 8, 8),
            "timestep": whole(b),
            "class_labels": torch.randint(0, 900, (b,)),
        },
    ),
    "EasyAnimateTransformer3DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 3,
            "mmdit_layers": 2,
            "time_embed_dim": 8,
            "text_embed_dim": 32,
            "time_position_encoding_type": "3d_rope",
            "after_norm": False,
        },
        batch=lambda b, s, t: video(b, s, t, frames=2),
    ),
    "ErnieImageTransformer2DModel": Animal(
        config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 3,
            "ffn_hidden_size": 48,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": 32,
            "rope_axes_dim": (4, 6, 6),
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 4, s, s),
            "timestep": whole(b),
            "text_bth": n(b, t, 32),
            "text_lens": torch.full((b,), t),
        },
    ),
    "Flux2Transformer2DModel": Animal(
        config={**_FLUX, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
        batch=lambda b, s, t: {**tokens(b, s, t, columns=4), "guidance": torch.rand(b)},
    ),
    "FluxControlNetModel": Animal(
        config={**_FLUX, "pooled_projection_dim": 16},
        batch=lambda b, s, t: {**pooled(tokens(b, s, t), b), "controlnet_cond": n(b, s * s // 4, 8)},
    ),
    "GlmImageTransformer2DModel": Animal(
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "text_embed_dim": 32,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "prior_vq_quantizer_codebook_size": 64,
        },
        batch=lambda b, s, t: {
            **latents(b, s, t),
            "prior_token_id": torch.randint(0, 64, (b, s * s // 4)),
            "prior_token_drop": torch.zeros(b, s * s // 4, dtype=torch.bool),
            "target_size": torch.tensor([[8.0 * s, 8.0 * s]] * b),
            "crop_coords": torch.zeros(b, 2),
        },
    ),
    "HiDreamImageTransformer2DModel": Animal(
        config={
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "caption_channels": [32, 16],
            "text_emb_dim": 16,
            "num_routed_experts": 2,
            "num_activated_experts": 1,
            "axes_dims_rope": (4, 6, 6),
            "max_resolution": (32, 32),
            "llama_layers": [0, 1],
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 4, s, s),
            "timesteps": whole(b),
            "encoder_hidden_states_t5": n(b, t, 32),
            "encoder_hidden_states_llama3": n(2, b, t, 16),
            "pooled_embeds": n(b, 16),
        },
    ),
    "HunyuanImageTransformer2DModel": Animal(
        config={**_HUNYUAN, "in_channels": 4, "out_channels": 4, "num_single_layers": 2, "rope_axes_dim": (8, 8)},
        batch=lambda b, s, t: {
            **latents(b, s, t),
            "timestep": whole(b).float(),
            "encoder_attention_mask": mask(b, t),
        },
    ),
    "HunyuanVideo15Transformer3DModel": Animal(
        config={
            **_HUNYUAN,
            "in_channels": 9,
            "out_channels": 4,
            "text_embed_2_dim": 16,
            "image_embed_dim": 16,
            "rope_axes_dim": (4, 6, 6),
            "target_size": 16,
        },
        batch=lambda b, s, t: {
            **video(b, s, t, channels=9),
            "timestep": whole(b).float(),
            "encoder_attention_mask": mask(b, t),
            "encoder_hidden_states_2": n(b, t, 16),
            "encoder_attention_mask_2": mask(b, t),
            "image_embeds": n(b, 3, 16),
        },
    ),
    "I2VGenXLUNet": Animal(
        config={
            **_UNET,
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "attention_head_dim": 4,
        },
        batch=lambda b, s, t: {
            "sample": n(b, 4, 3, s, s),
            "timestep": whole(b),
            "fps": torch.full((b,), 16),
            "image_latents": n(b, 4, 3, s, s),
            "image_embeddings": n(b, 32),
            "encoder_hidden_states": n(b, t, 32),
        },
    ),
    "Kandinsky5Transformer3DModel": Animal(
        config={
            "in_text_dim": 32,
            "in_text_dim2": 16,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 48,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 2, s, s, 4),
            "encoder_hidden_states": n(b, t, 32),
            "timestep": whole(b),
            "pooled_projections": n(b, 16),
            "visual_rope_pos": [torch.arange(2), torch.arange(s // 2), torch.arange(s // 2)],
            "text_rope_pos": torch.arange(t),
        },
    ),
    "LTXVideoTransformer3DModel": Animal(
        config={
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "num_layers": 3,
            "caption_channels": 32,
        },
        batch=_ltx,
    ),
    "LatteTransformer3DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "attention_bias": True,
            "sample_size": 8,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 32,
            "video_length": 3,
        },
        batch=lambda b, s, t: video(b, 8, t),
    ),
    "LongCatImageTransformer2DModel": Animal(
        config={**_FLUX, "pooled_projection_dim": 16}, batch=lambda b, s, t: tokens(b, s, t)
    ),
    "Lumina2Transformer2DModel": Animal(
        config={
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (64, 32, 32),
            "cap_feat_dim": 32,
        },
        batch=lambda b, s, t: {**latents(b, s, t), "encoder_attention_mask": mask(b, t)},
    ),
    "LuminaNextDiT2DModel": Animal(
        config={
            "sample_size": 8,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "cross_attention_dim": 32,
        },
        batch=lambda b, s, t: {
            **latents(b, s, t),
            "encoder_mask": mask(b, t),
            "cross_attention_kwargs": {},
            "image_rotary_emb": torch.polar(torch.ones(s // 2, s // 2, 8), n(s // 2, s // 2, 8)),
        },
    ),
    "MochiTransformer3DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 3,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 8,
        },
        batch=lambda b, s, t: {**video(b, s, t), "encoder_attention_mask": torch.ones(b, t, dtype=torch.bool)},
    ),
    "MotifVideoTransformer3DModel": Animal(
        config={
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "text_embed_dim": 32,
            "rope_axes_dim": (4, 6, 6),
        },
        batch=lambda b, s, t: {**video(b, s, t, channels=9), "encoder_attention_mask": mask(b, t)},
    ),
    "OvisImageTransformer2DModel": Animal(config={**_FLUX, "out_channels": 8}, batch=lambda b, s, t: tokens(b, s, t)),
    "PRXTransformer2DModel": Animal(
        config={
            "in_channels": 4,
            "context_in_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 3,
            "axes_dim": [8, 8],
        },
        batch=lambda b, s, t: {**latents(b, s, t), "timestep": torch.rand(b), "attention_mask": mask(b, t).bool()},
    ),
    "PriorTransformer": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 3,
            "embedding_dim": 16,
            "num_embeddings": 5,
            "additional_embeddings": 4,
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 16),
            "timestep": whole(b),
            "proj_embedding": n(b, 16),
            "encoder_hidden_states": n(b, 5, 16),
            "attention_mask": mask(b, 5).bool(),
        },
    ),
    "QwenImageTransformer2DModel": Animal(
        config={
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        batch=_qwen,
    ),
    "SD3ControlNetModel": Animal(
        config={
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
        batch=lambda b, s, t: {**pooled(latents(b, s, t), b), "controlnet_cond": n(b, 4, s, s)},
    ),
    "SanaControlNetModel": Animal(
        config={**_SANA, "sample_size": 8},
        batch=lambda b, s, t: {
            **latents(b, s, t),
            "controlnet_cond": n(b, 4, s, s),
            "encoder_attention_mask": mask(b, t),
        },
    ),
    "SanaTransformer2DModel": Animal(
        config={**_SANA, "sample_size": 8},
        batch=lambda b, s, t: {**latents(b, s, t), "encoder_attention_mask": mask(b, t)},
    ),
    "SanaVideoTransformer3DModel": Animal(
        config={**_SANA, "sample_size": 8},
        batch=lambda b, s, t: {**video(b, s, t), "encoder_attention_mask": mask(b, t)},
    ),
    "SkyReelsV2Transformer3DModel": Animal(config=_WAN, batch=lambda b, s, t: video(b, s, t)),
    "SparseControlNetModel": Animal(
        config={
            **{key: value for key, value in _CONTROL.items() if key != "conditioning_embedding_out_channels"},
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "motion_num_attention_heads": 2,
            "conditioning_channels": 4,
            "use_simplified_condition_embedding": True,
            "concat_conditioning_mask": False,
        },
        batch=lambda b, s, t: {
            "sample": n(b, 4, 3, s, s),
            "timestep": whole(b),
            "encoder_hidden_states": n(b * 3, t, 32),
            "controlnet_cond": n(b, 4, 3, s, s),
        },
    ),
    "StableAudioDiTModel": Animal(
        config={
            "sample_size": 16,
            "in_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 32,
        },
        batch=lambda b, s, t: {
            "hidden_states": n(b, 4, s),
            "timestep": torch.rand(b),
            "encoder_hidden_states": n(b, t, 32),
            "global_hidden_states": n(b, 1, 16),
            "rotary_embedding": rotary(s + 1, 8),
        },
    ),
    "StableCascadeUNet": Animal(
        config={
            "in_channels": 4,
            "out_channels": 4,
            "timestep_ratio_embedding_dim": 8,
            "conditioning_dim": 32,
            "block_out_channels": (32, 48),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 2),
            "up_num_layers_per_block": (2, 1),
            "clip_text_in_channels": 16,
            "clip_text_pooled_in_channels": 16,
            "clip_image_in_channels": 16,
            "switch_level": (False,),
        },
        batch=lambda b, s, t: {
            "sample": n(b, 4, s, s),
            "timestep_ratio": torch.rand(b),
            "clip_text_pooled": n(b, 1, 16),
            "clip_text": n(b, t, 16),
            "clip_img": n(b, 1, 16),
        },
    ),
    "Transformer2DModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 8,
            "num_layers": 3,
            "norm_num_groups": 4,
            "cross_attention_dim": 32,
        },
        batch=lambda b, s, t: {"hidden_states": n(b, 8, s, s), "encoder_hidden_states": n(b, t, 32)},
    ),
    "TransformerTemporalModel": Animal(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 8,
            "num_layers": 3,
            "norm_num_groups": 4,
        },
        batch=lambda b, s, t: {"hidden_states": n(b * 2, 8, s, s), "num_frames": 2},
    ),
    "UNet1DModel": Animal(
        config={
            "sample_size": 64,
            "in_channels": 4,
            "out_channels": 4,
            "extra_in_channels": 64,
            "block_out_channels": (32, 32, 64),
            "flip_sin_to_cos": True,
        },
        batch=lambda b, s, t: {"sample": n(b, 4, 8 * s), "timestep": whole(b)},
    ),
    "UNetControlNetXSModel": Animal(
        config={
            **{key: value for key, value in _UNET.items() if key != "layers_per_block"},
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "num_attention_heads": 4,
            "ctrl_conditioning_embedding_out_channels": (8, 8),
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
        },
        batch=lambda b, s, t: {
            "sample": n(b, 4, s, s),
            "timestep": whole(b),
            "encoder_hidden_states": n(b, t, 32),
            "controlnet_cond": n(b, 3, 2 * s, 2 * s),
        },
    ),
    "UVit2DModel": Animal(
        config={
            "hidden_size": 32,
            "cond_embed_dim": 16,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "encoder_hidden_size": 32,
            "vocab_size": 64,
            "codebook_size": 60,
            "in_channels": 32,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "sample_size": 8,
            "downsample": True,
            "upsample": True,
        },
        batch=lambda b, s, t: {
            "input_ids": torch.randint(0, 60, (b, s, s)),
            "encoder_hidden_states": n(b, t, 32),
            "pooled_text_emb": n(b, 16),
            "micro_conds": torch.rand(b, 5) * 100,
        },
    ),
    "VQModel": Animal(
        config={
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
        },
        batch=lambda b, s, t: {"sample": n(b, 3, 2 * s, 2 * s)},
    ),
    "WanVACETransformer3DModel": Animal(
        config={**_WAN, "vace_layers": [0, 2], "vace_in_channels": 8},
        batch=lambda b, s, t: {**video(b, s, t), "control_hidden_states": n(b, 8, 3, s, s)},
    ),
    "ZImageTransformer2DModel": Animal(
        config={
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
            "axes_dims": [4, 6, 6],
            "axes_lens": [64, 32, 32],
        },
        batch=lambda b, s, t: {
            "x": [n(4, 1, s, s) for _ in range(b)],
            "t": torch.rand(b),
            "cap_feats": [n(t, 32) for _ in range(b)],
        },
    ),
}


def output_of(model: nn.Module, batch: Batch) -> Any:
    """What the model's own forward gives: a tensor, or a tuple of them."""
    from torch.utils._pytree import tree_leaves

    options = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
    found = [one for one in tree_leaves(model(**batch, **options)) if one is not None]
    return found[0] if len(found) == 1 else tuple(found)
