"""A batch for a model, by the sizes in its config: what a training script would hand it, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError, GraphError

CLIP_TOKENS = 77
"""Tokens of a CLIP text encoder, whose output the U-Nets read."""


class Shapes:
    """Makes meta tensors of a microbatch size and dtype, with a look at the model's config."""

    def __init__(self, model: Any, microbatch_size: int, dtype: torch.dtype) -> None:
        self.model, self.config = model, model.config
        self._microbatch_size, self._dtype = microbatch_size, dtype

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(self._microbatch_size, *shape, dtype=self._dtype, device="meta")

    def integers(self, *shape: int) -> Tensor:
        return torch.empty(self._microbatch_size, *shape, dtype=torch.long, device="meta")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a sample."""
        size = self.config.sample_size
        if size is None:
            raise ConfigError(
                f"config of {type(self.model).__name__}: sample_size is null, so the size of an example is unknown; "
                "set it in config.json"
            )
        return (size, size) if isinstance(size, int) else tuple(size)


def example_batch(model: nn.Module, *, microbatch_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the model's ``forward``; the first is the first layer's input.

    Raises :class:`GraphError` for a model whose arguments are not known here.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in EXAMPLES:
            return EXAMPLES[kind.__name__](Shapes(model, microbatch_size, dtype))
    raise GraphError(
        f"no example batch is known for {type(model).__name__}, only for {', '.join(EXAMPLES)}; "
        "write a function that returns a layer list and an example batch and give it as package.module:function"
    )


def _unet_2d(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = shapes.integers()
    return batch


def _unet_2d_condition(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    width = config.encoder_hid_dim or config.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    batch: dict[str, Any] = {
        "sample": shapes.numbers(config.in_channels, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(CLIP_TOKENS, width),
    }
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = _classes(shapes)
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        batch["added_cond_kwargs"] = {"text_embeds": shapes.numbers(pooled), "time_ids": shapes.numbers(6)}
    return batch


def _classes(shapes: Shapes) -> Tensor:
    kind = shapes.config.class_embed_type
    if kind in (None, "timestep"):
        return shapes.integers()
    if kind == "identity":
        return shapes.numbers(shapes.model.time_embedding.linear_2.out_features)
    return shapes.numbers(shapes.config.projection_class_embeddings_input_dim)


EXAMPLES: dict[str, Callable[[Shapes], dict[str, Any]]] = {
    "UNet2DModel": _unet_2d,
    "UNet2DConditionModel": _unet_2d_condition,
}
"""Class of the model to the arguments of its ``forward``."""
