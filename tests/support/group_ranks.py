"""How process groups of a job are made: all with a timeout, those of equal ranks once, channels apart."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from support.accelerator_ranks import begun
from support.parity import models

from deepspeed_pulse.engine import communicator
from deepspeed_pulse.engine.groups import GroupOptions, configured_groups

TIMEOUT_SECONDS = 432.0


def have_timeouts(case: dict[str, Any]) -> None:
    """On a CPU channels get groups too, as where backends ignore tags."""
    communicator.HOST_BACKENDS = ()
    layers, batch, first = models(case["model"])
    pulse = {"timeout_seconds": TIMEOUT_SECONDS, "solver_seconds": 0, "placement": "wave"}
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731
    engine = begun(case, layers(), sgd, {"pulse": pulse}, input=first)
    engine.train_batch(data_iter=(batch(number, 0, engine.grid.data_parallel_id) for number in range(case["M"])))
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    found = [(torch.distributed.get_backend(group), _timeout(group)) for group in groups]
    assert {seconds for name, seconds in found if name == "gloo"} == {TIMEOUT_SECONDS}, found
    later = TIMEOUT_SECONDS + 10 + 1 + 60
    assert {seconds for name, seconds in found if name != "gloo"} <= {later, later + 3600}, found
    grid, channels = engine.grid, engine._steps.lowering.communicator._groups
    assert len(found) >= len(channels) + 3
    assert grid.get_model_parallel_group() is grid.get_pipe_parallel_group()
    others = {id(group) for group in groups} - {id(group) for group in channels.values()}
    assert len({id(group) for group in channels.values()}) == len(channels) == 2 and len(others) == len(groups) - 2
    if torch.distributed.get_backend() == "gloo":  # torch's own, and no stand-in that leaves half of torch out
        _split_off_nothing()


def _split_off_nothing() -> None:
    """torch does not look for a communicator to split, although the world is bound to a device."""
    world, torchs = torch.distributed.group.WORLD, torch.distributed.distributed_c10d
    looked: list[Any] = []
    torchs._get_split_source = looked.append
    world.bound_device_id = device = torch.device("cuda", dist.get_rank())
    for ranks in ([0], [0, 1]):
        with configured_groups(GroupOptions(timeout_seconds=TIMEOUT_SECONDS)):
            group = dist.new_group(ranks)
        assert world.bound_device_id == device and not looked
        assert dist.get_rank() not in ranks or group.bound_device_id is None
    torch.distributed.new_group([0])
    assert looked == [world], "else this would prove nothing"
    world.bound_device_id = None


def _timeout(group: Any) -> float:
    """Seconds; a group of the stand-in has its options itself."""
    options = getattr(group, "options", None) or group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())
