"""``UniDiffuserModel``, diffusers' U-ViT over pictures and texts, as a layer list.

    embeddings
    transformer_in_blocks.0 ──skip0──────────────┐
    ...                                          │
    transformer_in_blocks.n-1 ──skip──────┐      │
    transformer_mid_block                 │      │
    transformer_out_blocks.0 ←────────────┘      │
    ...                                          │
    transformer_out_blocks.n-1 ←─────────────────┘
    outputs

Latents, picture embedding, text and both times are tokens of one sequence. The output is the model's: the
noise of latents, picture embedding and text, a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import UniDiffuserModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.units import unpatchify
from deepspeed_pulse.models.units import (
    Origin,
    Piece,
    Unit,
    Whole,
    classes_beside,
    declare,
    foreign,
    numbered,
    refuse,
    same,
)

BLOCKS = classes_beside(UniDiffuserModel, "UniDiffuserBlock", "UTransformerBlock")
TAKES_APART = (UniDiffuserModel, *classes_beside(UniDiffuserModel, "UTransformer2DModel"), *BLOCKS)
TEXT = "encoder_hidden_states"


def to_layers(
    model: UniDiffuserModel, origin: Origin, *, fine: bool, data_type: bool = False, encoder_hidden_states: bool = False
) -> Iterator[Declared]:
    """The layers of a UniDiffuser.

    The first layer's input is ``latent_image_embeds``. Batch entries that the layers pop: ``image_embeds``,
    ``prompt_embeds``, ``timestep_img``, ``timestep_text``; ``data_type`` and ``encoder_hidden_states`` when the
    flags of these names say that the batch has them. Without a data type a model that embeds it takes 1, as
    its own forward does.
    With ``granularity="fine"`` the attention of a block is one layer and its feed-forward another.
    """
    refuse(model, _problems(model, data_type=data_type, text=encoder_hidden_states))
    entries = ("image_embeds", "prompt_embeds", "timestep_img", "timestep_text", *(("data_type",) if data_type else ()))
    yield declare(Stem(model, origin), pop=same(*entries), name="embeddings")
    text = same(TEXT) if encoder_hidden_states else {}
    outer = numbered(model, "transformer.transformer_in_blocks")
    rows: list[tuple[str, str, dict[str, str], str | None]]  # a block, what joins it with its skip, pop, stash
    rows = [(path, "", text, f"skip{index}") for index, path in enumerate(outer)]
    rows += [("transformer.transformer_mid_block", "", {}, None)]  # the model reads no text in the middle
    for index, path in enumerate(numbered(model, "transformer.transformer_out_blocks")):
        rows += [(f"{path}.block", f"{path}.skip", {"skip": f"skip{len(outer) - 1 - index}", **text}, None)]
    for path, join, pop, skip in rows:
        name = path.removeprefix("transformer.").removesuffix(".block")
        if fine:
            yield declare(Attentions(model, origin, path, join=join), pop=pop, name=f"{name}.attn")
            yield declare(FeedForward(model, origin, path), skip=skip, name=f"{name}.ff")
        elif join:
            yield declare(SkipBlock(model, origin, join, path), pop=pop, name=name)
        else:
            yield declare(Whole(model, origin, path), pop=pop, skip=skip, name=name)
    yield declare(Head(model, origin), name="outputs")


def _problems(model: UniDiffuserModel, *, data_type: bool, text: bool) -> Iterator[str]:
    config = model.config
    if config.norm_type != "layer_norm":
        yield f"config.norm_type is {config.norm_type!r}, supported: 'layer_norm'"
    if data_type and not config.use_data_type_embedding:
        yield "data_type=True was asked for, but config.use_data_type_embedding is False"
    if text and config.cross_attention_dim is None:
        yield f"{TEXT}=True was asked for, but config.cross_attention_dim is None"
    paths = [*numbered(model, "transformer.transformer_in_blocks"), "transformer.transformer_mid_block"]
    paths += [f"{path}.block" for path in numbered(model, "transformer.transformer_out_blocks")]
    yield from foreign(model, paths, BLOCKS)


class Stem(Unit):
    """Everything that becomes a token, with its position.

    ``transformer.pos_embed`` is here because it has to be somewhere: the model never calls it.
    """

    TIMES = ("timestep_img_proj", "timestep_img_embed", "timestep_text_proj", "timestep_text_embed")
    POSITIONS = ("pos_embed", "pos_embed_drop", "transformer.pos_embed")
    OPTIONAL = ("data_type_token_embedding", "data_type_pos_embed_token")
    PARTS = ("vae_img_in", "clip_img_in", "text_in", *TIMES, *POSITIONS, *OPTIONAL)

    def __init__(self, model: UniDiffuserModel, origin: Origin) -> None:
        super().__init__(model, origin)
        self.typed, self.num_text_tokens = bool(model.use_data_type_embedding), model.num_text_tokens

    def forward(self, latents: Tensor, *popped: Tensor) -> Tensor:
        given = self.given(popped)
        if given["prompt_embeds"].shape[1] != self.num_text_tokens:
            raise BatchError(
                f"prompt_embeds: expected {self.num_text_tokens} text tokens (config.num_text_tokens), "
                f"found {given['prompt_embeds'].shape[1]}; pad or cut the texts"
            )
        times = [
            self._time(self.timestep_img_proj, self.timestep_img_embed, given["timestep_img"], latents),
            self._time(self.timestep_text_proj, self.timestep_text_embed, given["timestep_text"], latents),
        ]
        positions = self.pos_embed
        if self.typed:
            kinds = given.get("data_type", torch.ones(1, dtype=torch.int, device=latents.device))
            times.append(self.data_type_token_embedding(kinds.expand(len(latents))).unsqueeze(1))
            positions = torch.cat([positions[:, :2], self.data_type_pos_embed_token, positions[:, 2:]], dim=1)
        embeds = self.text_in(given["prompt_embeds"]), self.clip_img_in(given["image_embeds"])
        return self.pos_embed_drop(torch.cat([*times, *embeds, self.vae_img_in(latents)], dim=1) + positions)

    def _time(self, project: Any, embed: Any, timestep: Tensor, latents: Tensor) -> Tensor:
        waves = project(timestep.expand(len(latents)))
        return embed(waves.to(self.pos_embed.dtype)).unsqueeze(1)


class SkipBlock(Unit):
    """The layer that joins a block on the way out with its skip, and the block."""

    def forward(self, hidden: Tensor, *popped: Tensor) -> Tensor:
        join, block = map(self.part, self.paths)
        given = self.given(popped)
        return block(join(hidden, given.pop("skip")), **given)


class Half(Piece):
    """Half a block, with the block's own order of norm, branch and residual."""

    def __init__(self, model: UniDiffuserModel, origin: Origin, at: str, *, join: str = "") -> None:
        super().__init__(model, origin, at, *((join,) if join else ()))
        block = model.get_submodule(at)
        self.join = join
        self.norm_first, self.only_text = bool(block.pre_layer_norm), bool(block.only_cross_attention)
        self.norm_on_backbone = isinstance(block, BLOCKS[0])

    def residual(self, hidden: Tensor, norm: Any, branch: Any) -> Tensor:
        """``branch`` of ``hidden``, normed before or after, in the branch alone or in what it is added to."""
        if self.norm_on_backbone:
            hidden = norm(hidden) if self.norm_first else hidden
            hidden = branch(hidden) + hidden
            return hidden if self.norm_first else norm(hidden)
        output = branch(norm(hidden) if self.norm_first else hidden)
        return (output if self.norm_first else norm(output)) + hidden


class Attentions(Half):
    """The first half: the long skip, attention among the tokens and, where the block has it, to the text."""

    CHILDREN = ("norm1", "attn1", "norm2", "attn2")

    def forward(self, hidden: Tensor, *popped: Tensor) -> Tensor:
        block, given = self.block, self.given(popped)
        if self.join:
            hidden = self.part(self.join)(hidden, given["skip"])
        text = given.get(TEXT)
        first = text if self.only_text else None
        hidden = self.residual(hidden, block.norm1, lambda normed: block.attn1(normed, encoder_hidden_states=first))
        if "attn2" in block._modules:
            hidden = self.residual(hidden, block.norm2, lambda normed: block.attn2(normed, encoder_hidden_states=text))
        return hidden


class FeedForward(Half):
    """The second half."""

    CHILDREN = ("norm3", "ff")

    def forward(self, hidden: Tensor) -> Any:
        return self.leave(self.residual(hidden, self.block.norm3, self.block.ff))


class Head(Unit):
    """The tokens of latents, picture embedding and text, each projected back."""

    PARTS = ("transformer.norm_out", "vae_img_out", "clip_img_out", "text_out")

    def __init__(self, model: UniDiffuserModel, origin: Origin) -> None:
        super().__init__(model, origin)
        self.num_times = 3 if model.use_data_type_embedding else 2
        self.num_text_tokens, self.patch_size = model.num_text_tokens, model.patch_size
        self.side = model.sample_size // model.patch_size

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (self.num_times, self.num_text_tokens, 1, self.side * self.side)
        _, text, image, latents = self.part("transformer.norm_out")(hidden).split(lengths, dim=1)
        latents = unpatchify(self.vae_img_out(latents), (self.side, self.side), (self.patch_size, self.patch_size))
        return latents, self.clip_img_out(image), self.text_out(text)


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "latent_image_embeds": shapes.numbers(config.in_channels, *shapes.sides),
        "image_embeds": shapes.numbers(1, config.clip_img_dim),
        "prompt_embeds": shapes.numbers(config.num_text_tokens, config.text_dim),
        "timestep_img": shapes.integers(),
        "timestep_text": shapes.integers(),
    }
