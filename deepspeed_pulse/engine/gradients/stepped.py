"""The parameters that an engine's optimizer steps: what a script may change about them between steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from deepspeed_pulse.errors import ConfigError

_STEPPED_IN_ONE = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Groups of upstream's optimizers that step many weights as one flat tensor, which is what their own groups hold."""

MOVES_FROZEN = (
    "weights were frozen that trained before: ZeRO, bf16 and fp16 step weights in one piece, so moments and weight "
    'decay go on moving them; give them a parameter group of their own and set its "lr" to 0 while they are frozen'
)


def moves_frozen(optimizer: Any) -> bool:
    """Weights are frozen now that upstream's optimizer steps in one piece with others: moments and decay move them."""
    groups = next((getattr(optimizer, kind) for kind in _STEPPED_IN_ONE if hasattr(optimizer, kind)), ())
    return any(not parameter.requires_grad for group in groups for parameter in group)


class Stepped:
    """Sees whether a script has given the optimizer what the module did not have when the engine was made.

    Of others no gradient is cleared, nor summed over replicas. ``parameters``: of the module then.
    """

    def __init__(self, parameters: Collection[torch.Tensor]) -> None:
        self._known = set(map(id, parameters))
        self._count: int | None = None

    def problem(self, optimizer: Any) -> ConfigError | None:
        """Of this rank; looked for where the number of stepped parameters has changed."""
        if optimizer is None or any(hasattr(optimizer, kind) for kind in _STEPPED_IN_ONE):
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
