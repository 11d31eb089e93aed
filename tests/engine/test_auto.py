""" "auto": the ways to run a job are measured and compared, all ranks run the best one, and it can be pinned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.launch import launch
from support.toy import toy_profile

from deepspeed_pulse.config import parse_pulse
from deepspeed_pulse.engine.plans import choosing, planning
from deepspeed_pulse.engine.plans.asked import asked_of, num_stages_of, settled, sizes_to_measure
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.choice import Choice, Constraints
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.planner import OpenJob, cache

ROOT = Path(__file__).parents[2]


def write_cluster(path: Path, bandwidth_gb_per_s: float) -> str:
    link = Link(bandwidth_gb_per_s=bandwidth_gb_per_s, latency_us=0.0)
    cluster = Cluster(name=path.stem, nodes=1, ranks_per_node=4, memory_bytes=10**9, intra_node=link, inter_node=link)
    path.write_text(cluster.to_json())
    return str(path)


def test_what_is_chosen_trains_as_the_unpartitioned_model_and_can_be_pinned(tmp_path: Path) -> None:
    """Slow links make pipelines: reducing gradients takes longer than all sends."""
    profile = tmp_path / "profile.json"
    profile.write_text(toy_profile().to_json())
    case = {
        "folder": str(tmp_path / "checkpoints"),
        "profile": str(profile),
        "fast": write_cluster(tmp_path / "fast.json", 100.0),
        "slow": write_cluster(tmp_path / "slow.json", 1e-5),
    }
    launch("support.auto_ranks:chooses", 4, case, timeout=250)


@pytest.mark.timeout(300)
def test_the_example_trains_with_nothing_else_set(tmp_path: Path) -> None:
    """But for how long orders are searched, which is 30 s by default."""
    folder = ROOT / "examples" / "unet"
    config = json.loads((folder / "ds_config_auto.json").read_text())
    assert [config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")] == ["auto"] * 2
    assert set(config["pulse"].values()) == {"auto"}
    quick = tmp_path / "ds_config_auto.json"
    quick.write_text(json.dumps(config | {"pulse": config["pulse"] | {"solver_seconds": 1}}))
    steps = ["--steps", "2", "--size", "8", "--out", str(tmp_path), "--ranks", "auto"]
    command = [str(folder / "train.py"), "--deepspeed_config", str(quick), *steps]
    found = launch("support.example_ranks:example", 2, command, timeout=250)
    assert "pulse: chosen for num_stages" in found[0][1]
    assert (tmp_path / "loss.csv").read_text().count("\n") == 3
    assert (tmp_path / "model" / "unet" / "config.json").is_file()
    pinned = json.loads((tmp_path / "checkpoints" / "step2" / "pulse_ds_config.json").read_text())
    assert pinned["train_batch_size"] == config["train_batch_size"]
    assert pinned["pipeline"]["stages"] * pinned["pulse_choice"]["options"][0]["data_parallel"] == 2


def test_a_decision_is_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WORTH_KEEPING_SECONDS", 0.0)
    cluster = Cluster.load(write_cluster(tmp_path / "cluster.json", 100.0))
    pulse = parse_pulse({"plan_cache": str(tmp_path / "kept"), "solver_seconds": 0})
    assert pulse is not None
    job = OpenJob(profiles=(toy_profile(),), cluster=cluster, global_batch=16)
    first = planning.decide(job, pulse, choosing.told)
    monkeypatch.setattr(planning, "tune", lambda *_, **__: pytest.fail("tuned anew"))
    assert planning.decide(job, pulse, choosing.told) == first
    other = replace(job, given=Constraints(waves=(1,)))
    with pytest.raises(pytest.fail.Exception, match="tuned anew"):
        planning.decide(other, pulse, choosing.told)


# -- what is asked for ---------------------------------------------------------------------------


def ask(config: dict, *, stages: object = "auto", world: int = 4, pulse: object = True) -> Constraints | tuple:
    found = asked_of(stages, None, config, parse_pulse(pulse), plan=None, world=world)
    assert found is not None
    return found


BATCH, SIZE, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "stages", "pulse", "batch", "given"),
    [
        ({BATCH: 8}, "auto", True, 8, Constraints(waves=(0, 1), loops=(1,), zero_stage=0)),
        ({BATCH: 8, SIZE: "auto"}, 2, True, 8, Constraints(pipeline_ranks=2, waves=(0, 1), loops=(1,), zero_stage=0)),
        ({SIZE: 3}, "auto", True, 12, Constraints(microbatch_size=3, waves=(0, 1), loops=(1,), zero_stage=0)),
        (
            {SIZE: 3, STEPS: 2},
            2,
            {"waves": "auto"},
            12,
            Constraints(pipeline_ranks=2, microbatch_size=3, microbatches=2, waves=(0, 1, 2), zero_stage=0),
        ),
        (
            {BATCH: 8},
            4,
            {"waves": "auto", "placement": "wave"},
            8,
            Constraints(pipeline_ranks=4, microbatches=1, waves=(1, 2), loops=(), zero_stage=0),
        ),
        (
            {BATCH: 8, "zero_optimization": {"stage": 1}},
            "auto",
            {"placement": "linear", "schedule": "1f1b"},
            8,
            Constraints(waves=(0,), loops=(), zero_stage=1, schedule="1f1b"),
        ),
        (
            {BATCH: 8},
            "auto",
            {"placement": "loop", "schedule": "interleaved"},
            8,
            Constraints(waves=(), loops=(1,), zero_stage=0, schedule="interleaved"),
        ),
    ],
)
def test_what_is_settled_and_what_is_open(config, stages, pulse, batch, given) -> None:
    found = ask(config, stages=stages, pulse=pulse)
    assert (found.global_batch, found.given) == (batch, given)


def test_numbers_leave_nothing_to_choose() -> None:
    assert asked_of(4, None, {BATCH: "auto", SIZE: 2}, parse_pulse(True), plan=None, world=4) is None
    assert settled({BATCH: "auto", SIZE: 2}, None) == {SIZE: 2}
    assert asked_of(4, None, None, parse_pulse(True), plan=None, world=4) is None


@pytest.mark.parametrize(("stages", "config", "found"), [("auto", 2, 2), (None, "auto", "auto"), (2, "auto", 2)])
def test_the_configs_number_of_stages(stages, config, found) -> None:
    assert num_stages_of(stages, {"pipeline": {"stages": config}}) == found
    assert num_stages_of(stages, {"pipeline": {}}) == stages


@pytest.mark.parametrize(
    ("config", "world", "sizes"),
    [
        ({BATCH: 32}, 4, (1, 2, 4, 8)),
        ({BATCH: 27}, 3, (1, 3, 9)),
        ({BATCH: 2}, 4, (1,)),
        ({BATCH: 32, SIZE: 16}, 4, (16,)),
        ({BATCH: 32, STEPS: 2}, 4, (4, 8, 16)),
    ],
)
def test_sizes_that_are_measured(config, world, sizes) -> None:
    assert sizes_to_measure(ask(config, world=world)) == sizes


def test_a_config_that_asks_for_something_else_is_refused() -> None:
    asked = ask({BATCH: 8, SIZE: "auto"})
    choice = Choice(pipeline_ranks=1, data_parallel=4, waves=0, microbatch_size=2, microbatches=1)
    assert settled({BATCH: 8, SIZE: "auto", "x": 1}, (asked, choice)) == {BATCH: 8, SIZE: 2, STEPS: 1, "x": 1}
    assert settled({BATCH: 8, SIZE: 2, STEPS: 1}, (asked, choice))[STEPS] == 1
    with pytest.raises(ConfigError, match=r"brings train_batch_size 16.* chose for train_batch_size 8"):
        settled({BATCH: 16, SIZE: "auto"}, (asked, choice))
