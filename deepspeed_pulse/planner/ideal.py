"""A makespan that no cuts and no order can beat, from the model's work alone: what a placement's bubble costs at least.

Let s_i be the share of stage i in one microbatch's work. The first action of stage i or of a later stage of the same
rank starts after one microbatch's forward of all stages before i, and their backward of the last one comes after its
last action. So for every stage i, with the later stages j >= i of its rank,

    makespan >= sum of s_k over k < i  +  M * sum of s_j.

Where backward runs in halves, of what comes before stage i only the forward is in the way: weights' halves may come
last. The bound is the smallest makespan over all shares that sum to one: a linear program.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.profile import Profile

_TOLERANCE = 1e-6
"""Of the solver."""


def ideal_ms(
    profile: Profile,
    placement: Placement,
    microbatches: int,
    *,
    reduction_ms: float = 0.0,
    split: bool = False,
    apart: bool = False,
) -> float:
    """No plan of this placement has a shorter step; layers are whole, messages take no time.

    ``split``: backward may run in halves. ``reduction_ms``: of all gradients over data-parallel peers, one rank after
    the other. A rank reduces its own after all its work but one backward, or with several stages at least after all
    their forwards; on average that is a P-th of all. ``placement``: of each of several backbones. ``apart``: these may
    make steps of their own; then one of them, whichever it is, begins and ends with the step.
    """
    work = [layer.forward_ms + layer.backward_ms for layer in profile.layers]
    ranks = placement.num_ranks
    if profile.backbones:  # any one fills the others' bubble, and reduces its gradients behind their work
        parts = [profile.part(index) for index in range(len(profile.backbones))]
        alone = [ideal_ms(part, placement, microbatches, split=split) for part in parts]
        return max(microbatches * sum(work) / ranks, min(alone) if apart else max(alone))
    shares = [layer.forward_ms / ms for layer, ms in zip(profile.layers, work, strict=True) if ms]
    forward = min(shares, default=1.0)
    first = 1.0 - (1.0 - forward) / microbatches if len(placement) == ranks else forward
    return max(
        sum(work) * least_makespan(placement, microbatches, forward if split else 1.0),
        microbatches * max(work),
        (microbatches * sum(work) * first + reduction_ms) / ranks,
    )


@lru_cache(maxsize=4096)
def least_makespan(placement: Placement, microbatches: int, before: float = 1.0) -> float:
    """In units of one microbatch's work on all stages; ``before``: how much of it must come before later stages."""
    from scipy.optimize import linprog  # 0.3 s at the start of every rank, though only planning needs it

    stages, rows = len(placement), []
    for rank in range(placement.num_ranks):
        held = placement.stages_of(rank)
        for at, stage in enumerate(held):
            row = np.zeros(stages + 1)
            row[:stage] = before
            row[list(held[at:])] = microbatches
            row[stages] = -1.0
            rows.append(row)
    makespan, total = np.zeros(stages + 1), np.ones(stages + 1)
    makespan[stages], total[stages] = 1.0, 0.0
    found = linprog(makespan, A_ub=np.array(rows), b_ub=np.zeros(len(rows)), A_eq=total[None], b_eq=[1.0])
    assert found.success, found.message
    return float(found.fun) * (1 - _TOLERANCE)
