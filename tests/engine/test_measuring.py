"""Ranks measure layers together and agree on what they found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from support.launch import launch
from torch import nn

from deepspeed_pulse.engine import device as device_module
from deepspeed_pulse.engine.data.resizing import resized
from deepspeed_pulse.engine.measure import optimizer as optimizer_module
from deepspeed_pulse.engine.measure.fitting import fit_link
from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.links import rounds, shape_of, uneven
from deepspeed_pulse.engine.measure.optimizer import optimizer_ms_per_gb
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.engine.measure.sums import rings
from deepspeed_pulse.engine.plans.measuring import _built, shares
from deepspeed_pulse.engine.waist.older import cast_of_buffers
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph, Layer


def test_every_rank_measures_its_share() -> None:
    launch("support.measuring_ranks:measures", 3, timeout=200)


EXPECTED = {
    f"{kind} of layer {at}": text.format(at)
    for at in (0, 3, 5)
    for kind, text in (
        ("build", "RunError: layer {}.Fails, while it is built: ValueError: no such"),
        ("forward", ": ValueError: cannot run (in layer {}.Fails)"),
        ("backward", ": ValueError: cannot run back (in layer {}.Fails)"),
    )
} | {
    "no rows": "BatchError: example_batch: entry 'c': expected 2 rows, one a sample, to measure microbatches of 4",
    "other rows": "BatchError: example_batch: expected 3 rows in the first layer's input",
    "no size fits": "expected a microbatch size at which every layer fits the device's memory, found none of 3, 4",
}


def test_an_error_on_one_rank_is_every_ranks(tmp_path: Path) -> None:
    (_, output), *_ = launch("support.measuring_ranks:meets_errors", 3, str(tmp_path), timeout=200)
    found = dict(json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE "))
    assert set(found) == set(EXPECTED)
    for name, text in EXPECTED.items():
        assert text in found[name], (name, found[name])
    assert "microbatches of 4 do not fit the device's memory" in output


@pytest.mark.parametrize("buffer_dtype", [None, torch.bfloat16])
def test_a_layer_is_measured_as_the_engine_will_cast_it(buffer_dtype: torch.dtype | None) -> None:
    layer = nn.BatchNorm1d(4)
    asked: Any = SimpleNamespace(dtype=torch.bfloat16, buffer_dtype=buffer_dtype)
    found = _built(layer, "norm", asked)
    assert (found.weight.dtype, found.running_mean.dtype) == (torch.bfloat16, buffer_dtype or torch.float32)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    assert _built(found, "norm", asked) is found, "nothing is left to cast"


def test_buffers_are_cast_where_this_version_casts_them() -> None:
    def buffers_in(block: dict[str, Any]) -> Any:
        config = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "bf16": {"enabled": True}, **block})
        return cast_of_buffers(config, torch.bfloat16)

    apart = hasattr(DeepSpeedEngine, "_cast_module_mixed_precision")  # parameters alone, unless told otherwise
    assert buffers_in({}) == (None if apart else torch.bfloat16)
    assert not apart or buffers_in({"data_types": {"buffer_dtype": "fp16"}}) == torch.float16


def test_shares_are_as_equal_as_can_be() -> None:
    assert [len(share) for share in shares(10, 4)] == [2, 3, 2, 3]
    assert shares(2, 4) == [range(1), range(1, 2)]


def test_a_batch_is_repeated_or_cut() -> None:
    hidden, mask, scale = torch.arange(6.0).reshape(3, 2), torch.ones(1, 7), torch.tensor(2.0)
    entries = {"mask": mask, "scale": scale, "word": "text", "pair": (hidden, hidden)}
    more, named = resized(hidden, entries, have=3, want=7)
    assert more[:, 0].tolist() == [0.0, 2.0, 4.0, 0.0, 2.0, 4.0, 0.0]
    assert named["mask"] is mask and named["scale"] is scale and named["word"] == "text"
    assert [len(part) for part in named["pair"]] == [7, 7]
    fewer, _ = resized(hidden, {}, have=3, want=2)
    assert torch.equal(fewer, hidden[:2])
    same, _ = resized(hidden, {"odd": torch.ones(5)}, have=3, want=3)
    assert same is hidden
    with pytest.raises(BatchError, match=r"entry 'odd': expected 3 rows.*found \[5\]"):
        resized(hidden, {"odd": torch.ones(5)}, have=3, want=1)


def test_links_are_measured_between_ranks(tmp_path: Path) -> None:
    (_, output), *_ = launch("support.measuring_ranks:measures_links", 4, str(tmp_path), timeout=200)
    print(output)
    (text,) = (json.loads(line[5:])[1] for line in output.splitlines() if line.startswith("CASE "))
    assert "expected the same device on every rank, to measure layers and links, found fast on ranks 0, 1, 3" in text
    assert "slow on rank 2 (host host1)" in text and '"profile" (ds_pulse profile)' in text
    assert "ranks differ in threads: 1 on ranks 0, 1, 2 (hosts a, b), 2 on rank 3 (host b)" in output
    assert "measured anew" in output


def test_links_are_fitted_by_latency_and_bandwidth() -> None:
    def exact(size: int) -> float:
        return 0.05 + size / 2e6

    link = fit_link([(size, exact(size)) for size in (2**12, 2**16, 2**20)])
    assert (link.latency_us, link.bandwidth_gb_per_s) == (50.0, 2.0)
    noisy = fit_link([(2**12, 0.05), (2**16, 0.04), (2**20, 0.03)])  # more bytes in less time
    assert noisy.latency_us == 50.0 and noisy.bandwidth_gb_per_s > 0
    below = fit_link([(2**12, 0.001), (2**16, 0.1), (2**20, 1.9)])
    assert below.latency_us == 1.0 and below.bandwidth_gb_per_s == pytest.approx(2**20 / 1.9e6, rel=1e-5)


def test_no_rank_is_in_two_pairs_at_a_time() -> None:
    for nodes, per_node in itertools.product(range(1, 5), range(1, 6)):
        for inside, pairs in rounds(nodes, per_node):
            ranks = [rank for pair in pairs for rank in pair]
            assert len(set(ranks)) == len(ranks) and max(ranks) < nodes * per_node
            assert all((a // per_node == b // per_node) is inside for a, b in pairs)


def test_every_rank_sums_in_one_ring_of_a_kind() -> None:
    for nodes, per_node in itertools.product(range(1, 5), range(1, 6)):
        found = dict(rings(nodes, per_node))
        assert (True in found, False in found) == (per_node > 1, nodes > 1)
        for inside, groups in found.items():
            assert sorted(itertools.chain(*groups)) == list(range(nodes * per_node))
            same = [{rank // per_node if inside else rank % per_node for rank in ranks} for ranks in groups]
            assert all(len(places) == 1 for places in same)


class LaggingDevice:
    """An accelerator whose events say when the device was there, which is known after waiting only."""

    def __init__(self) -> None:
        self.now_ms, self.waited = 0.0, 0

    def use_host_timers(self) -> bool:
        return False

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: LaggingDevice) -> None:
        self._device = device

    def record(self) -> None:
        self.ms = self._device.now_ms

    def synchronize(self) -> None:
        self._device.waited += 1

    def elapsed_time(self, end: Event) -> float:
        assert self._device.waited
        return end.ms - self.ms


def test_an_accelerator_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LaggingDevice()
    monkeypatch.setattr(device_module, "get_accelerator", lambda: device)
    monkeypatch.setattr(device_module, "_host_ms", lambda: 0.0)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        device.now_ms += 7.0
        return hidden

    graph = Graph(layers=(Layer(name="seven"),))
    clock = device_module.DeviceClock(torch.device("meta"))
    (cost,) = measure_layers(
        graph, [lambda: layer], LayerInputs(hidden=torch.ones(2, 2), values={}), torch.device("cpu"), clock
    ).layers
    assert (cost.forward_ms, cost.backward_ms, cost.spread) == (7.0, 0.0, 0.0)


def test_hosts_of_unequal_numbers_of_ranks_are_told() -> None:
    hosts = ["a", "a", "b"]
    assert shape_of(hosts) == (3, 1)
    assert "one host after the other (2 on a, 1 on b): planned as a rank a node" in uneven(hosts)


FP32, FP64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("trained", "options", "stepped", "num_bytes"),
    [
        ([(7, "float32"), (5, "float32")], {}, [(7, FP32), (5, FP32)], 48),
        ([(5, "float32"), (7, "float32")], {"shared": True}, [(12, FP32)], 48),
        ([(5, "bfloat16"), (7, "bfloat16")], {}, [(12, FP32)], 24),
        ([(7, "float16"), (5, "float16")], {}, [(7, FP32), (5, FP32)], 24),
        ([(5, "float16"), (7, "float16")], {"fused": True}, [(12, FP32)], 24),
        ([(5, "float32"), (7, "bfloat16")], {}, [(5, FP32), (7, FP32)], 34),
        ([(0, "float64"), (5, "float64")], {"shared": True}, [(5, FP64)], 40),
        ([(3, "float8_e4m3fn"), (5, "float32")], {}, [(5, FP32)], 20),
    ],
)
def test_the_optimizer_that_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    trained: list[tuple[int, str]],
    options: dict[str, bool],
    stepped: list[tuple[int, torch.dtype]],
    num_bytes: int,
) -> None:
    """As DeepSpeed's would be. It takes 1 ms here."""
    made: list[dict[str, Any]] = []

    class OneMs:
        def __init__(self, parameters: list[torch.Tensor], **options: Any) -> None:
            assert all(p.grad is not None for p in parameters)
            made.append({"parameters": [(p.numel(), p.dtype) for p in parameters], **options})

        def step(self) -> None:
            now[0] += 1.0

    now = [0.0]
    monkeypatch.setattr(optimizer_module, "_some_of", lambda trained, ranks: trained)
    monkeypatch.setattr(torch.optim, "AdamW", OneMs)
    monkeypatch.setattr(device_module, "_host_ms", lambda: now[0])
    found = optimizer_ms_per_gb(trained, torch.device("cpu"), **options)
    assert made == [{"parameters": stepped, "fused": options.get("fused")}]
    assert found == pytest.approx(1e9 / num_bytes)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_torch_steps_what_is_measured(dtype: str, fused: bool, shared: bool) -> None:
    assert optimizer_ms_per_gb([(9, dtype)] * 3, torch.device("cpu"), fused=fused, shared=shared) > 0


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("dtype", "held"), [("float32", 16), ("bfloat16", 18)])
def test_some_of_each_kind_are_stepped_and_no_more_than_a_share_is_held(ranks: int, dtype: str, held: int) -> None:
    """Weights and biases in turn, behind one more of them."""
    trained = [(64, dtype), *[(2**20, dtype), (1024, dtype)] * 96]
    found = optimizer_module._some_of(trained, ranks)
    assert {size for size, _ in found} >= {2**20, 1024}
    weights = sum(size for size, _ in trained) * getattr(torch, dtype).itemsize
    assert 0.5 * weights / ranks < held * sum(size for size, _ in found) < 1.2 * weights / ranks


@pytest.mark.parametrize("ranks", [8, 32, 64, 128, 512, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_however_many_ranks_it_is_no_bias_alone_that_is_stepped(ranks: int, dtype: str) -> None:
    """Its kernels' start would stand for a GB."""
    trained = [(9437184, dtype), (1536, dtype)] * 200
    share = sum(size for size, _ in trained) // ((9 if dtype == "bfloat16" else 4) * ranks)
    assert 0.5 * share <= sum(size for size, _ in optimizer_module._some_of(trained, ranks)) <= 1.5 * share


@pytest.mark.parametrize(
    ("trained", "ranks", "found"),
    [
        ([(2**28, "float32")], 1, [(2**25, "float32")]),
        ([(800, "float32")], 2, [(100, "float32")]),
        ([(8, "float32")], 64, [(1, "float32")]),
    ],
)
def test_of_a_large_parameter_a_part_is_stepped(
    trained: list[tuple[int, str]], ranks: int, found: list[tuple[int, str]]
) -> None:
    assert optimizer_module._some_of(trained, ranks) == found


@pytest.mark.parametrize("trained", [[], [(0, "float32")], [(4, "float8_e4m3fn")]])
def test_without_parameters_there_is_no_step(trained: list[tuple[int, str]]) -> None:
    assert optimizer_ms_per_gb(trained, torch.device("cpu")) == 0.0
