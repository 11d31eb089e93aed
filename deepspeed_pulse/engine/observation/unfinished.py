"""Backbones in the midst of a step when their engine is gone: said, as their weights lack that step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from deepspeed_pulse.engine.starting.start import has_failed


class Unfinished:
    """What the last step of an engine has left; the first rank tells it when the engine is gone, or the script ends.

    Attributes:
        text: what is left, in words; empty where nothing is.
    """

    def __init__(self, engine: Any) -> None:
        self.text = ""
        if engine.global_rank == 0:
            weakref.finalize(engine, self._tell)

    def begin(self, backbones: Sequence[str], step: int) -> None:
        """A step begins that these backbones do not end by themselves."""
        which = f"backbone{'s' * (len(backbones) > 1)} {' and '.join(backbones)}"
        self.text = f"{which}: step {step}, the last one, is not ended, and the weights lack it"

    def end(self) -> None:
        """All have ended."""
        self.text = ""

    def _tell(self) -> None:
        if self.text and not has_failed():
            print(
                f"pulse: warning: {self.text}; call engine.finish_backbones() on all ranks after the last "
                "train_batch(), before weights are read",
                flush=True,
            )
