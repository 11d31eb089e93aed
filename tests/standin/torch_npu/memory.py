"""What the device's allocator says, in bytes."""

from __future__ import annotations

from typing import Any

from torch_npu import library


def allocated(device: Any = None) -> int:
    return library.allocated()


def peak(device: Any = None) -> int:
    return library.peak_allocated()


def reserved(device: Any = None) -> int:
    return library.reserved()


def reset_peak(device: Any = None) -> None:
    library.reset_peak()


def limit(num_bytes: int, *, plain_error: bool = False) -> None:
    """What may be allocated from now on; beyond, ``torch.OutOfMemoryError``, or with ``plain_error`` a RuntimeError.

    torch-npu has both forms, of the same words.
    """
    library.set_limit(num_bytes, plain_error)


def stats(device: Any = None) -> dict[str, int]:
    return {"allocated_bytes.all.current": allocated(), "allocated_bytes.all.peak": peak()}


NAMES = {
    "memory_allocated": allocated,
    "max_memory_allocated": peak,
    "memory_stats": stats,
    "empty_cache": lambda: None,
    **dict.fromkeys(("memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached"), reserved),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), reset_peak),
}
"""Of ``torch.npu``."""
