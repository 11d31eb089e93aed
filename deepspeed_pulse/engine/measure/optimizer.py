"""Measuring the optimizer's step, with which every training step ends."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch

from deepspeed_pulse.engine.device import DeviceClock
from deepspeed_pulse.ir.profile import DTYPES, is_16_bit

_MOST_ELEMENTS = 2**25
"""Of parameters that are stepped: so many need 512 MB, and take a GPU longer than it takes to start its kernels."""

_REPEATS = 3

_FUSING = ("cpu", "cuda")
"""Devices for which torch has a fused Adam."""

Trained = tuple[int, str]
"""Elements and dtype of a parameter."""


def optimizer_ms_per_gb(
    trained: Sequence[Trained], device: torch.device, *, ranks: int = 1, fused: bool = False, shared: bool = False
) -> float:
    """How long torch's AdamW takes to step 10^9 bytes of trained parameters, in ms; 0 where there are none.

    Other optimizers count as this one does, as they do in memory. As DeepSpeed's optimizers do, it steps fp32 copies
    of what is in 16 bit, and one piece instead of parameters under ZeRO, in bf16, and where a fused one steps fp16.

    Args:
        trained: every parameter, some of which are stepped.
        ranks: that measure together in one memory. What each holds for it is no more than its share of the weights.
        fused: the job's optimizer is.
        shared: ZeRO-1 is on.
    """
    known = [(size, dtype) for size, dtype in trained if size and dtype in DTYPES]
    if not known:
        return 0.0
    chosen = _some_of(known, ranks)
    stepped: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for size, dtype in _pieces(chosen, fused, shared):
        weight = master = torch.zeros(size, dtype=_torch(dtype), device=device)
        if shared or is_16_bit(dtype):
            master = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        gradient = torch.zeros_like(master)
        master.requires_grad_(True).grad = gradient
        stepped.append(master)
        if master is not weight:
            copies.append((weight, gradient, master))
    optimizer = torch.optim.AdamW(stepped, fused=(fused and device.type in _FUSING) or None)

    def step() -> None:
        for weight, gradient, _ in copies:
            gradient.copy_(weight)  # as if it were a gradient, of the same size and dtype
        optimizer.step()
        for weight, _, master in copies:
            weight.copy_(master.detach())

    step()  # makes its state
    clock, times = DeviceClock(device), []
    for _ in range(_REPEATS):
        start = clock.mark()
        step()
        times.append(clock.mean_ms([(start, clock.mark())]))
    return statistics.median(times) * 1e9 / sum(size * _torch(dtype).itemsize for size, dtype in chosen)


def _some_of(trained: Sequence[Trained], ranks: int) -> list[Trained]:
    """Every n-th by size, as layers repeat themselves; a part of a very large one."""
    total = sum(size for size, _ in trained)
    # times an element's bytes: gradient, moments and weight, in 16 bit that and all of these in fp32
    held = 9 if any(is_16_bit(dtype) for _, dtype in trained) else 4
    most = max(1, min(_MOST_ELEMENTS, total // (held * ranks)))
    every, ordered = max(1, total // most), sorted(trained, reverse=True)
    chosen = [(min(size, most), dtype) for size, dtype in ordered[every // 2 :: every]]
    if 2 * sum(size for size, _ in chosen) < most:  # so few that they may all be biases
        size, dtype = _in_the_middle(ordered, total)
        return [(min(size, most), dtype)]
    return chosen


def _in_the_middle(ordered: Sequence[Trained], total: int) -> Trained:
    """The parameter that half of all elements are in or before."""
    sums = itertools.accumulate(size for size, _ in ordered)
    return next(parameter for parameter, so_far in zip(ordered, sums, strict=True) if 2 * so_far >= total)


def _pieces(chosen: Sequence[Trained], fused: bool, shared: bool) -> Iterator[Trained]:
    """What the optimizer steps."""
    for dtype in dict.fromkeys(dtype for _, dtype in chosen):
        sizes = [size for size, kind in chosen if kind == dtype]
        one = shared or dtype == "bfloat16" or (dtype == "float16" and fused)
        yield from ((size, dtype) for size in ([sum(sizes)] if one else sizes))


def _torch(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found
