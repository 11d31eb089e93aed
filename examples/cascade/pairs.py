"""Batches of a cascade: the same crops small for the base model, and large, with the small ones beside, for the other.

Every batch is a pure function of where it belongs, as in ``examples/unet/data.py``: any rank that asks for one gets
the same bits, also after a resume.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "unet"))
from data import Photographs, generator_for, noise_scheduler

SIZE = 32
"""Side of what the super-resolution model makes, in pixels. The base makes half of it."""

AUGMENTATION = 0.1
"""Noise on the small pictures that the super-resolution model reads: the base's samples are not perfect either."""

UPSCALED = 0.5
"""Of a microbatch, the share that the super-resolution model trains on: its pictures are larger."""

Batch = tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]


def shrunk(images: Tensor) -> Tensor:
    """Half the side: (count, 3, 32, 32) to (count, 3, 16, 16)."""
    return functional.avg_pool2d(images, 2)


def read_by_upscaler(noisy: Tensor, small: Tensor, noise: Tensor) -> Tensor:
    """What the super-resolution model reads: 3 noisy channels, and 3 of the small picture, enlarged."""
    augmented = small + AUGMENTATION * noise
    enlarged = functional.interpolate(augmented, scale_factor=2.0, mode="bilinear", align_corners=False)
    return torch.cat([noisy, enlarged], dim=1)


class PairBatches:
    """Batches ``(inputs, labels)``, each a dict by backbone, by step, data-parallel index and microbatch."""

    def __init__(self, photographs: Photographs, *, microbatch_size: int, seed: int = 0) -> None:
        self.photographs, self.microbatch_size, self.seed = photographs, microbatch_size, seed
        self.scheduler = noise_scheduler()

    def batch(self, step: int, data_index: int, microbatch: int) -> Batch:
        """The same arguments give the same bits on every rank."""
        generator = generator_for(self.seed, step, data_index, microbatch)
        labels = torch.randint(len(self.photographs.names), (self.microbatch_size,), generator=generator)
        large = torch.stack([self.photographs.crop(int(label), generator) for label in labels])
        small = shrunk(large)
        base, base_target = self._noised(small, labels, generator)
        count = max(1, round(UPSCALED * len(labels)))
        upscaler, target = self._noised(large[:count], labels[:count], generator)
        noise = torch.randn(small[:count].shape, generator=generator)
        upscaler["sample"] = read_by_upscaler(upscaler["sample"], small[:count], noise)
        return {"base": base, "upscaler": upscaler}, {"base": base_target, "upscaler": target}

    def _noised(self, clean: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of a model and what it shall say of them."""
        noise = torch.randn(clean.shape, generator=generator)
        timestep = torch.randint(self.scheduler.config.num_train_timesteps, (len(clean),), generator=generator)
        noisy = self.scheduler.add_noise(clean, noise, timestep)
        inputs = {"sample": noisy, "timestep": timestep, "class_labels": labels}
        return inputs, self.scheduler.get_velocity(clean, noise, timestep)

    def iterate(self, *, first_step: int, microbatches: int, data_index: int) -> Iterator[Batch]:
        """Endless: the microbatches of ``first_step``, of the step after it, and so on."""
        step = first_step
        while True:
            for microbatch in range(microbatches):
                yield self.batch(step, data_index, microbatch)
            step += 1
