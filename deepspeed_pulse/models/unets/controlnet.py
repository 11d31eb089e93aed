"""A U-Net together with its ControlNet, as one layer list.

    conv_in                               ──skip0──────────────────────────────────┐
    controlnet.conv_in                    ──controlnet.skip0──────────────────┐    │
    down_blocks.0.resnets.0               ──skip1───────────────────────┐     │    │
    controlnet.down_blocks.0.resnets.0    ──controlnet.skip1───────┐    │     │    │
    ...                                                            │    │     │    │
    mid_block, controlnet.mid_block, controlnet.controlnet_mid_block    │     │    │
    ...                                                            │    │     │    │
    controlnet.controlnet_down_blocks.1 ←──────────────────────────┴────┘     │    │
    up_blocks.n.resnets.m                                                     │    │
    controlnet.controlnet_down_blocks.0 ←─────────────────────────────────────┴────┘
    up_blocks.n.resnets.m + 1

The two encoders go down side by side, so that both ends of every skip can lie on one rank: down to the middle the
hidden state is a pair of tensors, the U-Net's and the ControlNet's. The ControlNet's projections run where the skips
are popped, the deepest one above the U-Net's middle: what is stashed is then what the next layer keeps for backward
anyway, and gradients add up in the models' own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.bypassed import check_bypassed, check_modes, check_switches
from deepspeed_pulse.models.entries import set_entry_rules
from deepspeed_pulse.models.unets.unet_2d import BLOCKS, CONFIG, IN_BLOCKS, SAMPLERS
from deepspeed_pulse.models.unets.units import Stem
from deepspeed_pulse.models.unets.walk import Layers, Walk, unknown_blocks, unknown_values
from deepspeed_pulse.models.units import Origin, Unit, check_cover, declare, refuse, same, without_wrapper

PREFIX = "controlnet."


class Lane(Unit):
    """Runs a unit on one of two hidden states that travel as a pair; a single one enters as both."""

    def __init__(self, declared: Declared, lane: int) -> None:
        unit: Any = declared.layer
        super().__init__(unit, unit.origin, *unit.paths)
        self._unit = [unit]  # in a list: its parameters are registered here already, under their own names
        self.lane, self.stashes = lane, bool(declared.stash)

    def forward(self, hidden: Tensor | tuple[Tensor, Tensor], *popped: Tensor) -> Any:
        pair = list(hidden) if isinstance(hidden, tuple) else [hidden, hidden]
        output = self._unit[0](pair[self.lane], *popped)
        pair[self.lane], *stashed = output if self.stashes else (output,)
        return (tuple(pair), *stashed) if stashed else tuple(pair)


class ControlStem(Stem):
    """The ControlNet's own embeddings, and the image that controls added behind ``conv_in``."""

    PARTS = (*Stem.PARTS[:-1], "controlnet_cond_embedding", "conv_in")

    def __init__(self, model: Any, origin: Origin, *, timestep_cond: bool = False) -> None:
        super().__init__(model, origin, timestep_cond=timestep_cond)
        self.flips = model.config.controlnet_conditioning_channel_order == "bgr"

    def entries(self, *, timestep_cond: bool) -> dict[str, bool]:
        return {**super().entries(timestep_cond=False), "controlnet_cond": True}

    def enter(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        image = entries["controlnet_cond"]
        image = torch.flip(image, dims=[1]) if self.flips else image
        return self.conv_in(sample) + self.controlnet_cond_embedding(image)


class _Residual(Unit):
    """A projection of the ControlNet's hidden state, scaled."""

    def __init__(self, model: Any, origin: Origin, path: str, scale: float) -> None:
        super().__init__(model, origin, path)
        self.scale, self.pools = scale, bool(model.config.global_pool_conditions)

    def residual(self, control: Tensor) -> Tensor:
        projected = self.part()(control) * self.scale
        return torch.mean(projected, dim=(2, 3), keepdim=True) if self.pools else projected


class ControlledSkip(_Residual):
    """Adds the ControlNet's residual to a skip, and stashes it anew for the resnet that follows."""

    def forward(self, hidden: Tensor, skip: Tensor, control: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, skip + self.residual(control)


class ControlledMiddle(_Residual):
    """Joins the pair of hidden states below the encoders."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        hidden, control = pair
        return hidden + self.residual(control)


class ControlWalk(Walk):
    """The ControlNet's encoder and middle; its names begin with ``controlnet.``."""

    stem_kind = ControlStem

    def own_rows(self) -> list[Layers]:
        """Every row of the encoder, then the middle."""
        rows = [*(self.pushed(row) for row in self.encoder()), self.middle()]
        own = {name for row in rows for layer in row for name in layer.stash}
        return [[_prefixed(layer, own) for layer in row] for row in rows]


class ControlledWalk(Walk):
    """A U-Net's walk that takes the ControlNet's along."""

    def __init__(self, unet: Any, origin: Origin, control: ControlWalk, *, scale: float, **options: Any) -> None:
        super().__init__(unet, origin, **options)
        self.control, self.scale = control, scale

    def layers(self) -> Layers:
        own = [self.pushed(row) for row in self.encoder()]
        *control_rows, control_middle = self.control.own_rows()
        if len(own) != len(control_rows):
            raise GraphError(
                f"the ControlNet's encoder stores {len(control_rows)} skips, the U-Net's {len(own)}; they must be of "
                "one shape (ControlNetModel.from_unet makes such a one)"
            )
        layers: Layers = []
        for row, control_row in zip(own, control_rows, strict=True):
            layers += [*_on_lane(0, row), *_on_lane(1, control_row)]
        self._deepest = self.waiting[-1]
        layers += [*_on_lane(1, control_middle), self._controlled(self._deepest), *_on_lane(0, self.middle())]
        middle = self._residual(ControlledMiddle, "controlnet_mid_block")
        return [*layers, declare(middle, name=f"{PREFIX}controlnet_mid_block"), *self.decoder(), *self.head()]

    def skip_resnet(self, path: str, skip: str) -> Layers:
        controlled = [] if skip == self._deepest else [self._controlled(skip)]
        return [*controlled, *super().skip_resnet(path, f"controlled.{skip}")]

    def _controlled(self, skip: str) -> Declared:
        path = f"controlnet_down_blocks.{skip.removeprefix('skip')}"
        unit, pop = self._residual(ControlledSkip, path), same(skip, f"{PREFIX}{skip}")
        return declare(unit, pop=pop, stash=(f"controlled.{skip}",), name=f"{PREFIX}{path}")

    def _residual(self, kind: type[_Residual], path: str) -> _Residual:
        return kind(self.control.model, self.control.origin, path, self.scale)


def _on_lane(lane: int, layers: Layers) -> Layers:
    return [replace(layer, layer=Lane(layer, lane)) for layer in layers]


def controlled_layers(
    unet: Any, origin: Origin, controlnet: Any, *, conditioning_scale: float, fine: bool, **options: Any
) -> Layers:
    """The layers of both; ``options`` are those of :class:`.walk.Walk`.

    Raises :class:`GraphError` naming every part of the ControlNet that cannot be expressed.
    """
    controlnet = without_wrapper(controlnet)
    if not isinstance(controlnet, ControlNetModel):
        raise GraphError(f"controlnet: expected a ControlNetModel, found {type(controlnet).__name__}")
    refuse(controlnet, _problems(controlnet, options.get("masks", ())))
    check_switches(controlnet)
    control = ControlWalk(controlnet, Origin.of(controlnet), fine=fine)
    layers = ControlledWalk(unet, origin, control, scale=conditioning_scale, fine=fine, **options).layers()
    check_cover(layers, control.origin)
    check_bypassed(controlnet, layers, (ControlNetModel, *IN_BLOCKS))
    check_modes(controlnet, layers)
    set_entry_rules(controlnet, ControlNetModel, layers, controlled_layers)
    return layers


def _problems(controlnet: Any, masks: tuple[str, ...]) -> Iterator[str]:
    if "attention_mask" in masks:
        yield "attention_mask=True was asked for, which is not supported beside a ControlNet"
    yield from unknown_values(controlnet.config, {**CONFIG, "encoder_hid_dim_type": (None,)})
    yield from unknown_blocks(controlnet, **{**BLOCKS, "up": ()}, **SAMPLERS)


def _prefixed(declared: Declared, own: set[str]) -> Declared:
    return replace(
        declared,
        name=f"{PREFIX}{declared.name}",
        stash=tuple(f"{PREFIX}{name}" for name in declared.stash),
        pop=tuple(f"{PREFIX}{name}" if name in own else name for name in declared.pop),
    )
