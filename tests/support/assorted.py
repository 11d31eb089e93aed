"""Named values of every kind that a backend may not know: dtypes, layouts, nothing at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 8
NAMES = ("shorts", "flags", "waves", "negatives", "halves", "doubles", "nothing", "image")


class Source(nn.Module):
    """Stashes the values; ``waves`` and ``negatives`` are views that torch marks, their memory holds other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.inner(x))
        seen, on_cpu = h.detach(), h.device.type == "cpu"
        waves = torch.complex(h, 2 * h).conj() if on_cpu else torch.complex(h, -2 * h)  # the stand-in marks nothing
        image = h.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        values = (10 * seen).to(torch.int16), seen > 0, waves, waves.imag, seen.bfloat16(), 0.5 * h.double()
        return h, *values, h.new_empty(len(h), 0), image


class Mix(nn.Module):
    """Reads them all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        shorts, flags, waves, negatives, halves, doubles, nothing, image, shared = values
        assert nothing.shape == (len(x), 0) and image.is_contiguous(memory_format=torch.channels_last)
        y = 0.1 * shorts + flags * negatives + halves.float() + doubles.float() + nothing.sum() + image.flatten(1)
        y = y + shared
        return x + torch.tanh(self.inner(y + 0.3 * waves.imag + waves.real))


def assorted_layers() -> list[Any]:
    """Made on the first rank, and read by all layers after it: no cut keeps them there."""
    from deepspeed_pulse import LayerSpec

    return [LayerSpec(Source, stash=NAMES), *(LayerSpec(Mix, pop=(*NAMES, "shared")) for _ in range(5))]


def assorted_batch(step: int, microbatch: int, data_index: int, *, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    hidden, labels = (torch.randn(2, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    shared = torch.rand(WIDTH, generator=generator, dtype=dtype).expand(2, WIDTH)  # its rows are one in memory
    return {"hidden": hidden, "shared": shared}, labels
