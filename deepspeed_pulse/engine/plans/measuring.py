"""Measuring what layers cost, every rank a share of them, so that none ever holds the whole model.

Ranks hand on what the layers so far have given, each after one forward of its share; then all measure at the same time,
as they will compute at the same time: what they share (cores, memory bandwidth, power) counts. Then all of them step
an optimizer.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.backbones import INPUT
from deepspeed_pulse.engine.collectives import (
    agree,
    as_pulse_error,
    everywhere,
    raise_everywhere,
    told_as,
    told_by_all,
)
from deepspeed_pulse.engine.data.resizing import num_samples, resized
from deepspeed_pulse.engine.device import emptied_after, same_random_numbers
from deepspeed_pulse.engine.measure.hardware import agreed_hardware, device_name
from deepspeed_pulse.engine.measure.layers import Measured, measure_layers
from deepspeed_pulse.engine.measure.optimizer import Trained, optimizer_ms_per_gb
from deepspeed_pulse.engine.measure.probe import LayerInputs, reach
from deepspeed_pulse.engine.plans import kept
from deepspeed_pulse.engine.plans.costs import PlanRequest, built, skips_of
from deepspeed_pulse.engine.specs import in_a_row
from deepspeed_pulse.errors import BatchError, PulseError, RunError, in_words
from deepspeed_pulse.ir.backbones import value_name
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.runtime.stage import module_of

T = TypeVar("T")


def measure_profiles(request: PlanRequest, sizes: Sequence[int], known: Sequence[Profile] = ()) -> tuple[Profile, ...]:
    """Layer costs on the example batch, a profile for each microbatch size, in their order.

    All ranks of the world call it; the first error that any met is raised by all. Kept profiles are used where
    ``plan_cache`` has them. Other sizes than the example's (the request's) repeat its samples or take the first ones;
    none stands there twice. A size at which a layer does not fit the device's memory is left out where there are
    others, and said. All sizes have one time of the optimizer: that of ``known`` profiles of the job, or of a kept one,
    if there are any.
    """
    found: dict[int, Profile] = agree(lambda: kept.profiles(request, sizes), "reading kept profiles")
    missing = [size for size in sizes if size not in found]
    if missing:
        before = next(iter([*known, *found.values()]), None)
        stepping = None if before is None else before.optimizer_ms_per_gb
        measured = _measured(request, missing, stepping, has_others=before is not None)
        agree(lambda: kept.keep_profiles(request, measured), "keeping profiles")
        found.update({profile.microbatch_size: profile for profile in measured})
    return tuple(found[size] for size in sizes if size in found)


def _measured(
    request: PlanRequest, sizes: Sequence[int], stepping: float | None, *, has_others: bool
) -> tuple[Profile, ...]:
    """``stepping``: the optimizer's time; None: it is measured, too. ``has_others``: profiles of other sizes exist."""
    agreed_hardware(request.device, compared="threads")
    mine: list[Measured | None] = []
    problem: PulseError | None = None
    try:
        with same_random_numbers(request.device), emptied_after(request.device):
            shared = shares(len(request.layers), dist.get_world_size())
            mine = _measure_share(request, sizes, shared, may_be_too_large=has_others or len(sizes) > 1)
    except Exception as met:
        problem = as_pulse_error(met, f"measuring on rank {dist.get_rank()}")
    raise_everywhere(problem, "measuring layer costs")
    profiles: list[Profile] = []
    trained: list[Trained] = []
    for size, *parts in zip(sizes, *(row for row in told_by_all(mine) if row), strict=True):
        if None not in parts:
            profiles.append(_joined(request, size, parts))
            trained = [parameter for part in parts for parameter in part.trained]
        elif dist.get_rank() == 0:
            print(f"pulse: microbatches of {size} do not fit the device's memory: not measured", flush=True)
    if not profiles and not has_others:
        raise BatchError(
            f"example_batch: expected a microbatch size at which every layer fits the device's memory, found none of "
            f"{', '.join(map(str, sizes))}; give a smaller train_micro_batch_size_per_gpu"
        )
    if not profiles:
        return ()
    if stepping is None:
        stepping = _measured_optimizer(request, trained)
    return tuple(replace(profile, optimizer_ms_per_gb=stepping) for profile in profiles)


def _measured_optimizer(request: PlanRequest, trained: Sequence[Trained]) -> float:
    """The mean of all ranks, which step at the same time, as they will."""
    fused, shared = request.rules.fused_optimizer, request.rules.shards_optimizer
    sharing = dist.get_world_size() if request.device.type == "cpu" else 1  # a card's memory is its rank's own
    mine = everywhere(
        lambda: optimizer_ms_per_gb(trained, request.device, ranks=sharing, fused=fused, shared=shared),
        "measuring the optimizer",
        RunError,
    )
    return float(statistics.mean(told_by_all(mine)))


def shares(num_layers: int, world: int) -> list[range]:
    """Per rank the layers that it measures, as many on each as possible; ranks beyond the layers have none.

    >>> shares(5, 2)
    [range(0, 2), range(2, 5)]
    """
    ranks = min(num_layers, world)
    return [range(r * num_layers // ranks, (r + 1) * num_layers // ranks) for r in range(ranks)]


def _measure_share(
    request: PlanRequest, sizes: Sequence[int], shared: Sequence[range], *, may_be_too_large: bool
) -> list[Measured | None]:
    """Per size this rank's costs, None where memory is too small and may be; nothing on ranks without a share."""
    rank = dist.get_rank()
    if rank >= len(shared):
        return []
    graph, layers, device = request.graph, shared[rank], request.device
    build = [partial(_built, layer, graph.layers[i].name, request) for i, layer in enumerate(request.layers)]

    def fitting(run: Callable[[LayerInputs], T], starts: Sequence[LayerInputs | None]) -> list[T | None]:
        def one(start: LayerInputs) -> T:
            with in_a_row(request.layers[i] for i in layers):
                return run(start)

        if not may_be_too_large:
            return [one(start) if start else None for start in starts]
        return [_if_it_fits(partial(one, start)) if start else None for start in starts]

    found: list[Any] = [None]
    if rank:
        torch.distributed.recv_object_list(found, src=rank - 1)
    hand_on = partial(torch.distributed.send_object_list, dst=rank + 1) if rank + 1 < len(shared) else None
    try:
        if isinstance(found[0], PulseError):
            raise found[0]
        starts: list[LayerInputs | None] = found[0] if rank else _starts(request, sizes)
        if hand_on is not None:
            hand_on([fitting(lambda start: reach(graph, build, start, device, layers), starts)])
    except Exception as problem:
        if hand_on is not None:
            hand_on([problem if isinstance(problem, PulseError) else RunError(in_words(problem))])
        raise
    return fitting(lambda s: measure_layers(graph, build, s, device, layers=layers), starts)


def _starts(request: PlanRequest, sizes: Sequence[int]) -> list[LayerInputs | None]:
    """What the first layer finds at each size."""
    assert request.example is not None
    inputs, given = request.example
    entries = {value.name: given[value.name] for value in request.graph.batch_entries}
    later = {part.layers[0]: given[value_name(part.name, INPUT)] for part in request.backbones[1:]}
    starts: list[LayerInputs | None] = []
    for size in sizes:
        hidden, values = inputs, entries
        if size != request.microbatch_size:
            have = num_samples(inputs)
            if have != request.microbatch_size:
                raise BatchError(
                    f"example_batch: expected {request.microbatch_size} rows in the first layer's input, one a sample, "
                    f"to measure microbatches of {size}; found {have}; give the microbatch size "
                    "(train_micro_batch_size_per_gpu), or profiles measured at other sizes"
                )
            hidden, values = resized(inputs, entries, have=have, want=size)
        starts.append(LayerInputs(hidden=hidden, values=values, later=later))
    return starts


def _built(layer: Any, name: str, request: PlanRequest) -> Any:
    """As the engine will cast it; a copy, as a module of the user's own is not this package's to change yet."""
    with told_as(RunError, f"layer {name}, while it is built: "):
        function = built(layer)
        if not _casts(function, request):
            return function
        function = copy.deepcopy(function)
        for tensor, dtype in _casts(function, request):
            tensor.data = tensor.data.to(dtype)
        return function


def _casts(function: Any, request: PlanRequest) -> list[tuple[torch.Tensor, torch.dtype]]:
    """A layer's tensors that have another dtype than they will have."""
    module = module_of(function)
    if module is None:
        return []
    wanted = ((module.parameters(), request.dtype), (module.buffers(), request.buffer_dtype))
    found = ((t, dtype) for tensors, dtype in wanted if dtype for t in tensors if t.is_floating_point())
    return [(t, dtype) for t, dtype in found if t.dtype != dtype]


def _if_it_fits(run: Callable[[], T]) -> T | None:
    """None where the device's memory is too small."""
    try:
        return run()
    except RuntimeError as problem:
        # torch-npu has a plain RuntimeError of these words too, by its version
        if isinstance(problem, torch.OutOfMemoryError) or "NPU out of memory" in str(problem):
            return None
        raise


def _joined(request: PlanRequest, size: int, parts: Sequence[Measured]) -> Profile:
    dtypes = [part.dtype for part in parts if part.dtype is not None]
    value_bytes = {name: found for part in parts for name, found in part.value_bytes.items()}
    return Profile(
        name="measured",
        device=device_name(request.device),
        dtype=dtypes[-1] if dtypes else "float32",
        microbatch_size=size,
        layers=tuple(layer for part in parts for layer in part.layers),
        skips=skips_of(request.graph, value_bytes),
        backbones=request.backbones,
    )
