"""What a cut costs: prefix sums over layers and skips that the partitioner looks up."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.placement import describe_placement
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.cost import rank_link, state_bytes
from deepspeed_pulse.planner.routes import named_values, stage_of

_DIGITS = 9
"""Sums of the same times in another order are equal: ms are compared to 1e-9."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, order=True)
class Score:
    """What partitions are compared by, the first field first. Bytes are per microbatch, forward and backward.

    ``excess_bytes``: how far the fullest rank is above the memory limit.
    ``parted_bytes``: of values with one consumer whose ends are on two ranks; 0 unless the placement is a wave.
    ``rank_ms``: the largest rank's compute, or the busiest link's transfer.
    """

    excess_bytes: float
    parted_bytes: float
    rank_ms: float
    stage_ms: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Value:
    """A named value: ``bytes`` forward and backward together."""

    source: int
    targets: tuple[int, ...]
    bytes: float

    @property
    def travels(self) -> bool:
        """Several consumers: it goes from rank to rank and does not bind cuts."""
        return len(self.targets) > 1


class Weights:
    """A profile's layers and values, for partitioning onto a placement.

    ``in_flight`` in its methods: per stage, how many microbatches' activations count against memory.
    """

    def __init__(
        self,
        profile: Profile,
        placement: Sequence[int],
        *,
        cluster: Cluster,
        data_parallel: int,
        memory_bytes: int | None,
    ) -> None:
        self.profile, self.placement, self.memory_bytes = profile, tuple(placement), memory_bytes
        self.num_layers = profile.num_layers
        self.collocates = describe_placement(self.placement).startswith("wave")
        """Whether the placement is meant to keep both ends of a value on one rank."""
        self.work_ms = _prefix([x.forward_ms + x.backward_ms for x in profile.layers])
        self.state = _prefix([state_bytes(profile, x.param_bytes) for x in profile.layers])
        self.activations = _prefix([x.activation_bytes for x in profile.layers])
        self.cut_bytes = np.array([0.0] + [float(x.output_bytes) for x in profile.layers])
        """Hidden state that crosses a cut before a layer, one way."""
        self.values = _values(profile)
        self._ms_per_byte = _slowness(self.placement, cluster, data_parallel)

    def without_memory(self) -> Weights:
        """The same, with no memory limit."""
        free = copy.copy(self)
        free.memory_bytes = None
        return free

    @property
    def paired(self) -> tuple[Value, ...]:
        """Values with one consumer: both ends belong on one rank."""
        return tuple(value for value in self.values if not value.travels)

    @property
    def travelling(self) -> tuple[Value, ...]:
        return tuple(value for value in self.values if value.travels)

    def ms_per_byte(self, stage: int) -> float:
        """Of the slower direction between a stage and the one before it; 0 on one rank."""
        return self._ms_per_byte[stage]

    def score(self, boundaries: Sequence[int], in_flight: Sequence[int]) -> Score:
        """The true score of cuts, any placement."""
        stages, ranks = len(self.placement), max(self.placement) + 1
        work = np.diff(self.work_ms[list(boundaries)])
        memory = np.diff(self.state[list(boundaries)]) + np.diff(self.activations[list(boundaries)]) * in_flight
        held = np.bincount(self.placement, weights=work, minlength=ranks)
        full = np.bincount(self.placement, weights=memory, minlength=ranks)
        moved = [s for s in range(1, stages) if self.placement[s - 1] != self.placement[s]]
        crossing = sum(2.0 * self.cut_bytes[boundaries[s]] for s in moved)
        parted, travelling = self._value_bytes(boundaries)
        return Score(
            excess_bytes=0.0 if self.memory_bytes is None else max(0.0, float(full.max()) - self.memory_bytes),
            parted_bytes=parted if self.collocates else 0.0,
            rank_ms=round(max(float(held.max()), self._link_ms(boundaries)), _DIGITS),
            stage_ms=round(float(work.max()), _DIGITS),
            bytes=float(crossing) + parted + travelling,
        )

    def _link_ms(self, boundaries: Sequence[int]) -> float:
        """Busiest directed link: hidden states one way and hidden gradients the other."""
        busy: dict[tuple[int, int], float] = {}
        for stage in range(1, len(self.placement)):
            before, here = self.placement[stage - 1], self.placement[stage]
            transfer = self.cut_bytes[boundaries[stage]] * self.ms_per_byte(stage)
            for pair in ((before, here), (here, before)):
                if before != here:
                    busy[pair] = busy.get(pair, 0.0) + transfer
        return max(busy.values(), default=0.0)

    def _value_bytes(self, boundaries: Sequence[int]) -> tuple[float, float]:
        parted = travelling = 0.0
        for value in self.values:
            home = self.placement[stage_of(boundaries, value.source)]
            ranks = {self.placement[stage_of(boundaries, target)] for target in value.targets} - {home}
            if value.travels:
                travelling += value.bytes * len(ranks)
            else:
                parted += value.bytes * len(ranks)
        return parted, travelling


def _prefix(numbers: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(numbers, dtype=np.float64))])


def _values(profile: Profile) -> tuple[Value, ...]:
    size = {skip.name: skip.bytes * (2.0 if skip.gradient else 1.0) for skip in profile.skips}
    return tuple(_value(value, size[value.name]) for value in named_values(profile))


def _value(value: NamedValue, size: float) -> Value:
    assert value.source is not None
    return Value(source=value.source, targets=value.targets, bytes=size)


def _slowness(placement: tuple[int, ...], cluster: Cluster, data_parallel: int) -> tuple[float, ...]:
    slowness = [0.0]
    for before, here in itertools.pairwise(placement):
        there = rank_link(cluster, before, here, data_parallel).transfer_ms(1)
        back = rank_link(cluster, here, before, data_parallel).transfer_ms(1)
        slowness.append(0.0 if before == here else max(there, back))
    return tuple(slowness)


def in_flight(placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Microbatches whose activations a 1F1B-like order keeps, per stage.

    Linear: P - s. Wave: S - 1 - s on the way down and S - s on the way up, over the number of waves, so that a rank
    of a V holds 2 P half-stages in all.
    """
    stages = len(placement)
    if describe_placement(tuple(placement)).startswith("wave"):
        waves = stages // (2 * (max(placement) + 1))
        depth = [-(-(stages - s - (2 * s < stages)) // waves) for s in range(stages)]
    else:
        depth = [stages - s for s in range(stages)]
    return tuple(max(1, min(microbatches, d)) for d in depth)
