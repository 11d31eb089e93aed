"""Benchmarks run, and say which promise they miss."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch
from support.standin import environment, needs_standin

from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import OpenJob, tune
from deepspeed_pulse.report.tuning import describe

ROOT = Path(__file__).parents[1]
PLANNER = ROOT / "benchmarks" / "planner" / "run.py"


def planner(line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PLANNER), *line.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_kept_promise_is_status_0() -> None:
    result = planner("--only uncapped")
    assert result.returncode == 0, result.stderr
    assert "| uniform: makespans within their targets | 57 (<= 57), 105 (<= 105), 117 (<= 117)" in result.stdout


def test_a_missed_promise_is_named_with_status_1() -> None:
    """Without a search the caps are not reached."""
    result = planner("--only capped --seconds 0")
    assert result.returncode == 1
    assert "MISSED uniform, capped: makespans within their targets: P=4 M=8, cap 8: 64 > 60" in result.stderr
    assert "never worse" not in result.stderr
    assert "| dualpipev, not searched |" in result.stdout


def test_only_whole_runs_are_kept() -> None:
    before = PLANNER.with_name("README.md").read_bytes()
    result = planner("--write --only capped --seconds 1")
    assert result.returncode == 2
    assert "leave out --seconds, --only" in result.stderr
    assert PLANNER.with_name("README.md").read_bytes() == before


SHORTER = {
    "slow_network": ("--rounds 1", "--stage-ms 5", "--timeout 9", "--sides wave", "--quick"),
    "real_compute": ("--rounds 1", "--steps 1", "--sides wave", "--quick"),
    "fill": ("--seconds 1", "--quick"),
    "accelerator": ("--rounds 1", "--steps 1", "--timeout 9", "--models sd15"),
}
"""Of scripts, options that make a run a part of the whole."""


@pytest.mark.parametrize("name", SHORTER)
def test_no_option_that_shortens_a_run_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script(monkeypatch, f"{name}/run.py")
    for line in SHORTER[name]:
        monkeypatch.setattr(sys, "argv", ["run.py", "--write", *line.split()])
        with pytest.raises(SystemExit, match="2"):
            getattr(module, "parse" if hasattr(module, "parse") else "_options")()
        assert f"--write keeps whole runs only: leave out {line.split()[0]}" in capsys.readouterr().err


MISSPELT = {
    "slow_network/run.py": ("--sides wvae", "--sides: 'wvae' is in none of '1F1B, stock', '1F1B',"),
    "real_compute/run.py": ("--sides wave wvae", "--sides: 'wvae' is in none of '1F1B, stock', '1F1B',"),
    "accelerator/run.py": ("--small --models sd16", "--models: 'sd16' is in none of 'sd15', 'sdxl', 'uvit'"),
    "choice/run.py": ("--only 3 8", "--only: there are 0 to 7, found 8"),
    "prediction/run.py": ("--only -1", "--only: there are 0 to 11, found -1"),
    "tuner/brute.py": ("SDXXL", "cases: 'SDXXL' is in none of 'SD 1.5, PCIe',"),
    "tuner/run.py": ("odrer", "expected parts among ablation, order, linear, speed, found 'odrer'"),
}
"""Of scripts, lines that name what is not there."""


@pytest.mark.parametrize("path", MISSPELT)
def test_what_is_not_there_is_a_usage_error(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, told = MISSPELT[path]
    module = script(monkeypatch, path)
    monkeypatch.setattr(sys, "argv", ["run.py", *line.split()])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert f"error: {told}" in capsys.readouterr().err


def test_all_that_the_search_improved_runs_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the pick alone: beside others' known orders it would win by its search."""
    from types import SimpleNamespace

    module = script(monkeypatch, "choice/run.py")
    from deepspeed_pulse import planner
    from deepspeed_pulse.ir.choice import Choice, Trial, Verdict

    ways = [
        Choice(pipeline_ranks=p, data_parallel=4 // p, waves=1, microbatch_size=1, microbatches=p) for p in (1, 2, 4)
    ]

    def trial(choice: Choice, order: str) -> Trial:
        plan: Any = SimpleNamespace(estimate=SimpleNamespace(step_ms=1.0), to_json=lambda: order)
        return Trial(choice=choice, verdict=Verdict.PLANNED, plan=plan)

    def tune(job: Any, *, solver_seconds: float, exhaustive: bool = False) -> Any:
        trials = [trial(way, "searched" if solver_seconds else "known") for way in (ways if exhaustive else ways[:2])]
        return SimpleNamespace(ranked=trials, best=trials[0], rejected=[])

    monkeypatch.setattr(planner, "tune", tune)
    sizes = {"param_bytes": 2, "activation_bytes": 8, "output_bytes": 8}
    layer = LayerCost(name="l", forward_ms=1, backward_ms=2, **sizes)
    profile = Profile(name="p", device="none", dtype="float32", microbatch_size=1, layers=(layer,))
    measured = {"profiles": [profile.to_json()], "cluster": load_cluster("a100:1x4").to_json()}
    found = module.choose((module.CASES[0], measured))
    assert found["plans"] == ["searched", "searched", "known"] and found["pick"] == 0


def test_what_does_not_fit_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script(monkeypatch, "backbones/run.py")
    found = {"1F1B": [30.0, 20.0, None], "ours: waves, filled": [None, 10.0, None]}
    assert run._table(found, (8, 16, 32)).splitlines()[2:] == [
        "| 1F1B | 30 | 20 (2.00) | does not fit |",
        "| ours: waves, filled | does not fit | 10 (1.00) | does not fit |",
    ]


def test_a_kept_run_without_a_wave_has_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    headline = script(monkeypatch, "headline.py")
    sides = {"1F1B": {"unlimited": {"step_ms": 2.0}}, "wave": {"failed": "ranks 1 took too long"}}
    monkeypatch.setattr(headline, "figures", lambda path, nothing: {"uvit-8": [{"sides": sides}]})
    command = "`python benchmarks/slow_network/run.py --ranks 8 --models uvit`"
    assert list(headline.slow_network())[1] == ("U-ViT 2.7 B, 8 ranks, fast links", "", "", "", command)


def slow_links() -> OpenJob:
    """Four ranks; sums of gradients take as long as the work."""
    sizes = {"param_bytes": 10**6, "activation_bytes": 8, "output_bytes": 10**4}
    layers = tuple(LayerCost(name=str(i), forward_ms=1 + i % 3, backward_ms=4, **sizes) for i in range(8))
    profile = Profile(name="p", device="none", dtype="float32", microbatch_size=1, layers=layers)
    link = Link(bandwidth_gb_per_s=0.2, latency_us=10.0)
    cluster = replace(load_cluster("a100:1x4"), intra_node=link, inter_node=link)
    return OpenJob(profiles=[profile], cluster=cluster, global_batch=8)


def test_brute_force_plans_all_that_the_tuner_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel in several stages, too."""
    brute = script(monkeypatch, "tuner/brute.py")
    tried = {trial.choice for trial in tune(slow_links(), solver_seconds=0).trials}
    assert any(choice.pipeline_ranks == 1 and choice.waves for choice in tried)
    lacking = tried - set(brute.choices(slow_links()))
    assert all(choice.pipeline_ranks == 1 and choice.loop for choice in lacking)


def test_brute_force_finds_a_false_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the choice is not the best of all."""
    brute = script(monkeypatch, "tuner/brute.py")
    tuning = tune(slow_links(), solver_seconds=0)
    slow = next(trial for trial in tuning.trials if trial.reason.startswith("at most"))
    search = brute.Search(slow_links(), tuning.best.figures.step_ms)
    assert brute.untrue(tuning, search) == []
    false = replace(slow, samples_per_second=slow.samples_per_second / 4, reason="at most 1 samples/s")
    told = brute.untrue(replace(tuning, trials=(*tuning.ranked, false)), search)
    assert told == [f"{describe(slow.choice)}: at most 1 samples/s, but a plan makes more"]


def script(monkeypatch: pytest.MonkeyPatch, path: str) -> Any:
    """A script of a benchmark as a module, with the modules beside it as its own."""
    file = PLANNER.parents[1] / path
    for folder in (file.parents[1], file.parent):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("cases", "report", "sides"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that it is as before afterwards
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(f"benchmark_{file.parent.name}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_figures_are_written_when_asked_for_only() -> None:
    """Every script that writes a README or kept figures has the option ``--write``."""
    scripts = {path: path.read_text() for path in sorted(PLANNER.parents[1].glob("*/*.py"))}
    writing = {path for path, text in scripts.items() if "add_argument" in text and re.search(r"\w\.write\(", text)}
    assert len(writing) > 5
    for path in writing:
        assert "readme.keep_option(" in scripts[path] and "s.write:" in scripts[path], path


def test_the_readme_has_the_newest_figures() -> None:
    """``python benchmarks/headline.py`` writes them."""
    command = [sys.executable, str(PLANNER.parents[1] / "headline.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def forked(benchmark: str, line: str) -> tuple[int, str]:
    """Exit status and output of a script that starts ranks, in a process forked from one that has imported all."""
    command = [str(ROOT / "benchmarks" / benchmark / "run.py"), *line.split()]
    return launch("support.example_ranks:example", 1, command, timeout=240, check=False)[0]


def test_sleeping_layers_take_as_long_as_simulated() -> None:
    """On real ranks, the engine's own time taken from its instructions; how long a step took here says nothing."""
    status, output = forked("sleeping_layers", "--ranks 2 --microbatches 2 --layers 4 --steps 2")
    assert status == 0 and "measured / simulated makespan" in output, output


def test_memory_is_predicted() -> None:
    """On real ranks, planned over counted; how long a step took here says nothing.

    On a busy machine messages come earlier or later than planned: 7.5 MiB of some 25 at the most.
    """
    _, output = forked("prediction", "--quick --only 1")
    rows = [line for line in output.splitlines() if line.startswith("| sleeping, 8 layers | 2 | 1 | 6 | linear | 0 |")]
    assert rows and 0.65 <= float(rows[0].split("|")[-2]) <= 1.5, output


ACCELERATOR = PLANNER.parents[1] / "accelerator" / "run.py"
LISTED = ("runtime/pipe/engine.py:", "deepspeed/runtime/utils.py:")
"""Where the host waits in every step with bf16, by docs/decisions.md."""


def on_accelerator(folder: Path, line: str, seconds: int, **more: str) -> tuple[str, list[dict[str, Any]]]:
    """The tables and the figures; ``more``: of the environment."""
    command = [sys.executable, str(ACCELERATOR), *f"--small --rounds 1 --steps 1 --timeout {seconds}".split()]
    command += [*line.split(), "--out", str(folder / "figures.json")]
    result = subprocess.run(
        command, env={**os.environ, **more}, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads((folder / "figures.json").read_text())


def holds_on_the_standin(case: dict[str, Any]) -> None:
    """Same numbers as in one process, the host waits where it may, memory as planned, no word of time."""
    assert not case["unfit"] and set(case["sides"]) == {"wave", "1F1B, relayed", "data parallel"}
    assert case["parity"]["layers"] > 10 and case["unpartitioned"]["gradient_norm"] > 0
    for rank in case["per_rank"]:
        assert all(place.startswith(LISTED) for place in rank["waits"]), rank
        assert rank["allocated_bytes"] > 0 and 0 < rank["counted_bytes"] <= rank["planned_bytes"]
    assert not any("step_ms" in side for side in case["sides"].values())


@needs_standin()
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_accelerators_benchmark_runs_on_the_standin(tmp_path: Path) -> None:
    text, (case,) = on_accelerator(tmp_path, "--ranks 2 --models uvit", 550, **environment())
    holds_on_the_standin(case)
    assert "**not yet on cards**" in text


@needs_standin()
@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_model_of_the_accelerators_benchmark(tmp_path: Path, ranks: int) -> None:
    _, cases = on_accelerator(tmp_path, f"--ranks {ranks}", 1800, **environment())
    assert len(cases) == 3
    for case in cases:
        holds_on_the_standin(case)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_accelerators_benchmark_runs_without_one(tmp_path: Path) -> None:
    """Times are compared there; host waits and the allocator's memory are not there to be counted."""
    text, (case,) = on_accelerator(tmp_path, "--ranks 1 --models uvit", 800, DS_ACCELERATOR="cpu")
    assert all(side["step_ms"] > 0 and side["allocated_bytes"] is None for side in case["sides"].values())
    assert "rank 0: not counted" in text


def test_cuts_are_compared_with_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has nearly all parameters, the last one most of the work: each method errs in its own way."""
    monkeypatch.syspath_prepend(str(PLANNER.parent))
    import quality

    sizes = {"param_bytes": 2, "activation_bytes": 8, "output_bytes": 1000}
    layers = tuple(
        LayerCost(name=str(i), forward_ms=ms, backward_ms=2 * ms, **sizes) for i, ms in enumerate((1, 1, 1, 1, 2, 4))
    )
    skips = (Skip(name="far", source=0, target=5, bytes=500), Skip(name="near", source=1, target=4, bytes=500))
    profile = Profile(name="p", device="none", dtype="bfloat16", microbatch_size=1, layers=layers, skips=skips)
    sides = quality.compared("p", profile, (90, 1, 1, 1, 1, 1), 2).sides
    assert {name: (round(side.rank, 2), side.mb) for name, side in sides.items()} == {
        "uniform": (1.4, 0.004),
        "parameters": (1.8, 0.003),
        "linear": (1.2, 0.003),
        "wave": (1.0, 0.004),
        "auto": (1.0, 0.004),
    }


def test_what_scripts_use_of_the_package_is_there() -> None:
    """Scripts of benchmarks, examples and docs, also where they import inside a function or reach into a module."""
    lacking = []
    for path in (path for part in ("benchmarks", "examples", "docs") for path in (ROOT / part).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lacking += [f"{path.relative_to(ROOT)}: {name}" for name in _used(tree) if not _is_there(name)]
    assert not lacking


def _used(tree: ast.Module) -> set[str]:
    """``module:name`` of what is imported of the package, and of what is taken from an imported module."""
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed_pulse"):
            for alias in node.names:
                used.add(f"{node.module}:{alias.name}")
                if _is_module(f"{node.module}.{alias.name}"):
                    here = (use.attr for use in taken if use.value.id == (alias.asname or alias.name))
                    used |= {f"{node.module}.{alias.name}:{name}" for name in here}
    return used


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return _is_module(name.replace(":", "."))
    return True
