"""The parameters that an engine's optimizer steps: what a script may change about them between steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from deepspeed_pulse.errors import ConfigError

MOVES_FROZEN = (
    "weights were frozen that trained before: ZeRO, bf16 and fp16 step weights in one piece, so moments and weight "
    'decay go on moving them; give them a parameter group of their own and set its "lr" to 0 while they are frozen'
)


def parameter_groups(optimizer: Any) -> list[list[torch.Tensor]]:
    """The model's own parameters in each group of an engine's optimizer."""
    found = _stepped_in_one(optimizer)
    return [list(group["params"]) for group in optimizer.param_groups] if found is None else found


def _stepped_in_one(optimizer: Any) -> list[list[torch.Tensor]] | None:
    """The same of one of upstream's that steps each group as one flat tensor; None of any other."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, attribute):
            return [list(group) for group in getattr(optimizer, attribute)]
    return None


def moves_frozen(optimizer: Any) -> bool:
    """Weights are frozen now that upstream's optimizer steps in one piece with others: moments and decay move them."""
    return any(not parameter.requires_grad for group in _stepped_in_one(optimizer) or () for parameter in group)


class Stepped:
    """Sees whether a script has given the optimizer what the module did not have when the engine was made.

    Of others no gradient is cleared, nor summed over replicas. ``parameters``: of the module then.
    """

    def __init__(self, parameters: Collection[torch.Tensor]) -> None:
        self._known = set(map(id, parameters))
        self._count: int | None = None

    def problem(self, optimizer: Any) -> ConfigError | None:
        """Of this rank; looked for where the number of stepped parameters has changed."""
        if optimizer is None or _stepped_in_one(optimizer) is not None:
            return None
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count == self._count:
            return None
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._known]
        if foreign:
            return ConfigError(
                "the optimizer was given parameters that the module did not have at deepspeed.initialize: found "
                f"{len(foreign)}, the first of shape {list(foreign[0].shape)}. Nobody would clear their gradients, or "
                "sum them over replicas; make all parts before, and let them train later with requires_grad_(True)"
            )
        self._count = count
        return None
