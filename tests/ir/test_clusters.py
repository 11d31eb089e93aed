"""Clusters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.clusters import ACCELERATORS, load_cluster


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_named_cluster_is_one_that_its_file_reads_back(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(f"{name.upper()}:2x8")
    assert (cluster.nodes, cluster.ranks_per_node, cluster.name) == (2, 8, f"{name}:2x8")
    assert cluster.intra_node.bandwidth_gb_per_s > cluster.inter_node.bandwidth_gb_per_s
    path = tmp_path / "cluster.json"
    path.write_text(cluster.to_json())
    assert load_cluster(str(path)) == cluster


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("h20:2x8", r'no such accelerator \(did you mean "h200"\?\); expected a cluster file, or NAME:NODESxRANKS'),
        ("a100:0x8", "no such file; expected a cluster file, or NAME:NODESxRANKS"),
        ("a100", "no such file"),
    ],
)
def test_what_is_neither_file_nor_name_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(FileError, match=complaint):
        load_cluster(text)
