"""The layers that diffusers' U-Nets are made of; every family of them takes its layers from here.

A hidden state is one tensor of images ``(batch, channels, height, width)``; ``temb`` is the time embedding
``(batch, channels)``, ``text`` what the model attends to, ``(batch, tokens, channels)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models.units import Origin, Unit


class Part(Unit):
    """A part of the model, which may stash its output as a skip, and the skip's height and width.

    It is called as the model calls it, with popped values in order; a subclass computes its output in another ``run``.
    """

    size = False

    def forward(self, hidden: Tensor, *popped: Tensor) -> Any:
        return self.leave(self.run(hidden, *popped))

    def run(self, hidden: Tensor, *popped: Any) -> Tensor:
        return self.part()(hidden, *popped)

    def leave(self, hidden: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """``(hidden, *stashed)``, or ``hidden`` alone when nothing is stashed; of a size two integers."""
        size = (torch.tensor(hidden.shape[-2:], device=hidden.device),) if self.size else ()
        stashed = (*((hidden, *size) if self.skip else ()), *more)
        return (hidden, *stashed) if stashed else hidden


class Stem(Part):
    """Embeddings of time, class and added conditions, then ``conv_in``; stashes ``temb`` and text that it projects."""

    OPTIONAL = ("class_embedding", "add_time_proj", "add_embedding", "time_embed_act", "encoder_hid_proj")
    PARTS: tuple[str, ...] = ("time_proj", "time_embedding", *OPTIONAL, "conv_in")
    MORE: tuple[str, ...] = ()

    def __init__(self, model: Any, origin: Origin, *, timestep_cond: bool = False) -> None:
        super().__init__(model, origin)
        config = model.config
        self.center = bool(getattr(config, "center_input_sample", False))
        self.class_is_time = getattr(config, "class_embed_type", None) == "timestep"
        self.concat_class = bool(getattr(config, "class_embeddings_concat", False))
        self.addition = getattr(config, "addition_embed_type", None)
        self.projects_text = "encoder_hid_proj" in self.paths
        self.pops = tuple(name for name, wanted in self.entries(timestep_cond=timestep_cond).items() if wanted)
        self.stashes = ("temb", *(("text_states",) if self.projects_text else ()), *self.MORE)

    def entries(self, *, timestep_cond: bool) -> dict[str, bool]:
        """Every batch entry that stems of this kind know, and whether this model has it."""
        return {
            "timestep": True,
            "timestep_cond": timestep_cond,
            "class_labels": "class_embedding" in self._modules,
            "encoder_hidden_states": self.addition == "text" or self.projects_text,
            "added_cond_kwargs.text_embeds": self.addition == "text_time",
            "added_cond_kwargs.time_ids": self.addition == "text_time",
        }

    def forward(self, sample: Tensor, *popped: Tensor) -> Any:
        entries = self.given(popped)
        if self.center:
            sample = 2 * sample - 1.0
        temb = self.embed(sample, entries)
        return self.leave(self.enter(sample, entries), temb, *self.more(sample, entries))

    def more(self, sample: Tensor, entries: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """What is stashed besides ``temb``: text, and ``MORE`` of this kind of stem."""
        return (self.encoder_hid_proj(entries["encoder_hidden_states"]),) if self.projects_text else ()

    def enter(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        """The sample as a hidden state."""
        return self.conv_in(sample)

    def embed(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        """The time embedding with everything that is added to it."""
        temb = self.time(sample, entries)
        if "class_labels" in entries:
            classes = self._classes(sample, entries["class_labels"])
            temb = torch.cat([temb, classes], dim=-1) if self.concat_class else temb + classes
        if self.addition == "text":
            temb = temb + self.add_embedding(entries["encoder_hidden_states"])
        elif self.addition == "text_time":
            temb = temb + self._text_and_sizes(temb, entries)
        return self.time_embed_act(temb) if "time_embed_act" in self._modules else temb

    def time(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        timestep = entries["timestep"]
        timestep = (timestep[None] if timestep.ndim == 0 else timestep).expand(sample.shape[0])
        waves = self.time_proj(timestep).to(sample.dtype)
        return self.time_embedding(waves, entries.get("timestep_cond"))

    def _classes(self, sample: Tensor, labels: Tensor) -> Tensor:
        if self.class_is_time:
            labels = self.time_proj(labels).to(sample.dtype)
        return self.class_embedding(labels).to(sample.dtype)

    def _text_and_sizes(self, temb: Tensor, entries: dict[str, Tensor]) -> Tensor:
        text = entries["added_cond_kwargs.text_embeds"]
        sizes = self.add_time_proj(entries["added_cond_kwargs.time_ids"].flatten()).reshape(text.shape[0], -1)
        return self.add_embedding(torch.cat([text, sizes], dim=-1).to(temb.dtype))


NO_REMEDY = "this model takes no other sizes"


class SkipResnet(Part):
    """A resnet on the way up: reads the hidden state joined with its skip."""

    remedy = "make the list with to_layers(model, upsample_size=True)"

    def forward(self, hidden: Tensor, *popped: Tensor) -> Any:
        skip, *others = popped
        if hidden.shape[-2:] != skip.shape[-2:]:
            raise BatchError(
                f"layer {self.paths[0]}: the hidden state is {_by(hidden)}, its skip {_by(skip)}: the sample's height "
                f"or width is not divisible by the model's total downsampling; {self.remedy}"
            )
        return super().forward(torch.cat([hidden, skip], dim=1), *others)


class CrossAttention(Part):
    """A transformer over the pixels that may also read the text; masks are as the model takes them (1 = keep)."""

    def run(self, hidden: Tensor, *popped: Tensor) -> Tensor:
        return self.part()(hidden, return_dict=False, **self.given(popped))[0]


class Upsample(Part):
    """Doubles height and width, or meets the size given."""

    def run(self, hidden: Tensor, size: Tensor | None = None) -> Tensor:
        return self.part()(hidden) if size is None else self.part()(hidden, tuple(size.tolist()))


class Head(Unit):
    """Norm, activation and ``conv_out``; with Fourier time embedding the output is scaled by the time."""

    OPTIONAL = ("conv_norm_out", "conv_act")
    PARTS = (*OPTIONAL, "conv_out")

    def forward(self, hidden: Tensor, timestep: Tensor | None = None) -> Tensor:
        for part in map(self.part, self.paths):
            hidden = part(hidden)
        return hidden if timestep is None else hidden / timestep.expand(hidden.shape[0]).reshape(-1, 1, 1, 1)


def _by(image: Tensor) -> str:
    return "x".join(str(side) for side in image.shape[-2:])
