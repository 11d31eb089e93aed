"""Costs of published models as counts of their operations, on the meta device: nothing is timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sources import kept

from deepspeed_pulse.ir.profile import Profile

if TYPE_CHECKING:
    from deepspeed_pulse.engine.specs import Workload

TFLOPS = 125.0
"""Operations a second of the device that times stand for."""
FINE = ", fine"
"""At the end of a name: transformer blocks are layers of their own."""

SDV2_17B = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 32,
    "block_out_channels": [448, 896, 1792, 1792],
    "attention_head_dim": [7, 14, 28, 28],
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
}
"""Stable Diffusion 2's U-Net, 1.4 times as wide: 1.7 billion parameters, latents of 32 x 32."""


class Profiles:
    """By name, of microbatches of one sample; estimated on first use and kept for the sources there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Profile:
        return Profile.from_json(kept(self.folder / f"{name}.json", lambda: _estimated(name), Path(__file__)))


def _estimated(name: str) -> str:
    from deepspeed_pulse.engine.plans.profiles import estimate_profile

    return estimate_profile(job(name), tflops=TFLOPS).profile.to_json()


def job(name: str) -> Workload:
    """A published model, "sdv2-1.7b", or "sd15-controlnet": a ControlNet that trains beside a frozen U-Net."""
    from deepspeed_pulse.engine.specs import Workload
    from deepspeed_pulse.models import to_layers
    from deepspeed_pulse.models.catalogue.published import PUBLISHED
    from deepspeed_pulse.models.catalogue.sources import DTYPES, build_model, example_batch, find_workload

    if name.removesuffix(FINE) in PUBLISHED:
        return find_workload(name.removesuffix(FINE), granularity="fine" if name.endswith(FINE) else None)
    unet = build_model(SDV2_17B if name == "sdv2-1.7b" else PUBLISHED["sd15"], dtype="bfloat16")
    batch = example_batch(unet, microbatch_size=1, dtype=DTYPES["bfloat16"])
    if name == "sdv2-1.7b":
        return Workload(name=name, layers=to_layers(unet), batch=(batch, None), microbatch_size=1)
    import torch
    from diffusers import ControlNetModel

    with torch.device("meta"):
        controlnet = ControlNetModel.from_unet(unet, load_weights_from_unet=False).to(torch.bfloat16)
    unet.requires_grad_(False)
    batch["controlnet_cond"] = torch.empty(1, 3, 512, 512, device="meta", dtype=torch.bfloat16)
    return Workload(name=name, layers=to_layers(unet, controlnet=controlnet), batch=(batch, None), microbatch_size=1)
