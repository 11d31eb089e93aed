"""What DeepSpeed's own pipeline tests hold of its module, held of ours; and files that both read."""

from __future__ import annotations

from pathlib import Path

from support.launch import launch


def test_a_sequential_model_gives_what_it_gives_by_itself_and_gradients_are_scaled_once() -> None:
    """And a loss that is no number is returned, and nothing else happens."""
    launch("support.upstream_ranks:on_two_ranks", 2, timeout=250)


def test_training_data_feeds_every_topology_with_changing_shapes() -> None:
    """At pp1dp4, pp2dp2, pp4dp1, and with pipelines of neighbouring ranks."""
    launch("support.upstream_ranks:training_data", 4, timeout=250)


def test_layer_files_interchange_with_plain_deepspeed(tmp_path: Path) -> None:
    """Each continues from the other's files with the same losses; the plain runs have none of this package."""
    plain = str(tmp_path / "plain")
    launch("support.plain_ranks:plain_writes", 2, plain, timeout=100)
    launch("support.plain_ranks:pulse_reads_and_writes", 2, str(tmp_path), timeout=100)
    folders = [str(tmp_path / name) for name in ("wave", "linear", "off", "plain")]
    launch("support.plain_ranks:plain_reads", 2, folders, timeout=100)
