"""What carries messages: refused where it cannot, and without a message where there is nothing to carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_pulse.engine import communicator
from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import ConfigError
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
