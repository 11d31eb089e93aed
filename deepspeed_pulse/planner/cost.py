"""Costs of stages, summed from a profile's layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.profile import LayerCost, Profile, bucket_bytes, is_16_bit, optimizer_factor
from deepspeed_pulse.ir.rules import Rules

NOMINAL_LINK = Link(bandwidth_gb_per_s=25.0, latency_us=10.0)
"""What is assumed of a link nobody measured: one PCIe 4.0 x16 or 200 Gbit/s port."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Per stage and microbatch: times in ms, sizes in bytes.

    While a stage's backward runs, gradients become whole from its last layer with parameters to its first:
    ``first_whole`` is the share of the backward's time after which the first of them are, ``last_whole`` the share of
    bytes that are at its end only.

    ``weight_grad_ms`` is the part of ``backward_ms`` that a ``W`` action does (half of it where the profile
    does not say), ``input_grad_ms`` what an ``I`` takes; ``output_bytes`` is the hidden state that leaves the stage's
    last layer.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weight_grad_ms: tuple[float, ...]
    input_grad_ms: tuple[float, ...]
    param_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    first_whole: tuple[float, ...]
    last_whole: tuple[float, ...]

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
            activation_bytes=tuple(sum(x.activation_bytes for x in stage) for stage in stages),
            output_bytes=tuple(stage[-1].output_bytes if stage else 0 for stage in stages),
            first_whole=tuple(map(_first_whole, stages)),
            last_whole=tuple(map(_last_whole, stages)),
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


def _first_whole(stage: Sequence[LayerCost]) -> float:
    behind = [at for at, layer in enumerate(stage) if layer.param_bytes]
    total = sum(layer.backward_ms for layer in stage)
    return sum(layer.backward_ms for layer in stage[behind[-1] :]) / total if behind and total else 1.0


def _last_whole(stage: Sequence[LayerCost]) -> float:
    sizes = [layer.param_bytes for layer in stage if layer.param_bytes]
    return sizes[0] / sum(sizes) if sizes else 1.0


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


def state_bytes(profile: Profile, param_bytes: int, rules: Rules, replicas: int) -> int:
    """Weights, gradients and optimizer state of ``param_bytes`` of parameters.

    The optimizer part (fp32 master weights and two Adam moments) is divided by :func:`optimizer_shards`; weights and
    gradients are not, and under ZeRO-1 its bucket is beside them.
    """
    zero = rules.shards_optimizer
    optimizer = optimizer_factor(profile.dtype, zero=zero) * param_bytes
    bucket = bucket_bytes(profile.dtype, param_bytes) if zero else 0
    return 2 * param_bytes + bucket + -(-optimizer // optimizer_shards(profile, rules, replicas))


def step_bytes(profile: Profile, param_bytes: int, rules: Rules, replicas: int) -> int:
    """What sums of gradients and a step of the optimizer hold at most beside :func:`state_bytes`.

    Without ZeRO: in 16 bit an fp32 copy of gradients, and in any precision the roots of all second moments, which
    torch's Adam makes at once and a fused one does not. Under ZeRO-1: first a second bucket; then, when the first one
    and other shards' gradients have gone, the shard's gradients in one piece, and in 16 bit an fp32 copy of that.
    """
    wide, own = is_16_bit(profile.dtype), -(-param_bytes // optimizer_shards(profile, rules, replicas))
    if not rules.shards_optimizer:
        roots = 0 if rules.fused_optimizer else own * (2 if wide else 1)
        return roots + own * (2 if wide else 0)
    bucket = bucket_bytes(profile.dtype, param_bytes)
    return max(bucket, own * (3 if wide else 1) - bucket - (param_bytes - own))
