"""Published models by name: the values of their config files, and the size of sample they were made for.

Keys that are left out have the defaults of the model's class. Sources are the ``config.json`` of the
repositories named beside each.
"""

from __future__ import annotations

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {
    # stable-diffusion-v1-5/stable-diffusion-v1-5, 512 x 512
    "sd15": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 64,
        "attention_head_dim": 8,
        "cross_attention_dim": 768,
    },
    # stabilityai/stable-diffusion-2-1, 768 x 768
    "sd21": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 96,
        "attention_head_dim": [5, 10, 20, 20],
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
    },
    # stabilityai/stable-diffusion-xl-base-1.0, 1024 x 1024
    "sdxl": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 128,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
