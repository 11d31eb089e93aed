"""Named values the upstream way: relayed through every stage in the tuple. The baseline.

Between layers the state is a tuple: the hidden tensors and live values that need a gradient first
(upstream differentiates every floating tensor), then those that need none, as integers of the same
width, then a header that says which tensor is what. A header is read once for each shape of the tuple: to read it,
the host waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_pulse.engine.data.batches import can_travel, kind
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.payload import num_bytes, plainly, tensors_of

HIDDEN = ""
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

    Raises:
        BatchError: an entry is no tensor and no tuple of tensors.
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


Key = tuple[tuple[torch.dtype, torch.Size], ...]


class Headers:
    """The headers of a rank's tuples, by the shapes and dtypes of their tensors."""

    def __init__(self) -> None:
        self._known: dict[Key, list[int]] = {}
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
        """Of a tuple that was packed here.

        Raises:
            BatchError: another than before: who receives it goes by what the first one said.
        """
        if self._known.setdefault(_key(state), header) != header:
            raise BatchError(
                "named values relayed in the tuple: expected the same values to be tuples, to have a gradient, and to "
                "have their dtypes as in earlier batches of the same shapes, found others; where parameters are frozen "
                "or thawed in the middle of a run, begin anew from a checkpoint, or leave "
                '"pulse": {"enabled": false} away'
            )


def _key(state: Sequence[torch.Tensor]) -> Key:
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
                header.append(-1)
                graded.append(tensor)
            else:
                header.append(_DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else len(_DTYPES))
                plain.append(_as_integers(tensor))
    device = tensors_of(hidden)[0].device
    state = (*graded, *plain, headers.tensor(header, device))
    headers.note(state, header)
    return state


def unpack(state: Sequence[torch.Tensor], names: Sequence[str], headers: Headers) -> tuple[Any, dict[str, Any]]:
    """Inverse of :func:`pack`."""
    header = headers.of(state)
    num_graded = _count_graded(header)
    graded, plain = iter(state[:num_graded]), iter(state[num_graded:-1])
    found: list[Any] = []
    position = 0
    while position < len(header):
        is_tuple, count = header[position : position + 2]
        codes = header[position + 2 : position + 2 + count]
        tensors = tuple(next(graded) if code == -1 else _as_before(next(plain), code) for code in codes)
        found.append(tensors if is_tuple else tensors[0])
        position += 2 + count
    hidden, *values = found
    return hidden, dict(zip(names, values, strict=True))


def _count_graded(header: Sequence[int]) -> int:
    count, position = 0, 0
    while position < len(header):
        tensors = header[position + 1]
        count += sum(1 for code in header[position + 2 : position + 2 + tensors] if code == -1)
        position += 2 + tensors
    return count


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.dtype in _DTYPES:
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    return tensor


def _as_before(tensor: torch.Tensor, code: int) -> torch.Tensor:
    return tensor.view(_DTYPES[code]) if code < len(_DTYPES) else tensor


def bytes_by_label(state: Any, names: Sequence[str], headers: Headers, *, gradients: bool) -> Counter[str]:
    """Bytes of a relayed tuple by channel (``hidden``, ``value:NAME``; with ``_grad`` for its gradients)."""
    suffix = "_grad" if gradients else ""
    count: Counter[str] = Counter()
    if isinstance(state, torch.Tensor) or not names:
        tensors = tensors_of(state)
        count[f"hidden{suffix}"] = num_bytes([t for t in tensors if t.is_floating_point() or not gradients])
        return count
    header = headers.of(state)
    num_graded = _count_graded(header)
    graded, plain = iter(state[:num_graded]), iter(state[num_graded:-1])
    position = 0
    for name in (HIDDEN, *names):
        label = f"value{suffix}:{name}" if name else f"hidden{suffix}"
        codes = header[position + 2 : position + 2 + header[position + 1]]
        for code in codes:
            tensor = next(graded) if code == -1 else next(plain)
            if code == -1 or not gradients:
                count[label] += num_bytes([tensor])
        position += 2 + len(codes)
    return count
