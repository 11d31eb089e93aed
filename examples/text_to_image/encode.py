"""The frozen half of the pipeline: images become latents, captions become text states.

They run in the pipeline's idle time for the next step's batch, on any rank; or once for the whole data set
(``--cache_latents``), and without pulse or where velocity is predicted for every batch, on the first rank. However they
run, the same views give the same latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler
from diffusers.image_processor import VaeImageProcessor
from images import Images, View
from PIL.Image import Image
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from deepspeed_pulse import FrozenSpec, spec
from deepspeed_pulse.models.encoders import text_encoder_layers, vae_encoder_layers

CACHE_CHUNK = 64


class Encoders:
    """VAE, tokenizer and text encoder of a pipeline folder, frozen."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype)
        self.vae = vae.requires_grad_(False).eval().to(device)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
        text = CLIPTextModel.from_pretrained(folder / "text_encoder")
        self.text_encoder = text.requires_grad_(False).eval().to(device, dtype)

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> Tensor:
        """Mean and log-variance of the latents of images (b, 3, h, w): (b, 2 * channels, h / f, w / f)."""
        return self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.parameters

    @torch.no_grad()
    def text_states(self, captions: Sequence[str]) -> Tensor:
        """(b, tokens, width), captions padded or cut to the length the text encoder knows."""
        return self.text_encoder(self.token_ids(captions).to(self.device))[0]

    def token_ids(self, captions: Sequence[str]) -> Tensor:
        """(b, tokens)."""
        tokens = self.tokenizer(
            list(captions),
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        return tokens.input_ids

    @torch.no_grad()
    def images(self, latents: Tensor) -> list[Image]:
        """Decoded latents of the scale the U-Net works on."""
        scaled = latents.to(self.device, self.vae.dtype) / self.vae.config.scaling_factor
        pixels = self.vae.decode(scaled).sample
        return VaeImageProcessor().postprocess(pixels.float(), output_type="pil")


def sampled(moments: Tensor, draw: Tensor, scaling_factor: float) -> Tensor:
    """Latents of the scale the U-Net works on, from their mean and log-variance and a normal draw."""
    mean, logvar = moments.chunk(2, dim=1)
    return (mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * draw) * scaling_factor


class Noised(torch.nn.Module):
    """The end of the frozen half: moments to noised latents."""

    def __init__(self, scheduler: DDPMScheduler, scaling_factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.scheduler, self.scaling_factor, self.dtype = scheduler, scaling_factor, dtype

    def forward(self, moments: Tensor, draw: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """(b, channels, h, w) in the U-Net's dtype."""
        clean = sampled(moments.float(), draw, self.scaling_factor)
        return self.scheduler.add_noise(clean, noise, timestep).to(self.dtype)


def frozen_parts(
    encoders: Encoders, scheduler: DDPMScheduler, *, scaling_factor: float, dtype: torch.dtype
) -> dict[str, FrozenSpec]:
    """The frozen half for the pipeline's idle time."""
    noised = spec(Noised(scheduler, scaling_factor, dtype), pop=("draw", "noise", "timestep"))
    return {
        "moments": FrozenSpec(vae_encoder_layers(encoders.vae), input="pixel_values", dtype=dtype),
        "sample": FrozenSpec([noised], input="moments"),
        "encoder_hidden_states": FrozenSpec(text_encoder_layers(encoders.text_encoder), input="input_ids", dtype=dtype),
    }


class Raw:
    """Reads what the frozen parts encode."""

    def __init__(self, images: Images, encoders: Encoders, latents: Sequence[int]) -> None:
        self.images, self.encoders, self.latents = images, encoders, tuple(latents)

    def read(self, views: Sequence[View]) -> dict[str, Tensor]:
        """Pixels and token ids, one row a view."""
        pixels = torch.stack([self.images.pixels(view) for view in views])
        return {"pixel_values": pixels, "input_ids": self.encoders.token_ids([view.caption for view in views])}


class OnTheFly:
    """Encodes what a batch asks for, when it asks."""

    def __init__(self, images: Images, encoders: Encoders) -> None:
        self.images, self.encoders = images, encoders

    def encode(self, views: Sequence[View]) -> tuple[Tensor, Tensor]:
        """Moments of the latents and text states, one row a view."""
        pixels = torch.stack([self.images.pixels(view) for view in views])
        return self.encoders.moments(pixels), self.encoders.text_states([view.caption for view in views])


class Cached:
    """Every image, mirrored too if asked for, and every caption, encoded once and kept on the CPU."""

    def __init__(self, images: Images, encoders: Encoders, *, mirror: bool, pause: Callable[[], None]) -> None:
        """``pause`` is called after every chunk of images: other ranks wait there, and not for too long."""
        self.device = encoders.device
        self.latents: dict[tuple[int, bool], Tensor] = {}
        self.texts: dict[str, Tensor] = {}
        for start in range(0, len(images.entries), CACHE_CHUNK):
            for index in range(start, min(start + CACHE_CHUNK, len(images.entries))):
                self._add(images, encoders, index, mirror)
            pause()
        self.texts[""] = encoders.text_states([""])[0].cpu()

    def _add(self, images: Images, encoders: Encoders, index: int, mirror: bool) -> None:
        for mirrored in (False, True) if mirror else (False,):
            pixels = images.pixels(View(index=index, caption="", mirrored=mirrored))
            self.latents[index, mirrored] = encoders.moments(pixels[None])[0].cpu()
        for caption in images.entries[index].captions:
            self.texts[caption] = encoders.text_states([caption])[0].cpu()

    def encode(self, views: Sequence[View]) -> tuple[Tensor, Tensor]:
        """As :meth:`OnTheFly.encode`."""
        latents = torch.stack([self.latents[view.index, view.mirrored] for view in views])
        return latents.to(self.device), torch.stack([self.texts[view.caption] for view in views]).to(self.device)
