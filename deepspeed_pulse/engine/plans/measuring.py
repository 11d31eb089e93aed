"""Measuring what layers cost, every rank a share of them, so that none ever holds the whole model.

Ranks hand on what the layers so far have given, each after one forward of its share; then all measure at the same time,
as they will compute at the same time: what they share (cores, memory bandwidth, power) counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.collectives import agree, as_pulse_error, raise_everywhere, told_by_all
from deepspeed_pulse.engine.data.resizing import num_samples, resized
from deepspeed_pulse.engine.measure.hardware import agreed_hardware, device_name
from deepspeed_pulse.engine.measure.layers import Measured, measure_layers
from deepspeed_pulse.engine.measure.probe import LayerInputs, reach
from deepspeed_pulse.engine.plans import kept
from deepspeed_pulse.engine.plans.costs import PlanRequest, built, skips_of
from deepspeed_pulse.engine.specs import TiedCall
from deepspeed_pulse.errors import BatchError, PulseError, RunError, in_words
from deepspeed_pulse.ir.profile import Profile

CPU = torch.device("cpu")


def measure_profiles(request: PlanRequest, sizes: Sequence[int]) -> tuple[Profile, ...]:
    """Layer costs on the example batch, a profile for each microbatch size; all ranks of the world call it.

    Kept profiles are used where ``plan_cache`` has them. A size at which a layer does not fit the device's memory is
    left out where there are others, and said.

    Args:
        request: the job; ``microbatch_size`` is that of its example batch.
        sizes: microbatch sizes, none twice. Other sizes than the example's repeat its samples or take the first ones.

    Returns:
        The same on every rank, in the order of ``sizes``.

    Raises:
        PulseError: the first error that any rank met, the same on every rank.
    """
    found: dict[int, Profile] = agree(lambda: kept.profiles(request, sizes), "reading kept profiles")
    missing = [size for size in sizes if size not in found]
    if missing:
        measured = _measured(request, missing)
        agree(lambda: kept.keep_profiles(request, measured), "keeping profiles")
        found.update({profile.microbatch_size: profile for profile in measured})
    return tuple(found[size] for size in sizes if size in found)


def _measured(request: PlanRequest, sizes: Sequence[int]) -> tuple[Profile, ...]:
    agreed_hardware(request.device, compared="threads")
    mine: list[Measured | None] = []
    problem: PulseError | None = None
    try:
        with same_random_numbers(request.device):
            mine = _measure_share(request, sizes, shares(len(request.layers), dist.get_world_size()))
    except Exception as met:
        problem = as_pulse_error(met, f"measuring on rank {dist.get_rank()}")
    raise_everywhere(problem, "measuring layer costs")
    by_rank = [row for row in told_by_all(mine) if row]
    profiles = []
    for index, size in enumerate(sizes):
        parts = [row[index] for row in by_rank]
        if None not in parts:
            profiles.append(_joined(request, size, parts))
        elif dist.get_rank() == 0:
            print(f"pulse: microbatches of {size} do not fit the device's memory: not measured", flush=True)
    if not profiles:
        raise BatchError(
            f"example_batch: expected a microbatch size at which every layer fits the device's memory, found none of "
            f"{', '.join(map(str, sizes))}; give a smaller train_micro_batch_size_per_gpu"
        )
    return tuple(profiles)


def shares(num_layers: int, world: int) -> list[range]:
    """Per rank the layers that it measures, as many on each as possible; ranks beyond the layers have none.

    >>> shares(5, 2)
    [range(0, 2), range(2, 5)]
    """
    ranks = min(num_layers, world)
    return [range(r * num_layers // ranks, (r + 1) * num_layers // ranks) for r in range(ranks)]


def _measure_share(request: PlanRequest, sizes: Sequence[int], shared: Sequence[range]) -> list[Measured | None]:
    """Per size this rank's costs, None where memory is too small; nothing on ranks without a share."""
    rank = dist.get_rank()
    if rank >= len(shared):
        return []
    build = [
        partial(_built, layer, request.graph.layers[i].name, request.dtype) for i, layer in enumerate(request.layers)
    ]
    found = _handed(rank) if rank else None
    try:
        if isinstance(found, PulseError):
            raise found
        starts: list[LayerInputs | None] = _starts(request, sizes) if found is None else found
        if rank + 1 < len(shared):
            run = partial(reach, request.graph, build, device=request.device, layers=shared[rank])
            _hand_on(rank, [_if_it_fits(partial(run, start=start), sizes) if start else None for start in starts])
    except Exception as problem:
        if rank + 1 < len(shared):
            told = problem if isinstance(problem, PulseError) else RunError(in_words(problem))
            _hand_on(rank, told)
        raise
    return [
        _if_it_fits(partial(_measure, request, build, shared[rank], start), sizes) if start else None
        for start in starts
    ]


def _measure(request: PlanRequest, build: Sequence[Callable[[], Any]], layers: range, start: LayerInputs) -> Measured:
    return measure_layers(request.graph, build, start.hidden, start.values, request.device, layers=layers)


def _starts(request: PlanRequest, sizes: Sequence[int]) -> list[LayerInputs | None]:
    """What the first layer finds at each size."""
    assert request.example is not None
    inputs, given = request.example
    entries = {value.name: given[value.name] for value in request.graph.batch_entries}
    starts: list[LayerInputs | None] = []
    for size in sizes:
        if size == request.microbatch_size:
            hidden, values = inputs, entries
        else:
            have = num_samples(inputs)
            if have != request.microbatch_size:
                raise BatchError(
                    f"example_batch: expected {request.microbatch_size} rows in the first layer's input, one a sample, "
                    f"to measure microbatches of {size}; found {have}; give the microbatch size "
                    "(train_micro_batch_size_per_gpu), or profiles measured at other sizes"
                )
            hidden, values = resized(inputs, entries, have=have, want=size)
        starts.append(LayerInputs(hidden=hidden, values=values))
    return starts


def _built(layer: Any, name: str, dtype: torch.dtype | None) -> Any:
    try:
        return _cast(built(layer), dtype)
    except PulseError:
        raise
    except Exception as problem:
        raise RunError(f"layer {name}, while it is built: {type(problem).__name__}: {problem}") from problem


def _cast(function: Any, dtype: torch.dtype | None) -> Any:
    """As the engine will cast it; a copy, as a module of the user's own is not this package's to change yet."""
    if dtype is None or not isinstance(function, (torch.nn.Module, TiedCall)):
        return function
    if all(p.dtype == dtype for p in function.parameters() if p.is_floating_point()):
        return function
    return copy.deepcopy(function).to(dtype)


def _hand_on(rank: int, item: Any) -> None:
    torch.distributed.send_object_list([item], dst=rank + 1)


def _handed(rank: int) -> Any:
    found: list[Any] = [None]
    torch.distributed.recv_object_list(found, src=rank - 1)
    return found[0]


def _if_it_fits(run: Callable[[], Any], sizes: Sequence[int]) -> Any:
    """None where the device's memory is too small and there are other sizes."""
    try:
        return run()
    except RuntimeError as problem:
        if len(sizes) > 1 and _out_of_memory(problem):
            return None
        raise


def _out_of_memory(problem: RuntimeError) -> bool:
    """torch-npu has a plain RuntimeError of these words too, by its version."""
    return isinstance(problem, torch.OutOfMemoryError) or "NPU out of memory" in str(problem)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Measuring must not change the run that follows."""
    accelerator = get_accelerator()
    with torch.random.fork_rng(devices=[]):
        state = None if device.type == "cpu" else accelerator.get_rng_state()
        try:
            yield
        finally:
            if state is not None:
                accelerator.set_rng_state(state)


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
    )
