"""The models: published ones, and small ones of the same kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from deepspeed_pulse.models import from_config, to_layers
from deepspeed_pulse.models.catalogue.published import PUBLISHED
from deepspeed_pulse.models.catalogue.sources import build_model, example_batch
from deepspeed_pulse.models.families import class_of, construct
from deepspeed_pulse.models.weights.skeleton import Skeleton

SEED = 0
"""Of the weights; a batch's numbers follow from its own number."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the batch of a step.

    Attributes:
        config: of the model, as diffusers has it.
        samples: of a microbatch.
        microbatches: of a step, for each rank.
        fine: transformer blocks are layers of their own.
    """

    name: str
    title: str
    config: Mapping[str, Any]
    samples: int
    microbatches: int
    fine: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def layers(self) -> list[Any]:
        """Of which a rank builds its own."""
        return from_config(self.config, seed=SEED, dtype=torch.bfloat16, granularity=self._granularity)

    def model(self, device: torch.device) -> tuple[torch.nn.Module, dict[tuple[int, str], torch.nn.Parameter]]:
        """The unpartitioned diffusers model, with the same weights, and its parameters by layer and name there."""
        kind = class_of(self.config, self.name)
        skeleton = Skeleton(
            lambda: construct(kind, self.config, self.name), seed=SEED, cast=lambda model: model.to(torch.bfloat16)
        )
        skeleton.model.load_state_dict(skeleton.initial(skeleton.entries), assign=True)
        model = skeleton.model.to(device).train()
        layers = to_layers(model, granularity=self._granularity)
        return model, {(i, name): p for i, one in enumerate(layers) for name, p in one.layer.named_parameters()}

    def batches(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Inputs by their names and what the output should be, in the host's memory; each has its own numbers."""
        for number in itertools.count():
            generator = torch.Generator().manual_seed(number)
            inputs = _map(self._shapes, lambda meta, generator=generator: _numbers(meta, generator))
            yield inputs, torch.randn(inputs["sample"].shape, generator=generator).to(torch.bfloat16)

    @property
    def _granularity(self) -> Any:
        return "fine" if self.fine else "block"

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        model = build_model(self.config, dtype="bfloat16", where=self.name)
        return example_batch(model, microbatch_size=self.samples, dtype=torch.bfloat16)


def loss_of(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean squared error, computed in float32."""
    return torch.nn.functional.mse_loss(output.float(), wanted.float())


def on(device: torch.device, value: Any) -> Any:
    """A batch or a part of one, on the device."""
    return _map(value, lambda tensor: tensor.to(device))


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _map(part, change) for name, part in value.items()}
    return change(value)


def _numbers(meta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if meta.is_floating_point():
        return torch.randn(meta.shape, generator=generator).to(meta.dtype)
    return torch.randint(1000, meta.shape, generator=generator)


def _published(name: str, title: str, samples: int) -> Case:
    return Case(name=name, title=title, config=PUBLISHED[name], samples=samples, microbatches=4, fine=True)


def _small(name: str, title: str, config: Mapping[str, Any]) -> Case:
    return Case(name=name, title=title, config=config, samples=2, microbatches=2)


_UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 16, "norm_num_groups": 8, "cross_attention_dim": 32}

PUBLISHED_CASES = (
    _published("sd15", "Stable Diffusion 1.5, 512 px", 4),
    _published("sdxl", "SDXL, 1024 px", 1),
    _published("uvit-h", "U-ViT-H/2, 256 px", 16),
    _published("uvit-2.7b", "U-ViT 2.7 B", 8),
)
SMALL_CASES = (
    _small(
        "sd15",
        "U-Net like Stable Diffusion's, small",
        {**_UNET, "block_out_channels": [32, 64, 64, 64], "attention_head_dim": 4},
    ),
    _small(
        "sdxl",
        "U-Net like SDXL's, small",
        {
            **_UNET,
            "block_out_channels": [32, 64, 64],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "transformer_layers_per_block": [1, 2, 3],
            "attention_head_dim": [2, 4, 4],
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
        },
    ),
    _small(
        "uvit",
        "U-ViT, small",
        {
            "_class_name": "UViTModel",
            "sample_size": 16,
            "patch_size": 2,
            "hidden_size": 128,
            "num_layers": 12,
            "num_attention_heads": 4,
        },
    ),
)
"""The same kinds in bf16 too, so that nothing but the sizes differs."""
