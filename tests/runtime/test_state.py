"""Frozen parameters need their weights and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from deepspeed_pulse.engine.measure.counter import count_layers
from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.state import frozen_bytes, param_bytes, state_bytes, step_bytes


@pytest.mark.parametrize(("dtype", "factor", "shared"), [(torch.float32, 4, 3), (torch.bfloat16, 8, 6)])
def test_state_of_trained_and_frozen(dtype: torch.dtype, factor: int, shared: int) -> None:
    """ZeRO-1 shares moments and master weights, which it keeps of fp32 weights too, and has a bucket of gradients."""
    layer = torch.nn.Linear(16, 16, dtype=dtype)
    layer.bias.requires_grad_(False)
    weight, bias = layer.weight.nbytes, layer.bias.nbytes
    assert state_bytes(layer.parameters()) == factor * weight + bias
    sharded = 2 * weight + shared * weight // 2 + bias
    assert state_bytes(layer.parameters(), shards=2, bucket_elements=10**6) == sharded + weight
    assert state_bytes(layer.parameters(), shards=2, bucket_elements=10) == sharded + 10 * layer.weight.itemsize
    assert (param_bytes(layer.parameters()), frozen_bytes(layer.parameters())) == (weight, bias)


def test_deepspeeds_optimizer_for_bf16_shares_its_state_without_zero() -> None:
    weight = torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16).weight
    assert state_bytes([weight], shards=2) == 2 * weight.nbytes + 6 * weight.nbytes // 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("optimizer", "rooted"),
    [
        (torch.optim.AdamW, True),
        (partial(torch.optim.Adam, foreach=True), True),
        (partial(torch.optim.Adam, foreach=False), False),
        (torch.optim.SGD, False),
    ],
)
def test_a_step_makes_roots_where_torchs_adam_works_by_lists(
    device: str, optimizer: Callable[..., torch.optim.Optimizer], rooted: bool
) -> None:
    """A device that is not the host's stands for an accelerator."""
    layer = torch.nn.Linear(16, 16, device=device)
    masters = sum(p.nbytes for p in layer.parameters())
    roots = masters if rooted and device == "meta" else 0
    made = optimizer(layer.parameters(), lr=0.1)
    assert step_bytes(layer.parameters(), made, copies=False) == roots
    assert step_bytes(layer.parameters(), made, copies=True) == masters + roots


def test_a_step_under_zero_1_goes_group_by_group() -> None:
    """800 bytes of bf16 weights in two groups, as fp32 shards of two replicas."""
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (300, 100)]
    shards = [torch.nn.Parameter(torch.zeros(size)) for size in (150, 50)]
    made = torch.optim.AdamW([{"params": [shard]} for shard in shards])
    options = {"copies": True, "shards": 2}
    assert step_bytes(weights, made, **options, bucket_elements=10**6) == 800
    assert step_bytes(weights, made, **options, bucket_elements=10) == 150 * 6 - 20 - 400


def frozen_around_one(device: str) -> list[Callable[[], torch.nn.Module]]:
    """Three layers of which the second trains."""
    return [
        lambda trains=trains: torch.nn.Linear(16, 16, bias=False, device=device).requires_grad_(trains)
        for trains in (False, True, False)
    ]


def test_profiles_count_frozen_layers_apart() -> None:
    graph = Graph(layers=tuple(Layer(name=str(index), stash=(), pop=()) for index in range(3)))
    expected = [(0, 4 * 16 * 16), (4 * 16 * 16, 0), (0, 4 * 16 * 16)]
    measured = measure_layers(
        graph, frozen_around_one("cpu"), LayerInputs(hidden=torch.randn(2, 16), values={}), torch.device("cpu")
    )
    assert [(layer.param_bytes, layer.frozen_bytes) for layer in measured.layers] == expected
    counted = count_layers(graph, frozen_around_one("meta"), torch.randn(2, 16), {})
    assert [(layer.param_bytes, layer.frozen_bytes) for layer in counted.layers] == expected
    assert [layer.backward_flop > 0 for layer in counted.layers] == [False, True, True]
