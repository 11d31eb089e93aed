"""Which rank holds which stage.

The wave (V) placement puts stage i and stage 2P-1-i on rank i (PULSE, arXiv 2606.19163), so both
ends of a nested skip meet on one rank. With W waves the V is repeated W times.
"""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
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
    """The rank of every stage, in order; equal to the plain tuple, where there is one backbone.

    ``starts``: the first stage of each backbone. The hidden state goes from a stage to the next within a backbone.
    """

    starts: tuple[int, ...]

    def __new__(cls, ranks: Iterable[int], starts: Sequence[int] = (0,)) -> Placement:
        self = super().__new__(cls, ranks)
        self.starts = tuple(starts)
        return self

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.starts == getattr(other, "starts", (0,))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __getnewargs__(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self), self.starts

    @classmethod
    def of_backbones(cls, parts: Sequence[Placement]) -> Placement:
        """The stages of several backbones, one after the other."""
        starts = itertools.accumulate(map(len, parts[:-1]), initial=0)
        return cls(itertools.chain.from_iterable(parts), tuple(starts))

    @property
    def backbones(self) -> tuple[range, ...]:
        """The stages of each backbone."""
        return tuple(range(a, b) for a, b in itertools.pairwise((*self.starts, len(self))))

    @cached_property
    def parts(self) -> tuple[Placement, ...]:
        """The placement of each backbone on its own."""
        return tuple(Placement(self[stages.start : stages.stop]) for stages in self.backbones)

    def backbone_of(self, stage: int) -> int:
        """Index of the backbone that a stage belongs to."""
        return bisect_right(self.starts, stage) - 1

    def before(self, stage: int) -> int | None:
        """The stage that gives this one its hidden state; None for a backbone's first, and where there is none."""
        return None if stage in self.starts or stage >= len(self) else stage - 1

    def after(self, stage: int) -> int | None:
        """The stage that takes this one's hidden state; None for a backbone's last."""
        return None if stage + 1 in self.starts or stage + 1 >= len(self) else stage + 1

    @property
    def hidden_edges(self) -> list[tuple[int, int]]:
        """(from, to) of every hidden state that goes to another rank."""
        pairs = itertools.pairwise(range(len(self)))
        return [(a, b) for a, b in pairs if b not in self.starts and self[a] != self[b]]

    @property
    def mirrored(self) -> Placement:
        """The same, with the ranks numbered the other way round."""
        last = self.num_ranks - 1
        return Placement((last - rank for rank in self), self.starts)

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
        """``wave``, ``wave x W``, ``linear``, ``loop x n`` or ``custom``; ``reversed wave``; of each backbone."""
        if len(self.starts) > 1:
            return " + ".join(part.name for part in self.parts)
        if self.kind is Kind.CUSTOM and self.mirrored.kind is not Kind.CUSTOM:
            return f"reversed {self.mirrored.name}"
        times = {Kind.WAVE: self.waves, Kind.LOOP: len(self) // self.num_ranks}.get(self.kind, 1)
        return self.kind.value if times == 1 else f"{self.kind.value} x {times}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self) if owner == rank)
