"""Steps that backbones miss because another one's gradients are not finite: one optimizer drops its whole step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Missed:
    """Says once of backbones that step together what none of them would do alone.

    Args:
        names: of the backbones, in their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._told = names, False

    def told(self, step: int, squares: torch.Tensor | None) -> str | None:
        """What is said of a step that was dropped; None where it was said before, or each would have dropped its own.

        ``squares``: of the norm of each backbone's gradients; None where they are not known.
        """
        bad = [] if squares is None else [not finite for finite in squares.isfinite().tolist()]
        if self._told or (bad and all(bad)):
            return None
        self._told = True
        whose = [name for name, is_bad in zip(self._names, bad, strict=False) if is_bad]
        of = f" of {' and '.join(whose)}" if whose else ""
        return (
            f"warning: step {step}: gradients{of} are not finite, so DeepSpeed's optimizer dropped the step of all "
            f"backbones ({', '.join(self._names)}), where each alone would drop its own only: "
            '"backbone_steps": "each" in the "pulse" block does that; said once'
        )
