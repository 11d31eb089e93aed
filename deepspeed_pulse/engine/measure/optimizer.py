"""Measuring the optimizer's step, with which every training step ends."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from deepspeed_pulse.engine.device import DeviceClock
from deepspeed_pulse.ir.profile import is_16_bit

_MOST_ELEMENTS = 2**24
"""Of parameters that are stepped: so many need 256 MB, and take a GPU longer than it takes to start its kernels."""

_REPEATS = 3

_FUSING = ("cpu", "cuda")
"""Devices for which torch has a fused Adam."""


def optimizer_ms_per_gb(sizes: Sequence[int], dtype: str, device: torch.device, *, fused: bool) -> float:
    """How long torch's AdamW takes to step 10^9 bytes of trained parameters, in ms; 0 where there are none.

    Other optimizers count as this one does, as they do in memory.

    Args:
        sizes: elements of each parameter. Of very many, every n-th one is stepped.
        dtype: of the parameters. Of those in 16 bit, DeepSpeed steps fp32 master weights in one piece and copies them.
        fused: the job's optimizer is.
    """
    stride = max(1, -(-sum(sizes) // _MOST_ELEMENTS))
    stepped = [min(size, _MOST_ELEMENTS) for size in sizes[::stride]]
    if not stepped:
        return 0.0
    wide = is_16_bit(dtype)
    kind: torch.dtype = getattr(torch, dtype)
    parameters = [
        torch.zeros(size, dtype=torch.float32 if wide else kind, device=device, requires_grad=True)
        for size in ([sum(stepped)] if wide else stepped)
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    copies = [(torch.empty_like(p, dtype=kind), p.detach()) for p in parameters if wide]
    optimizer = torch.optim.AdamW(parameters, fused=(fused and device.type in _FUSING) or None)

    def step() -> None:
        optimizer.step()
        for copy, master in copies:
            copy.copy_(master)

    step()  # makes its state
    clock, times = DeviceClock(device), []
    for _ in range(_REPEATS):
        start = clock.mark()
        step()
        times.append(clock.mean_ms([(start, clock.mark())]))
    return statistics.median(times) * 1e9 / (sum(stepped) * kind.itemsize)
