"""Frozen parameters need their weights and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepspeed_pulse.engine.measure.counter import count_layers
from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.profile import state_factor
from deepspeed_pulse.runtime.state import param_bytes, state_bytes


@pytest.mark.parametrize(("dtype", "factor", "shared"), [(torch.float32, 4, 3), (torch.bfloat16, 8, 6)])
def test_state_of_trained_and_frozen(dtype: torch.dtype, factor: int, shared: int) -> None:
    """ZeRO-1 shares moments and master weights, which it keeps of fp32 weights too, and has a bucket of gradients."""
    layer = torch.nn.Linear(16, 16, dtype=dtype)
    layer.bias.requires_grad_(False)
    weight, bias = layer.weight.nbytes, layer.bias.nbytes
    assert state_bytes(layer.parameters()) == factor * weight + bias
    sharded = 2 * weight + shared * weight // 2 + bias
    assert state_bytes(layer.parameters(), shards=2) == sharded + weight
    assert state_bytes(layer.parameters(), shards=2, bucket_elements=10) == sharded + 10 * layer.weight.itemsize
    assert factor * param_bytes(layer.parameters()) == factor * weight + bias


def frozen_around_one(device: str) -> list[Callable[[], torch.nn.Module]]:
    """Three layers of which the second trains."""
    return [
        lambda trains=trains: torch.nn.Linear(16, 16, bias=False, device=device).requires_grad_(trains)
        for trains in (False, True, False)
    ]


def test_profiles_count_frozen_layers_so() -> None:
    graph = Graph(layers=tuple(Layer(name=str(index), stash=(), pop=()) for index in range(3)))
    expected = [16 * 16, 4 * 16 * 16, 16 * 16]
    measured = measure_layers(
        graph, frozen_around_one("cpu"), LayerInputs(hidden=torch.randn(2, 16), values={}), torch.device("cpu")
    )
    assert [layer.param_bytes for layer in measured.layers] == expected
    assert state_factor(measured.dtype) == 4
    counted = count_layers(graph, frozen_around_one("meta"), torch.randn(2, 16), {})
    assert [layer.param_bytes for layer in counted.layers] == expected
    assert [layer.backward_flop > 0 for layer in counted.layers] == [False, True, True]
