"""What a batch may be: nested dicts, bools, integers, tuples, None, scalars, strings."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from support.cases import launch_each
from support.launch import launch
from support.nested import nested_batch

from deepspeed_pulse.engine.backbones import Head
from deepspeed_pulse.engine.data.batches import BatchForm, ShapeKeeper, SplitBatch, StepBatches, flatten
from deepspeed_pulse.engine.data.batches import _checksum as checksum
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph, Layer

CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"model": "scalars", "P": 1}, {"model": "nested", "P": 1, "enabled": False}],
    4: [
        {"model": "scalars", "P": 2, "clip": 0.1},
        {"model": "scalars", "P": 4},
        {"model": "nested", "P": 4, "first_rank_only": True, "untagged": True},
        {"model": "nested", "P": 2, "first_rank_only": True, "placement": "linear"},
        {"model": "nested", "P": 4, "enabled": False},
        {"model": "nested", "P": 2, "enabled": False},
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_nested_batches_train_as_if_unpartitioned(subtests: pytest.Subtests, world: int) -> None:
    cases = [{"M": 3, "clip": 0.0, "enabled": True, **case} for case in CASES[world]]
    for rank, output in enumerate(launch_each(subtests, "support.parity:run_cases", world, cases, timeout=200)):
        warned = "no layer pops these entries of the batch: " in output
        assert warned == (rank == 0), "entries that go nowhere are named once, on the first rank"


def test_values_of_any_dtype_and_layout_travel(subtests: pytest.Subtests) -> None:
    """Short integers, flags, complex numbers, conjugated views, nothing, channels last; as bytes where tags are not."""
    ways: tuple[dict[str, Any], ...] = ({}, {"placement": "linear"}, {"untagged": True})
    cases = [{"model": "assorted", "P": 2, "M": 3, "clip": 0.0, "enabled": True, **way} for way in ways]
    launch_each(subtests, "support.parity:run_cases", 2, cases, timeout=200)


def graph_that_pops(*names: str) -> Graph:
    return Graph(layers=(Layer(name="first"), Layer(name="second", pop=names)))


def split(inputs: Any, *names: str, first: str = "hidden") -> SplitBatch:
    return SplitBatch((inputs, None), graph_that_pops(*names), first)


def test_entries_of_nested_dicts_have_dotted_names_and_none_is_absent() -> None:
    found = split(nested_batch(0, 0, 0)[0], "added.deep.ids", first="latents.noisy")
    assert list(found.entries) == ["mask", "added.text", "added.deep.ids", "added.factor", "rotary", "how", "captions"]
    assert found.inputs.shape == (2, 8)
    assert found.unread() == ["mask", "added.text", "added.factor", "rotary", "how", "captions"]


def test_the_first_entry_that_is_not_none_is_the_first_layers_input() -> None:
    found = split({"a": None, "b": {"c": torch.ones(1)}, "d": torch.zeros(1)})
    assert found.inputs == torch.ones(1) and list(found.entries) == ["d"]


BAD = [
    ({"x": torch.ones(1), "mask": None}, "layer second pops 'mask'.*must have it.*None: mask"),
    ({"x": torch.ones(1), "added": {"mask": torch.ones(1)}}, "entries are: added.mask"),
    ({"hidden": None, "mask": torch.ones(1)}, "first layer's input to be a tensor.*'hidden': None"),
    ({"x": None, "y": {"z": None}}, "found only None: x, y.z"),
    ({"x": torch.ones(1), 3: torch.ones(1)}, "names as keys of the inputs, found 3"),
    ({"x": torch.ones(1), "a.mask": 1, "a": {"mask": 2}}, "called 'a.mask': once with a dot, once nested"),
]


def test_an_input_that_was_named_must_be_there() -> None:
    with pytest.raises(BatchError, match=r"first layer's input 'smaple' among .* found mask, sample; .*input="):
        split({"sample": torch.ones(1), "mask": torch.ones(1)}, "mask", first="smaple")


@pytest.mark.parametrize(("inputs", "message"), BAD)
def test_what_is_no_batch_is_named(inputs: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split(inputs, "mask")


def test_flatten_keeps_order_and_empty_dicts_vanish() -> None:
    assert list(flatten({"b": {"d": 1, "c": {}}, "a": 2})) == ["b.d", "a"]


DYNAMIC: dict[int, list[dict[str, Any]]] = {
    3: [
        {"model": "tokens", "P": 3},
        {"model": "tokens", "P": 3, "placement": "linear", "first_rank_only": True, "untagged": True},
    ],
    4: [
        *[{"model": "tokens", "P": ranks} for ranks in (1, 2, 4)],
        {"model": "unet buckets", "P": 2, "M": 2},
        {"model": "tokens", "P": 4, "first_rank_only": True},
        {"model": "tokens", "P": 2, "enabled": False},
        {"model": "tokens", "P": 4, "enabled": False},
    ],
}


@pytest.mark.parametrize("world", DYNAMIC)
def test_changing_shapes_train_as_if_unpartitioned(subtests: pytest.Subtests, world: int) -> None:
    """At (pipeline ranks, data parallel) = (3, 1), (1, 4), (2, 2), (4, 1): shapes change in and between steps."""
    cases = [{"M": 3, "clip": 0.0, "enabled": True, "dynamic": True, **case} for case in DYNAMIC[world]]
    launch_each(subtests, "support.parity:run_cases", world, cases, timeout=200)


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.soak)])
def test_changing_shapes_leave_nothing_behind(steps: int) -> None:
    for _, output in launch("support.engine_ranks:changes_shapes", 3, steps, timeout=250):
        assert "PASSED" in output


def keeper_of(graph: Graph, first: str, *, dynamic: bool) -> ShapeKeeper:
    head = Head(name=None, loss_fn=None, input=first, layers=range(len(graph.layers)))
    return ShapeKeeper(BatchForm(graph=graph, heads=(head,)), dynamic)


def drawn(*sizes: int) -> StepBatches:
    batches = (({"latents.noisy": torch.ones(size, 2), "n": size}, None) for size in sizes)
    keeper = keeper_of(graph_that_pops("n"), "latents.noisy", dynamic=True)
    return StepBatches(batches.__next__, len(sizes), keeper.split, torch.device("cpu"), ["n"])


class Picture:
    """Its repr tells its address, as that of most objects."""


@pytest.mark.parametrize(
    "value", [Picture(), [Picture(), 3], {"of": Picture()}, torch.ones(2, dtype=torch.complex64).conj(), {"a", "b"}]
)
def test_a_checksum_is_of_the_content(value: Any) -> None:
    again = copy.deepcopy(value)
    first, second = (checksum(one, 0) for one in (value, again))
    assert first == second


def test_an_entry_goes_to_the_device_once_and_its_input_stays_no_longer_than_it_is_read() -> None:
    keeper = keeper_of(graph_that_pops("time"), "latents", dynamic=False)
    batches = (({"latents": torch.ones(2), "time": torch.ones(3)}, None) for _ in range(2))
    data = StepBatches(batches.__next__, 2, keeper.split, torch.device("meta"), ["time"])
    entry = data.entry("time", 0)
    assert entry.device.type == "meta"
    assert data.entry("time", 0) is entry is not data.entry("time", 1)
    assert data.inputs(0, 0) is not data.inputs(0, 0)
    reference = weakref.ref(entry)
    del entry
    assert reference() is not None
    data.release(0)
    assert reference() is None
    assert data.entry("time", 1) is data.entry("time", 1)


def test_ranks_that_draw_other_shapes_are_told_at_the_draw() -> None:
    keys = drawn(2, 3, 2).draw_all()
    assert keys[0] == keys[2] != keys[1]
    late = drawn(2, 4, 2)
    late.expect(keys)
    late.inputs(0, 0)
    with pytest.raises(BatchError, match=r"microbatch 1: expected the shapes that.*found others \(inputs \[4, 2\]"):
        late.inputs(1, 0)
    early = drawn(3, 3, 2)
    early.first()
    with pytest.raises(BatchError, match="microbatch 0: expected the shapes that the first pipeline rank has drawn"):
        early.expect(keys)
