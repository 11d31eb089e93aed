"""Counting the operations of each layer on the meta device: no memory, no arithmetic, seconds for any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_pulse.engine.collectives import told_as
from deepspeed_pulse.engine.measure.probe import LayerInputs, Probe, Visits
from deepspeed_pulse.errors import RunError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.state import frozen_bytes, param_bytes


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """Operations and bytes of one layer for one microbatch.

    A multiplication and its addition are two operations; those of matrix products, convolutions and attention are
    counted, as ``torch.utils.flop_counter`` does. ``weight_grad_flop`` is the part of ``backward_flop`` without which
    the gradients of the layer's inputs can be had.
    """

    name: str
    forward_flop: int
    backward_flop: int
    weight_grad_flop: int
    param_bytes: int
    frozen_bytes: int
    activation_bytes: int
    output_bytes: int
    unkept_output_bytes: int


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts of all layers; ``value_bytes``: per named value its bytes and whether it has a gradient."""

    layers: tuple[LayerCount, ...]
    value_bytes: dict[str, tuple[int, bool]]
    dtype: str


def count_layers(graph: Graph, build: Sequence[Callable[[], Any]], inputs: Any, entries: Mapping[str, Any]) -> Counted:
    """Run every layer forward and backward on the meta device.

    ``build`` makes a layer each, on any device; of the first one's ``inputs`` and of the batch ``entries`` only shapes
    matter. Raises a :class:`RunError` naming the layer when one depends on the values of its input.
    """
    visits = Visits(graph, build, LayerInputs(hidden=inputs, values=dict(entries)), torch.device("meta"))
    with told_as(RunError):
        counts = tuple(_count(probe) for probe in visits)
    return Counted(layers=counts, value_bytes=visits.value_bytes, dtype=visits.dtype or "float32")


def _count(probe: Probe) -> LayerCount:
    with FusedAttention():
        with FlopCounterMode(display=False) as forward:
            kept = probe.first_run()
        with FlopCounterMode(display=False) as inputs_only:
            probe.backward(inputs_only=True)
        with FlopCounterMode(display=False) as backward:
            probe.backward()
    return LayerCount(
        name=probe.name,
        forward_flop=forward.get_total_flops(),
        backward_flop=backward.get_total_flops(),
        weight_grad_flop=backward.get_total_flops() - inputs_only.get_total_flops(),
        param_bytes=param_bytes(probe.parameters),
        frozen_bytes=frozen_bytes(probe.parameters),
        activation_bytes=kept.activation_bytes,
        output_bytes=kept.output_bytes,
        unkept_output_bytes=kept.unkept_output_bytes,
    )


class FusedAttention(TorchFunctionMode):
    """Attention on the meta device as accelerators run it: scores are not kept, backward makes them again.

    Without it torch takes the plain formula there, whose kept scores would be most of the memory.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = _attention if function is functional.scaled_dot_product_attention else function
        return function(*args, **kwargs or {})


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
    if query.device.type != "meta" or query.ndim != 4 or rest.get("enable_gqa"):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **rest)
    if attn_mask is not None:
        bias = attn_mask.to(query.dtype)  # bytes and gradient of a mask of any dtype; values do not matter here
        attn_mask = bias.expand(*query.shape[:3], key.shape[2])
    keep_sums = query.requires_grad or key.requires_grad or value.requires_grad
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keep_sums, dropout_p, rest.get("is_causal", False), scale=rest.get("scale")
    )[0]
