"""What DeepSpeed's own pipeline tests hold of its module, held of ours; and files that both read.

On the CPU, and on the stand-in for an accelerator under both kinds of wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.launch import launch
from support.standin import environment, needs_standin

WAITS = [
    pytest.param(kind, marks=[needs_standin(), pytest.mark.timeout(400), pytest.mark.soak]) for kind in ("hccl", "nccl")
]
"""Whose kind of wait the device has."""


def on(waits: str | None) -> dict[str, Any]:
    return {} if waits is None else {"environment": environment(waits=waits)}


@pytest.mark.parametrize("waits", [None, *WAITS])
def test_a_sequential_model_gives_what_it_gives_by_itself_and_gradients_are_scaled_once(waits: str | None) -> None:
    """And a loss that is no number is returned, and nothing else happens; of upstream's module too."""
    launch("support.upstream_ranks:on_two_ranks", 2, timeout=250, **on(waits))


@pytest.mark.parametrize("waits", [None, *WAITS])
def test_training_data_feeds_every_topology_with_changing_shapes(waits: str | None) -> None:
    """At pp1dp4, pp2dp2, pp4dp1, and with pipelines of neighbouring ranks."""
    launch("support.upstream_ranks:training_data", 4, timeout=250, **on(waits))


@pytest.mark.parametrize("waits", [None, *WAITS])
def test_layer_files_interchange_with_plain_deepspeed(tmp_path: Path, waits: str | None) -> None:
    """Each continues from the other's files with the same losses; the plain runs have none of this package."""
    plain = str(tmp_path / "plain")
    launch("support.plain_ranks:plain_writes", 2, plain, timeout=120, without_us=True, **on(waits))
    launch("support.plain_ranks:pulse_reads_and_writes", 2, str(tmp_path), timeout=120, **on(waits))
    folders = [str(tmp_path / name) for name in ("wave", "linear", "off", "plain")]
    launch("support.plain_ranks:plain_reads", 2, folders, timeout=120, without_us=True, **on(waits))
