"""Noised latents with their text, each batch a pure function of where it belongs.

Which images a batch has, how they are cropped, mirrored and captioned, the noise and the timesteps all
follow from the seed, the step, the data-parallel index and the microbatch, so a resumed run sees what
the first one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from encode import Raw, sampled
from images import Captioned, View
from torch import Tensor

Batch = tuple[dict[str, Tensor], tuple[Tensor, Tensor]]


class Source(Protocol):
    """Where latents and text states come from."""

    def encode(self, views: Sequence[View]) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a run a batch belongs."""

    step: int
    data_index: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Views:
    """Chooses the views of every batch: each epoch is a new order of all images.

    ``num_pipelines`` and ``microbatches`` say how a step's samples are shared out.
    """

    entries: Sequence[Captioned]
    size: int
    microbatches: int
    num_pipelines: int
    center_crop: bool
    random_flip: bool
    empty_prompts: float
    seed: int

    def steps(self, *, epochs: int) -> int:
        """Optimizer steps of so many epochs, the last one filled up."""
        return -(-epochs * len(self.entries) // (self.size * self.microbatches * self.num_pipelines))

    def at(self, place: Place, generator: torch.Generator) -> list[View]:
        """The views of one microbatch."""
        batch = (place.step * self.microbatches + place.microbatch) * self.num_pipelines + place.data_index
        return [self._view(self._index(batch * self.size + i), generator) for i in range(self.size)]

    def _index(self, sample: int) -> int:
        epoch, position = divmod(sample, len(self.entries))
        return int(_order(self.seed, epoch, len(self.entries))[position])

    def _view(self, index: int, generator: torch.Generator) -> View:
        # As many draws whatever the flags are: a run with other flags keeps the rest of its randomness.
        down, right, mirror, choice, empty = torch.rand(5, generator=generator).tolist()
        captions = self.entries[index].captions
        return View(
            index=index,
            caption="" if empty < self.empty_prompts else captions[int(choice * len(captions))],
            down=0.5 if self.center_crop else down,
            right=0.5 if self.center_crop else right,
            mirrored=self.random_flip and mirror < 0.5,
        )


class Batches:
    """Batches ``({"sample", "timestep", "encoder_hidden_states"}, (target, weights))``."""

    def __init__(
        self,
        views: Views,
        source: Source | Raw,
        scheduler: DDPMScheduler,
        *,
        scaling_factor: float,
        noise_offset: float = 0.0,
        snr_gamma: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.views, self.source, self.scheduler = views, source, scheduler
        self.scaling_factor = scaling_factor
        self.noise_offset = noise_offset
        self.snr_gamma = snr_gamma
        self.dtype = dtype

    def batch(self, place: Place) -> Batch:
        """The microbatch of one place: noised latents, and the noise or velocity to predict with a weight a sample."""
        generator = self._generator(place)
        views = self.views.at(place, generator)
        if isinstance(self.source, Raw):
            return self._raw(self.source, views, generator)
        moments, text = self.source.encode(views)
        clean = self._latents(moments.float(), generator)
        noise = self._noise(clean, generator)
        num_timesteps = self.scheduler.config.num_train_timesteps
        timestep = torch.randint(num_timesteps, (len(clean),), generator=generator).to(clean.device)
        noisy = self.scheduler.add_noise(clean, noise, timestep)
        velocity = self.scheduler.config.prediction_type == "v_prediction"
        target = self.scheduler.get_velocity(clean, noise, timestep) if velocity else noise
        inputs = {"sample": noisy.to(self.dtype), "timestep": timestep, "encoder_hidden_states": text.to(self.dtype)}
        return inputs, (target, self._weights(timestep))

    def _raw(self, source: Raw, views: Sequence[View], generator: torch.Generator) -> Batch:
        """What encoders in idle time read, with the same randomness; to be predicted is the noise."""
        draw = torch.randn(len(views), *source.latents, generator=generator)
        noise = self._noise(draw, generator)
        timestep = torch.randint(self.scheduler.config.num_train_timesteps, (len(views),), generator=generator)
        inputs = {**source.read(views), "draw": draw, "noise": noise, "timestep": timestep}
        return inputs, (noise, self._weights(timestep))

    def _generator(self, place: Place) -> torch.Generator:
        return torch.Generator().manual_seed(_seed(self.views.seed, place.step, place.data_index, place.microbatch))

    def iterate(self, *, first_step: int, data_index: int) -> Iterator[Batch]:
        """Endless: the microbatches of ``first_step``, of the step after it, and so on."""
        step = first_step
        while True:
            for microbatch in range(self.views.microbatches):
                yield self.batch(Place(step=step, data_index=data_index, microbatch=microbatch))
            step += 1

    def _latents(self, moments: Tensor, generator: torch.Generator) -> Tensor:
        draw = torch.randn(len(moments), moments.shape[1] // 2, *moments.shape[2:], generator=generator)
        return sampled(moments, draw.to(moments.device), self.scaling_factor)

    def _noise(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(clean.shape, generator=generator)
        offset = torch.randn(*clean.shape[:2], 1, 1, generator=generator)
        return (noise + self.noise_offset * offset).to(clean.device)

    def _weights(self, timestep: Tensor) -> Tensor:
        """(b,) min-SNR weights of arXiv 2303.09556, equation 3 and its form for velocity; else ones."""
        if self.snr_gamma is None:
            return torch.ones(len(timestep), device=timestep.device)
        snr = compute_snr(self.scheduler, timestep)
        capped = snr.clamp(max=self.snr_gamma)
        return capped / (snr + 1 if self.scheduler.config.prediction_type == "v_prediction" else snr)


def weighted_error(predicted: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error of each sample times its weight, averaged."""
    target, weights = labels
    errors = (predicted.float() - target.float()).pow(2).flatten(1).mean(1)
    return (errors * weights).mean()


def raw_example(*, size: int, shape: Sequence[int], resolution: int, tokens: int) -> Batch:
    """The same for encoders in idle time."""
    zeros, timestep = torch.zeros(size, *shape), torch.zeros(size, dtype=torch.int64)
    pixels, ids = torch.zeros(size, 3, resolution, resolution), torch.zeros(size, tokens, dtype=torch.int64)
    inputs = {"pixel_values": pixels, "input_ids": ids, "draw": zeros, "noise": zeros, "timestep": timestep}
    return inputs, (zeros, torch.ones(size))


def example(*, size: int, shape: Sequence[int], text: Sequence[int], dtype: torch.dtype) -> Batch:
    """A batch of zeros, as a measure of shapes and costs."""
    sample = torch.zeros(size, *shape, dtype=dtype)
    timestep = torch.zeros(size, dtype=torch.int64)
    states = torch.zeros(size, *text, dtype=dtype)
    inputs = {"sample": sample, "timestep": timestep, "encoder_hidden_states": states}
    return inputs, (torch.zeros(size, *shape), torch.ones(size))


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Any:
    return np.random.default_rng(np.random.SeedSequence((seed, epoch))).permutation(count)


def _seed(*key: int) -> int:
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state >> np.uint64(1))
