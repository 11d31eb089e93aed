"""Self-conditioning: some microbatches of a step run one more forward first, whose result their own forward reads.

Chen, Zhang and Hinton, "Analog Bits" (arXiv 2208.04202), section 3.2. Which places in the order of a step are for such
microbatches is a plan's matter; which of the step's data takes these places is drawn anew in every step, so the order
of actions never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from deepspeed_pulse.ir.codec import Form
from deepspeed_pulse.ir.fields import Fields


@dataclass(frozen=True, kw_only=True)
class SelfConditioned:
    """Of one backbone.

    Attributes:
        entry: the name under which its layers pop the estimate, or zeros.
        layers: those that pop it, ascending.
        probability: share of a step's microbatches that get an estimate.
        microbatches: the numbers of these in the plan's order, ascending; of a plan that is not ordered yet, none.
    """

    entry: str
    layers: Annotated[tuple[int, ...], Form(some="layer")]
    probability: float
    microbatches: Annotated[tuple[int, ...], Form(required=True)] = ()

    def check_form(self, fields: Fields) -> None:
        if self.probability > 1:
            raise fields.error("probability", "a share of the microbatches, 0 to 1")
        for name in ("layers", "microbatches"):
            numbers = getattr(self, name)
            if list(numbers) != sorted(set(numbers)):
                raise fields.error(name, "numbers in ascending order, each once")

    def count(self, microbatches: int) -> int:
        """How many of so many get an estimate; halves go to the even number."""
        return round(self.probability * microbatches)


def placed(conditioning: Sequence[SelfConditioned], priority: Sequence[int]) -> tuple[SelfConditioned, ...]:
    """With the first microbatches of a list of all of them, as many as each wants: so one's are among another's."""
    return tuple(replace(one, microbatches=tuple(sorted(priority[: one.count(len(priority))]))) for one in conditioning)


def drawn(seed: int, step: int, microbatches: int) -> tuple[int, ...]:
    """All microbatches of a step in an order drawn by chance: the first so many of them get an estimate.

    It depends on nothing but its arguments, so it is the same on all ranks, in all replicas and after a resume.
    """

    def place(microbatch: int) -> bytes:
        return hashlib.sha256(f"{seed} {step} {microbatch}".encode()).digest()

    return tuple(sorted(range(microbatches), key=place))


def data_order(conditioning: Iterable[SelfConditioned], order: Sequence[int]) -> tuple[int, ...]:
    """For each microbatch of a plan, which of the step's data it is, by an order that was :func:`drawn`.

    The microbatches of each backbone that get an estimate are then the first in that order, whatever the plan.
    """
    sizes = sorted((one.microbatches for one in conditioning), key=len)
    places = list(dict.fromkeys(m for row in sizes for m in row))
    places += [m for m in range(len(order)) if m not in set(places)]
    found = [0] * len(order)
    for place, data in zip(places, order, strict=True):
        found[place] = data
    return tuple(found)
