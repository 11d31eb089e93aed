"""``ds_pulse tune --verify``: the best choices really run, on ranks of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deepspeed_pulse.cli import main
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.plan import Plan

pytestmark = pytest.mark.timeout(900)  # four cold starts of ranks, and a profile

LAYERS = """
import torch
from deepspeed_pulse import LayerSpec, spec

class Join(torch.nn.Linear):
    def forward(self, hidden, skip):
        return super().forward(hidden + skip)

def keep(hidden):
    return hidden, hidden

def model(microbatch_size=2):
    linear = [LayerSpec(torch.nn.Linear, 16, 16) for _ in range(3)]
    layers = [*linear, spec(keep, stash="skip"), LayerSpec(Join, 16, 16, pop="skip")]
    return layers, ({"hidden": torch.randn(microbatch_size, 16)}, None)

def fixed():
    return model()

def other(microbatch_size=2):
    layers, batch = model(microbatch_size)
    return layers[1:], batch
"""
TUNE = "tune profile.json --cluster cluster.json --global-batch 8 --solver-seconds 0 --world 2"


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of the model, a cluster of two nodes, and room for two ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    Path("verified.py").write_text(LAYERS)
    link = Link(bandwidth_gb_per_s=1.0, latency_us=500.0)
    cluster = Cluster(name="here", nodes=2, ranks_per_node=2, memory_bytes=10**9, intra_node=link, inter_node=link)
    Path("cluster.json").write_text(cluster.to_json())
    assert run("profile verified:model --out profile.json") == 0
    return tmp_path


def measured_rows(out: str) -> list[tuple[int, float]]:
    """Pipeline ranks and measured samples/s of the choices that were run, as the table has them."""
    cells = [(line.split()[0], line.split("%")[1].split()) for line in out.splitlines() if " % " in line]
    return [(int(ranks), float(after[2])) for ranks, after in cells if ranks.isdigit() and len(after) == 4]


def test_the_best_are_ranked_by_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TUNE} --verify 2 --model verified:model --out plan.json --config ds.json") == 0
    out = capsys.readouterr().out
    assert "the best 2 by measurement here" in out
    rows = measured_rows(out)
    assert len(rows) == 2 and rows[0][1] >= rows[1][1] > 0, out
    plan, config = Plan.load("plan.json"), json.loads(Path("ds.json").read_text())
    assert plan.pipeline_ranks == rows[0][0], out
    assert config["train_micro_batch_size_per_gpu"] == plan.microbatch_size


def test_a_model_that_is_not_the_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TUNE} --world 1 --verify 1 --model verified:other") == 2
    message = capsys.readouterr().err
    assert "none of the best 1 choices ran" in message
    assert "expected the 5 layers of the profile, found 4 layers" in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--verify 1", "--verify K and --model MODEL go together"),
        ("--model verified:model", "--verify K and --model MODEL go together"),
        ("--granularity fine", "--granularity goes with --verify"),
        ("--verify 1 --model verified:fixed", "--verify: verified:fixed takes no microbatch_size, and choices have"),
        ("--verify 1 --model verified:model --world 4", "4 ranks of cluster 'here' are on 2 nodes"),
        (
            "--world 1 --verify 1 --model verified:model --verify-seconds 0.1",
            "took longer than 0.1 s; --verify-seconds gives",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str], more: str, message: str) -> None:
    assert run(f"{TUNE} {more}") == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert run(f"{TUNE} --verify 1 --model verified:model") == 2
    assert "2 ranks, this machine has 1 cores, a rank needs one of its own" in capsys.readouterr().err
