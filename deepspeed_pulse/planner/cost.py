"""Costs of stages, summed from a profile's layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.profile import LayerCost, Profile, bucket_bytes, is_16_bit, optimizer_factor
from deepspeed_pulse.ir.rules import Rules

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-4
"""Of a byte: what shares of terabytes in floating point may be off."""

NOMINAL_LINK = Link(bandwidth_gb_per_s=25.0, latency_us=10.0)
"""What is assumed of a link nobody measured: one PCIe 4.0 x16 or 200 Gbit/s port."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Per stage and microbatch: times in ms, sizes in bytes.

    While a stage's backward runs, gradients become whole from its last layer with parameters to its first: ``whole``
    are, of each of these layers, the share of the backward's time after which they are, and their bytes.

    ``weight_grad_ms`` is the part of ``backward_ms`` that a ``W`` action does (half of it where the profile
    does not say), ``input_grad_ms`` what an ``I`` takes; ``output_bytes`` is the hidden state that leaves the stage's
    last layer, ``unkept_bytes`` what of it is not among the stage's activations.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weight_grad_ms: tuple[float, ...]
    input_grad_ms: tuple[float, ...]
    param_bytes: tuple[int, ...]
    frozen_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    unkept_bytes: tuple[int, ...]
    whole: tuple[tuple[tuple[float, int], ...], ...]

    @classmethod
    def of(cls, profile: Profile, boundaries: Sequence[int]) -> StageCosts:
        """Sum the layers between consecutive boundaries."""
        stages = [profile.layers[a:b] for a, b in itertools.pairwise(boundaries)]
        return cls(
            forward_ms=tuple(sum(x.forward_ms for x in stage) for stage in stages),
            backward_ms=tuple(sum(x.backward_ms for x in stage) for stage in stages),
            weight_grad_ms=tuple(sum(weight_grad_ms(x) for x in stage) for stage in stages),
            input_grad_ms=tuple(sum(input_grad_ms(x) for x in stage) for stage in stages),
            param_bytes=tuple(sum(x.param_bytes for x in stage) for stage in stages),
            frozen_bytes=tuple(sum(x.frozen_bytes for x in stage) for stage in stages),
            activation_bytes=tuple(sum(x.activation_bytes for x in stage) for stage in stages),
            output_bytes=tuple(stage[-1].output_bytes if stage else 0 for stage in stages),
            unkept_bytes=tuple(_unkept_bytes(stage[-1]) if stage else 0 for stage in stages),
            whole=tuple(tuple(_whole(stage)) for stage in stages),
        )

    def with_overheads(self, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> StageCosts:
        """Every forward and every backward longer by what its messages cost the rank."""
        return replace(
            self,
            forward_ms=tuple(a + b for a, b in zip(self.forward_ms, forward_ms, strict=True)),
            backward_ms=tuple(a + b for a, b in zip(self.backward_ms, backward_ms, strict=True)),
            input_grad_ms=tuple(a + b for a, b in zip(self.input_grad_ms, backward_ms, strict=True)),
        )

    def work_ms(self, stage: int) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_ms[stage] + self.backward_ms[stage]


def _whole(stage: Sequence[LayerCost]) -> Iterator[tuple[float, int]]:
    """Gradients by what still runs behind them."""
    ahead = [0.0, *itertools.accumulate(layer.backward_ms for layer in stage)]
    for at in reversed(range(len(stage))):
        if stage[at].param_bytes:
            yield 1.0 - ahead[at] / ahead[-1] if ahead[-1] else 1.0, stage[at].param_bytes


def _unkept_bytes(layer: LayerCost) -> int:
    return layer.output_bytes if layer.unkept_output_bytes is None else layer.unkept_output_bytes


def weight_grad_ms(layer: LayerCost) -> float:
    """The layer's ``weight_grad_ms``, or half of its backward where the profile does not say."""
    return layer.backward_ms / 2 if layer.weight_grad_ms is None else layer.weight_grad_ms


def input_grad_ms(layer: LayerCost) -> float:
    """The layer's ``input_grad_ms``, or what :func:`weight_grad_ms` leaves of its backward."""
    return layer.backward_ms - weight_grad_ms(layer) if layer.input_grad_ms is None else layer.input_grad_ms


def default_cluster(num_ranks: int, memory_bytes: int) -> Cluster:
    """One node with nominal links, for ``"cluster": "auto"``; ``memory_bytes`` is a rank's."""
    link = NOMINAL_LINK
    return Cluster(
        name="nominal", nodes=1, ranks_per_node=num_ranks, memory_bytes=memory_bytes, intra_node=link, inter_node=link
    )


def optimizer_shards(profile: Profile, rules: Rules, replicas: int) -> int:
    """Parts that optimizer state is cut into; DeepSpeed's optimizer for bf16 shares it without ZeRO, too."""
    return replicas if rules.shards_optimizer or profile.dtype == "bfloat16" else 1


class WeightCosts:
    """Bytes that ranks hold for so many bytes of trained parameters each, activations apart."""

    def __init__(self, profile: Profile, rules: Rules, replicas: int) -> None:
        wide, zero = is_16_bit(profile.dtype), rules.shards_optimizer
        share = 1 / optimizer_shards(profile, rules, replicas)
        self._bucket = bucket_bytes(profile.dtype) if zero else 0
        self._state = 2 + optimizer_factor(profile.dtype, zero=zero) * share
        """Bytes a byte of parameters, the bucket apart; and so is the step's."""
        if zero:
            self._step = (4 if wide else 2) * share - 1
        else:
            roots = 0 if rules.fused_optimizer else 2 if wide else 1
            self._step = (roots + (2 if wide else 0)) * share

    def state(self, param_bytes: npt.ArrayLike) -> Floats:
        """Weights, gradients and optimizer state.

        The optimizer part (fp32 master weights and two Adam moments) is divided by :func:`optimizer_shards`; weights
        and gradients are not, and under ZeRO-1 its bucket is beside them.
        """
        params = np.asarray(param_bytes, dtype=np.float64)
        state = self._state * params
        return np.asarray(state + np.minimum(params, self._bucket) if self._bucket else state)

    def step(self, param_bytes: npt.ArrayLike) -> Floats:
        """What sums of gradients and a step of the optimizer hold at most beside :meth:`state`.

        Without ZeRO: in 16 bit an fp32 copy of gradients, and in any precision the roots of all second moments, which
        torch's Adam makes at once and a fused one does not. Under ZeRO-1: first a second bucket; then, when the first
        one and other shards' gradients have gone, the shard's gradients in one piece, and in 16 bit an fp32 copy of it.
        """
        params = np.asarray(param_bytes, dtype=np.float64)
        if not self._bucket:
            return np.asarray(self._step * params)
        bucket = np.minimum(params, self._bucket)
        return np.asarray(np.maximum(bucket, self._step * params - bucket))


def optimizer_ms(profile: Profile, param_bytes: int, rules: Rules, replicas: int) -> float:
    """How long a rank's step of the optimizer takes, whose work is divided as its state is."""
    return profile.optimizer_ms_per_gb * param_bytes / 1e9 / optimizer_shards(profile, rules, replicas)


def state_bytes(profile: Profile, param_bytes: int, rules: Rules, replicas: int) -> int:
    """:meth:`WeightCosts.state` of one rank."""
    return math.ceil(WeightCosts(profile, rules, replicas).state(param_bytes) - _ROUNDING)


def step_bytes(profile: Profile, param_bytes: int, rules: Rules, replicas: int) -> int:
    """:meth:`WeightCosts.step` of one rank."""
    return math.ceil(WeightCosts(profile, rules, replicas).step(param_bytes) - _ROUNDING)
