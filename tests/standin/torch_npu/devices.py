"""Which device, and what it says of itself."""

from __future__ import annotations

import types
from typing import Any

import torch

from torch_npu import library


def index(device: Any = None) -> int:
    """Of a number, a name, a device, or None for the current one."""
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return library.current_device() if found is None else found


class DeviceContext:
    """``with torch.npu.device(...)``; None changes nothing."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = library.current_device()
        library.set_device(index(self.device))

    def __exit__(self, *_: Any) -> None:
        library.set_device(self.before)


def properties(device: Any = None) -> Any:
    return types.SimpleNamespace(name="stand-in", total_memory=library.limit())


NAMES = {
    "device": DeviceContext,
    "set_device": lambda device: library.set_device(index(device)),
    "current_device": library.current_device,
    "device_count": library.device_count,
    "synchronize": lambda device=None: library.synchronize(index(device)),
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "_lazy_call": lambda function: function(),
    "is_bf16_supported": lambda: True,
    "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    "get_device_name": lambda device=None: "stand-in",
    "get_device_properties": properties,
}
"""Of ``torch.npu``."""
