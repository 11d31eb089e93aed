"""Streams and events, and gates that hold a stream."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu import library
from torch_npu.devices import index


class Stream(torch.Stream):
    """A new stream of a device."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, torch.device("npu", index(device)))


def event(enable_timing: bool = False, **_: Any) -> torch.Event:
    """A function, for ``elapsed_time`` takes no subclass."""
    return torch.Event(torch.device("npu", library.current_device()), enable_timing=True)


class StreamContext:
    """``with torch.npu.stream(stream)``; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = current_stream()
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        set_stream(self.before)


def set_stream(stream: torch.Stream) -> None:
    library.set_stream(stream.device_index, stream.stream_id)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    private_use_1 = 20
    return torch.Stream(stream_id=0, device_index=index(device), device_type=private_use_1)


def gate(stream: torch.Stream | None = None) -> Any:
    """Holds a stream (the current one) until ``open()``: work that a test knows to be unfinished, without a clock."""
    held = stream or current_stream()
    return library.Gate(held.device_index, held.stream_id)


NAMES = {
    "Stream": Stream,
    "Event": event,
    "stream": StreamContext,
    "set_stream": set_stream,
    "current_stream": current_stream,
    "default_stream": default_stream,
}
"""Of ``torch.npu``."""
