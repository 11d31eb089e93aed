"""On an asynchronous device, the stand-in of ``tests/standin``: losses, gradients and weights as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.launch import launch
from support.standin import environment, needs_standin

pytestmark = needs_standin()

DEVICES = [("hccl", 0), ("nccl", 200)]
"""Whose kind of wait, and microseconds by which every kernel is late."""


def toy(ranks: int, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "P": ranks, "M": 3, "clip": 0.1, "enabled": True, **more}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("waits", "delay"), DEVICES)
def test_a_pipeline_of_two_trains_as_on_the_cpu(waits: str, delay: int) -> None:
    cases = [toy(2), toy(2, W=2), toy(2, placement="linear")]
    device = environment(waits=waits, kernel_delay_us=delay)
    for _, output in launch("support.parity:run_cases", 2, cases, timeout=300, environment=device):
        assert output.count("PASSED") == len(cases)
