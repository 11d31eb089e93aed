"""What is predicted and run: layers that sleep on up to 8 ranks, real models on as many ranks as there are cores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ranks import sleepers
from small_models import small_unet

HIDDEN = 64 * 1024
"""Elements of the hidden state and of each skip of a sleeping model: 256 KiB."""

FORWARD_MS = (6.0, 10.0, 14.0, 8.0, 12.0, 10.0)
"""Of sleeping layers in turn; backward takes twice as long."""

PARAM_BYTES = 128 * 1024
"""Of a sleeping layer: few, as 8 ranks share the cores for what is not emulated, the arithmetic of the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on ``pipeline_ranks * data_parallel`` ranks; ``model`` is a key of :data:`MODELS`."""

    model: str
    pipeline_ranks: int
    data_parallel: int
    microbatches: int
    placement: str
    zero_stage: int = 0

    @property
    def world(self) -> int:
        return self.pipeline_ranks * self.data_parallel

    @property
    def sleeps(self) -> bool:
        return self.model.startswith("sleeping")


def sleeping(num_layers: int) -> tuple[list[Any], Callable[[], Any]]:
    """Nested skips between mirror layers; layers of unequal length."""
    times = list(itertools.islice(itertools.cycle(FORWARD_MS), num_layers))
    layers = sleepers(times, param_bytes=PARAM_BYTES)
    return layers, lambda: (torch.randn(1, HIDDEN), torch.randn(1, HIDDEN))


def unet() -> tuple[list[Any], Callable[[], Any]]:
    """Stable Diffusion's U-Net, small: 46 layers, 12 skips."""
    from deepspeed_pulse.models import to_layers

    torch.manual_seed(0)
    model = small_unet(sample_size=32)

    def batch() -> Any:
        inputs = {
            "sample": torch.randn(4, 4, 32, 32),
            "timestep": torch.randint(1000, (4,)),
            "encoder_hidden_states": torch.randn(4, 7, 32),
        }
        return inputs, torch.randn(4, 4, 32, 32)

    return to_layers(model), batch


def uvit() -> tuple[list[Any], Callable[[], Any]]:
    """U-ViT, small: 12 blocks around the middle one, 6 skips."""
    from deepspeed_pulse.models import to_layers
    from deepspeed_pulse.models.transformers.uvit import UViTModel

    torch.manual_seed(0)
    model = UViTModel(sample_size=32, hidden_size=128, num_layers=12, num_attention_heads=4)

    def batch() -> Any:
        return {"sample": torch.randn(4, 4, 32, 32), "timestep": torch.randint(1000, (4,))}, torch.randn(4, 4, 32, 32)

    return to_layers(model), batch


MODELS: dict[str, Callable[[], tuple[list[Any], Callable[[], Any]]]] = {
    "sleeping, 8 layers": lambda: sleeping(8),
    "sleeping, 18 layers": lambda: sleeping(18),
    "U-Net": unet,
    "U-ViT": uvit,
}


def _cases() -> Iterator[Case]:
    rows: Sequence[tuple[str, int, int, int, str, int]] = (
        ("sleeping, 8 layers", 1, 4, 4, "linear", 0),
        ("sleeping, 8 layers", 2, 1, 6, "linear", 0),
        ("sleeping, 8 layers", 2, 2, 4, "wave", 0),
        ("sleeping, 8 layers", 2, 4, 4, "wave", 1),
        ("sleeping, 8 layers", 4, 1, 8, "linear", 0),
        ("sleeping, 18 layers", 4, 1, 8, "wave", 0),
        ("sleeping, 18 layers", 4, 2, 4, "wave", 0),
        ("sleeping, 18 layers", 8, 1, 8, "wave", 0),
        ("U-Net", 1, 2, 4, "linear", 0),
        ("U-Net", 2, 1, 6, "wave", 0),
        ("U-Net", 2, 1, 6, "linear", 0),
        ("U-ViT", 2, 1, 4, "wave", 0),
    )
    for model, ranks, replicas, microbatches, placement, zero_stage in rows:
        yield Case(
            model=model,
            pipeline_ranks=ranks,
            data_parallel=replicas,
            microbatches=microbatches,
            placement=placement,
            zero_stage=zero_stage,
        )


CASES = tuple(_cases())
