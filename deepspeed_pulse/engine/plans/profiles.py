"""The profile of a layer list without a run: measured layer by layer, or estimated from operation counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.backbones import DEFAULT_INPUT
from deepspeed_pulse.engine.collectives import told_as
from deepspeed_pulse.engine.data.batches import SplitBatch
from deepspeed_pulse.engine.measure.counter import LayerCount, count_layers
from deepspeed_pulse.engine.measure.hardware import device_name
from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.optimizer import optimizer_ms_per_gb
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.engine.plans.costs import built, skips_of
from deepspeed_pulse.engine.rules import rules_of
from deepspeed_pulse.engine.specs import TiedCall, Workload
from deepspeed_pulse.errors import BatchError, ConfigError, RunError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.profile import LayerCost, Profile, adam_ms_per_gb
from deepspeed_pulse.runtime.payload import map_tensors, tensors_in

Watch = Callable[[str, int, int], None]
"""Called with the name of a layer, its index and the number of layers, before the layer is run."""

_INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """A profile and the operation counts that it was made from."""

    profile: Profile
    counts: tuple[LayerCount, ...]


def estimate_profile(
    workload: Workload, *, tflops: float, memory_gb_per_s: float | None = None, watch: Watch | None = None
) -> Estimated:
    """Operation counts on the meta device as times of a device that does ``tflops`` * 1e12 of them a second.

    Memory-bound work of layers counts nothing, so times are too short in all, and most of all for layers without
    matrix products; ratios between layers are what a partition needs. ``memory_gb_per_s``: of the device, for which the
    optimizer's step is memory-bound; None: that counts nothing either.
    """
    graph = workload.graph
    split = _split(workload, graph)
    counted = count_layers(graph, _watched(workload, graph, watch, _on_meta), split.inputs, split.entries)
    flop_a_ms = tflops * 1e9
    layers = tuple(
        LayerCost(
            name=count.name,
            forward_ms=count.forward_flop / flop_a_ms,
            backward_ms=count.backward_flop / flop_a_ms,
            weight_grad_ms=count.weight_grad_flop / flop_a_ms,
            input_grad_ms=(count.backward_flop - count.weight_grad_flop) / flop_a_ms,
            param_bytes=count.param_bytes,
            frozen_bytes=count.frozen_bytes,
            activation_bytes=count.activation_bytes,
            output_bytes=count.output_bytes,
            unkept_output_bytes=count.unkept_output_bytes,
        )
        for count in counted.layers
    )
    profile = Profile(
        name=f"{workload.name} (estimate)",
        device=f"estimated at {tflops:g} TFLOP/s",
        dtype=counted.dtype,
        microbatch_size=_microbatch_size(workload, split),
        layers=layers,
        skips=skips_of(graph, counted.value_bytes),
        optimizer_ms_per_gb=adam_ms_per_gb(counted.dtype, memory_gb_per_s) if memory_gb_per_s else 0.0,
    )
    return Estimated(profile=profile, counts=counted.layers)


def measure_profile(workload: Workload, *, fused: bool = False, watch: Watch | None = None) -> Profile:
    """Run each layer on the accelerator at hand.

    A batch on the meta device is replaced by random data of its shapes. Layers on the meta device are
    made on the accelerator with random weights when their turn comes, and dropped after it, so the
    model need not fit. At last an optimizer steps, ``fused`` if the job's is.
    """
    graph, device = workload.graph, torch.device(get_accelerator().current_device_name())
    split = _split(workload, graph)
    build = _watched(workload, graph, watch, partial(on_device, device=device))
    fill = partial(map_tensors, change=partial(filled, device=device))
    with told_as(RunError):
        entries = {name: fill(value) for name, value in split.entries.items()}
        measured = measure_layers(graph, build, LayerInputs(hidden=fill(split.inputs), values=entries), device)
        stepping = optimizer_ms_per_gb(measured.trained, device, fused=fused)
    return Profile(
        name=workload.name,
        device=device_name(device),
        dtype=measured.dtype or "float32",
        microbatch_size=_microbatch_size(workload, split),
        layers=measured.layers,
        skips=skips_of(graph, measured.value_bytes),
        optimizer_ms_per_gb=stepping,
    )


def _split(workload: Workload, graph: Graph) -> SplitBatch:
    if not workload.layers:
        raise ConfigError(f"{workload.name}: expected at least one layer, found none")
    try:
        rules = rules_of(workload.layers, [value.name for value in graph.batch_entries])
        return SplitBatch(workload.batch, graph, DEFAULT_INPUT, rules=rules)
    except BatchError as problem:
        raise BatchError(f"{workload.name}: example batch: {problem}") from None


def _microbatch_size(workload: Workload, split: SplitBatch) -> int:
    return workload.microbatch_size or int(tensors_in(split.inputs)[0].shape[0])


def _watched(
    workload: Workload, graph: Graph, watch: Watch | None, build: Callable[[Any], Any]
) -> list[Callable[[], Any]]:
    def make(index: int) -> Any:
        if watch is not None:
            watch(graph.layers[index].name, index, len(workload.layers))
        return build(workload.layers[index])

    return [partial(make, index) for index in range(len(workload.layers))]


def _on_meta(layer: Any) -> Any:
    with torch.device("meta"):
        function = built(layer)
    return function.to(torch.device("meta")) if isinstance(function, (torch.nn.Module, TiedCall)) else function


def on_device(layer: Any, device: torch.device) -> Any:
    """The layer, its weights random where they are on the meta device so far."""
    function = built(layer)
    if not isinstance(function, torch.nn.Module) or not any(p.is_meta for p in function.parameters()):
        return function
    made = copy.deepcopy(function).to_empty(device=device)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=_INITIAL_STD)
        for buffer in made.buffers():
            buffer.zero_()
    return made


def filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In place of meta tensors, normal numbers; ones for integers and flags, which may be indices or masks."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
