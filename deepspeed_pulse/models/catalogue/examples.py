"""A batch for a model, by the sizes in its config: what a training script would hand it, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.families import FAMILIES, family_of
from deepspeed_pulse.models.shapes import Shapes


def example_batch(model: nn.Module, *, microbatch_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the model's ``forward``; the first is the first layer's input.

    Raises :class:`GraphError` for a model whose arguments are not known here.
    """
    found = family_of(model)
    if found is None:
        raise GraphError(
            f"no example batch is known for {type(model).__name__}, only for {', '.join(FAMILIES)}; "
            "write a function that returns a layer list and an example batch and give it as package.module:function"
        )
    batch: dict[str, Any] = found[1].example(Shapes(model, microbatch_size, dtype))
    return batch
