"""Published models by name: the values of their config files, and the size of sample they were made for.

Keys that are left out have the defaults of the model's class. Sources are the ``config.json`` of the
repositories named beside each.
"""

from __future__ import annotations

from typing import Any

_LATENT = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "num_classes": 1001}
_PIXEL = {**_LATENT, "sample_size": 64, "patch_size": 4, "in_channels": 3}
_M = {"hidden_size": 768, "num_layers": 16, "num_attention_heads": 12}
_L = {"hidden_size": 1024, "num_layers": 20, "num_attention_heads": 16}
_H = {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16}

UVIT_SIZES: dict[str, dict[str, Any]] = {
    "M/2": {**_LATENT, **_M},
    "M/4": {**_PIXEL, **_M},
    "L/2": {**_LATENT, **_L},
    "L/4": {**_PIXEL, **_L},
    "H/2": {**_LATENT, **_H},
    "H/4": {**_LATENT, **_H, "sample_size": 64, "patch_size": 4},
    "1B": {**_LATENT, **_H, "in_channels": 3, "num_layers": 56},
    "2.7B": {**_LATENT, "in_channels": 3, "hidden_size": 2048, "num_layers": 48, "num_attention_heads": 32},
}
"""U-ViT by name, width and depth.

M, L and H are Bao et al.'s, table 1 (class-conditional ImageNet; /2 and H/4 on latents, M/4 and L/4 on 64x64
pixels). 1B and 2.7B have the tokens (258), widths and, for 2.7B, the blocks of the PULSE paper (arXiv 2606.19163);
the depth of 1B is the one that gives its number of parameters at its width.
"""


def _model(kind: str, **values: Any) -> dict[str, Any]:
    return {"_class_name": kind, **values}


def _sd3(depth: int) -> dict[str, Any]:
    """As many heads as blocks."""
    sizes = {"num_layers": depth, "num_attention_heads": depth, "caption_projection_dim": 64 * depth}
    return _model("SD3Transformer2DModel", sample_size=128, **sizes, pos_embed_max_size=192)


_HUNYUAN_DIT = _model(
    "HunyuanDiT2DModel", sample_size=128, patch_size=2, in_channels=4, num_layers=40, hidden_size=1408, mlp_ratio=4.3637
)
_PIXART = _model("PixArtTransformer2DModel", sample_size=128, caption_channels=4096)

PUBLISHED: dict[str, dict[str, Any]] = {
    # stable-diffusion-v1-5/stable-diffusion-v1-5, 512 x 512
    "sd15": _model("UNet2DConditionModel", sample_size=64, attention_head_dim=8, cross_attention_dim=768),
    # stabilityai/stable-diffusion-2-1, 768 x 768
    "sd21": _model(
        "UNet2DConditionModel",
        sample_size=96,
        attention_head_dim=[5, 10, 20, 20],
        cross_attention_dim=1024,
        use_linear_projection=True,
    ),
    # stabilityai/stable-diffusion-xl-base-1.0, 1024 x 1024
    "sdxl": _model(
        "UNet2DConditionModel",
        sample_size=128,
        block_out_channels=[320, 640, 1280],
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        transformer_layers_per_block=[1, 2, 10],
        attention_head_dim=[5, 10, 20],
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ),
    # stabilityai/stable-video-diffusion-img2vid, 14 frames, and -xt, 25 frames; 576 x 1024 has as many latents as the
    # square that the config names
    "svd": _model("UNetSpatioTemporalConditionModel", sample_size=96, num_frames=14),
    "svd-xt": _model("UNetSpatioTemporalConditionModel", sample_size=96, num_frames=25),
    # ali-vilab/text-to-video-ms-1.7b, 256 x 256
    "text-to-video": _model("UNet3DConditionModel", sample_size=32),
    # guoyww/animatediff-motion-adapter-v1-5-2 on Stable Diffusion 1.5, 512 x 512
    "animatediff": _model("UNetMotionModel", sample_size=64, cross_attention_dim=768),
    # Tencent-Hunyuan/HunyuanDiT-v1.1-Diffusers and v1.2-Diffusers, 1024 x 1024
    "hunyuan-dit-1.1": {**_HUNYUAN_DIT, "use_style_cond_and_image_meta_size": True},
    "hunyuan-dit": {**_HUNYUAN_DIT, "use_style_cond_and_image_meta_size": False},
    # thu-ml/unidiffuser-v1, 512 x 512
    "unidiffuser": _model(
        "UniDiffuserModel",
        sample_size=64,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=30,
        num_attention_heads=24,
        attention_head_dim=64,
        text_dim=64,
        activation_fn="gelu",
        num_embeds_ada_norm=1000,
        use_data_type_embedding=True,
    ),
    # 256 x 256, but for the two of the PULSE paper, which are on pixels
    **{f"uvit-{size[0].lower()}": _model("UViTModel", **UVIT_SIZES[size]) for size in ("M/2", "L/2", "H/2")},
    **{f"uvit-{size.lower()}": _model("UViTModel", **UVIT_SIZES[size]) for size in ("1B", "2.7B")},
    # kandinsky-community/kandinsky-3, 1024 x 1024
    "kandinsky3": _model("Kandinsky3UNet"),
    # PixArt-alpha/PixArt-XL-2-1024-MS and PixArt-Sigma-XL-2-1024-MS
    "pixart-alpha": {**_PIXART, "use_additional_conditions": True},
    "pixart-sigma": {**_PIXART, "use_additional_conditions": False},
    # stabilityai/stable-diffusion-3-medium-diffusers and stable-diffusion-3.5-large, 1024 x 1024
    "sd3-medium": _sd3(24),
    "sd3.5-large": {**_sd3(38), "qk_norm": "rms_norm"},
    # black-forest-labs/FLUX.1-dev, 1024 x 1024
    "flux-dev": _model("FluxTransformer2DModel", guidance_embeds=True),
    # Wan-AI/Wan2.1-T2V-1.3B-Diffusers and 14B, 81 frames of 480 x 832
    "wan-1.3b": _model("WanTransformer3DModel", num_attention_heads=12, ffn_dim=8960, num_layers=30),
    "wan-14b": _model("WanTransformer3DModel"),
    # hunyuanvideo-community/HunyuanVideo, 129 frames of 720 x 1280
    "hunyuan-video": _model("HunyuanVideoTransformer3DModel"),
    # THUDM/CogVideoX-2b and 5b, 49 frames of 480 x 720
    "cogvideox-2b": _model("CogVideoXTransformer3DModel"),
    "cogvideox-5b": _model(
        "CogVideoXTransformer3DModel", num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True
    ),
    # Those below have no family: they are traced (examples.py has their batches).
    # Efficient-Large-Model/Sana_600M_1024px_diffusers and Sana_1600M_1024px_diffusers, 1024 x 1024
    "sana-0.6b": _model(
        "SanaTransformer2DModel",
        num_layers=28,
        num_attention_heads=36,
        num_cross_attention_heads=16,
        cross_attention_head_dim=72,
        cross_attention_dim=1152,
    ),
    "sana-1.6b": _model("SanaTransformer2DModel"),
    # THUDM/CogView4-6B, 1024 x 1024
    "cogview4": _model("CogView4Transformer2DModel", num_layers=28, attention_head_dim=128, num_attention_heads=32),
    # lodestones/Chroma1-HD, 1024 x 1024
    "chroma": _model("ChromaTransformer2DModel"),
    # Qwen/Qwen-Image, 1024 x 1024
    "qwen-image": _model("QwenImageTransformer2DModel"),
    # black-forest-labs/FLUX.2-dev, 1024 x 1024
    "flux2-dev": _model("Flux2Transformer2DModel"),
    # Lightricks/LTX-Video, 161 frames of 512 x 704
    "ltx-video": _model("LTXVideoTransformer3DModel"),
}
