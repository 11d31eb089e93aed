"""A profile, a cluster and the line that plans them, as files in the working directory."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from deepspeed_pulse.cli import main

LINK = {"bandwidth_gb_per_s": 10.0, "latency_us": 50.0}
LAYER = {"forward_ms": 1.0, "backward_ms": 2.0, "param_bytes": 10**7, "activation_bytes": 10**6, "output_bytes": 10**5}

PLAN = "plan profile.json --cluster cluster.json --pipeline-ranks 2 --microbatches 4 --solver-seconds 0 --out plan.json"
COSTS = "--profile profile.json --cluster cluster.json"


def write(path: str, kind: str, **fields: Any) -> None:
    Path(path).write_text(json.dumps({"format": f"pulse-{kind}/1", "name": "toy", **fields}))


def write_files() -> None:
    """Eight equal layers with four nested skips; one node of four ranks."""
    layers = [{"name": f"block{i}", **LAYER} for i in range(8)]
    skips = [{"name": f"skip{i}", "source": i, "target": 7 - i, "bytes": 10**5} for i in range(4)]
    write("profile.json", "profile", device="cpu", dtype="float32", microbatch_size=1, layers=layers, skips=skips)
    write("cluster.json", "cluster", nodes=1, ranks_per_node=4, memory_bytes=10**10, intra_node=LINK, inter_node=LINK)


def planned_text(line: str, folder: Path) -> str:
    """The plan that this line makes of these files, in a folder of its own."""
    with contextlib.chdir(folder):
        write_files()
        assert main(line.split()) == 0
        return Path("plan.json").read_text()
