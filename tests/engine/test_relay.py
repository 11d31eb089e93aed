"""The tuples of the baseline: packed, read with one look at their header, refused where upstream would not follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_pulse.engine.relay.tuples import Headers, pack, pack_batch, unpack, unpack_batch
from deepspeed_pulse.errors import BatchError


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
