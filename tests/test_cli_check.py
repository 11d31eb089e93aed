"""``ds_pulse simulate`` and ``check``: figures, violations with their place, and files that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pulse_files import COSTS, PLAN, planned_text, write_files

from deepspeed_pulse.cli import main
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import estimate


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    return planned_text(PLAN + " --placement wave --schedule wave", tmp_path_factory.mktemp("planned"))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files()
    Path("plan.json").write_text(plan)
    return tmp_path


def change(name: str, changes: Callable[[Any], object]) -> None:
    data = json.loads(Path(name).read_text())
    changes(data)
    Path(name).write_text(json.dumps(data))


@pytest.mark.usefixtures("planned")
def test_simulate_prints_the_figures_of_any_plan(capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(Path("plan.json").read_text())["estimate"]
    change("plan.json", lambda plan: plan.update(estimate=None, solver=None, profile_fingerprint=None))
    assert run(f"simulate plan.json {COSTS}") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"makespan {written['makespan_ms']:.3g} ms" in printed.out
    assert f"step {written['step_ms']:.3g} ms" in printed.out
    assert f"bubble {100 * written['bubble_ratio']:.1f} %" in printed.out
    assert "0.4 MB sent per microbatch" in printed.out
    assert "a rank of the cluster has 10.00 GB" in printed.out
    assert "does not fit" not in printed.out


@pytest.mark.usefixtures("planned")
def test_simulate_marks_ranks_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    change("cluster.json", lambda cluster: cluster.update(memory_bytes=10**8))
    assert run(f"simulate plan.json {COSTS}") == 0
    assert capsys.readouterr().out.count("does not fit") == 2


@pytest.mark.usefixtures("planned")
def test_zero_stage_1_shares_the_optimizer_state(capsys: pytest.CaptureFixture[str]) -> None:
    """4 layers of 10 MB a rank: 160 MB of state, 40 MB to step; half of the state, and 40 MB of copies, is divided by
    two, and two buckets of 40 MB come to it.
    """
    for stage, peak in ((0, "0.20"), (1, "0.22")):
        rules = {"zero_stage": stage, "reduce_early": not stage}
        change("plan.json", lambda plan, rules=rules: plan.update(data_parallel=2, rules=rules))
        assert run(f"simulate plan.json {COSTS}") == 0
        printed = capsys.readouterr().out
        files = Plan.load("plan.json"), Profile.load("profile.json"), Cluster.load("cluster.json")
        figures = estimate(*files)
        assert f" {peak} " in printed and f"{figures.samples_per_second:.4g} samples/s" in printed


@pytest.mark.usefixtures("planned")
def test_show_of_a_route_to_nowhere_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for route in ({"hops": [[0, 9]]}, {"source_stage": 9, "hops": [[0, 1]]}):
        change("plan.json", lambda plan, route=route: plan["routes"][0].update(route))
        assert run("show plan.json") == 2
        assert "route 'skip0'" in capsys.readouterr().err


@pytest.mark.usefixtures("planned")
def test_check_of_a_sound_plan_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"check plan.json {COSTS}") == 0
    assert capsys.readouterr().out == "plan.json: no violation\n"


def swap(row: list[str], first: str, second: str) -> None:
    i, j = row.index(first), row.index(second)
    row[i], row[j] = row[j], row[i]


VIOLATIONS: dict[str, tuple[str, Callable[[Any], object], list[str]]] = {
    "backward before forward": (
        "plan.json",
        lambda plan: swap(plan["schedule"][0], "3F1", "3B1"),
        ["4 violations", "schedule of rank 0: runs before what it needs: 3B1 before 3F1", ">>3F1<<", "rank 0: 0F0"],
    ),
    "two at once": (
        "plan.json",
        lambda plan: (plan["schedule"][1].remove("1F2"), plan.update(microbatch_size=3)),
        ["never runs: 1F2", "microbatch_size: the plan has 3, the profile was taken with"],
    ),
    "deadlock": (
        "plan.json",
        lambda plan: swap(plan["schedule"][1], "1F0", "1F3"),
        ["microbatches are not in order within a stage", "deadlock: rank 0 is stuck at", ">>1B0<<"],
    ),
    "route": (
        "plan.json",
        lambda plan: plan["routes"][0].update(hops=[[0, 1]]),
        ["1 violation", "route 'skip0': goes to rank 1, which neither reads it nor passes it on"],
    ),
    "another model": ("plan.json", lambda plan: plan["boundaries"].__setitem__(-1, 9), ["the plan cuts 9 layers"]),
    "another profile": (
        "profile.json",
        lambda profile: profile["layers"][0].update(forward_ms=2),
        ["profile_fingerprint: the plan was made from another profile"],
    ),
    "microbatch size": (
        "plan.json",
        lambda plan: plan.update(microbatch_size=2),
        ["microbatch_size: the plan has 2, the profile was taken with 1"],
    ),
    "memory": (
        "cluster.json",
        lambda cluster: cluster.update(memory_bytes=165 * 10**6),
        ["memory of rank 0: needs 0.200 GB in the optimizer's step; the cluster's memory_bytes allows 0.165 GB"],
    ),
    "memory of activations": (
        "profile.json",
        lambda profile: [layer.update(activation_bytes=5 * 10**9) for layer in profile["layers"]],
        ["memory of rank 0: needs ", "GB at", "the cluster's memory_bytes allows 10.000 GB", ">>"],
    ),
    "cluster too small": (
        "cluster.json",
        lambda cluster: cluster.update(ranks_per_node=1),
        ["ranks: 2 pipeline ranks x 1 data parallel = 2, the cluster 'toy' has 1"],
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
@pytest.mark.usefixtures("planned")
def test_check_lists_violations_with_status_1(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, changes, parts = VIOLATIONS[case]
    change(name, changes)
    assert run(f"check plan.json {COSTS}") == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    text = " ".join(printed.out.split())
    for part in parts:
        assert part in text


Variant = Callable[[str], str]


def replaced(old: str, new: str) -> Variant:
    """The file's text with its first ``old`` changed."""

    def variant(text: str) -> str:
        assert old in text, old
        return text.replace(old, new, 1)

    return variant


BAD_FILES: list[tuple[str, Variant, str]] = [
    ("profile.json", lambda text: "", "not a JSON file"),
    ("profile.json", lambda text: text[: len(text) // 2], "not a JSON file"),
    ("profile.json", lambda text: "\0\1\2", "not a JSON file"),
    ("profile.json", lambda text: "[" * 100_000, "not a JSON file"),
    ("profile.json", lambda text: f"[{text}]", "expected an object"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": -1.0'), "expected a finite number >= 0, found -1.0"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": NaN'), "NaN is not a number"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": Infinity'), "Infinity is not a number"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": 1e400'), "found inf"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": 1e300'), "at most 1e+15, found 1e+300"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": true'), "'forward_ms': expected a finite number"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": "1"'), "found '1'"),
    ("profile.json", replaced('"forward_ms": 1.0', '"forward_ms": 1, "forward_ms": 2'), "occurs twice"),
    ("profile.json", replaced('"param_bytes": 10000000', f'"param_bytes": {10**30}'), "'param_bytes'"),
    ("profile.json", replaced('"param_bytes": 10000000', '"param_bytes": 1.5'), "an integer >= 0, found 1.5"),
    ("profile.json", replaced('"param_bytes"', '"parm_bytes"'), "unknown field 'parm_bytes' (did you mean \"param_"),
    ("profile.json", replaced('"source": 0, "target": 7', '"source": 7, "target": 0'), "a skip runs forward"),
    ("profile.json", replaced('"source": 3, "target": 4', '"source": 3, "target": 8'), "a layer index below 8"),
    ("profile.json", replaced('"skip1"', '"skip0"'), "entries of one name share source"),
    ("profile.json", replaced("pulse-profile/1", "pulse-profile/9"), "expected 'pulse-profile/1'"),
    ("cluster.json", replaced('"nodes": 1', '"nodes": false'), "'nodes': expected an integer >= 1, found False"),
    ("cluster.json", replaced('"nodes": 1', '"nodes": 0'), "'nodes': expected an integer >= 1, found 0"),
    ("cluster.json", replaced('"memory_bytes": 10000000000', '"memory_bytes": null'), "found None"),
    ("cluster.json", replaced('"bandwidth_gb_per_s": 10.0', '"bandwidth_gb_per_s": 0'), "a finite number > 0"),
    ("cluster.json", replaced('"bandwidth_gb_per_s": 10.0', '"bandwidth_gb_per_s": 1e-300'), "at least 1e-09"),
    ("cluster.json", replaced('"intra_node": {', '"intra_node": 3, "inter": {'), "unknown field 'inter'"),
    ("plan.json", lambda text: text[:-200], "not a JSON file"),
    ("plan.json", replaced('"pipeline_ranks": 2', '"pipeline_ranks": 3'), "every rank 0..2 at least once"),
    ("plan.json", replaced('"pipeline_ranks": 2', f'"pipeline_ranks": {2**60}'), "'placement'"),
    ("plan.json", replaced('"microbatches": 4', f'"microbatches": {2**60}'), "'microbatches': expected at most 16"),
    ("plan.json", replaced('"microbatches": 4', '"microbatches": true'), "found True"),
    ("plan.json", replaced('"1F0"', '"1G0"'), "expected an action such as '2F0'"),
    ("plan.json", replaced('"1F0"', '"1F99999999999"'), "expected an action such as '2F0'"),
    ("plan.json", replaced('"peak_bytes": [', '"peak_bytes": [7,'), "peak_bytes for each of the 2 ranks"),
    ("plan.json", replaced('"name": "skip1"', '"name": "skip0"'), "each name at most once"),
    ("plan.json", replaced('"gap": 0', '"gap": -7, "gaps": 0'), "unknown field 'gaps'"),
]


@pytest.mark.parametrize(("name", "variant", "message"), BAD_FILES)
def test_bad_files_are_one_line_with_status_2_and_nothing_is_written(
    name: str, variant: Variant, message: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planned / name
    path.write_text(variant(path.read_text()))
    before = {path.name: path.read_bytes() for path in planned.iterdir()}
    lines = [f"simulate plan.json {COSTS}", f"check plan.json {COSTS}", f"show plan.json {COSTS} --out new.svg"]
    for line in lines if name == "plan.json" else [*lines, PLAN.replace("plan.json", "new.json")]:
        assert run(line) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("ds_pulse: error: ")
        assert name in printed.err
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert len(printed.err) < 400
    assert {path.name: path.read_bytes() for path in planned.iterdir()} == before


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            PLAN + " --memory-gb 0.01",
            ["0.010 GB a rank", "needs 0.20", "use more pipeline ranks", "smaller microbatch"],
        ),
        (PLAN.replace("ranks 2", "ranks 4") + " --waves 2 --placement wave", ["needs at least 16 layers", "has 8"]),
        (PLAN.replace("ranks 2", "ranks 99999999"), ["the cluster 'toy' has 4"]),
        (PLAN + " --zero-stage 2", ["invalid choice: 2"]),
        ("simulate plan.json --profile profile.json", ["required: --cluster"]),
    ],
)
def test_what_cannot_be_planned_says_what_would_help(
    line: str, parts: list[str], planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(planned.iterdir())
    assert run(line.replace("--out plan.json", "--out new.json")) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    for part in parts:
        assert part in printed.err
    assert sorted(planned.iterdir()) == before


@pytest.mark.usefixtures("planned")
def test_simulate_refuses_a_plan_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    change("plan.json", lambda plan: plan["schedule"][1].remove("1F2"))
    assert run(f"simulate plan.json {COSTS}") == 2
    assert "plan.json: the plan cannot run: schedule of rank 1: never runs: 1F2" in capsys.readouterr().err


@pytest.mark.usefixtures("planned")
def test_simulate_refuses_a_cluster_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    change("cluster.json", lambda cluster: cluster.update(ranks_per_node=1))
    assert run(f"simulate plan.json {COSTS}") == 2
    assert "plan.json is for 2 x 1 ranks, cluster.json has 1" in capsys.readouterr().err


@pytest.mark.usefixtures("planned")
def test_layers_that_take_no_time_are_no_error() -> None:
    def free(profile: Any) -> None:
        for layer in profile["layers"]:
            layer.update(forward_ms=0, backward_ms=0, output_bytes=0)

    change("profile.json", free)
    change("cluster.json", lambda cluster: cluster["intra_node"].update(latency_us=0))
    assert run(PLAN) == 0
    assert run(f"simulate plan.json {COSTS}") == 0
    assert run(f"check plan.json {COSTS}") == 0
    assert run(f"show plan.json {COSTS} --memory --out a.svg --out a.html --out a.json") == 0
