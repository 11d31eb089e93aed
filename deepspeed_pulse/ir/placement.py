"""Which rank holds which stage.

The wave (V) placement puts stage i and stage 2P-1-i on rank i (PULSE, arXiv 2606.19163), so both
ends of a nested skip meet on one rank. With W waves the V is repeated W times.
"""

from __future__ import annotations


def wave_placement(ranks: int, waves: int = 1) -> tuple[int, ...]:
    """Ranks of the 2*ranks*waves stages: 0..P-1, P-1..0, repeated.

    >>> wave_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(ranks))
    return (down + down[::-1]) * waves


def linear_placement(ranks: int) -> tuple[int, ...]:
    """One stage a rank."""
    return tuple(range(ranks))


def loop_placement(ranks: int, rounds: int) -> tuple[int, ...]:
    """Ranks 0..P-1, again and again: interleaved 1F1B."""
    return tuple(range(ranks)) * rounds


def stages_of(placement: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Stages that ``rank`` holds, ascending."""
    return tuple(stage for stage, owner in enumerate(placement) if owner == rank)


def describe_placement(placement: tuple[int, ...]) -> str:
    """``wave``, ``wave x W``, ``linear``, ``loop x n`` or ``custom``."""
    ranks = max(placement) + 1
    if placement == linear_placement(ranks):
        return "linear"
    waves, rest = divmod(len(placement), 2 * ranks)
    if rest == 0 and placement == wave_placement(ranks, waves):
        return "wave" if waves == 1 else f"wave x {waves}"
    rounds = len(placement) // ranks
    return f"loop x {rounds}" if placement == loop_placement(ranks, rounds) else "custom"
