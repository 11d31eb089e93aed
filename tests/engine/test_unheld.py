"""Of layers of other ranks, what is moved away and what stays because this rank reads it. Here "away" is the CPU.

That tensors arrive there is tested on the stand-in (``test_accelerator.py``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_models import sd_entries, small_sd_unet
from torch import nn

from deepspeed_pulse.engine import unheld
from deepspeed_pulse.engine.specs import unwrap


class Cut(nn.Module):
    """Of a ``PipelineModule``, what is asked: it holds the first of its layers."""

    def __init__(self, layers: list[Any], count: int, loss_fn: Any = None) -> None:
        super().__init__()
        self.layer_list, self.frozen = layers, None
        self.held = [(index, unwrap(layer)) for index, layer in enumerate(layers[:count])]
        for index, layer in self.held:
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)
        self.job = SimpleNamespace(heads=[SimpleNamespace(loss_fn=loss_fn)], conditioning=None)

    def local_layers(self) -> list[tuple[int, Any]]:
        return self.held


def moved(layers: list[Any], count: int, loss_fn: Any = None) -> int:
    return unheld.move_to_host(Cut(layers, count, loss_fn))


@pytest.fixture(autouse=True)
def nowhere_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unheld, "_HOST", ("meta",))


class Knows(nn.Linear):
    """Reads a layer that is no part of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(4, 4)
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](super().forward(x))


def test_what_this_rank_reads_stays() -> None:
    first, shared, norm, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
    last.weight = first.weight
    size = 4 * (4 * 4 + 4)
    assert moved([first, shared, nn.Linear(4, 4), shared], 2) == size
    assert moved([first, last, nn.Sequential(nn.Linear(4, 4), last)], 1) == size  # its bias stays beside the weight
    assert moved([first, norm], 1) == 4 * 4 * 4 + 8
    assert moved([Knows(norm), norm], 1) == 0
    assert moved([lambda x: norm(x), norm], 1) == 0
    assert moved([first, norm], 1, lambda output, labels: norm(output).mean()) == 0


@pytest.mark.parametrize("options", [{}, {"trace": True, "example_batch": sd_entries()}], ids=["family", "traced"])
def test_layers_of_a_model_know_nothing_but_their_own(options: dict[str, Any]) -> None:
    from deepspeed_pulse.models import to_layers

    layers = to_layers(small_sd_unet(), **options)
    others = {p for layer in layers[20:] for p in (*layer.layer.parameters(), *layer.layer.buffers())}
    assert moved(layers, 20) == sum(tensor.nbytes for tensor in others)
