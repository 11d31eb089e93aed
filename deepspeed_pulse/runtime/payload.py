"""What a message carries: a tensor or a tuple of tensors, and the signature both ends agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from deepspeed_pulse.errors import GraphError, RunError

Payload = torch.Tensor | tuple[torch.Tensor, ...]

METADATA_INTS = 256
"""Length of the int64 tensor that carries a signature."""

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_DTYPES = (*_FLOATING, *_WHOLE, torch.complex64, torch.complex128)


def tensors_of(payload: Payload) -> tuple[torch.Tensor, ...]:
    return (payload,) if isinstance(payload, torch.Tensor) else payload


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among what a layer gave: of a tensor or a tuple; none of anything else."""
    found = value if isinstance(value, (tuple, list)) else (value,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor changed; lists become tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return tuple(map_tensors(item, change) for item in value)
    return value


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers where memory holds them: torch marks conjugates and negatives, a message has no such mark."""
    return tensor.resolve_conj().resolve_neg()


def plainly(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it travels: row by row, with nothing marked."""
    return _unmarked(tensor).contiguous()


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def can_travel(value: Any) -> bool:
    """True for a tensor and for a tuple or list of tensors; anything else stays on the rank that has it."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def as_payload(value: Any, what: str) -> Payload:
    """``value`` if it can travel; a list becomes a tuple.

    All that layers hand on must be able to, whether or not a plan cuts there: what a model may do never depends on it.

    Raises:
        GraphError: it cannot; ``what`` names the layer.
    """
    if not can_travel(value):
        raise GraphError(
            f"{what}: expected a tensor or a tuple of tensors, which can travel between ranks, found "
            f"{_described(value)}; give numbers and words to the layers that need them when they are built, or as "
            "batch entries"
        )
    return value if isinstance(value, torch.Tensor) else tuple(value)


def _described(value: Any) -> str:
    kind = type(value).__name__
    if not isinstance(value, (tuple, list)):
        return "None" if value is None else f"a value of type {kind}"
    return f"a {kind} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype and layout of one tensor, and whether its gradient is wanted back.

    ``stride``: how the tensor lies in memory; None: row by row, as it travels then. Random numbers are drawn in the
    order of memory, and kernels are chosen by it (channels last), so it is the same on both ends.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        stride = None if tensor.is_contiguous() or not is_dense(tensor) else tuple(tensor.stride())
        wanted = tensor.requires_grad and torch.is_grad_enabled()  # a weight that is handed on, in an evaluation
        return cls(tuple(tensor.shape), tensor.dtype, wanted, stride)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor of this shape, in the order in which they travel; a view where it lies like that."""
        if self.stride is None:
            return plainly(tensor)
        tensor = _unmarked(tensor)
        if tuple(tensor.stride()) != self.stride:
            layout = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = layout.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """Of a contiguous tensor that these numbers arrive in."""
        return self.shape if self.stride is None else (math.prod(self.shape),)

    def shaped(self, buffer: torch.Tensor) -> torch.Tensor:
        """What arrived in a flat buffer, as it lay before."""
        return buffer if self.stride is None else buffer.as_strided(self.shape, self.stride)

    def __str__(self) -> str:
        grad = "" if self.requires_grad else ", no gradient"
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{grad}"


def is_dense(tensor: torch.Tensor) -> bool:
    """True where a tensor fills its memory without a gap, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class Signature:
    """What one boundary carries, the same for every microbatch and step."""

    tensors: tuple[TensorMeta, ...]
    is_tuple: bool

    @classmethod
    def of(cls, payload: Payload) -> Signature:
        return cls(tuple(map(TensorMeta.of, tensors_of(payload))), not isinstance(payload, torch.Tensor))

    @property
    def wants_gradient(self) -> bool:
        return any(meta.requires_grad for meta in self.tensors)

    def pack(self, tensors: Sequence[torch.Tensor]) -> Payload:
        return tuple(tensors) if self.is_tuple else tensors[0]

    def __str__(self) -> str:
        return "; ".join(map(str, self.tensors))

    def advice_where(self, found: Signature) -> str:
        """What a user may do where a boundary carries something else than agreed."""
        wanted = zip(self.tensors, found.tensors, strict=False)
        if self == replace(found, tensors=tuple(replace(m, requires_grad=own.requires_grad) for own, m in wanted)):
            return (
                "gradients must flow through the same tensors in every microbatch of a step: multiply by 0 what a "
                "microbatch is not to train, or freeze weights between steps"
            )
        return "what travels between stages must follow from the shapes of the batch: pad what depends on its values"

    def encode(self) -> torch.Tensor:
        """int64 tensor of :data:`METADATA_INTS` numbers."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for meta in self.tensors:
            flags = meta.requires_grad + 2 * (meta.stride is not None)
            numbers += [_DTYPES.index(meta.dtype), flags, len(meta.shape), *meta.shape, *(meta.stride or ())]
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
        numbers = iter(encoded.tolist())
        is_tuple, count = islice(numbers, 2)
        metas = []
        for _ in range(count):
            dtype, flags, dims = islice(numbers, 3)
            shape = tuple(islice(numbers, dims))
            stride = tuple(islice(numbers, dims)) if flags & 2 else None
            metas.append(TensorMeta(shape, _DTYPES[dtype], bool(flags & 1), stride))
        return cls(tuple(metas), bool(is_tuple))
