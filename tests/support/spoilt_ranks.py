"""The engine with one fault in how it sends, on the stand-in: the losses must tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.accelerator_ranks import STEADY, batches, engine_of
from support.cases import run_each
from support.parity import share_groups

from deepspeed_pulse.engine import communicator
from deepspeed_pulse.engine.communicator import PipelineCommunicator, _Message

Send = Callable[[PipelineCommunicator, torch.Tensor, Any], _Message]


def differ(cases: list[dict[str, Any]]) -> None:
    """Steps of engines that begin alike; in the last steps of each the fault is there."""
    torch.set_num_threads(1)
    share_groups()
    run_each(cases, _differs)


def _differs(case: dict[str, Any]) -> None:
    found = _losses(case, FAULTS[case["fault"]])
    wanted = _sound(case["model"], case["P"], case["M"])
    assert torch.equal(found[:STEADY], wanted[:STEADY])
    assert not torch.equal(found, wanted), f"{case['fault']} does no harm"


@functools.cache
def _sound(model: str, ranks: int, microbatches: int) -> torch.Tensor:
    case = {"model": model, "P": ranks, "M": microbatches, "clip": 0.1, "enabled": True}
    return _losses(case, lambda patch: None)


def _losses(case: dict[str, Any], fault: Callable[[pytest.MonkeyPatch], None]) -> torch.Tensor:
    engine = engine_of(case)
    data = batches(case["model"], engine.grid.data_parallel_id)
    found = [engine.train_batch(data_iter=data) for _ in range(STEADY)]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        found += [engine.train_batch(data_iter=data) for _ in range(2)]
    losses = torch.stack(found).cpu()
    engine.destroy()
    return losses


def wrong_order(patch: pytest.MonkeyPatch) -> None:
    """The first two hidden states of a rank leave the other way round."""
    send, held = PipelineCommunicator.isend, list[torch.Tensor]()

    def isend(self: PipelineCommunicator, tensor: torch.Tensor, channel: Any) -> _Message:
        if len(held) == 2:
            return send(self, tensor, channel)
        held.append(tensor)
        if len(held) == 1:
            return _Message(None, tensor)
        second = send(self, held[1], channel)
        send(self, held[0], channel)
        return second

    patch.setattr(PipelineCommunicator, "isend", isend)


def missing_wait(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits until a message has come."""
    patch.setattr(communicator, "wait", lambda *_: None)


def freed_early(patch: pytest.MonkeyPatch) -> None:
    """What is sent is used for something else as soon as the host has handed it over."""
    send = PipelineCommunicator.isend

    def isend(self: PipelineCommunicator, tensor: torch.Tensor, channel: Any) -> _Message:
        copy = tensor.clone()
        message = send(self, copy, channel)
        copy.fill_(1)
        return message

    patch.setattr(PipelineCommunicator, "isend", isend)


FAULTS = {fault.__name__: fault for fault in (wrong_order, missing_wait, freed_early)}
