"""Random numbers of the devices."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu import library
from torch_npu.devices import index

GENERATORS = [library.default_generator(number) for number in range(library.device_count())]


def of(device: Any = None) -> torch.Generator:
    return GENERATORS[index(device)]


def seed_all(seed: int) -> None:
    for generator in GENERATORS:
        generator.manual_seed(seed)


def names() -> dict[str, Any]:
    """Of ``torch.npu``."""
    return {
        "default_generators": GENERATORS,
        "manual_seed": lambda seed: of().manual_seed(seed),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: of().initial_seed(),
        "get_rng_state": lambda device=None: of(device).get_state(),
        "set_rng_state": lambda state, device=None: of(device).set_state(state),
    }
