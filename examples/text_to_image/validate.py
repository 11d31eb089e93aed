"""Images of the validation prompts, denoised by the pipeline of ranks that is being trained.

No rank gathers the U-Net: each denoising step is one ``engine.eval_batch`` of two rows a microbatch. Every
rank walks through the same timesteps; text states and decoder are where data is read, on the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import torch
from batches import Batch
from diffusers import DDIMScheduler
from encode import Encoders
from PIL.Image import Image
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Validation:
    """Makes the same images from the same noise whenever it is called; all ranks call it."""

    def __init__(
        self,
        engine: Any,
        prompts: Sequence[str],
        *,
        encoders: Encoders | None,
        example: Batch,
        scheduler_config: dict[str, Any],
        num_inference_steps: int,
        guidance_scale: float,
        seed: int,
    ) -> None:
        """``encoders`` is None on ranks that read no data; ``example`` says shapes and dtypes of a batch."""
        self.engine = engine
        self.prompts = tuple(prompts)
        self.encoders = encoders
        self.example = example
        self.scheduler = DDIMScheduler.from_config(scheduler_config)
        self.num_inference_steps = num_inference_steps
        self.guidance_scale = guidance_scale
        self.seed = seed
        self.text = None
        if encoders is not None:
            self.text = encoders.text_states([*self.prompts, *("" for _ in self.prompts)]).to(self._sample.dtype)

    @property
    def _sample(self) -> Tensor:
        return self.example[0]["sample"]

    def images(self) -> list[Image] | None:
        """One image a prompt, on the first rank; None on the others."""
        self.scheduler.set_timesteps(self.num_inference_steps)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.prompts), *self._sample.shape[1:])
        latents = torch.randn(shape, generator=generator) * self.scheduler.init_noise_sigma
        for timestep in self.scheduler.timesteps:
            scaled = self.scheduler.scale_model_input(latents, timestep)
            conditional, free = self._predict(scaled, timestep).chunk(2)
            guided = free + self.guidance_scale * (conditional - free)
            latents = self.scheduler.step(guided, timestep, latents).prev_sample
        return self.encoders.images(latents) if self.encoders and self.engine.global_rank == 0 else None

    def _predict(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """What the U-Net says of the latents with the prompts (first half) and without them, on every rank."""
        both = torch.cat([latents, latents]).to(self._sample.dtype)
        parts = self.engine.eval_batch(
            None if self.text is None else self._microbatches(both, self.text, timestep),
            compute_loss=False,
            reduce_output=None,
            num_micro_batches=len(self.prompts),
        )
        # The rank of the last stage has the output; the sum with zeros takes it to all others.
        output = torch.zeros(both.shape, device=self.engine.device)
        if parts is not None:
            output += torch.cat(parts).float()
        torch.distributed.all_reduce(output, group=self.engine.grid.get_pipe_parallel_group())
        return output.cpu()

    def _microbatches(
        self, latents: Tensor, text: Tensor, timestep: Tensor
    ) -> Iterator[tuple[dict[str, Tensor], None]]:
        for sample, states in zip(latents.split(2), text.split(2), strict=True):
            yield {"sample": sample, "timestep": timestep.expand(2), "encoder_hidden_states": states}, None


def save_row(images: Sequence[Image], prompts: Sequence[str], picture: Path, *, title: str) -> None:
    """The images side by side, each above its prompt."""
    figure, row = plt.subplots(1, len(images), figsize=(2.2 * len(images), 2.9), squeeze=False, layout="constrained")
    for axes, image, prompt in zip(row[0], images, prompts, strict=True):
        axes.imshow(image)
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel("\n".join(wrap(prompt, 26)), fontsize=8)
    figure.suptitle(title, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
