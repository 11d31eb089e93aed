"""Bytes on the wire per sample at published sizes, counted between real ranks. Needs root and iproute2.

Layers do not sleep here, and payloads are half the published ones; figures are multiplied back. Usage:
python benchmarks/slow_network/traffic.py [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed  # noqa: F401 - once, before ranks are forked
import readme
from namespaces import bridged
from ranks import launch
from slow_network import rank, report
from slow_network.cases import Case, sized_case
from slow_network.plans import as_profile, balanced, pipelined
from slow_network.rank import Job

HERE = Path(__file__).resolve().parent
SCALE = 1 / 2
"""With smaller ones, what ranks send beside the payload (headers, acknowledgements, the loss) counts for too much."""
MIB = 2**20
UVIT_1B = {2: 2.27, 4: 6.80, 8: 15.87}
"""MiB per sample by number of ranks, PULSE paper (arXiv 2606.19163)."""
CASES = (("uvit-1b", 2), ("uvit-1b", 4), ("uvit-1b", 8), ("hunyuan", 8))


def main() -> int:
    arguments = parse()
    found = [counted(sized_case(name, ranks, SCALE, arguments.work / "profiles")) for name, ranks in CASES]
    print(report.traffic_table(found))
    if arguments.write:
        arguments.figures.write_text(json.dumps(found, indent=1) + "\n")
        report.write(arguments.figures.with_name("figures.json"))
    missed = report.missed(promises(found))
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/slow_network"), help="folder of estimated profiles")
    parser.add_argument("--figures", type=Path, default=HERE / "traffic.json", help="what --write writes")
    return readme.keep_option(parser)


def counted(case: Case) -> dict[str, Any]:
    """MiB per sample of each way: the cards' bytes, and for ours the payload by kind."""
    profile = as_profile(case)
    relayed = {"boundaries": balanced(case, profile, "1f1b"), "dualpipev": False, "joined": True}
    sides = {"relayed": Job(side="relayed", case=_awake(case), options=relayed, speeds={"free": None})}
    for name, placement in (("direct", "linear"), ("wave", "wave")):
        options = pipelined(case, profile, placement)["options"]
        sides[name] = Job(side="pulse", case=_awake(case), options=options, speeds={"free": None})
    found: dict[str, Any] = {"model": case.name, "title": case.title, "ranks": case.ranks, "sides": {}}
    unit = case.microbatches * case.byte_scale * MIB
    with bridged(case.ranks) as homes:
        for name, job in sides.items():
            step = launch(rank.measure, case.ranks, job, namespaces=homes, timeout=200)["free"][0]
            found["sides"][name] = {"wire_mib": sum(step["card_bytes"]) / unit}
            if "p2p_bytes" in step:
                kinds = report.by_kind(step["p2p_bytes"])
                found["sides"][name]["payload_mib"] = {kind: count / unit for kind, count in kinds.items()}
    return found


def _awake(case: Case) -> Case:
    still = (replace(layer, forward_ms=0.0, input_ms=0.0, weight_ms=0.0, activation_bytes=4) for layer in case.layers)
    return replace(case, layers=tuple(still))


def promises(found: list[dict[str, Any]]) -> Iterator[report.Promise]:
    """What is promised of the wave, what was counted, the target, and whether it is kept."""
    for case in found:
        wire = {name: side["wire_mib"] for name, side in case["sides"].items()}
        if case["model"] == "uvit-1b":
            target = UVIT_1B[case["ranks"]]
            kept = abs(wire["wave"] / target - 1) <= 0.01
            yield f"U-ViT 1 B, {case['ranks']} ranks, MiB per sample", wire["wave"], f"{target} within 1 %", kept
        else:
            for name, least in (("relayed", 0.89), ("direct", 0.64)):
                less = 1 - wire["wave"] / wire[name]
                yield f"Hunyuan-DiT, less than {name}, share", less, f">= {least}", less >= least
            yield "Hunyuan-DiT, MiB per sample", wire["wave"], "<= 87", wire["wave"] <= 87


if __name__ == "__main__":
    sys.exit(main())
