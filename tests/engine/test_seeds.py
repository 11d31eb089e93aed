"""Random numbers of a layer and microbatch are those of upstream's ``seed_layers``."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import torch
from deepspeed.runtime.utils import set_random_seed

from deepspeed_pulse.engine.binding import _seed


def drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_every_generator_is_seeded_as_by_upstream() -> None:
    set_random_seed(1234 * (3 + 2) + 7)
    expected = drawn()
    _seed(SimpleNamespace(base_seed=1234, seed_fn=None), 7, 3)
    assert drawn() == expected


def test_the_users_own_function_goes_before() -> None:
    asked: list[int] = []
    _seed(SimpleNamespace(base_seed=1234, seed_fn=asked.append), 7, 3)
    assert asked == [1234 * (3 + 2) + 7]
