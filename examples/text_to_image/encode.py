"""The frozen half of the pipeline: images become latents, captions become text states.

Only the first rank of a pipeline has these models. They run for every batch, or once for the whole
data set (``--cache_latents``); either way the same views give the same latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from images import Images, View
from PIL.Image import Image
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

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
        tokens = self.tokenizer(
            list(captions),
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        return self.text_encoder(tokens.input_ids.to(self.device))[0]

    @torch.no_grad()
    def images(self, latents: Tensor) -> list[Image]:
        """Decoded latents of the scale the U-Net works on."""
        scaled = latents.to(self.device, self.vae.dtype) / self.vae.config.scaling_factor
        pixels = self.vae.decode(scaled).sample
        return VaeImageProcessor().postprocess(pixels.float(), output_type="pil")


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
