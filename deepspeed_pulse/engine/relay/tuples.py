"""Named values the upstream way: relayed through every stage in the tuple. The baseline.

Between layers the state is a tuple: the hidden tensors and live values that need a gradient first (upstream
differentiates every floating tensor), then those that need none, as integers of the same width, then a header that says
which tensor is what. A header is read once for each shape of the tuple: to read it, the host waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from deepspeed_pulse.engine.data.batches import kind
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.payload import can_travel, num_bytes, plainly, tensors_of

_GRADED = -1
"""In a header, a tensor that needs a gradient; the dtypes of others count from 0."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool)


def live_after(graph: Graph, layer: int) -> tuple[str, ...]:
    """Names alive between ``layer`` and the next: stashed or in the batch, and popped later."""
    names = [v.name for v in graph.batch_entries if v.targets[-1] > layer]
    names += [v.name for v in graph.values if v.source is not None and v.source <= layer < v.targets[-1]]
    return tuple(names)


def pack_batch(inputs: Any, entries: Mapping[str, Any]) -> Any:
    """What the first layer is given: the input alone, or a flat tuple of all tensors and, for each value, an empty one.

    The size of an empty one says how many tensors the value has: that is known without a look into a device's memory.
    An entry that is no tensor and no tuple of tensors is a :class:`BatchError`.
    """
    if not entries:
        return inputs
    for name, value in entries.items():
        if not can_travel(value):
            raise BatchError(
                f"batch entry {name!r}: expected a tensor or a tuple of tensors, found {kind(value)}; with "
                '"pulse": {"enabled": false} entries travel in the tuple: make it a tensor, or turn pulse on'
            )
    found = (inputs, *(tuple(value) if isinstance(value, list) else value for value in entries.values()))
    sizes = [0 if isinstance(value, torch.Tensor) else 1 + len(value) for value in found]
    return (*(tensor for value in found for tensor in tensors_of(value)), *(torch.empty(0, size) for size in sizes))


def unpack_batch(state: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Inverse of :func:`pack_batch`."""
    num_values = 1 + len(names)
    tensors, sizes = iter(state[:-num_values]), [empty.shape[1] for empty in state[-num_values:]]
    found = [next(tensors) if size == 0 else tuple(next(tensors) for _ in range(size - 1)) for size in sizes]
    hidden, *values = found
    return hidden, dict(zip(names, values, strict=True))


class Headers:
    """The headers of a rank's tuples, by the shapes and dtypes of their tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[torch.dtype, torch.Size], ...], list[int]] = {}
        self._tensors: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}

    def of(self, state: Sequence[torch.Tensor]) -> list[int]:
        """Of a tuple that was packed here or elsewhere; the first of its shapes is waited for."""
        key = _key(state)
        if key not in self._known:
            self._known[key] = state[-1].tolist()
        return self._known[key]

    def tensor(self, header: list[int], device: torch.device) -> torch.Tensor:
        """A header as it travels; made once."""
        key = device, tuple(header)
        if key not in self._tensors:
            self._tensors[key] = torch.tensor(header, dtype=torch.int64, device=device)
        return self._tensors[key]

    def note(self, state: Sequence[torch.Tensor], header: list[int]) -> None:
        """Of a tuple packed here; another than before is an error: who receives it goes by what the first one said."""
        if self._known.setdefault(_key(state), header) != header:
            raise BatchError(
                "named values relayed in the tuple: expected the same values to be tuples, to have a gradient, and to "
                "have their dtypes as in earlier batches of the same shapes, found others; where parameters are frozen "
                "or thawed in the middle of a run, begin anew from a checkpoint, or leave "
                '"pulse": {"enabled": false} away'
            )


def _key(state: Sequence[torch.Tensor]) -> tuple[tuple[torch.dtype, torch.Size], ...]:
    return tuple((tensor.dtype, tensor.shape) for tensor in state)


def pack(hidden: Any, values: dict[str, Any], headers: Headers) -> tuple[torch.Tensor, ...]:
    """The tuple that travels between two layers."""
    graded: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    header: list[int] = []
    for value in (hidden, *values.values()):
        tensors = tensors_of(value)
        header += [int(not isinstance(value, torch.Tensor)), len(tensors)]
        for tensor in map(plainly, tensors):
            if tensor.requires_grad:
                if not tensor.is_floating_point():
                    raise BatchError(
                        f"named value of {tensor.dtype} with a gradient: DeepSpeed's pipeline, which "
                        '"pulse": {"enabled": false} runs, sends gradients of floating tensors only; stash '
                        "torch.view_as_real of it, or turn pulse on"
                    )
                header.append(_GRADED)
                graded.append(tensor)
            elif tensor.dtype in _DTYPES:
                header.append(_DTYPES.index(tensor.dtype))
                plain.append(tensor.detach().view(_INTEGERS[tensor.element_size()]))
            else:
                header.append(len(_DTYPES))
                plain.append(tensor.detach())
    state = (*graded, *plain, headers.tensor(header, tensors_of(hidden)[0].device))
    headers.note(state, header)
    return state


def unpack(state: Sequence[torch.Tensor], names: Sequence[str], headers: Headers) -> tuple[Any, dict[str, Any]]:
    """Inverse of :func:`pack`."""
    found: list[Any] = []
    for is_tuple, parts in _travelled(state, headers.of(state)):
        value = tuple(tensor.view(_DTYPES[code]) if code in range(len(_DTYPES)) else tensor for tensor, code in parts)
        found.append(value if is_tuple else value[0])
    hidden, *values = found
    return hidden, dict(zip(names, values, strict=True))


def _travelled(
    state: Sequence[torch.Tensor], header: Sequence[int]
) -> Iterator[tuple[int, list[tuple[torch.Tensor, int]]]]:
    """Of each value, whether it is a tuple, and its tensors as they travel, with what the header says of each."""
    numbers = iter(header)
    values = [(is_tuple, list(islice(numbers, next(numbers)))) for is_tuple in numbers]
    num_graded = sum(codes.count(_GRADED) for _, codes in values)
    graded, plain = iter(state[:num_graded]), iter(state[num_graded:-1])
    for is_tuple, codes in values:
        yield is_tuple, [(next(graded if code == _GRADED else plain), code) for code in codes]


def bytes_by_label(state: Any, names: Sequence[str], headers: Headers, *, gradients: bool) -> Counter[str]:
    """Bytes of a relayed tuple by channel (``hidden``, ``value:NAME``; with ``_grad`` for its gradients)."""
    suffix = "_grad" if gradients else ""
    count: Counter[str] = Counter()
    if isinstance(state, torch.Tensor) or not names:
        tensors = tensors_of(state)
        count[f"hidden{suffix}"] = num_bytes([t for t in tensors if t.is_floating_point() or not gradients])
        return count
    labels = (f"hidden{suffix}", *(f"value{suffix}:{name}" for name in names))
    for label, (_, parts) in zip(labels, _travelled(state, headers.of(state)), strict=True):
        counted = [tensor for tensor, code in parts if code == _GRADED or not gradients]
        if counted:
            count[label] = num_bytes(counted)
    return count
