"""What ranks run in the tests of measuring: costs and links are the same everywhere, and errors too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.parity import models
from torch import nn

CPU = torch.device("cpu")


def request(model: str = "toy", *, layers: Any = None, batch: Any = None, pulse: Any = None) -> Any:
    """What the engine would ask for, on all ranks as one pipeline."""
    import deepspeed

    from deepspeed_pulse.config import PulseConfig
    from deepspeed_pulse.engine.data.batches import SplitBatch
    from deepspeed_pulse.engine.plans.costs import PlanRequest
    from deepspeed_pulse.engine.specs import describe
    from deepspeed_pulse.ir.graph import Graph

    deepspeed.init_distributed()
    make_layers, make_batch, first = models(model)
    found = make_layers() if layers is None else layers
    graph = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(found)))
    split = SplitBatch(make_batch(0, 0, 0) if batch is None else batch, graph, first)
    return PlanRequest(
        graph=graph,
        layers=found,
        pulse=PulseConfig.model_validate(pulse or {}),
        pipeline_ranks=torch.distributed.get_world_size(),
        data_parallel=1,
        microbatches=4,
        microbatch_size=2,
        partition_method="profile",
        example=(split.inputs, dict(split.entries)),
        device=CPU,
    )


def told_by_all(item: Any) -> list[Any]:
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, item)
    return found


def measures(_: Any) -> None:
    """Sizes are those of the whole model on one rank, times are there, every rank has the same."""
    from deepspeed_pulse.engine.measure.layers import measure_layers
    from deepspeed_pulse.engine.measure.probe import LayerInputs
    from deepspeed_pulse.engine.plans.measuring import measure_profiles
    from deepspeed_pulse.engine.specs import LayerSpec

    built = []
    build = LayerSpec.build

    def counting(self: Any, log: bool = False) -> Any:
        built.append(self)
        return build(self, log)

    for model in ("toy", "unet"):
        asked = request(model)
        built.clear()
        LayerSpec.build = counting
        before = torch.get_rng_state()
        profiles = measure_profiles(asked, [1, 2, 5])
        assert torch.equal(torch.get_rng_state(), before)
        LayerSpec.build = build
        share = told_by_all(len({id(layer) for layer in built}))
        assert all(s <= -(-len(asked.layers) // len(share)) for s in share), share
        prints = [profile.fingerprint for profile in profiles]
        assert all(told == prints for told in told_by_all(prints))
        assert [profile.microbatch_size for profile in profiles] == [1, 2, 5]
        (stepping,) = {profile.optimizer_ms_per_gb for profile in profiles}
        assert stepping > 0
        assert all(layer.forward_ms > 0 for profile in profiles for layer in profile.layers)
        inputs, entries = asked.example
        from deepspeed_pulse.engine.plans.costs import built as make
        from deepspeed_pulse.engine.plans.costs import skips_of

        alone = measure_layers(
            asked.graph, [lambda x=x: make(x) for x in asked.layers], LayerInputs(hidden=inputs, values=entries), CPU
        )
        assert sizes(profiles[1].layers) == sizes(alone.layers)
        assert profiles[1].skips == skips_of(asked.graph, alone.value_bytes)
        assert profiles[1].dtype == alone.dtype == "float32"
        assert all(
            a.output_bytes * 5 == b.output_bytes
            for a, b in zip(profiles[0].layers, profiles[2].layers, strict=True)
            if a.output_bytes
        )
    print("PASSED", flush=True)


def sizes(layers: Any) -> list[tuple[str, int, int, int]]:
    return [(layer.name, layer.param_bytes, layer.activation_bytes, layer.output_bytes) for layer in layers]


class Fails(nn.Module):
    """A layer whose ``kind`` of failure is met where it is built, in forward or in backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "build" and torch.get_default_device().type != "meta":
            raise ValueError("no such kind of layer")
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "forward":
            raise ValueError("cannot run")
        if self.kind == "memory" and len(hidden) > 2:
            kind = RuntimeError if len(hidden) > 3 else torch.OutOfMemoryError  # torch-npu has both
            raise kind("NPU out of memory. Tried to allocate 1 MiB")
        output = self.inner(hidden)
        return _FailsBackward.apply(output) if self.kind == "backward" else output


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot run back")


def failing(kind: str, at: int) -> list[Any]:
    from deepspeed_pulse import LayerSpec

    return [LayerSpec(Fails, kind if i == at else "none") for i in range(6)]


def meets_errors(folder: str) -> None:
    """Whichever rank meets it, all raise it; a size that does not fit is left out where another does."""
    from deepspeed_pulse.engine.plans.measuring import measure_profiles
    from deepspeed_pulse.errors import PulseError

    batch = (torch.randn(2, 8), torch.randn(2, 8))
    cases: dict[str, Callable[[], Any]] = {
        f"{kind} of layer {at}": lambda kind=kind, at=at: measure_profiles(
            request(layers=failing(kind, at), batch=batch), [2]
        )
        for kind in ("build", "forward", "backward")
        for at in (0, 3, 5)
    }
    entries = {
        "hidden": torch.randn(2, 8),
        "t": torch.randn(2, 1),
        "c": torch.tensor([1, 2, 3]),
        "unread": torch.ones(7),
    }
    toy = request()
    cases["no rows"] = lambda: measure_profiles(replace(toy, example=(toy.example[0], entries)), [2, 4])
    cases["other rows"] = lambda: measure_profiles(replace(toy, microbatch_size=3), [3, 6])
    cases["no size fits"] = lambda: measure_profiles(request(layers=failing("memory", 3), batch=batch), [3, 4])
    for name, case in cases.items():
        try:
            case()
            text = "nothing"
        except PulseError as problem:
            text = f"{type(problem).__name__}: {problem}"
        told = told_by_all(text)
        assert len(set(told)) == 1, told
        if os.environ["RANK"] == "0":
            os.write(1, f"CASE {json.dumps([name, text])}\n".encode())
    left = measure_profiles(request(layers=failing("memory", 3), batch=batch), [1, 2, 4])
    assert [profile.microbatch_size for profile in left] == [1, 2]
    again = request(layers=failing("memory", 3), batch=batch, pulse={"plan_cache": folder})
    for _ in range(2):  # the second time smaller ones are kept, and none is measured that fits
        assert [profile.microbatch_size for profile in measure_profiles(again, [1, 2, 3, 4])] == [1, 2]
    assert measure_profiles(request(layers=failing("memory", 3), batch=batch), [4], left) == ()
    print("PASSED", flush=True)


def measures_links(folder: str) -> None:
    """Every rank has the same cluster; hosts make nodes; kept links are found again, damaged ones measured anew."""
    import socket
    import time

    import deepspeed

    from deepspeed_pulse.engine import communicator
    from deepspeed_pulse.engine.measure import hardware, links, overhead, sums
    from deepspeed_pulse.engine.plans.machines import machines
    from deepspeed_pulse.errors import ConfigError

    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    started = time.perf_counter()
    cluster = machines(CPU)
    print(f"LINKS {cluster} in {time.perf_counter() - started:.2f} s", flush=True)
    assert told_by_all(cluster) == [cluster] * 4
    assert (cluster.nodes, cluster.ranks_per_node) == (1, 4)
    assert cluster.intra_node == cluster.inter_node and cluster.intra_node.latency_us > 0
    assert cluster.intra_node.overhead_us > 0 and cluster.intra_node.bus_gb_per_s > 0
    assert cluster.intra_node.bus_latency_us >= 0
    # from here on what is found does not count, only that all find it
    links.SIZES, sums._SIZES = links.SIZES[:3], sums._SIZES[:3]
    overhead._STEPS = overhead._MICROBATCHES = 2
    one_boot, hardware.boot = hardware.boot, lambda: str(rank // 2)
    assert (machines(CPU).nodes, machines(CPU).ranks_per_node) == (2, 2), "two machines of one name"
    hardware.boot = one_boot
    socket.gethostname = lambda: f"host{rank // 2}"
    cluster = machines(CPU, plan_cache=folder)
    assert (cluster.nodes, cluster.ranks_per_node) == (2, 2)
    socket.gethostname = lambda: f"another{rank // 2}"
    assert machines(CPU, plan_cache=folder) == cluster, "the same job on other hosts"
    socket.gethostname = lambda: f"host{rank // 2}"
    (file,) = Path(folder).iterdir()
    torch.distributed.barrier()
    if rank == 0:
        file.write_text(file.read_text()[:100])
    torch.distributed.barrier()
    assert told_by_all(machines(CPU, plan_cache=folder))[0].nodes == 2
    communicator.HOST_BACKENDS = ()  # as on backends that ignore tags
    assert machines(CPU).nodes == 2
    communicator.HOST_BACKENDS = ("gloo", "mpi")
    hardware.device_name = lambda device: "slow" if rank == 2 else "fast"
    try:
        machines(CPU)
        text = "nothing"
    except ConfigError as problem:
        text = str(problem)
    assert told_by_all(text) == [text] * 4
    hardware.device_name = lambda device: "fast"
    torch.set_num_threads(2 if rank == 3 else 1)
    socket.gethostname = lambda: "ab"[rank % 2]
    hardware.agreed_hardware(CPU, compared="threads")
    assert (machines(CPU).nodes, machines(CPU).ranks_per_node) == (4, 1)
    os.write(1, f"CASE {json.dumps(['devices', text])}\n".encode())
