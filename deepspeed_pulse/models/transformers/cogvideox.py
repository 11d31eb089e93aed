"""``CogVideoXTransformer3DModel`` (CogVideoX 1.0 and 1.5) as a layer list.

    patch_embed ──temb──▶ every block and proj_out
    transformer_blocks.0, ..., transformer_blocks.n-1        (hidden, text)
    proj_out

No long skips: the pair of video and text travels from layer to layer. The rotary table is a batch entry, as the
model's own forward takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.joint_blocks import JointBlock, Streams
from deepspeed_pulse.models.transformers.units import PatchUnit
from deepspeed_pulse.models.units import Origin, Piece, classes_beside, declare, foreign, numbered, refuse, same

ROTARY = "image_rotary_emb"
BLOCKS = classes_beside(CogVideoXTransformer3DModel, "CogVideoXBlock")
TAKES_APART = (CogVideoXTransformer3DModel, *BLOCKS)


def to_layers(
    model: CogVideoXTransformer3DModel, origin: Origin, *, fine: bool, image_rotary_emb: bool | None = None
) -> Iterator[Declared]:
    """The layers of a CogVideoX transformer.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep``,
    ``encoder_hidden_states``; ``ofs`` when the config has ``ofs_embed_dim``; ``image_rotary_emb``, the pair
    (cos, sin), when the batch has it; by default when the config has ``use_rotary_positional_embeddings``.
    With ``granularity="fine"`` the attention of a block is one layer and its feed-forward another.
    """
    paths = numbered(model, "transformer_blocks")
    refuse(model, foreign(model, paths, BLOCKS))
    offset = ("ofs",) if model.ofs_embedding is not None else ()
    pop = same("timestep", "encoder_hidden_states", *offset)
    yield declare(Stem(model, origin), pop=pop, stash=("patches", "temb"))
    rotary = model.config.use_rotary_positional_embeddings if image_rotary_emb is None else image_rotary_emb
    pop = same("temb", *((ROTARY,) if rotary else ()))
    for path in paths:
        last = path == paths[-1]
        if fine:
            yield declare(Attention(model, origin, path), pop=pop, name=f"{path}.attn")
            feed_forward = FeedForward(model, origin, path)
            feed_forward.last = last
            yield declare(feed_forward, pop=same("temb"), name=f"{path}.ff")
        else:
            yield declare(JointBlock(model, origin, path, last=last), pop=pop)
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(PatchUnit):
    """The embedding of time and offset, and text and patches with their positions."""

    OPTIONAL = ("ofs_proj", "ofs_embedding")
    PARTS = ("time_proj", "time_embedding", "patch_embed", "embedding_dropout", *OPTIONAL)

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        given = self.given(popped)
        temb = self.time_embedding(self.time_proj(given["timestep"]).to(hidden.dtype))
        if "ofs" in given:
            temb = temb + self.ofs_embedding(self.ofs_proj(given["ofs"]).to(hidden.dtype))
        text = given["encoder_hidden_states"]
        joined = self.embedding_dropout(self.patch_embed(text, hidden))
        frames, _, height, width = hidden.shape[1:]
        streams = joined[:, text.shape[1] :], joined[:, : text.shape[1]]
        return streams, self.patches(hidden, frames, height, width), temb


class Attention(Piece):
    """The attention of one block."""

    CHILDREN = ("norm1", "attn1")

    def forward(self, streams: tuple[Tensor, Tensor], *popped: Any) -> tuple[Tensor, Tensor]:
        hidden, text = streams
        given = self.given(popped)
        normed, normed_text, gate, text_gate = self.block.norm1(hidden, text, given["temb"])
        output, text_output = self.block.attn1(
            hidden_states=normed, encoder_hidden_states=normed_text, image_rotary_emb=given.get(ROTARY)
        )
        return hidden + gate * output, text + text_gate * text_output


class FeedForward(Piece):
    """The feed-forward of one block, over text and patches together."""

    CHILDREN = ("norm2", "ff")
    last = False

    def forward(self, streams: tuple[Tensor, Tensor], temb: Tensor) -> Streams:
        hidden, text = streams
        normed, normed_text, gate, text_gate = self.block.norm2(hidden, text, temb)
        output = self.block.ff(torch.cat([normed_text, normed], dim=1))
        hidden = hidden + gate * output[:, text.shape[1] :]
        return hidden if self.last else (hidden, text + text_gate * output[:, : text.shape[1]])


class Head(PatchUnit):
    """Norms, projection, and patches back to a video ``(batch, frames, channels, height, width)``."""

    PARTS = ("norm_final", "norm_out", "proj_out")

    def forward(self, hidden: Tensor, patches: Tensor, temb: Tensor) -> Any:
        tokens = self.proj_out(self.norm_out(self.norm_final(hidden), temb=temb))
        grid = tokens.unflatten(1, patches.shape).unflatten(-1, (-1, *self.patch))
        return grid.permute(0, 1, 5, 4, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(1, 2)


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    depth = config.patch_size_t or 1
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    frames += -frames % depth
    height, width = config.sample_height, config.sample_width
    batch: dict[str, Any] = {
        "hidden_states": shapes.numbers(frames, config.in_channels, height, width),
        "encoder_hidden_states": shapes.numbers(config.max_text_seq_length, config.text_embed_dim),
        "timestep": shapes.integers(),
    }
    if config.ofs_embed_dim is not None:
        batch["ofs"] = shapes.numbers()
    if config.use_rotary_positional_embeddings:
        num_patches = frames // depth * (height // config.patch_size) * (width // config.patch_size)
        batch["image_rotary_emb"] = tuple(shapes.table(num_patches, config.attention_head_dim) for _ in ("cos", "sin"))
    return batch
