"""What carries messages: refused where it cannot, and without a message where there is nothing to carry."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.comm import comm as upstream_comm
from deepspeed.comm.torch import TorchBackend
from support.launch import launch

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine import communicator
from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.groups import GroupOptions, check_options, configured_groups, group_timeout
from deepspeed_pulse.engine.observation.watchdog import Watchdog
from deepspeed_pulse.engine.plans.machines import with_communicators
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.cluster import CommunicatorBytes
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.program import Channel


def seat(device: str) -> Seat:
    return Seat(pipelines=((0, 1),), index=0, rank=0, group=None, device=torch.device(device))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is given to DeepSpeed's messages over a backend of that name."""
    found: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "hccl" if found == ["hccl"] else "gloo")
    monkeypatch.setattr(communicator, "isend", lambda tensor, *_, **__: found.append(tensor))
    return found


def test_gloo_beside_a_model_on_a_device_is_refused(started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)backend 'gloo' sends from the host's memory.*'meta'.*init_distributed"):
        PipelineCommunicator(seat("meta"))


def test_a_message_is_bytes_where_backends_know_few_dtypes(started: list[Any]) -> None:
    started.append("hccl")
    channel = Channel(0, 1)
    carrier = PipelineCommunicator(seat("cpu"))
    started.clear()
    carrier.share([channel])
    for tensor in (torch.ones(2, 3, dtype=torch.complex64), torch.tensor(7, dtype=torch.int16)):
        carrier.isend(tensor, channel)
        assert started[-1].dtype is torch.uint8 and started[-1].numel() == tensor.nbytes
        assert started[-1].data_ptr() == tensor.data_ptr(), "no copy"
    carrier.isend(torch.empty(2, 0), channel).wait(1.0)
    assert len(started) == 2, "nothing is carried for a tensor without numbers"


# -- process groups ------------------------------------------------------------------------


@pytest.mark.timeout(200)
def test_every_process_group_has_a_timeout_and_those_of_equal_ranks_are_one() -> None:
    """And none is split off the world's, by torch's own rules."""
    case = {"model": "toy", "P": 2, "M": 2, "clip": 0.1, "enabled": True}
    launch("support.group_ranks:have_timeouts", 2, case, timeout=150)


class Started(TorchBackend):
    """DeepSpeed's backend, as rank 1 has it."""

    def __init__(self) -> None:
        pass

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return 1


DEVICE = torch.device("cuda:1")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NCCL's, bound to a device as upstream binds it."""
    found = SimpleNamespace(bound_device_id=DEVICE)
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "default_pg", found)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(upstream_comm, "cdb", Started())
    return found


def test_all_groups_are_made_apart_from_the_world_and_connect_afterwards(
    monkeypatch: pytest.MonkeyPatch, world: SimpleNamespace
) -> None:
    done: list[Any] = []

    def new_group(ranks: list[int], **options: Any) -> tuple[int, ...]:
        done.append((*ranks, world.bound_device_id))
        return tuple(ranks)

    def start(tensor: torch.Tensor, peer: int, group: Any, tag: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda *_: done.append((peer, group, world.bound_device_id)))

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(communicator, "isend", start)
    monkeypatch.setattr(communicator, "irecv", start)
    here = Seat(pipelines=((0, 1, 2), (3, 4, 5)), index=0, rank=1, group=None, device=torch.device("cpu"))
    carrier = PipelineCommunicator(here, got_on=lambda: done.append("got on"))
    channels = [Channel(0, 1), Channel(1, 2), Channel(0, 2)]
    made = [[(0, 1, None), (3, 4, None)], [(1, 2, None), (4, 5, None)], [(0, 2, None), (3, 5, None)]]
    carrier.open(channels[:1])
    assert done == [*made[0], "got on", (0, (0, 1), DEVICE), "got on"]
    done.clear()
    carrier.open([*channels, channels[1]])
    assert done == [*made[1], "got on", *made[2], "got on", (2, (1, 2), DEVICE), "got on", "got on"], "each once"


def test_the_world_is_bound_again_where_making_a_group_fails(
    monkeypatch: pytest.MonkeyPatch, world: SimpleNamespace
) -> None:
    def fail(ranks: list[int], **options: Any) -> None:
        raise RuntimeError(f"bound to {world.bound_device_id}")

    monkeypatch.setattr(torch.distributed, "new_group", fail)
    backend = upstream_comm.cdb
    with configured_groups(GroupOptions(timeout_seconds=1.0)), pytest.raises(RuntimeError, match="bound to None"):
        backend.new_group([0, 1])
    assert world.bound_device_id == DEVICE and "new_group" not in vars(backend)


@pytest.mark.parametrize("timeout_seconds", [1.0, 300.0, 600.0, 1e7])
def test_the_watchdog_speaks_before_a_backend_that_ends_the_process(timeout_seconds: float) -> None:
    """And one that raises does so before the watchdog."""
    dog = Watchdog(0, timeout_seconds, list[str]().append)
    with dog.watching_patiently("a start"):
        for backend, is_said in (("gloo", False), ("nccl", True), ("hccl", True)):
            since = time.monotonic() - group_timeout(timeout_seconds, backend).total_seconds()
            assert bool(dog._problem(replace(dog._place, since=since))) is is_said, backend


@pytest.mark.parametrize("backend", ["hccl", "nccl", "gloo"])
@pytest.mark.parametrize("for_messages", [True, False])
def test_options_arrive_where_they_are_meant(monkeypatch: pytest.MonkeyPatch, backend: str, for_messages: bool) -> None:
    hccl = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=SimpleNamespace))
    torch_npu = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=hccl))
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    nccl = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    options = GroupOptions(timeout_seconds=400.0, hccl_buffer_size=16, nccl_high_priority_stream=True)
    first, second = (options.arguments(backend, for_messages=for_messages) for _ in range(2))
    beyond = (first["timeout"] - group_timeout(400.0, backend)).total_seconds()
    assert beyond == (0 if backend == "gloo" else 3600), "NCCL counts from when a step's receives are posted"
    if backend == "hccl":
        assert first["pg_options"].hccl_config == {"hccl_buffer_size": 16}
        assert first["pg_options"] is not second["pg_options"], "torch writes into them"
    elif backend == "nccl" and for_messages:
        assert first["pg_options"].is_high_priority_stream and first["pg_options"]._timeout == first["timeout"]
    else:
        assert "pg_options" not in first
    assert "pg_options" not in GroupOptions(timeout_seconds=400.0).arguments(backend, for_messages=for_messages)


@pytest.mark.parametrize(("key", "value"), [("hccl_buffer_size", 200), ("nccl_high_priority_stream", True)])
def test_an_option_of_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch, key: str, value: Any) -> None:
    for backend, meant in (("gloo", False), ("hccl", key.startswith("hccl")), ("nccl", key.startswith("nccl"))):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda backend=backend: backend)
        check_options(PulseConfig())
        if meant:
            check_options(PulseConfig(**{key: value}))
        else:
            with pytest.raises(ConfigError, match=rf"key '{key}': an option of .* backend is '{backend}'.*remove"):
                check_options(PulseConfig(**{key: value}))


@pytest.mark.parametrize(
    ("name", "text"), [("HCCL_BUFFSIZE", "0"), ("HCCL_BUFFSIZE", "a"), ("P2P_HCCL_BUFFSIZE", "-1")]
)
def test_a_wrong_size_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "hccl")
    with monkeypatch.context() as patch:
        patch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"variable {name}: expected an integer of at least .*found '{text}'"):
            with_communicators(load_cluster("a100:1x8"), PulseConfig())
    monkeypatch.setenv("HCCL_BUFFSIZE", "50")
    found = with_communicators(load_cluster("a100:1x8"), PulseConfig(hccl_buffer_size=16))
    assert found.communicators == CommunicatorBytes.of_hccl(environment_mb=50, option_mb=16)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert with_communicators(found, PulseConfig()).communicators is None
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    assert with_communicators(found, PulseConfig()) == found, "what the cluster file says"
