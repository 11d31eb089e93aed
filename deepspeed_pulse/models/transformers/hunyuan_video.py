"""``HunyuanVideoTransformer3DModel`` as a layer list.

    x_embedder ──temb──▶ every block and proj_out
    transformer_blocks.0, ...                 (hidden, text) attend together, each with its own weights
    single_transformer_blocks.0, ...          (hidden, text) with the same weights
    proj_out

The rotary table and the mask over patches and text are made on every rank, once for a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.joint_blocks import JointAttention, JointBlock, JointFeedForward
from deepspeed_pulse.models.transformers.units import PatchHead, PatchUnit, Remembered, Sharing, halves, size_only
from deepspeed_pulse.models.units import Origin, classes_beside, declare, foreign, numbered, refuse, same

BLOCKS = {
    path: classes_beside(
        HunyuanVideoTransformer3DModel, f"HunyuanVideo{kind}Block", f"HunyuanVideoTokenReplace{kind}Block"
    )
    for path, kind in (("transformer_blocks", "Transformer"), ("single_transformer_blocks", "SingleTransformer"))
}
"""List of blocks to the classes of blocks in it."""

TAKES_APART = (HunyuanVideoTransformer3DModel, *BLOCKS["transformer_blocks"])
MASK = "encoder_attention_mask"
REPLACE = "token_replace"
LLAMA_TOKENS = 256


def to_layers(model: HunyuanVideoTransformer3DModel, origin: Origin, *, fine: bool) -> Iterator[Declared]:
    """The layers of a HunyuanVideo transformer.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep``,
    ``encoder_hidden_states``, ``encoder_attention_mask``, ``pooled_projections``, and ``guidance`` when the config
    has ``guidance_embeds``.
    With ``granularity="fine"`` the attention of a block of two streams is one layer and its feed-forwards
    another. The blocks of one stream stay whole: they compute both at once and project them together.
    """
    problems = [line for path, known in BLOCKS.items() for line in foreign(model, numbered(model, path), known)]
    if fine and model.config.image_condition_type == REPLACE:
        problems.append(
            f"config.image_condition_type is {REPLACE!r}, whose blocks treat the first frame apart: they are layers "
            'of granularity "block" only'
        )
    refuse(model, problems)
    guidance = ("guidance",) if model.config.guidance_embeds else ()
    replaced = ("token_replace_emb",) if model.config.image_condition_type == REPLACE else ()
    entries = ("timestep", "encoder_hidden_states", MASK, "pooled_projections", *guidance)
    yield declare(Stem(model, origin), pop=same(*entries), stash=("patches", "temb", *replaced))
    shared = Remembered()
    pop = same("patches", "temb", MASK, *replaced)
    paths = [path for blocks in BLOCKS for path in numbered(model, blocks)]
    for path in paths:
        last, single = path == paths[-1], path.startswith("single")
        if fine and not single:
            attention = Attention(model, origin, path, "rope").sharing(shared)
            yield from halves(attention, JointFeedForward(model, origin, path, last=last), pop=pop)
        else:
            kind = Block if single else TwoStreamBlock
            yield declare(kind(model, origin, path, "rope", last=last).sharing(shared), pop=pop)
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(PatchUnit):
    """Patches, the refined text, and the embedding of time, guidance and pooled text."""

    PARTS = ("x_embedder", "context_embedder", "time_text_embed")

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Any, ...]:
        given = self.given(popped)
        timestep, text, mask = given["timestep"], given["encoder_hidden_states"], given[MASK]
        temb, replaced = self.time_text_embed(timestep, given["pooled_projections"], given.get("guidance"))
        streams = self.x_embedder(hidden), self.context_embedder(text, timestep, mask)
        leaving = streams, self.patches(hidden, *hidden.shape[2:]), temb
        return leaving if replaced is None else (*leaving, replaced)


class _Masked(Sharing):
    """A layer that knows where the patches are and which text is padding."""

    def given(self, popped: tuple[Any, ...]) -> dict[str, Any]:
        given = super().given(popped)
        patches, mask = given.pop("patches"), given.pop(MASK)
        given["attention_mask"], given["image_rotary_emb"] = self.shared.get(
            lambda: (_joint_mask(patches, mask), self._angles(patches)), patches, mask
        )
        if "token_replace_emb" in given:
            given["num_tokens"] = patches[0].numel()
        return given

    def _angles(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        patch = (self.rope.patch_size_t, self.rope.patch_size, self.rope.patch_size)
        return self.rope(size_only(patches, patch))


class Block(_Masked, JointBlock):
    """A block of one stream."""


class TwoStreamBlock(Block):
    """A block of two streams, which has another word for the rotary table."""

    def given(self, popped: tuple[Any, ...]) -> dict[str, Any]:
        given = super().given(popped)
        given["freqs_cis"] = given.pop("image_rotary_emb")
        return given


class Attention(_Masked, JointAttention):
    """The attention of a block of two streams."""


class Head(PatchHead):
    """A token has its channels before the sides of the patch."""

    channels_first = True


def _joint_mask(patches: Tensor, mask: Tensor) -> Tensor:
    """``(batch, 1, 1, keys)``: True for all patches, and for as many text tokens as ``mask`` (batch, text) has ones."""
    length = patches.numel() + mask.sum(dim=1, dtype=torch.int)
    keys = torch.arange(patches.numel() + mask.shape[1], device=mask.device)
    return (keys < length[:, None])[:, None, None]


def example(shapes: Shapes) -> dict[str, Any]:
    """129 frames of 720 x 1280."""
    config = shapes.config
    batch = {
        "hidden_states": shapes.numbers(config.in_channels, 33, 90, 160),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(LLAMA_TOKENS, config.text_embed_dim),
        "encoder_attention_mask": shapes.integers(LLAMA_TOKENS),
        "pooled_projections": shapes.numbers(config.pooled_projection_dim),
    }
    return batch | ({"guidance": shapes.numbers()} if config.guidance_embeds else {})
