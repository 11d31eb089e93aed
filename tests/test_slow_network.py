"""The parts of benchmarks/slow_network that need no network: its layers, its verdicts, its refusals."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_pulse.ir.plan import Plan

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def layers() -> tuple[Any, ...]:
    """Two pairs of skips and a value with two readers."""
    from slow_network.layers import Layer

    def layer(stashes: Any = (), pops: Any = ()) -> Layer:
        sizes = {"param_bytes": 8, "activation_bytes": 4, "output_bytes": 64}
        return Layer(name="l", forward_ms=0.1, input_ms=0.1, weight_ms=0.1, stashes=stashes, pops=pops, **sizes)

    return (
        layer((("temb", 16), ("a", 64))),
        layer((("b", 64),), ("temb",)),
        layer((), ("temb",)),
        layer((), ("b",)),
        layer((), ("a",)),
    )


def test_relaying_layers_hand_on_what_later_ones_read() -> None:
    from slow_network.layers import relaying

    made = relaying(layers())
    assert [alive for _, _, alive, _ in made] == [
        (),
        ("temb", "a"),
        ("temb", "a", "b"),
        ("a", "b"),
        ("a",),
    ]


def test_every_layer_sleeps_once_and_every_weight_has_a_gradient() -> None:
    """The first layer's input needs no gradient, so nobody sleeps for it."""
    import slow_network.layers as sleeping

    values: Any = torch.zeros(1, 16)
    modules = [kind(*arguments) for kind, *arguments in sleeping.relaying(layers())]
    before = sleeping.slept_ms
    for module in modules:
        values = module(values)
    values.sum().backward()
    assert sleeping.slept_ms - before == pytest.approx(5 * 0.3 - 0.1)
    assert all(weight.grad is not None for module in modules for weight in module.parameters())


def test_the_case_as_a_profile_has_the_same_bytes() -> None:
    from slow_network.cases import Case
    from slow_network.plans import as_profile

    case = Case(name="c", title="c", ranks=2, samples=1, layers=layers(), time_scale=1.0, byte_scale=1.0)
    found = as_profile(case)
    assert [(skip.name, skip.source, skip.target, skip.bytes) for skip in found.skips] == [
        ("temb", 0, 1, 16),
        ("temb", 0, 2, 16),
        ("b", 1, 3, 64),
        ("a", 0, 4, 64),
    ]


@pytest.mark.parametrize(
    ("seed", "name", "schedule"), [(3, "1F1B", "1f1b"), (7, "DualPipeV", "dualpipev"), (7, "ZB-V", "zbv")]
)
def test_other_sides_have_the_cuts_that_are_best_in_their_own_order(seed: int, name: str, schedule: str) -> None:
    """Those for whatever order is fastest take longer in it."""
    import random

    from slow_network.cases import Case
    from slow_network.layers import Layer
    from slow_network.others import other_sides
    from slow_network.plans import PLACEMENTS, as_profile, nominal

    from deepspeed_pulse.planner import Job, SearchOptions, make_plan

    rng = random.Random(seed)

    def layer(index: int) -> Layer:
        times = {half: rng.uniform(1, 9) for half in ("forward_ms", "input_ms", "weight_ms")}
        return Layer(name=str(index), param_bytes=8, activation_bytes=4, output_bytes=64, **times)

    made = tuple(map(layer, range(8)))
    case = Case(name="c", title="c", ranks=2, samples=1, layers=made, time_scale=1.0, byte_scale=1.0)
    profile = as_profile(case)
    job = Job(profile=profile, cluster=nominal(case), pipeline_ranks=2, microbatches=4)
    free = SearchOptions(placement=PLACEMENTS[schedule], solver_seconds=0.0)

    def step_ms(cuts: tuple[int, ...]) -> float:
        own = replace(free, schedule=schedule, split_backward=schedule == "zbv", boundaries=cuts)
        found = make_plan(job, own).estimate
        assert found is not None
        return found.step_ms

    side = dict(other_sides(case, profile, {}))[name]
    assert step_ms(side.options["boundaries"]) < 0.99 * step_ms(make_plan(job, free).boundaries)


def test_a_plan_is_timed_once() -> None:
    """A side that runs another's plan has its figures; one with another order, or other samples, has its own."""
    from slow_network.cases import Case
    from slow_network.plans import as_profile, once_each, pipelined
    from slow_network.report import SIDES, _plans, summary

    case = Case(name="c", title="c", ranks=2, samples=1, layers=layers(), time_scale=1.0, byte_scale=1.0)
    wave = pipelined(case, as_profile(case), "wave")
    plan = Plan.from_json(wave["options"]["plan"])
    assert plan.estimate is not None
    as_long = replace(plan, estimate=replace(plan.estimate, step_ms=9.0), solver=None)
    tuned = {**wave, "options": {**wave["options"], "plan": as_long.to_json()}}
    linear = {**wave, "options": {**wave["options"], "samples": 2}}
    ours = once_each({"linear": linear, "wave": wave, "tuned": tuned})
    assert [side.get("same_as") for side in ours.values()] == [None, None, "wave"]

    step = {"step_ms": 3.0, "card_bytes": [1], "slept_ms": [1], "p2p_bytes": [{}], "peak_live_bytes": [1]}
    speeds = {"unlimited": {"step_ms": 1.0, "ratio": 0.0}}
    results = {"wave": {"speeds": {"unlimited": [step]}, "failed": {}}}
    state = {"speeds": speeds, "ours": {"unlimited": {"wave": ours["wave"], "tuned": ours["tuned"]}}}
    found = summary(case, as_profile(case), state, results, 1.0)
    assert [name for name in SIDES if name in found["sides"]] == ["wave", "tuned"]
    assert found["sides"]["tuned"]["unlimited"]["step_ms"] == 3.0
    assert "| tuned | unlimited | the plan of wave |" in "\n".join(_plans(found))


def figures() -> dict[str, Any]:
    def side(step_ms: float) -> dict[str, Any]:
        speeds = {"unlimited": step_ms, "ratio 1.5": step_ms, "ratio 2.5": step_ms}
        plain = {"lowest_ms": 1.0, "highest_ms": 9.0, "idle": 0.1, "mb_per_sample": 2.0, "work": 1.0}
        return {s: {**plain, "step_ms": ms, "samples_per_second": 1e3 / ms} for s, ms in speeds.items()}

    plan = {"plan": "P=4", "planned_ms": 1.0, "measured_over_planned": 1.0, "bound_ms": 1.0, "peak_over_planned": 1.0}
    ours = {s: {**found, **plan, "p2p_bytes": {}} for s, found in side(1.0).items()}
    speed = {"mbit": 8.0, "ratio": 2.5, "step_ms": 1.0}
    sides = {
        "1F1B": side(3.0),
        "DualPipeV": side(2.6),
        "linear": {s: {**f, **ours[s], "step_ms": 1.2} for s, f in side(1.2).items()},
    }
    return {
        "model": "uvit",
        "title": "U-ViT",
        "ranks": 4,
        "microbatches": 8,
        "time_scale": 1.0,
        "byte_scale": 1.0,
        "speeds": {"unlimited": {"step_ms": 1.0, "ratio": 0.0}, "ratio 1.5": speed, "ratio 2.5": speed},
        "sides": {**sides, "wave": ours, "tuned": copy.deepcopy(ours), "ZB-V": {"failed": "ranks 1 took too long"}},
    }


def test_promises_are_judged_and_failed_sides_are_named() -> None:
    from slow_network import report

    found = figures()
    assert report.misses(found) == ["ZB-V failed: ranks 1 took too long"]
    found["sides"]["1F1B"]["ratio 2.5"]["step_ms"] = 2.8
    assert report.missed(report.promises(found)) == ["ratio 2.5: wave over 1F1B: 2.800, target >= 2.9"]
    assert "| ZB-V | failed: ranks 1 took too long |" in report.table(found)


def test_a_side_that_failed_in_one_of_several_rounds_is_told() -> None:
    from slow_network import report

    found = figures()
    found["sides"]["1F1B"]["failed"] = "ranks 1 took too long"
    assert "1F1B failed: ranks 1 took too long" in report.misses(found)
    assert "| 1F1B (failed in part: ranks 1 took too long) | 333.3 |" in report.table(found)


def test_the_fastest_side_is_named_without_a_wave_too() -> None:
    from slow_network import report

    found = figures()
    del found["sides"]["wave"]
    found["sides"]["tuned"]["unlimited"]["step_ms"] = 2.0
    assert "unlimited: tuned over the fastest, linear: 0.600, target >= 0.99" in report.misses(found)


def test_the_fastest_of_the_others_is_what_ours_has_to_beat() -> None:
    """The wave and "auto" those that relay skips, the tuner's choice all sides, data parallel ones too."""
    from slow_network import report

    found = figures()
    found["sides"] |= {name: copy.deepcopy(found["sides"]["1F1B"]) for name in ("ZB-V", "DDP")}
    found["sides"]["ZB-V"]["unlimited"]["step_ms"] = 0.98
    found["sides"]["DDP"]["ratio 1.5"]["step_ms"] = 0.5
    found["sides"]["auto"] = copy.deepcopy(found["sides"]["wave"])
    found["sides"]["auto"]["unlimited"]["step_ms"] = 0.97
    found["sides"]["auto"]["ratio 1.5"]["step_ms"] = 3.0
    found["sides"]["tuned"]["ratio 2.5"]["measured_over_planned"] = 1.06
    assert report.missed(report.promises(found)) == [
        "unlimited: wave over the fastest, ZB-V: 0.980, target >= 1",
        "unlimited: tuned over the fastest, auto: 0.970, target >= 0.99",
        "ratio 1.5: auto over the fastest, DualPipeV: 0.867, target >= 1",
        "ratio 1.5: tuned over the fastest, DDP: 0.500, target >= 0.99",
        "ratio 2.5: tuned, measured over planned: 1.060, target <= 1.05",
    ]
    ahead = figures()
    ahead["sides"]["ZB-V"] = {"unlimited": {"step_ms": 1.1}}
    assert report.missed(report.of_all([found, ahead, figures()])) == [
        "unlimited: wave over ZB-V, mean of 2 cases: 1.040, target >= 1.05"
    ]


def test_the_same_figures_write_the_same_readme(tmp_path: Path) -> None:
    from slow_network import report

    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.keep(figures(), tmp_path / "figures.json")
    report.write(tmp_path / "figures.json")
    once = readme.read_text()
    report.write(tmp_path / "figures.json")
    assert readme.read_text() == once
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "old" not in once
    assert (tmp_path / "figures.png").stat().st_size > 1000


def test_figures_elsewhere_need_no_readme(tmp_path: Path) -> None:
    from slow_network import report

    report.keep(figures(), tmp_path / "mine.json")
    report.write(tmp_path / "mine.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "mine.png"]


def test_without_root_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import namespaces

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="run this benchmark as root"), namespaces.bridged(2):
        pass


def test_a_burst_that_drops_every_full_packet_is_refused() -> None:
    import namespaces

    with (
        pytest.raises(ValueError, match="a packet of 9000"),
        namespaces.namespaces(2, lambda a, b: 1.0, burst_bytes=4096),
    ):
        pass


def test_other_sides_contain_nothing_of_this_project() -> None:
    """What they import of the benchmark imports nothing either."""
    import subprocess

    modules = ", ".join(f"slow_network.sides.{name}" for name in ("relayed", "pipelining", "data_parallel"))
    found = f"import sys, {modules}; print([name for name in sys.modules if name.startswith('deepspeed_pulse')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([BENCHMARKS, *sys.path]), "DS_ACCELERATOR": "cpu"}
    result = subprocess.run([sys.executable, "-c", found], env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip().endswith("[]"), result.stderr


def test_joined_backward_of_a_stage_is_one_traversal() -> None:
    from slow_network.sides.relayed import _Outputs

    x = torch.ones(2, requires_grad=True)
    _Outputs((x * 2, x * 3)).backward([torch.ones(2), torch.ones(2)])
    assert x.grad is not None and x.grad.tolist() == [5.0, 5.0]


def test_sleeping_layers_are_measured_and_planned() -> None:
    import json

    from ranks import launch
    from slow_network import rank
    from slow_network.cases import Case
    from slow_network.plans import PLACEMENTS, balanced, limited, nominal, our_sides

    from deepspeed_pulse.ir.profile import Profile

    case = Case(name="c", title="c", ranks=2, samples=1, layers=layers(), time_scale=1.0, byte_scale=1.0)
    measured = launch(rank.profile, case.ranks, rank.Job(side="pulse", case=case), timeout=120)
    profile = Profile.from_json(json.dumps(measured))
    assert [layer.output_bytes for layer in profile.layers] == [64] * 5
    assert {schedule: len(balanced(case, profile, schedule)) for schedule in PLACEMENTS} == {
        "1f1b": 3,
        "dualpipev": 5,
        "zbv": 5,
        "interleaved": 5,
    }
    cluster = limited(nominal(case), 100.0)
    assert cluster.intra_node.bandwidth_gb_per_s < 0.0125 == pytest.approx(cluster.intra_node.bus_gb_per_s, rel=0.1)
    assert our_sides(case, profile, cluster).keys() == {"linear", "wave", "auto", "tuned"}


def test_what_the_tuner_chose_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop has as many stages as a wave."""
    from types import SimpleNamespace

    from slow_network import plans
    from slow_network.cases import Case

    from deepspeed_pulse.ir.choice import Choice
    from deepspeed_pulse.planner import Job, SearchOptions, make_plan

    case = Case(name="c", title="c", ranks=2, samples=1, layers=layers(), time_scale=1.0, byte_scale=1.0)
    profile, cluster = plans.as_profile(case), plans.nominal(case)
    job = Job(profile=profile, cluster=cluster, pipeline_ranks=2, microbatches=4)
    plan = make_plan(job, SearchOptions(placement="loop", solver_seconds=0.0))
    choice = Choice(pipeline_ranks=2, data_parallel=1, waves=1, microbatch_size=1, microbatches=4, loop=True)
    best = SimpleNamespace(choice=choice, planned=plan)
    monkeypatch.setattr(plans, "tune", lambda *_, **__: SimpleNamespace(best=best))
    found = plans.tuned(case, profile, cluster)
    assert found["told"] == "P=2 G=1 loop x 2, 4 microbatches of 1"
    assert found["options"] == {"plan": plan.to_json(), "samples": 1, "zero": 0}
