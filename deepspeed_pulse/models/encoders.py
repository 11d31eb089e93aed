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
    """A text encoder of transformers as a layer; see :func:`text_encoder_layers`."""

    def __init__(
        self, encoder: nn.Module, *, layer: int | None = None, final_norm: bool = False, pooled: bool = False
    ) -> None:
        super().__init__()
        self.encoder, self.layer, self.pooled = encoder, layer, pooled
        self.norm = _final_norm(encoder, layer) if final_norm else None

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Token ids (b, tokens), a mask of them or none, to states (b, tokens, width), and pooled ones (b, width)."""
        asked: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        if self.layer is not None:
            asked["output_hidden_states"] = True
        found = self.encoder(ids, **asked)
        # by name: the first output of a ...WithProjection is its projection
        states = found.last_hidden_state if self.layer is None else self._hidden_state(found, self.layer)
        if self.norm is not None:
            states = self.encoder.get_submodule(self.norm)(states)
        return (states, self._pooled(found)) if self.pooled else states

    def _hidden_state(self, found: Any, layer: int) -> Any:
        states = getattr(found, "hidden_states", None) or ()
        if not -len(states) <= layer < len(states):
            raise GraphError(
                f"text_encoder_layers(): layer={layer}: expected one of the {len(states)} hidden states that "
                f"{type(self.encoder).__name__} gives (0 the embeddings, -1 what its last block gives)"
            )
        return states[layer]

    def _pooled(self, found: Any) -> Any:
        for name in ("text_embeds", "pooler_output"):
            if (pooled := getattr(found, name, None)) is not None:
                return pooled
        raise GraphError(
            f"text_encoder_layers(): pooled=True: {type(self.encoder).__name__} gives neither text_embeds nor a "
            "pooler_output; leave it out"
        )


def _final_norm(encoder: nn.Module, layer: int | None) -> str:
    """The path of CLIP's last norm, which is behind all hidden states."""
    if layer is None:
        raise GraphError("text_encoder_layers(): final_norm=True: the last states have it anyway; give layer=, too")
    modules = dict(encoder.named_modules())
    for path in ("final_layer_norm", "text_model.final_layer_norm"):
        if path in modules:
            return path
    raise GraphError(
        "text_encoder_layers(): final_norm=True: expected an encoder of CLIP's kind, with a final_layer_norm behind "
        f"its hidden states, found {type(encoder).__name__}; leave it out"
    )


def text_encoder_layers(
    encoder: nn.Module,
    *,
    layer: int | None = None,
    final_norm: bool = False,
    pooled: bool = False,
    mask: str | None = None,
) -> list[Any]:
    """A text encoder of transformers as one layer (it is a twentieth of a VAE's encoder), from token ids (b, tokens).

    What a model must be given is what its pipeline's ``encode_prompt`` takes of the encoder: other states have the
    same shape, and train another model. docs/how_to/frozen_encoders.md has a table.

    Args:
        layer: which of transformers' ``hidden_states`` (b, tokens, width), as they are: -2 for SDXL. Left out,
            ``last_hidden_state``.
        final_norm: put CLIP's last norm behind that hidden state, as Stable Diffusion's ``clip_skip`` does: -2 is one
            layer skipped there.
        pooled: the result is a pair, the states and the pooled text (b, width): ``text_embeds``, where the encoder has
            a projection, else ``pooler_output``.
        mask: the batch entry with the attention mask (b, tokens), 1 for tokens and 0 for padding. Left out, padding is
            read as text is.

    Raises :class:`GraphError` for a ``final_norm`` without ``layer``, or of an encoder that is none of CLIP's kind;
    when the layer runs, for a hidden state or a pooled text that the encoder does not give.
    """
    states = TextStates(encoder, layer=layer, final_norm=final_norm, pooled=pooled)
    return [spec(states, pop=() if mask is None else mask, name="text_encoder")]
