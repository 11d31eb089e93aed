"""Which rank holds which stage.

The wave (V) placement puts stage i and stage 2P-1-i on rank i (PULSE, arXiv 2606.19163), so both
ends of a nested skip meet on one rank. With W waves the V is repeated W times.
"""

from __future__ import annotations

import enum
from functools import cached_property


class Kind(enum.Enum):
    """What a placement is known as."""

    LINEAR = "linear"
    """One stage a rank."""
    WAVE = "wave"
    """Stages 0..P-1 down and back up, once or several times."""
    LOOP = "loop"
    """Ranks 0..P-1, again and again: interleaved 1F1B."""
    CUSTOM = "custom"


class Placement(tuple[int, ...]):
    """The rank of every stage, in order; equal to the plain tuple."""

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        return cls(range(ranks))

    @classmethod
    def wave(cls, ranks: int, waves: int = 1) -> Placement:
        """Ranks of the 2*ranks*waves stages: 0..P-1, P-1..0, repeated.

        >>> Placement.wave(3)
        (0, 1, 2, 2, 1, 0)
        """
        return cls((*range(ranks), *reversed(range(ranks))) * waves)

    @classmethod
    def loop(cls, ranks: int, rounds: int) -> Placement:
        return cls(tuple(range(ranks)) * rounds)

    @classmethod
    def shaped(cls, ranks: int, waves: int, *, loop: bool = False) -> Placement:
        """``waves`` 0: linear; of a loop, half of its rounds.

        >>> Placement.shaped(2, 0), Placement.shaped(2, 1), Placement.shaped(2, 1, loop=True)
        ((0, 1), (0, 1, 1, 0), (0, 1, 0, 1))
        """
        if loop:
            return cls.loop(ranks, 2 * waves)
        return cls.wave(ranks, waves) if waves else cls.linear(ranks)

    @cached_property
    def num_ranks(self) -> int:
        return max(self) + 1

    @cached_property
    def kind(self) -> Kind:
        ranks = self.num_ranks
        rounds = len(self) // ranks
        known = {Kind.LINEAR: self.linear(ranks), Kind.WAVE: self.wave(ranks, rounds // 2)}
        known[Kind.LOOP] = self.loop(ranks, rounds)
        return next((kind for kind, placement in known.items() if placement == self), Kind.CUSTOM)

    @property
    def waves(self) -> int:
        """How often the ranks are passed down and up; 0 where they are passed once, or without a rule."""
        return 0 if self.kind is Kind.CUSTOM else len(self) // (2 * self.num_ranks)

    @property
    def is_v(self) -> bool:
        """One wave."""
        return self.kind is Kind.WAVE and self.waves == 1

    @property
    def is_loop(self) -> bool:
        """Ranks 0..P-1, more than once; on one rank that is a wave, too."""
        return len(self) > self.num_ranks and self == self.loop(self.num_ranks, len(self) // self.num_ranks)

    @property
    def name(self) -> str:
        """``wave``, ``wave x W``, ``linear``, ``loop x n`` or ``custom``."""
        times = {Kind.WAVE: self.waves, Kind.LOOP: len(self) // self.num_ranks}.get(self.kind, 1)
        return self.kind.value if times == 1 else f"{self.kind.value} x {times}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self) if owner == rank)
