"""DeepSpeed's accelerator as the runtime's device, and what it means to wait for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.errors import ConfigError

HOST_BACKENDS = ("gloo", "mpi")
"""Backends that keep messages apart by tag, and that cannot send device memory."""


QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The variable that says how many queues a device has for its streams (8 where it is unset), and the most it can be."""


def runs_at_once(device: torch.device) -> bool:
    """Whether the device has done what it is given when the call returns, by the rule of upstream's timers."""
    return device.type == "cpu" or bool(get_accelerator().use_host_timers())


def check_queues(device: torch.device) -> None:
    """Raise a ConfigError where the device has one queue for all streams.

    There the second message of a stream waits at the queue's head for the first, and behind it the kernels and messages
    that the first waits for.
    """
    if os.environ.get(QUEUES) == "1" and not runs_at_once(device):
        raise ConfigError(
            f"{QUEUES}: found 1, with which kernels and messages share one queue, and messages of a "
            f"pipeline that wait for one another stand still for ever; set {MOST_QUEUES}, the most"
        )


def recorded_event(*, timed: bool = True) -> Any:
    """An event at the end of what the device was given so far."""
    event = get_accelerator().Event(enable_timing=timed)
    event.record()
    return event


def wait(work: Any, tensor: torch.Tensor, timeout_seconds: float) -> None:
    """Let what comes next on the device find ``tensor`` sent, received or summed.

    Memory of the host: the host waits, for so long at most. Memory of a device: its stream waits and the host goes on;
    given a limit, NCCL would poll on the host and HCCL ignore it. There the watchdog keeps the limit, by
    :class:`~deepspeed_pulse.engine.observation.progress.DeviceProgress`.
    """
    if tensor.device.type == "cpu":
        work.wait(timedelta(seconds=timeout_seconds))
    else:
        work.wait()


@contextmanager
def emptied_after(device: torch.device) -> Iterator[None]:
    """A card's memory that torch kept goes back to it: communicators, which come next, do not ask torch for theirs."""
    try:
        yield
    finally:
        if device.type != "cpu":
            get_accelerator().empty_cache()


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """What measures, tries or builds must not change the run that follows: numbers of the host and of the device."""
    accelerator = get_accelerator()
    with torch.random.fork_rng(devices=[]):
        state = None if device.type == "cpu" else accelerator.get_rng_state()
        try:
            yield
        finally:
            if state is not None:
                accelerator.set_rng_state(state)


class SideStream:
    """A stream of the device beside the rank's own, for work that waits while the rank's own goes on.

    Memory that is taken for it goes back to it: once its last use is queued it may be let go, for what takes it next is
    queued behind. The rank's own memory has to outlive :meth:`join`.
    """

    def __init__(self) -> None:
        self._stream = get_accelerator().Stream()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is given to the device inside runs here, after all that the rank's own stream was given before."""
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            yield

    def join(self) -> None:
        """Let what comes next on the rank's own stream find all that was given here done."""
        get_accelerator().current_stream().wait_stream(self._stream)


class DeviceClock:
    """Times of a device's work, as upstream's timers take them.

    By the host's clock where the device runs what it is given at once, else by events that the device records. The host
    waits for the device only when it is asked for times.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.runs_at_once = runs_at_once(device)

    def mark(self) -> Any:
        """This moment among the work handed to the device."""
        return _host_ms() if self.runs_at_once else recorded_event()

    def times_ms(self, marks: Sequence[Any]) -> list[float]:
        """When the device came to marks, ms on the host's clock."""
        if self.runs_at_once:
            return list(marks)
        now = recorded_event()
        now.synchronize()
        now_ms = _host_ms()
        return [now_ms - float(mark.elapsed_time(now)) for mark in marks]

    def mean_ms(self, pairs: Sequence[tuple[Any, Any]]) -> float:
        """Mean of the times between two marks each."""
        times = self.times_ms([mark for pair in pairs for mark in pair])
        return sum(end - start for start, end in zip(times[::2], times[1::2], strict=True)) / len(pairs)


class DeviceMemory:
    """What the device's allocator has given out, in bytes; nothing is known where there is none (on a CPU)."""

    def __init__(self, device: torch.device) -> None:
        self._known = device.type != "cpu"

    def allocated(self) -> int:
        return int(get_accelerator().memory_allocated()) if self._known else 0

    def begin(self) -> None:
        """Forget the peak that was."""
        if self._known:
            get_accelerator().reset_peak_memory_stats()

    def peak(self) -> int:
        """Since :meth:`begin`."""
        return int(get_accelerator().max_memory_allocated()) if self._known else 0


class EngineDevice(DeviceClock):
    """The accelerator of this rank, with the engine's backward.

    Args:
        device: where tensors live.
        accumulating: the engine's prologue and epilogue of a backward.
        scale_loss: divides by the accumulation steps and applies loss scaling.
    """

    def __init__(
        self,
        device: torch.device,
        accumulating: Callable[[], AbstractContextManager[None]],
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(device)
        self._device, self.accumulating, self.scale_loss = device, accumulating, scale_loss

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


def _host_ms() -> float:
    return time.perf_counter() * 1e3
