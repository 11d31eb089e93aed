"""The stand-in for an accelerator keeps what it promises, and bites where a real device would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import launch
from support.standin import environment, needs_standin
from support.standin_proofs import PROOFS

pytestmark = needs_standin()


@pytest.fixture(scope="module")
def proofs() -> tuple[dict[str, int], str]:
    """Exit status by name, and what was printed; all in one launch."""
    command = [sys.executable, "-m", "support.standin_proofs", *PROOFS]
    whole = {**os.environ, **environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=whole, capture_output=True, text=True, timeout=350, cwd=Path(__file__).parents[1]
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[0] in PROOFS}, done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PROOFS)
def test_the_stand_in(name: str, proofs: tuple[dict[str, int], str]) -> None:
    statuses, output = proofs
    expected = -signal.SIGSEGV if "the_host_dies" in name else 0
    assert statuses.get(name) == expected, f"{name}: {statuses.get(name)}\n{output[-6000:]}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("waits", ["hccl", pytest.param("nccl", marks=pytest.mark.soak)])
def test_deepspeed_without_pipelines_trains_on_it_as_torch_on_the_cpu(waits: str) -> None:
    """Replicas, ZeRO-1 and 2, its fused optimizer, in fp32, bf16, fp16 and with autocast."""
    launch("support.data_parallel_ranks:trains", 2, timeout=250, environment=environment(waits=waits), without_us=True)
