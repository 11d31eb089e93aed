"""An example batch with another number of samples, to measure what layers cost at another microbatch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.runtime.payload import tensors_in


def num_samples(inputs: Any) -> int:
    """Leading size of the first layer's input; a :class:`BatchError` for a scalar."""
    first = tensors_in(inputs)[0]
    if first.ndim == 0:
        raise BatchError("example_batch: expected a batch dimension in the first layer's input, found a scalar")
    return int(first.shape[0])


def resized(inputs: Any, entries: Mapping[str, Any], *, have: int, want: int) -> tuple[Any, dict[str, Any]]:
    """Inputs and entries of ``want`` samples from those of ``have``: the first ones, or all again and again.

    Samples are rows: the leading dimension. A scalar, or a tensor with a single row where the batch has more, is shared
    by all samples and stays as it is, and so does what is no tensor.

    Raises:
        BatchError: a tensor has another number of rows, so that nothing says which dimension is the batch's.
    """
    if have == want:
        return inputs, dict(entries)
    return (
        _resized(inputs, "the first layer's input", have, want),
        {name: _resized(value, f"entry {name!r}", have, want) for name, value in entries.items()},
    )


def _resized(value: Any, what: str, have: int, want: int) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_resized(item, what, have, want) for item in value)
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or (value.shape[0] == 1 and have > 1):
        return value
    if value.shape[0] != have:
        raise BatchError(
            f"example_batch: {what}: expected {have} rows, one a sample, to measure microbatches of {want}; found "
            f"{list(value.shape)}: it is not known which dimension is the batch's; give the microbatch size "
            "(train_micro_batch_size_per_gpu) that the example has, or profiles measured at other sizes"
        )
    rows = torch.arange(want, device=value.device) % have
    return value.detach()[rows]
