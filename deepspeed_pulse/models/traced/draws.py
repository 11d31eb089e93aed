"""Random numbers while a forward runs without numbers.

Layers draw torch's as the model does. A seed that code between blocks sets, and what it draws from other sources, would
be lost or fixed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SEED = 0x70756C736521
"""Torch's while a trace runs, which no program sets: a forward that sets the seed of its script is noticed too."""


class Draws:
    """What has become of the random numbers of Python, numpy and torch since its beginning."""

    def __init__(self) -> None:
        torch.default_generator.manual_seed(_SEED)
        self._python, self._numpy = random.getstate(), _state_of_numpy()

    @property
    def seeded(self) -> bool:
        """Whether torch's are seeded, just now."""
        return torch.default_generator.initial_seed() != _SEED

    @property
    def others(self) -> str | None:
        """Whose other numbers were drawn, or seeded."""
        if _state_of_numpy() != self._numpy:
            return "numpy"
        return "Python" if random.getstate() != self._python else None

    @contextmanager
    def of_a_leaf(self) -> Iterator[None]:
        """While a leaf runs, which draws and seeds when its layer runs, too: nothing of it counts."""
        python, by_numpy, seed = random.getstate(), np.random.get_state(), torch.default_generator.initial_seed()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(by_numpy)
            if torch.default_generator.initial_seed() != seed:
                torch.default_generator.manual_seed(seed)


@contextmanager
def drawing() -> Iterator[Draws]:
    """Draws of a forward, after which all states are what they were."""
    python, by_numpy, by_torch = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield Draws()
    finally:
        random.setstate(python)
        np.random.set_state(by_numpy)
        torch.random.set_rng_state(by_torch)


def _state_of_numpy() -> tuple[bytes, int]:
    """Of its global generator."""
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2]
