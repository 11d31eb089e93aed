"""Walks any of diffusers' U-Nets in forward order and declares its layers.

    conv_in ──skip0──────────────────────────────────────────────┐
    down_blocks.0.resnets.0 [.attentions.0] ──skip1─────────┐    │
    down_blocks.0.downsamplers.0 ──skip2───────────────┐    │    │
    mid_block.resnets.0, .attentions.0, .resnets.1     │    │    │
    up_blocks.0.resnets.0 [.attentions.0] ←────────────┘    │    │
    up_blocks.0.resnets.1 [.attentions.1] ←─────────────────┘    │
    up_blocks.0.upsamplers.0, ..., up_blocks.n.resnets.m ←───────┘
    conv_out

One layer for each resnet, attention and resampler: the finest cut at which a single tensor, the hidden state, flows
(``granularity="fine"`` cuts transformers further). The layers up to a skip are a *row*: a resnet with what follows it,
or a resampler. Skips are stashed by the last layer of their row and popped by the up resnet that concatenates them, so
they nest strictly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import AttnUpBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.entries import takes_timestep_cond
from deepspeed_pulse.models.unets.tokens import Cut
from deepspeed_pulse.models.unets.units import NO_REMEDY, CrossAttention, Head, Part, SkipResnet, Stem, Upsample
from deepspeed_pulse.models.units import Origin, declare, same

Layers = list[Declared]
Kinds = tuple[type[nn.Module], ...]

PARTS: Mapping[str, Kinds] = {
    "resnets": (ResnetBlock2D,),
    "attentions": (Transformer2DModel,),
    "downsamplers": (Downsample2D,),
    "upsamplers": (Upsample2D,),
}
"""Lists of modules in a block, and the kinds of modules in them where a family has no others."""

PLAIN_PARTS: Mapping[str, Kinds] = {"attentions": (Attention,)}
"""What is different in blocks without cross attention."""


class Walk:
    """One walk over one model. A family overrides what differs.

    Args:
        model: a diffusers U-Net with ``down_blocks``, ``mid_block`` and ``up_blocks``.
        upsample_size: the down path stashes the size that each upsampler has to produce; None: where the size of
            samples in the config needs it.
        timestep_cond, masks: optional batch entries that the batch has.
    """

    followers: tuple[str, ...] = ("attentions",)
    """Lists of a block whose i-th module follows the i-th resnet, in this order."""

    stem_kind: type[Stem] = Stem
    head_kind: type[Head] = Head
    head_pop: tuple[str, ...] = ()
    transformer_kind: type[Part] = CrossAttention
    cut = Cut()

    def __init__(
        self,
        model: Any,
        origin: Origin,
        *,
        fine: bool,
        upsample_size: bool | None = False,
        timestep_cond: bool = False,
        masks: tuple[str, ...] = (),
    ) -> None:
        self.model, self.origin, self.fine = model, origin, fine
        self.timestep_cond, self.masks = timestep_cond, masks
        projects_text = getattr(model, "encoder_hid_proj", None) is not None
        self.text = "text_states" if projects_text else "encoder_hidden_states"
        if upsample_size is None:
            upsample_size = not isinstance(model, UNet2DModel) and _size_is_odd(model)
        self._sized = self._sized_skips() if upsample_size else {}
        self._takes_any_size = not upsample_size and not isinstance(model, UNet2DModel)
        self.waiting: list[str] = []  # skips stashed and not popped yet

    def layers(self) -> Layers:
        """Every layer, in forward order."""
        rows = [self.pushed(row) for row in self.encoder()]
        return [*chain(*rows), *self.middle(), *self.decoder(), *self.head()]

    # -- what a family may override ------------------------------------------------------------------

    def stem(self) -> Layers:
        """From the sample to the first skip."""
        stem = self.stem_kind(self.model, self.origin, timestep_cond=self.timestep_cond)
        return [declare(stem, name="conv_in", pop=same(*stem.pops), stash=stem.stashes)]

    def head(self) -> Layers:
        """With Fourier time embedding the output is scaled by the time."""
        fourier = isinstance(self.model, UNet2DModel) and self.model.config.time_embedding_type == "fourier"
        pop = ("timestep",) if fourier else self.head_pop
        return [declare(self.head_kind(self.model, self.origin), pop=same(*pop), name="conv_out")]

    def kinds(self) -> dict[type[nn.Module], Callable[[str], Layers]]:
        """Class of a part to the layers that it becomes; others pop nothing."""
        return {ResnetBlock2D: lambda path: self.one(path, "temb"), Transformer2DModel: self.transformer}

    def skip_resnet(self, path: str, skip: str) -> Layers:
        return self.one(path, skip, "temb", kind=SkipResnet)

    def transformer(self, path: str) -> Layers:
        """A ``Transformer2DModel``."""
        given = self.given(path)
        if self.fine:
            return list(self.cut.transformer(self.model, self.origin, path, given))
        return [declare(self.transformer_kind(self.model, self.origin, path), pop=given)]

    def given(self, path: str) -> dict[str, str]:
        """The named value for each argument of a transformer: the text, and the masks that the batch has."""
        return {"encoder_hidden_states": self.text, **same(*self.masks)}

    def row_after(self, block: nn.Module, index: int) -> Iterator[str]:
        """Paths within a block of what follows its resnet ``index``."""
        for group in self.followers:
            modules = getattr(block, group, None) or ()
            if index < len(modules) and modules[index] is not None:
                yield f"{group}.{index}"

    # -- the walk ------------------------------------------------------------------------------------

    def encoder(self) -> Iterator[Layers]:
        """The rows of the down path; each ends where the model stores a skip."""
        yield self.stem()
        for number, block in enumerate(self.model.down_blocks):
            path = f"down_blocks.{number}"
            for index in range(len(block.resnets)):
                yield self._row(path, block, index)
            for index in range(len(block.downsamplers or ())):
                yield self.part(f"{path}.downsamplers.{index}")

    def middle(self) -> Layers:
        block = self.model.mid_block
        rows = range(len(block.resnets)) if block is not None else ()
        return [layer for index in rows for layer in self._row("mid_block", block, index)]

    def decoder(self) -> Iterator[Declared]:
        for number, block in enumerate(self.model.up_blocks):
            path = f"up_blocks.{number}"
            for index in range(len(block.resnets)):
                for declared in self.skip_resnet(f"{path}.resnets.{index}", self.waiting.pop()):
                    if isinstance(declared.layer, SkipResnet) and not self._takes_any_size:
                        declared.layer.remedy = NO_REMEDY
                    yield declared
                yield from self._after(path, block, index)
            size = (f"size{self._sized[number]}",) if number in self._sized else ()
            for index, sampler in enumerate(block.upsamplers or ()):
                at = f"{path}.upsamplers.{index}"
                yield from self.one(at, *size, kind=Upsample) if isinstance(sampler, Upsample2D) else self.part(at)

    def pushed(self, row: Layers) -> Layers:
        """A row whose last layer, a :class:`Part`, now stashes the next skip."""
        *before, last = row
        assert isinstance(last.layer, Part)
        number = len(self.waiting)
        last.layer.skip, last.layer.size = True, number in self._sized.values()
        skip = (f"skip{number}", f"size{number}") if last.layer.size else (f"skip{number}",)
        self.waiting.append(f"skip{number}")
        return [*before, replace(last, stash=(*skip, *last.stash))]

    def part(self, path: str) -> Layers:
        """The layers of one resnet, attention or resampler, by its class."""
        module = self.model.get_submodule(path)
        for kind, make in self.kinds().items():
            if isinstance(module, kind):
                return make(path)
        return self.one(path)

    def one(self, path: str, *pop: str, kind: type[Part] = Part) -> Layers:
        """A part that is one layer."""
        return [declare(kind(self.model, self.origin, path), pop=same(*pop))]

    def _row(self, path: str, block: nn.Module, index: int) -> Layers:
        return [*self.part(f"{path}.resnets.{index}"), *self._after(path, block, index)]

    def _after(self, path: str, block: nn.Module, index: int) -> Layers:
        return [layer for name in self.row_after(block, index) for layer in self.part(f"{path}.{name}")]

    def _sized_skips(self) -> dict[int, int]:
        """Up block -> the skip popped after it, whose height and width its upsampler has to produce."""
        waiting = 1 + sum(len(block.resnets) + len(block.downsamplers or ()) for block in self.model.down_blocks)
        sized = {}
        for index, block in enumerate(self.model.up_blocks):
            waiting -= len(block.resnets)
            resizes = any(isinstance(sampler, Upsample2D) for sampler in block.upsamplers or ())
            if waiting and resizes and not isinstance(block, AttnUpBlock2D):  # which only ever doubles
                sized[index] = waiting - 1
        return sized


def _size_is_odd(model: Any) -> bool:
    """True when the sample size in the config is known and not divisible by the total downsampling."""
    size = model.config.sample_size
    sides = size if isinstance(size, (tuple, list)) else (size,)
    return any(side is not None and side % 2**model.num_upsamplers for side in sides)


def unknown_values(config: Any, handled: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Keys of a config whose value is not one of those handled; the first is that of configs without the key."""
    for key, values in handled.items():
        found = getattr(config, key, values[0])
        if found not in values:
            yield f"config.{key} is {found!r}, supported: {', '.join(repr(value) for value in values)}"


def unknown_condition(model: Any, timestep_cond: bool) -> Iterator[str]:
    """A ``timestep_cond`` that was asked for of a model that fails with one."""
    if timestep_cond and not takes_timestep_cond(model):
        yield "timestep_cond=True was asked for, but config.time_cond_proj_dim is None"


def unknown_blocks(model: Any, *, down: Kinds, mid: Kinds, up: Kinds, **parts: Kinds) -> Iterator[str]:
    """Blocks of another kind, blocks with FreeU on, and parts of another kind within known blocks.

    ``parts``: where a family's are not those of :data:`PARTS`.
    """
    for path, block, kinds in _blocks(model, down, mid, up):
        if not isinstance(block, kinds):
            yield f"{path} is a {type(block).__name__}, supported: {_names(kinds)}"
        elif any(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2")):
            yield f"{path} has FreeU enabled; call model.disable_freeu() (it is for sampling)"
        else:
            crosses = getattr(block, "has_cross_attention", False)
            yield from _unknown_parts(path, block, {**PARTS, **parts, **({} if crosses else PLAIN_PARTS)})


def _blocks(model: Any, down: Kinds, mid: Kinds, up: Kinds) -> Iterator[tuple[str, nn.Module, Kinds]]:
    yield from ((f"down_blocks.{index}", block, down) for index, block in enumerate(model.down_blocks))
    if model.mid_block is not None:
        yield "mid_block", model.mid_block, mid
    yield from ((f"up_blocks.{index}", block, up) for index, block in enumerate(getattr(model, "up_blocks", ())))


def _unknown_parts(path: str, block: nn.Module, parts: Mapping[str, Kinds]) -> Iterator[str]:
    for group, known in parts.items():
        for index, part in enumerate(getattr(block, group, None) or ()):
            at = f"{path}.{group}.{index}"
            if part is not None and not isinstance(part, known):
                yield f"{at} is a {type(part).__name__}, supported: {_names(known)}"
            elif getattr(part, "spatial_norm", None) is not None:
                yield f"{at} has a spatial norm, which reads the time embedding; supported: attention without"


def _names(kinds: Kinds) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
