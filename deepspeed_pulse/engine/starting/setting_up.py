"""The first that ranks do together: they tell one another what they have met, and compare what they bring."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.backbones import Head, check_backbones, check_independent, heads_of, joint_graph, own_ties
from deepspeed_pulse.engine.collectives import as_pulse_error, raise_everywhere
from deepspeed_pulse.engine.communicator import check_backend
from deepspeed_pulse.engine.groups import GroupOptions, check_options, configured_groups
from deepspeed_pulse.engine.observation.watchdog import Watchdog, of_process
from deepspeed_pulse.engine.plans.job import TrainingJob
from deepspeed_pulse.engine.sharing.patched import check_patched
from deepspeed_pulse.engine.sharing.shared import SharedWeights
from deepspeed_pulse.engine.sharing.unseen import check_functions, check_shared
from deepspeed_pulse.engine.specs import unwrap
from deepspeed_pulse.engine.starting.arguments import check_arguments, check_methods, listed
from deepspeed_pulse.engine.starting.sameness import check_same, config_facts, layer_facts, plain
from deepspeed_pulse.engine.starting.start import failure, init_distributed
from deepspeed_pulse.errors import ConfigError, PulseError

WHERE = "PipelineModule()"


def set_up(module_class: type, given: Mapping[str, Any]) -> tuple[TrainingJob, SharedWeights, Any, Watchdog | None]:
    """The job, what its layers share, the number of pipeline ranks as given or "auto", and the watchdog.

    Every rank of the world comes here, also one that cannot go on: the first PulseError that any has met, or what they
    differ in, is every rank's. The watchdog is None without pulse. ``given``: the arguments of the ``module_class``.
    """
    job: TrainingJob | None = None
    problem: PulseError | None = None
    try:
        layers, heads = declared(given)
        check_arguments(joint_graph(layers, heads), given)
        job = TrainingJob(layers, heads, given)
        shared = SharedWeights(layers)
        refuse_unrunnable(job, module_class, shared)
        num_stages = job.check(given["num_stages"], given["topology"], dynamic_shape=given["dynamic_shape"])
    except Exception as met:
        problem = as_pulse_error(met, WHERE)
    alone = dist.get_world_size() == 1 if dist.is_initialized() else os.environ.get("WORLD_SIZE", "1") == "1"
    if problem is not None and alone:
        raise problem
    pulse = PulseConfig() if job is None else job.pulse
    watchdog = None if pulse is None or not pulse.enabled else of_process(pulse.timeout_seconds)
    if watchdog is not None:
        watchdog.stop_request.listen()
    joining = f"{WHERE}: joining the process group"
    if "MASTER_ADDR" in os.environ:
        joining += f" at {os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    with nullcontext() if watchdog is None else watchdog.watching_patiently(joining):
        _meet(problem, watchdog, None if pulse is None else pulse.timeout_seconds)
        assert job is not None
        if dist.get_world_size() > 1:
            check_same(_facts(job, given), WHERE)
        if job.pulse is not None and job.pulse.enabled:
            check_options(job.pulse)
    return job, shared, num_stages, watchdog


def declared(given: Mapping[str, Any]) -> tuple[list[Any], tuple[Head, ...]]:
    """The layers of all backbones, and the backbones; a PulseError where they are not of the right kind."""
    backbones = given["backbones"]
    check_backbones(backbones, given["layers"], given["loss_fn"], given["input"])
    if backbones is None:
        layers = listed(given["layers"])
        return layers, (Head(name=None, loss_fn=given["loss_fn"], input=given["input"], layers=range(len(layers))),)
    lists = [listed(one.layers, f"backbone {name}: ") for name, one in backbones.items()]
    for name, one in zip(backbones, lists, strict=True):
        if not one:
            raise ConfigError(f"backbone {name}: layers: expected at least one layer, found none")
    lists = [own_ties(name, one) for name, one in zip(backbones, lists, strict=True)]
    return [layer for one in lists for layer in one], heads_of(backbones, lists)


def refuse_unrunnable(job: TrainingJob, module_class: type, shared: SharedWeights) -> None:
    """What no plan could run."""
    if job.enabled:
        check_methods(module_class)
    if job.pulse is not None:
        layers = zip(job.graph.layers, map(unwrap, job.layers), strict=True)
        check_patched([(declared.name, layer) for declared, layer in layers if isinstance(layer, torch.nn.Module)])
        for head in job.heads:
            check_functions(job.layers, job.graph, head.loss_fn)
        check_shared(shared, job.graph)
        check_independent(job.graph, job.heads, [one.holders for one in (*shared.parameters, *shared.buffers)])


def _facts(job: TrainingJob, given: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks; layers and config are compared by their contents."""
    facts = {name: plain(value) for name, value in given.items() if name not in ("layers", "config", "backbones")}
    facts["topology"] = [plain(getattr(given["topology"], name, None)) for name in ("axes", "dims")]
    layers = [layer_facts(index, layer) for index, layer in enumerate(job.layers)]
    facts["backbones"] = [[head.name, plain(head.loss_fn), head.input, len(head.layers)] for head in job.heads]
    return {"layers": layers, **facts, **config_facts(job.config)}


def _meet(problem: PulseError | None, watchdog: Watchdog | None, timeout_seconds: float | None) -> None:
    """Wait until all ranks have come, and raise what any has met."""
    try:
        init_distributed(timeout_seconds)
    except ConfigError as met:  # no launcher
        raise problem or met from None
    if watchdog is not None:
        join_others(watchdog)
        watchdog.go_on(f"{WHERE}: waiting for all ranks to come here")
    if dist.get_world_size() > 1:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # object gathers need it where ranks have devices
    if watchdog is not None:  # the same on every rank, and before upstream's groups, for tied layers and replicas too
        check_backend(torch.distributed.get_backend(), torch.device(get_accelerator().current_device_name()))
    raise_everywhere(problem, WHERE)
    if watchdog is not None:
        watchdog.meet()
        watchdog.go_on(f"{WHERE}: comparing what ranks bring")


def join_others(watchdog: Watchdog) -> None:
    """Tell the ranks of the process group where this one is, until it ends."""
    watchdog.join_others()
    _end_at_exit(watchdog)


@functools.cache
def _end_at_exit(watchdog: Watchdog) -> None:
    """Registered after, so called before, what ends the process group."""
    atexit.register(_end, watchdog)


def _end(watchdog: Watchdog) -> None:
    problem = failure()
    if problem is None:
        watchdog.end()
    else:
        watchdog.leave(f"{type(problem).__name__}: {problem}")


@contextmanager
def watched_start(watchdog: Watchdog | None, pulse: PulseConfig | None, doing: str) -> Iterator[None]:
    """What comes before the first step: watched, and in groups that do not wait for ever; upstream's way without."""
    if watchdog is None or pulse is None:
        yield
    else:
        with watchdog.watching_patiently(doing), configured_groups(GroupOptions.of(pulse)):
            yield
