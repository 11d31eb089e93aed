"""Frozen encoders as layer lists, cut finely enough to fit into a pipeline's idle time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D, UNetMidBlock2D
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.bypassed import changed_methods, check_bypassed
from deepspeed_pulse.models.units import refuse

TAKES_APART = (Encoder, DownEncoderBlock2D, UNetMidBlock2D, ResnetBlock2D)


class _Opening(nn.Module):
    """A resnet of an autoencoder up to its first convolution; it reads no time embedding."""

    def __init__(self, resnet: Any) -> None:
        super().__init__()
        self.norm1, self.conv1, self.nonlinearity = resnet.norm1, resnet.conv1, resnet.nonlinearity

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(b, channels, h, w) to itself and the first convolution's output."""
        return hidden, self.conv1(self.nonlinearity(self.norm1(hidden)))


class _Closing(nn.Module):
    """The rest of the resnet."""

    def __init__(self, resnet: Any) -> None:
        super().__init__()
        self.norm2, self.conv2, self.nonlinearity = resnet.norm2, resnet.conv2, resnet.nonlinearity
        self.dropout, self.shortcut, self.scale = resnet.dropout, resnet.conv_shortcut, resnet.output_scale_factor

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """What :class:`_Opening` gave to (b, channels, h, w)."""
        before, hidden = pair
        hidden = self.conv2(self.dropout(self.nonlinearity(self.norm2(hidden))))
        if self.shortcut is not None:
            before = self.shortcut(before.contiguous())
        return (before + hidden) / self.scale


def vae_encoder_layers(vae: Any) -> list[Any]:
    """The encoder of diffusers' ``AutoencoderKL``: pixels (b, 3, h, w) to the mean and log-variance of latents.

    The result is ``vae.encode(pixels).latent_dist.parameters``, bit for bit.
    Raises :class:`GraphError` when it is another model, or one with tiling on, changed methods or hooks that no layer
    would call.
    """
    if not isinstance(vae, AutoencoderKL):
        raise GraphError(f"vae_encoder_layers() takes an AutoencoderKL, found {type(vae).__name__}")
    problems = [f"the model itself {line}" for line in changed_methods(vae, AutoencoderKL, "encode")]
    if vae.use_tiling:
        problems.append("encodes large pictures in tiles; call vae.disable_tiling(): layers encode them whole")
    refuse(vae, problems)
    layers = [spec(layer, name=name) for name, layer in _vae_parts(vae)]
    check_bypassed(vae.encoder, layers, TAKES_APART)
    return layers


def _vae_parts(vae: Any) -> Iterator[tuple[str, nn.Module]]:
    encoder = vae.encoder
    yield "conv_in", encoder.conv_in
    for i, block in enumerate(encoder.down_blocks):
        for j, resnet in enumerate(block.resnets):
            yield from _halves(f"down_blocks.{i}.resnets.{j}", resnet)
        for j, sampler in enumerate(block.downsamplers or ()):
            yield f"down_blocks.{i}.downsamplers.{j}", sampler
    middle = encoder.mid_block
    yield from _halves("mid_block.resnets.0", middle.resnets[0])
    for j, (attention, resnet) in enumerate(zip(middle.attentions, middle.resnets[1:], strict=True)):
        if attention is not None:
            yield f"mid_block.attentions.{j}", attention
        yield from _halves(f"mid_block.resnets.{j + 1}", resnet)
    last = [encoder.conv_norm_out, encoder.conv_act, encoder.conv_out]
    if vae.quant_conv is not None:
        last.append(vae.quant_conv)
    yield "conv_out", nn.Sequential(*last)


def _halves(name: str, resnet: Any) -> Iterator[tuple[str, nn.Module]]:
    """A layer for each of a resnet's two convolutions: whole ones are longer than many gaps of a pipeline."""
    yield f"{name}.0", _Opening(resnet)
    yield f"{name}.1", _Closing(resnet)


class TextStates(nn.Module):
    """A text encoder of transformers that takes token ids (b, tokens) and gives its last states (b, tokens, width)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        # by name: the first output of a ...WithProjection is its projection
        return self.encoder(ids).last_hidden_state


def text_encoder_layers(encoder: nn.Module) -> list[Any]:
    """A text encoder as one layer: it is a twentieth of a VAE's encoder."""
    return [spec(TextStates(encoder), name="text_encoder")]
