"""The tuples of the baseline: packed, read with one look at their header, refused where upstream would not follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.in_place import WIDTH, Normalised
from torch import nn

from deepspeed_pulse.engine.relay.changed import ChangedWeights
from deepspeed_pulse.engine.relay.tuples import Headers, pack, pack_batch, unpack, unpack_batch
from deepspeed_pulse.engine.specs import graph_of
from deepspeed_pulse.errors import BatchError, GraphError


def values(*, graded: bool = True) -> tuple[torch.Tensor, dict[str, Any]]:
    hidden = torch.randn(2, 3, requires_grad=graded)
    pair = torch.randn(2, 3).requires_grad_(graded), torch.tensor([True, False])
    return hidden, {"skip": torch.randn(2, 3), "pair": pair, "ids": torch.arange(4)}


def test_what_is_packed_is_unpacked_and_its_header_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = Headers(), Headers()
    looks: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(self.numel()) or tolist(self))
    for _ in range(3):
        hidden, named = values()
        found, again = unpack(pack(hidden, named, sender), tuple(named), receiver)
        assert torch.equal(found, hidden) and torch.equal(again["skip"], named["skip"])
        assert torch.equal(again["pair"][1], named["pair"][1]) and again["pair"][1].dtype is torch.bool
    assert len(looks) == 1, "the receiver's first look"


def test_other_headers_for_the_same_shapes_are_refused() -> None:
    headers = Headers()
    hidden, named = values()
    pack(hidden, {"a": hidden, "b": named["skip"].requires_grad_()}, headers)
    swapped = {"a": (hidden,), "b": named["skip"]}
    with pytest.raises(BatchError, match="named values relayed in the tuple: expected the same"):
        pack(hidden, swapped, headers)


def test_upstream_sends_no_gradients_of_complex_numbers() -> None:
    hidden, _ = values()
    with pytest.raises(BatchError, match="complex64 with a gradient: DeepSpeed's pipeline"):
        pack(hidden, {"waves": torch.complex(hidden, hidden)}, Headers())


def test_a_batch_says_what_it_holds_by_shapes_alone() -> None:
    hidden, named = values(graded=False)
    packed = pack_batch(hidden, named)
    on_a_device = tuple(tensor.to("meta") for tensor in packed)
    found, again = unpack_batch(on_a_device, tuple(named))
    assert found.shape == hidden.shape
    assert [type(value) for value in again.values()] == [torch.Tensor, tuple, torch.Tensor]


class Layers(nn.Sequential):
    """A module's layers, the upstream way."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.graph = graph_of(layers)

    def local_layers(self) -> list[Any]:
        return list(enumerate(self))


class Decaying(nn.Linear):
    """Its weight is another one after every forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def watched(module: nn.Module, *, micro_batches: int = 2) -> Any:
    """Runs a forward of the first of two ranks."""
    engine = SimpleNamespace(module=module, micro_batches=micro_batches, num_stages=2, stage_id=0, device="cpu")
    changed = ChangedWeights(engine)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with changed.watching():
            return module(x)

    return forward


def test_a_weight_that_is_normalised_in_forward_serves_all_microbatches_in_flight() -> None:
    torch.manual_seed(0)
    module, alone = (Layers(Normalised(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Normalised(WIDTH, 3)) for _ in "ab")
    alone.load_state_dict(module.state_dict())
    forward, data = watched(module), [torch.randn(2, WIDTH) for _ in range(3)]
    for _ in range(2):
        module.eval()
        forward(data[0])
        module.train()
        for output in [forward(x) for x in data]:
            output.square().mean().backward()
        for x in data:
            alone(x).square().mean().backward()
        for (name, one), other in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7), name
        with torch.no_grad():
            for p in (*module.parameters(), *alone.parameters()):
                p.sub_(0.1 * p.grad)
                p.grad = None
    assert [bool(layer._forward_hooks) for layer in module] == [True, False, True], "others are left alone"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_weight_that_goes_on_changing_is_refused_where_backwards_wait(micro_batches: int) -> None:
    forward = watched(Layers(Decaying(WIDTH, WIDTH)), micro_batches=micro_batches)
    forward(torch.ones(2, WIDTH)).sum().backward()
    if micro_batches == 1:
        forward(torch.ones(2, WIDTH)).sum().backward()
        return
    with pytest.raises(GraphError, match=r"changes its weight weight in every forward.*while microbatches before"):
        forward(torch.ones(2, WIDTH))
