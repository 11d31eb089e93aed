"""What two U-Nets and their frozen encoders cost, as counts of operations on the meta device: nothing is timed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import estimated
from estimated import TFLOPS, Profiles
from sources import kept

from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.joined import joined_profile
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.tuning.sizes import scaled

if TYPE_CHECKING:
    from torch import nn

NAMES = ("sd15", "sdxl")
SIZE = 4
"""Samples of a microbatch."""

PIXELS = {"sd15": 512, "sdxl": 1024}
TEXTS = {
    "sd15": ({"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},),
    "sdxl": (
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20},
    ),
}
"""CLIP's text encoders of each."""


def backbones(folder: Path) -> tuple[Profile, tuple[FrozenPart, ...]]:
    """Of microbatches of ``SIZE``; frozen parts give their results to the layers of the joint list that read them."""
    known = Profiles(folder)
    joint = joined_profile([scaled(known(name), SIZE) for name in NAMES], NAMES)
    parts: list[FrozenPart] = []
    for name, own in zip(NAMES, joint.backbones, strict=True):
        reading = [i for i in range(*own.layers) if ".attentions." in joint.layers[i].name]
        for part, targets in encoders(name, folder).items():
            found = scaled(targets, SIZE)
            readers = (own.layers[0],) if part.endswith("vae") else tuple(reading)
            parts.append(FrozenPart(name=part, targets=readers, layers=tuple(map(_frozen, found.layers))))
    return joint, tuple(parts)


def of_backbone(parts: Sequence[FrozenPart], name: str) -> list[FrozenPart]:
    return [part for part in parts if part.name.startswith(name)]


def _frozen(cost: Any) -> FrozenLayer:
    """Without backward a layer holds its input and its result, about."""
    return FrozenLayer(
        name=cost.name,
        forward_ms=cost.forward_ms,
        param_bytes=cost.param_bytes,
        output_bytes=cost.output_bytes,
        activation_bytes=2 * cost.output_bytes,
    )


def encoders(name: str, folder: Path) -> dict[str, Profile]:
    """The VAE and the text encoders of a model, of one sample; kept in a folder, for the sources there are."""
    sources = Path(__file__), Path(estimated.__file__)
    parts = [f"{name} vae", *(f"{name} text{at}" for at in range(len(TEXTS[name])))]

    def text(at: int) -> str:
        return kept(folder / f"{parts[at]}.json", lambda: _estimated(name)[at].to_json(), *sources)

    return {part: Profile.from_json(text(at)) for at, part in enumerate(parts)}


@functools.cache
def _estimated(name: str) -> list[Profile]:
    logging.disable(logging.WARNING)
    import torch
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    from deepspeed_pulse.engine.plans.profiles import estimate_profile
    from deepspeed_pulse.engine.specs import Workload
    from deepspeed_pulse.models.encoders import text_encoder_layers, vae_encoder_layers

    dtype, pixels = torch.bfloat16, PIXELS[name]

    def cost(part: str, layers: Sequence[nn.Module], inputs: torch.Tensor) -> Profile:
        workload = Workload(name=part, layers=list(layers), batch=(inputs, None), microbatch_size=1)
        return estimate_profile(workload, tflops=TFLOPS).profile

    with torch.device("meta"):
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=4,
        ).to(dtype)
        texts = [CLIPTextModel(CLIPTextConfig(**config)).to(dtype) for config in TEXTS[name]]
        picture = torch.empty(1, 3, pixels, pixels, dtype=dtype)
        ids = torch.empty(1, 77, dtype=torch.long)
    return [
        cost("vae", vae_encoder_layers(vae), picture),
        *(cost("text", text_encoder_layers(text), ids) for text in texts),
    ]
