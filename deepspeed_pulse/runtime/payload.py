"""What a message carries: a tensor or a tuple of tensors, and the signature both ends agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.errors import RunError

Payload = torch.Tensor | tuple[torch.Tensor, ...]

METADATA_INTS = 256
"""Length of the int64 tensor that carries a signature."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def tensors_of(payload: Payload) -> tuple[torch.Tensor, ...]:
    return (payload,) if isinstance(payload, torch.Tensor) else payload


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among what a layer gave: of a tensor or a tuple; none of anything else."""
    found = value if isinstance(value, (tuple, list)) else (value,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def as_payload(value: Any, what: str) -> Payload:
    """``value`` if it can travel; a list becomes a tuple."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(t, torch.Tensor) for t in value):
        return tuple(value)
    raise RunError(f"{what}: expected a tensor or a tuple of tensors, found {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of one tensor, and whether its gradient is wanted back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        grad = "" if self.requires_grad else ", no gradient"
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{grad}"


@dataclass(frozen=True, slots=True)
class Signature:
    """What one boundary carries, the same for every microbatch and step."""

    tensors: tuple[TensorMeta, ...]
    is_tuple: bool

    @classmethod
    def of(cls, payload: Payload) -> Signature:
        metas = tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of(payload))
        return cls(metas, not isinstance(payload, torch.Tensor))

    @property
    def wants_gradient(self) -> bool:
        return any(meta.requires_grad for meta in self.tensors)

    def pack(self, tensors: Sequence[torch.Tensor]) -> Payload:
        return tuple(tensors) if self.is_tuple else tensors[0]

    def __str__(self) -> str:
        return "; ".join(map(str, self.tensors))

    def encode(self) -> torch.Tensor:
        """int64 tensor of :data:`METADATA_INTS` numbers."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for meta in self.tensors:
            numbers += [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
        if len(numbers) > METADATA_INTS:
            raise RunError(
                f"a boundary carries {len(self.tensors)} tensors, too many to describe in {METADATA_INTS} numbers; "
                "stack some of them or name them with stash"
            )
        encoded = torch.zeros(METADATA_INTS, dtype=torch.int64)
        encoded[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return encoded

    @classmethod
    def decode(cls, encoded: torch.Tensor) -> Signature:
        numbers = encoded.tolist()
        metas, position = [], 2
        for _ in range(numbers[1]):
            dtype, requires_grad, dims = numbers[position : position + 3]
            shape = tuple(numbers[position + 3 : position + 3 + dims])
            metas.append(TensorMeta(shape, _DTYPES[dtype], bool(requires_grad)))
            position += 3 + dims
        return cls(tuple(metas), bool(numbers[0]))
