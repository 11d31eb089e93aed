"""A small U-Net with its ControlNet: both models in one module, and their training on ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from support.parity import share_groups
from support.reference import error
from support.small_models import sd_entries, small_controlled_unet, small_controlnet
from support.transformer_ranks import MICROBATCHES, batches, loss_of, sgd, train_alone
from torch import Tensor, nn

from deepspeed_pulse.models import save_pretrained, to_layers


class Both(nn.Module):
    def __init__(self, unet: nn.Module, controlnet: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.unet, self.controlnet, self.scale = unet, controlnet, scale

    def forward(self, return_dict: bool = False, **batch: Any) -> tuple[Tensor, ...]:
        """The two calls of diffusers' training script."""
        image, mask = batch.pop("controlnet_cond"), batch.pop("encoder_attention_mask", None)
        down, mid = self.controlnet(
            **batch, controlnet_cond=image, conditioning_scale=self.scale, return_dict=return_dict
        )
        more = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return self.unet(**batch, encoder_attention_mask=mask, **more, return_dict=return_dict)


def both(scale: float = 1.0, unet: dict[str, Any] | None = None, **config: Any) -> Both:
    return Both(small_controlled_unet(**(unet or {})), small_controlnet(**config), scale)


def entries(size: tuple[int, int] = (16, 16)) -> dict[str, Any]:
    image = torch.rand(2, 3, 8 * size[0], 8 * size[1], generator=torch.Generator().manual_seed(8))
    return {**sd_entries(size=size), "controlnet_cond": image}


def forward(models: Any, batch: dict[str, Any]) -> Tensor:
    return models(**batch)[0]


def layers_of(models: Any, **options: Any) -> list[Any]:
    return to_layers(models.unet, controlnet=models.controlnet, conditioning_scale=models.scale, **options)


def trains(folder: str) -> None:
    """What a rank runs: losses and both saved models equal one process's, the frozen U-Net its start."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    share_groups()
    models = both()
    models.unet.requires_grad_(False)
    reference = copy.deepcopy(models)
    expected, _ = train_alone(reference, entries)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
    }
    layers = layers_of(models)
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_of, config=config, input="sample")
    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd(module), config=config)
    for step, wanted in enumerate(expected):
        found = float(engine.train_batch(batches(entries, step)).detach())
        assert abs(found - wanted) <= 1e-5 * abs(wanted), (step, found, wanted)
    for wanted in (reference.unet, reference.controlnet):
        saved = save_pretrained(engine, Path(folder, type(wanted).__name__), model_class=type(wanted))
        weights = type(wanted).from_pretrained(saved).state_dict()
        for key, weight in wanted.state_dict().items():
            assert error(weights[key], weight) <= 1e-5, key
    engine.destroy()
    print("PASSED", flush=True)
