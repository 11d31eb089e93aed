"""diffusers U-Nets (Stable Diffusion 1.x, 2.x, SDXL, ``UNet2DModel``) as layer lists.

    conv_in ──skip0──────────────────────────────────────────────┐
    down_blocks.0.resnets.0 [.attentions.0] ──skip1─────────┐    │
    down_blocks.0.downsamplers.0 ──skip2───────────────┐    │    │
    mid_block.resnets.0, .attentions.0, .resnets.1     │    │    │
    up_blocks.0.resnets.0 [.attentions.0] ←────────────┘    │    │
    up_blocks.0.resnets.1 [.attentions.1] ←─────────────────┘    │
    up_blocks.0.upsamplers.0, ..., up_blocks.n.resnets.m ←───────┘
    conv_out

One layer for each resnet, attention and resampler: the finest cut at which a single tensor, the
hidden state, flows. Skips are stashed by the last layer before the model stores them and popped by
the up resnet that concatenates them, so they nest strictly. The time embedding ``temb`` is stashed
by the first layer and popped by every resnet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets import unet_2d_blocks as blocks
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed_pulse.engine.specs import Declared, spec
from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models.units import Origin, Unit, check_cover

DOWN_BLOCKS = (
    blocks.DownBlock2D,
    blocks.AttnDownBlock2D,
    blocks.CrossAttnDownBlock2D,
    blocks.ResnetDownsampleBlock2D,
)
MID_BLOCKS = (blocks.UNetMidBlock2D, blocks.UNetMidBlock2DCrossAttn)
UP_BLOCKS = (blocks.UpBlock2D, blocks.AttnUpBlock2D, blocks.CrossAttnUpBlock2D, blocks.ResnetUpsampleBlock2D)
SIZED_UP_BLOCKS = (blocks.UpBlock2D, blocks.CrossAttnUpBlock2D)  # the ones that can meet any size of skip

Model = UNet2DConditionModel | UNet2DModel


def to_layers(
    model: Model,
    *,
    granularity: str = "block",
    attention_mask: bool = False,
    encoder_attention_mask: bool = False,
    timestep_cond: bool = False,
    upsample_size: bool | None = None,
) -> list[Declared]:
    """The layer list of a diffusers U-Net; its modules and weights are the model's own, not copies.

    The first layer's input is ``sample``. Batch entries that the layers pop: ``timestep``;
    ``class_labels`` when the model embeds classes; ``encoder_hidden_states`` when it has cross
    attention; ``text_embeds`` and ``time_ids`` (flat, not inside ``added_cond_kwargs``) for SDXL.
    All of this follows from the model's config. ``attention_mask``, ``encoder_attention_mask`` and
    ``timestep_cond`` say that the batch has these optional entries too.

    ``upsample_size=True`` is for samples whose height or width is not divisible by the model's total
    downsampling: the down path then also stashes the size that each upsampler has to produce (two
    integers a level). The default takes it from ``model.config.sample_size``.

    When ``model.enable_gradient_checkpointing()`` was called before, the layers recompute in backward
    what the model would.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    if granularity != "block":
        raise GraphError(f"granularity {granularity!r} is not there yet for {type(model).__name__}; use 'block'")
    if upsample_size is None:
        upsample_size = isinstance(model, UNet2DConditionModel) and _size_is_odd(model)
    entries = {"attention_mask": attention_mask, "encoder_attention_mask": encoder_attention_mask}
    asked = {**entries, "timestep_cond": timestep_cond, "upsample_size": upsample_size}
    problems = list(_problems(model, tuple(name for name, wanted in asked.items() if wanted)))
    if problems:
        raise GraphError(f"this {type(model).__name__} cannot become a layer list:\n  " + "\n  ".join(problems))
    walk = _Walk(model=model, masks=tuple(name for name, wanted in entries.items() if wanted))
    return walk.layers(timestep_cond=timestep_cond, upsample_size=upsample_size)


# ---------------------------------------------------------------------------------------- layers


class _Producer(Unit):
    """A unit that may stash its output as a skip, and the skip's height and width."""

    skip = False
    size = False

    def leave(self, hidden: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """``(hidden, *stashed)``, or ``hidden`` alone when nothing is stashed."""
        stashed = (hidden,) if self.skip else ()
        if self.size:
            stashed += (torch.tensor(hidden.shape[-2:], device=hidden.device),)
        return (hidden, *stashed, *more) if stashed or more else hidden


class Stem(_Producer):
    """Embeddings of time, class and added conditions, then ``conv_in``; stashes ``temb``."""

    OPTIONAL = ("class_embedding", "add_time_proj", "add_embedding", "time_embed_act", "encoder_hid_proj")

    def __init__(self, model: Model, origin: Origin, *, pops: tuple[str, ...]) -> None:
        present = tuple(name for name in self.OPTIONAL if getattr(model, name, None) is not None)
        super().__init__(model, origin, "time_proj", "time_embedding", *present, "conv_in")
        self.pops = pops
        self.center = bool(model.config.center_input_sample)
        self.class_is_time = model.config.class_embed_type == "timestep"
        self.concat_class = bool(getattr(model.config, "class_embeddings_concat", False))
        self.addition = getattr(model.config, "addition_embed_type", None)

    def forward(self, sample: Tensor, *popped: Tensor) -> tuple[Tensor, ...]:
        entries = dict(zip(self.pops, popped, strict=True))
        if self.center:
            sample = 2 * sample - 1.0
        temb = self._time(sample, entries)
        if "class_labels" in entries:
            classes = self._classes(sample, entries["class_labels"])
            temb = torch.cat([temb, classes], dim=-1) if self.concat_class else temb + classes
        if self.addition == "text":
            temb = temb + self.add_embedding(entries["encoder_hidden_states"])
        elif self.addition == "text_time":
            temb = temb + self._text_and_sizes(temb, entries["text_embeds"], entries["time_ids"])
        if "time_embed_act" in self._modules:
            temb = self.time_embed_act(temb)
        text = (self.encoder_hid_proj(entries["encoder_hidden_states"]),) if "encoder_hid_proj" in self._modules else ()
        hidden = self.conv_in(sample)
        return self.leave(hidden, temb, *text)

    def _time(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        timestep = entries["timestep"]
        timestep = (timestep[None] if timestep.ndim == 0 else timestep).expand(sample.shape[0])
        waves = self.time_proj(timestep).to(sample.dtype)
        return self.time_embedding(waves, entries.get("timestep_cond"))

    def _classes(self, sample: Tensor, labels: Tensor) -> Tensor:
        if self.class_is_time:
            labels = self.time_proj(labels).to(sample.dtype)
        return self.class_embedding(labels).to(sample.dtype)

    def _text_and_sizes(self, temb: Tensor, text_embeds: Tensor, time_ids: Tensor) -> Tensor:
        sizes = self.add_time_proj(time_ids.flatten()).reshape(text_embeds.shape[0], -1)
        return self.add_embedding(torch.cat([text_embeds, sizes], dim=-1).to(temb.dtype))


class Resnet(_Producer):
    """A resnet on the way down or in the middle, or a resampler that is a resnet."""

    recompute = False

    def forward(self, hidden: Tensor, temb: Tensor) -> Any:
        return self.leave(self.resnet(hidden, temb))

    def resnet(self, hidden: Tensor, temb: Tensor) -> Tensor:
        """The resnet itself; with ``recompute`` its activations are not kept for backward."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.part(), hidden, temb, use_reentrant=False)
        return self.part()(hidden, temb)


class SkipResnet(Resnet):
    """A resnet on the way up: reads the hidden state joined with its skip."""

    def forward(self, hidden: Tensor, skip: Tensor, temb: Tensor) -> Any:
        if hidden.shape[-2:] != skip.shape[-2:]:
            raise BatchError(
                f"layer {self.paths[0]}: the hidden state is {_by(hidden)}, its skip {_by(skip)}: the sample's height "
                "or width is not divisible by the model's total downsampling; "
                "make the list with to_layers(model, upsample_size=True)"
            )
        return self.leave(self.resnet(torch.cat([hidden, skip], dim=1), temb))


class SelfAttention(_Producer):
    """Attention among the pixels."""

    def forward(self, hidden: Tensor) -> Any:
        return self.leave(self.part()(hidden))


class CrossAttention(_Producer):
    """A transformer over the pixels that also reads the text; masks as the model takes them (1 = keep)."""

    masks: tuple[str, ...] = ()

    def forward(self, hidden: Tensor, text: Tensor, *masks: Tensor) -> Any:
        given = dict(zip(self.masks, masks, strict=True))
        return self.leave(self.part()(hidden, encoder_hidden_states=text, return_dict=False, **given)[0])


class Downsample(_Producer):
    """Halves height and width."""

    def forward(self, hidden: Tensor) -> Any:
        return self.leave(self.part()(hidden))


class Upsample(Unit):
    """Doubles height and width, or meets the size given."""

    def forward(self, hidden: Tensor, size: Tensor | None = None) -> Tensor:
        return self.part()(hidden) if size is None else self.part()(hidden, tuple(size.tolist()))


class Head(Unit):
    """Norm, activation and ``conv_out``; with Fourier time embedding the output is scaled by the time."""

    def __init__(self, model: Model, origin: Origin) -> None:
        present = tuple(name for name in ("conv_norm_out", "conv_act") if getattr(model, name) is not None)
        super().__init__(model, origin, *present, "conv_out")
        self.normed = "conv_norm_out" in present

    def forward(self, hidden: Tensor, timestep: Tensor | None = None) -> Tensor:
        if self.normed:
            hidden = self.conv_act(self.conv_norm_out(hidden))
        output = self.conv_out(hidden)
        return output if timestep is None else output / timestep.expand(output.shape[0]).reshape(-1, 1, 1, 1)


# ------------------------------------------------------------------------------------------ walk


class _Walk:
    """Walks a model in forward order and declares its layers."""

    def __init__(self, *, model: Model, masks: tuple[str, ...]) -> None:
        self.model = model
        self.masks = masks
        self.origin = Origin.of(model)
        self.projects_text = getattr(model, "encoder_hid_proj", None) is not None
        self.recompute = bool(getattr(model, "is_gradient_checkpointing", False))
        self.text = "text_states" if self.projects_text else "encoder_hidden_states"
        self.declared: list[Declared] = []
        self.waiting: list[str] = []  # skips stashed and not popped yet
        self.num_skips = 0
        self.sized: dict[int, int] = {}

    def layers(self, *, timestep_cond: bool, upsample_size: bool) -> list[Declared]:
        self.sized = _sized_skips(self.model) if upsample_size else {}
        self._stem(timestep_cond)
        for index, block in enumerate(self.model.down_blocks):
            self._down(f"down_blocks.{index}", block)
        if self.model.mid_block is not None:
            self._mid("mid_block", self.model.mid_block)
        for index, block in enumerate(self.model.up_blocks):
            self._up(f"up_blocks.{index}", block, size=f"size{self.sized[index]}" if index in self.sized else None)
        fourier = isinstance(self.model, UNet2DModel) and self.model.config.time_embedding_type == "fourier"
        self._add(Head(self.model, self.origin), name="conv_out", pop=("timestep",) if fourier else ())
        check_cover((declared.layer for declared in self.declared), self.origin)
        return self.declared

    def _stem(self, timestep_cond: bool) -> None:
        addition = getattr(self.model.config, "addition_embed_type", None)
        pops = {
            "timestep": True,
            "timestep_cond": timestep_cond,
            "class_labels": self.model.class_embedding is not None,
            "encoder_hidden_states": addition == "text" or self.projects_text,
            "text_embeds": addition == "text_time",
            "time_ids": addition == "text_time",
        }
        pop = tuple(name for name, wanted in pops.items() if wanted)
        stash = ("temb", "text_states") if self.projects_text else ("temb",)
        self._add(Stem(self.model, self.origin, pops=pop), name="conv_in", pop=pop, skip=True, stash=stash)

    def _down(self, path: str, block: nn.Module) -> None:
        attentions = getattr(block, "attentions", ())
        for index in range(len(block.resnets)):
            self._resnet(f"{path}.resnets.{index}", skip=not len(attentions))
            if len(attentions):
                self._attention(f"{path}.attentions.{index}", skip=True)
        for index, sampler in enumerate(block.downsamplers or ()):
            at = f"{path}.downsamplers.{index}"
            if isinstance(sampler, ResnetBlock2D):
                self._resnet(at, skip=True)
            else:
                self._add(Downsample(self.model, self.origin, at), skip=True)

    def _mid(self, path: str, block: nn.Module) -> None:
        self._resnet(f"{path}.resnets.0")
        for index, attention in enumerate(block.attentions):
            if attention is not None:
                self._attention(f"{path}.attentions.{index}")
            self._resnet(f"{path}.resnets.{index + 1}")

    def _up(self, path: str, block: nn.Module, *, size: str | None) -> None:
        for index in range(len(block.resnets)):
            unit = SkipResnet(self.model, self.origin, f"{path}.resnets.{index}")
            unit.recompute = self.recompute
            self._add(unit, pop=(self.waiting.pop(), "temb"))
            if len(getattr(block, "attentions", ())):
                self._attention(f"{path}.attentions.{index}")
        for index, sampler in enumerate(block.upsamplers or ()):
            at = f"{path}.upsamplers.{index}"
            if isinstance(sampler, ResnetBlock2D):
                self._resnet(at)
            else:
                self._add(Upsample(self.model, self.origin, at), pop=(size,) if size else ())

    def _resnet(self, path: str, *, skip: bool = False) -> None:
        unit = Resnet(self.model, self.origin, path)
        unit.recompute = self.recompute and ".resnets." in path
        self._add(unit, pop=("temb",), skip=skip)

    def _attention(self, path: str, *, skip: bool = False) -> None:
        if not isinstance(self.model.get_submodule(path), Transformer2DModel):
            self._add(SelfAttention(self.model, self.origin, path), skip=skip)
            return
        unit = CrossAttention(self.model, self.origin, path)
        unit.masks = self.masks
        self._add(unit, pop=(self.text, *self.masks), skip=skip)

    def _add(
        self,
        unit: Unit,
        *,
        name: str | None = None,
        pop: tuple[str, ...] = (),
        skip: bool = False,
        stash: tuple[str, ...] = (),
    ) -> None:
        if skip:
            unit.skip, unit.size = True, self.num_skips in self.sized.values()
            sizes = (f"size{self.num_skips}",) if unit.size else ()
            stash = (f"skip{self.num_skips}", *sizes, *stash)
            self.waiting.append(f"skip{self.num_skips}")
            self.num_skips += 1
        self.declared.append(spec(unit, stash=stash, pop=pop, name=name or unit.paths[0]))


def _sized_skips(model: Model) -> dict[int, int]:
    """Up block -> the skip popped after it, whose height and width its upsampler has to produce."""
    waiting = 1 + sum(len(block.resnets) + len(block.downsamplers or ()) for block in model.down_blocks)
    sized = {}
    for index, block in enumerate(model.up_blocks):
        waiting -= len(block.resnets)
        if isinstance(block, SIZED_UP_BLOCKS) and block.upsamplers and waiting:
            sized[index] = waiting - 1
    return sized


def _size_is_odd(model: Model) -> bool:
    """True when the sample size in the config is known and not divisible by the total downsampling."""
    size = model.config.sample_size
    sides = size if isinstance(size, (tuple, list)) else (size,)
    return any(side is not None and side % 2**model.num_upsamplers for side in sides)


def _by(image: Tensor) -> str:
    return "x".join(str(side) for side in image.shape[-2:])


# -------------------------------------------------------------------------------------- problems


def _problems(model: Model, asked: tuple[str, ...]) -> Iterator[str]:
    """Everything about the model, or asked for with it, that the layers cannot express."""
    config = model.config
    handled = {
        "addition_embed_type": (None, "text", "text_time"),
        "encoder_hid_dim_type": (None, "text_proj"),
        "attention_type": ("default",),
        "dual_cross_attention": (False,),
    }
    for key, values in handled.items():
        found = getattr(config, key, values[0])
        if found not in values:
            yield f"config.{key} is {found!r}, supported: {', '.join(repr(value) for value in values)}"
    if isinstance(model, UNet2DModel):
        yield from (f"{name}=True was asked for, which UNet2DModel does not take" for name in asked)
    elif "timestep_cond" in asked and config.time_cond_proj_dim is None:
        yield "timestep_cond=True was asked for, but config.time_cond_proj_dim is None"
    for path, block, kinds in _blocks(model):
        if type(block) not in kinds:
            supported = ", ".join(kind.__name__ for kind in kinds)
            yield f"{path} is a {type(block).__name__}, supported: {supported}"
        elif any(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2")):
            yield f"{path} has FreeU enabled; call model.disable_freeu() (it is for sampling)"
        else:
            yield from _unknown_parts(path, block)


def _blocks(model: Model) -> Iterator[tuple[str, nn.Module, tuple[type[nn.Module], ...]]]:
    yield from ((f"down_blocks.{index}", block, DOWN_BLOCKS) for index, block in enumerate(model.down_blocks))
    if model.mid_block is not None:
        yield "mid_block", model.mid_block, MID_BLOCKS
    yield from ((f"up_blocks.{index}", block, UP_BLOCKS) for index, block in enumerate(model.up_blocks))


def _unknown_parts(path: str, block: nn.Module) -> Iterator[str]:
    crosses = getattr(block, "has_cross_attention", False)
    kinds = {
        "resnets": (ResnetBlock2D,),
        "attentions": (Transformer2DModel,) if crosses else (blocks.Attention,),
        "downsamplers": (Downsample2D, ResnetBlock2D),
        "upsamplers": (Upsample2D, ResnetBlock2D),
    }
    for group, known in kinds.items():
        for index, part in enumerate(getattr(block, group, None) or ()):
            at = f"{path}.{group}.{index}"
            if part is not None and not isinstance(part, known):
                yield f"{at} is a {type(part).__name__}, supported: {', '.join(kind.__name__ for kind in known)}"
            elif getattr(part, "spatial_norm", None) is not None:
                yield f"{at} has a spatial norm, which reads the time embedding; supported: attention without"
