"""``ds_pulse`` as a person uses it: exit status, one line for an error, files whole or not at all."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pulse_files import COSTS, PLAN, planned_text, write_files

from deepspeed_pulse.cli import main
from deepspeed_pulse.cli.making import _memory_bytes as memory_bytes
from deepspeed_pulse.cli.terminal import check_files
from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.report.files import replacing

CLUSTER = "--cluster cluster.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files()
    return tmp_path


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    return planned_text(PLAN, tmp_path_factory.mktemp("planned"))


@pytest.fixture
def planned(folder: Path, plan: str) -> Path:
    Path("plan.json").write_text(plan)
    return folder


def test_plan_writes_a_plan_and_prints_its_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLAN) == 0
    plan = Plan.load("plan.json")
    assert (plan.pipeline_ranks, plan.microbatches, plan.num_layers) == (2, 4, 8)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "predicted: bubble" in printed.out
    assert "costs: profile toy" in printed.out
    assert sorted(path.name for path in folder.iterdir()) == ["cluster.json", "plan.json", "profile.json"]


@pytest.mark.parametrize("cuts", ["1,4,6", "block1,4,block6"])
@pytest.mark.usefixtures("folder")
def test_explicit_cuts_by_index_and_by_name(cuts: str) -> None:
    assert run(f"{PLAN} --cuts {cuts}") == 0
    assert Plan.load("plan.json").boundaries == (0, 1, 4, 6, 8)


@pytest.mark.usefixtures("folder")
def test_recompute_by_name_and_as_the_memory_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{PLAN} --recompute 1,3") == 0
    assert Plan.load("plan.json").recompute == (1, 3)
    assert "recomputed in backward: 2 of 8 layers (" in capsys.readouterr().out
    assert run(f"{PLAN} --recompute auto") == 0
    assert Plan.load("plan.json").recompute == ()
    assert run(f"{PLAN} --recompute 9") == 2
    assert "recompute: expected layer indices 0..7, found 9" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_tolerance_gives_load_for_bytes() -> None:
    """The fifth layer sends little: cutting behind it takes 5 layers instead of 4. Of few microbatches it is faster."""
    profile = json.loads(Path("profile.json").read_text())
    profile["layers"][4]["output_bytes"] = 1
    Path("profile.json").write_text(json.dumps({**profile, "skips": []}))
    cuts = []
    for tolerance in ("0", "0.25"):
        many = PLAN.replace("--microbatches 4", "--microbatches 16")
        assert run(f"{many} --placement linear --tolerance {tolerance}") == 0
        cuts.append(Plan.load("plan.json").boundaries)
    assert cuts == [(0, 4, 8), (0, 5, 8)]


@pytest.mark.usefixtures("folder")
def test_a_search_that_finds_nothing_better_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch in flight is all that fits: there is nothing to reorder."""
    profile = json.loads(Path("profile.json").read_text())
    for layer in profile["layers"]:
        layer["param_bytes"] //= 10
    Path("profile.json").write_text(json.dumps(profile))
    line = PLAN.replace("--solver-seconds 0", "--solver-seconds 60") + " --placement linear --memory-gb 0.0227"
    assert run(line) == 0
    assert "the search did not improve on wave (step 96.8" in capsys.readouterr().out
    solver = Plan.load("plan.json").solver
    assert solver is not None
    assert (solver.name, solver.generator) == ("wave", "wave")


@pytest.mark.usefixtures("folder")
def test_a_search_that_gains_says_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    write_uneven()
    assert run(UNEVEN) == 0
    text = "the search shortened the step of dualpipev, the best generator, by 3.3 %: 86.3143 ms to 83.5029 ms"
    assert text in " ".join(capsys.readouterr().out.split())


# ten forwards in flight, 1 MB each, and messages: with less the search goes on until its time is over
@pytest.mark.parametrize("memory", ["", " --memory-gb 0.0118"])
@pytest.mark.usefixtures("folder")
def test_two_runs_write_the_same_bytes(memory: str) -> None:
    """P=4, M=8, in processes of their own that hash texts differently."""
    write_uneven()
    texts = []
    for seed in ("1", "2"):
        result = process(UNEVEN + memory, PYTHONHASHSEED=seed)
        assert result.returncode == 0, result.stderr
        assert "the search shortened" in result.stdout
        texts.append(Path("plan.json").read_bytes())
    assert texts[0] == texts[1]


UNEVEN = (
    "plan profile.json --cluster cluster.json --pipeline-ranks 4 --microbatches 8 --placement wave "
    "--solver-seconds 300 --out plan.json"
)


def write_uneven() -> None:
    """Eight layers of other times each, which keep 1 MB and weigh nothing."""
    profile = json.loads(Path("profile.json").read_text())
    for index, layer in enumerate(profile["layers"]):
        layer.update(forward_ms=1 + 4 * index % 7 / 7, backward_ms=2 + 8 * index % 14 / 7, param_bytes=0)
    Path("profile.json").write_text(json.dumps(profile))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("folder")
def test_a_terminal_shows_what_is_found_while_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incumbent and bound on one line, which is erased at the end."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert run(PLAN.replace("--solver-seconds 0", "--solver-seconds 2")) == 0
    text = screen.getvalue()
    assert re.search(r"best schedule [\d.]+ ms, lower bound [\d.]+ ms, gap [\d.]+ %", text)
    assert "\x1b[2K" in text[-20:], "the line is erased at the end"


@pytest.mark.parametrize(
    ("placement", "schedule", "stages"), [("wave", "auto", 4), ("linear", "1f1b", 2), ("auto", "gpipe", None)]
)
@pytest.mark.usefixtures("folder")
def test_placement_and_schedule_are_passed_on(placement: str, schedule: str, stages: int | None) -> None:
    assert run(f"{PLAN} --placement {placement} --schedule {schedule} --memory-gb 2") == 0
    assert stages in (None, Plan.load("plan.json").num_stages)


@pytest.mark.parametrize("schedule", ["auto", "zbv", "vhalf", "vmin", "dualpipev", "wave", "gpipe"])
@pytest.mark.usefixtures("folder")
def test_split_backward_is_planned_checked_simulated_and_shown(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = "--profile profile.json --cluster cluster.json"
    needs = schedule in ("zbv", "vhalf", "vmin")
    assert run(f"{PLAN} --placement wave --schedule {schedule} --no-split-backward") == (2 if needs else 0)
    assert run(f"{PLAN} --placement wave --schedule {schedule} --split-backward") == 0
    ops = [a.op.value for row in Plan.load("plan.json").schedule for a in row]
    forwards, inputs, weights, whole = (ops.count(op) for op in "FIWB")
    assert (forwards, inputs + whole) == (4 * 4, 4 * 4)
    assert inputs == weights > 0 < whole, "nobody waits for the first stage's halves"
    assert run(f"check plan.json {costs}") == 0
    assert run(f"simulate plan.json {costs}") == 0
    capsys.readouterr()
    assert run(f"show plan.json {costs} --out a.csv") == 0
    assert "I( input gradient W~ weight gradient" in " ".join(capsys.readouterr().out.split())
    assert Path("a.csv").read_text().count("W") == weights


@pytest.mark.parametrize("profile", ["", " --profile profile.json --cluster cluster.json"])
@pytest.mark.usefixtures("planned")
def test_show_prints_the_grid(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show plan.json" + profile) == 0
    printed = capsys.readouterr().out
    assert "rank 1  " in printed
    assert "0F0>" in printed
    assert ("unit times" in printed) is not bool(profile)


@pytest.mark.usefixtures("planned")
def test_show_writes_what_the_suffix_asks_for() -> None:
    names = ["a.png", "a.svg", "a.html", "a.json", "a.csv"]
    costs = "--profile profile.json --cluster cluster.json --memory"
    assert run(f"show plan.json {costs} " + " ".join(f"--out {name}" for name in names)) == 0
    starts = [b"\x89PNG", b"<?xml", b"<!doctype html>", b'{"traceEvents"', b"0F0,"]
    for name, start in zip(names, starts, strict=True):
        assert Path(name).read_bytes().startswith(start), name
    assert not list(Path().glob(".*"))


@pytest.mark.usefixtures("planned")
def test_show_draws_a_model_and_the_cuts_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show profile.json --out a.svg") == 0
    printed = capsys.readouterr().out
    assert "block7" in printed and "costs: cpu" in printed
    assert run("show profile.json --plan plan.json --out b.svg --out b.png") == 0
    alone, cut = Path("a.svg").read_text(), Path("b.svg").read_text()
    assert "block7  7" in alone and "rank 1" not in alone
    assert "stage 1" in cut and "rank 1" in cut
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("planned")
def test_show_reads_a_pipe() -> None:
    command = f"cat profile.json | {sys.executable} -m deepspeed_pulse show /dev/stdin"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_reader_that_has_seen_enough_changes_no_status(planned: Path) -> None:
    plan = json.loads((planned / "plan.json").read_text())
    plan["schedule"][1].remove("1F2")
    (planned / "plan.json").write_text(json.dumps(plan))
    command = f"set -o pipefail; {sys.executable} -m deepspeed_pulse check plan.json {COSTS} | true"
    for _ in range(2):
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, result.stderr) == (1, "")


def test_what_fails_beside_writing_is_not_told_as_writing(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="elsewhere"), replacing(str(tmp_path / "a.json")):
        raise PermissionError(errno.EACCES, "no access", "elsewhere")
    with pytest.raises(FileError, match=r"cannot write .*a\.json: No space left"), replacing(str(tmp_path / "a.json")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("folder")
def test_a_pipe_that_a_shell_made_is_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    """``--out >(jq .)``, ``--out /dev/stdout | cat``: such a pipe has no path that is real."""
    readable, writable = os.pipe()
    line = PLAN.replace("plan.json", f"/dev/fd/{writable}")
    check_files([f"/dev/fd/{writable}"] * 2, [])
    assert run(line) == 0
    assert Plan.from_json(os.read(readable, 2**16).decode()).pipeline_ranks == 2
    os.close(readable)
    assert run(line) == 2
    assert f"cannot write /dev/fd/{writable}: Broken pipe" in capsys.readouterr().err
    os.close(writable)


ERRORS = {
    "show nowhere.json": "nowhere.json",
    "show cluster.json": "cluster.json: field 'format': expected 'pulse-plan/2' or 'pulse-plan/1' or 'pulse-profile/1'",
    "show profile.json --out a.html": "--out a.html: expected a name ending in one of .png, .svg, .pdf",
    "show profile.json --cluster cluster.json": "--cluster goes with a plan: profile.json is a profile",
    "show profile.json --memory": "--memory goes with a plan",
    "show profile.json --plan nowhere.json": "nowhere.json: cannot be read",
    "show profile.json --plan cluster.json": "expected 'pulse-plan/2', found 'pulse-cluster/1'",
    "show other.json --plan plan.json": "plan.json was made from another profile than other.json",
    "show plan.json --plan plan.json": "--plan goes with a profile: plan.json is none",
    "show plan.json --out a.gif": "--out a.gif: expected a name ending in one of .png, .svg",
    "show plan.json --profile profile.json": "--profile and --cluster go together",
    "show plan.json --memory": "--memory needs --profile and --cluster",
    "show plan.json --out missing/a.png": "cannot write missing/a.png: No such file or directory",
    "show plan.json --out a.json --out missing/a.png": "cannot write missing/a.png",
    "show plan.json --profile other.json --cluster cluster.json": "made from another profile than other.json",
    "shwo plan.json": "invalid choice: 'shwo'",
    "": "required: COMMAND",
    PLAN.replace("--pipeline-ranks 2", "--pipeline-ranks 0"): "--pipeline-ranks: expected an integer >= 1, found '0'",
    PLAN.replace("--microbatches 4", "--microbatches x"): "--microbatches: expected an integer >= 1, found 'x'",
    PLAN.replace("--pipeline-ranks 2", "--pipeline-ranks 9"): "the cluster 'toy' has 4",
    PLAN.replace("--out plan.json", ""): "required: --out",
    PLAN + " --memory-gb nan": "--memory-gb: expected a number > 0 and at most 1e+15, found 'nan'",
    PLAN + " --memory-gb 1e300": "--memory-gb: expected a number > 0 and at most 1e+15, found '1e300'",
    PLAN + " --waves 1000000000": "2 pipeline ranks with 1000000000 waves have 4000000000 stages and need as many",
    PLAN.replace("--microbatches 4", "--microbatches 200000"): "use at most 125000 microbatches a step",
    PLAN + " --memory-gb 0.001": "memory",
    PLAN + " --solver-seconds -1": "--solver-seconds: expected a number of seconds >= 0",
    PLAN + " --schedule wav": "wav",
    PLAN + " --tolerance 7": "--tolerance: expected a number from 0 to 1, found '7'",
    PLAN + " --cuts 1,blok4,6": "found 'blok4', which names 0 layers (did you mean \"block4\"?)",
    PLAN + " --cuts 1,4": "expected 3 (wave placement) or 1 (linear placement) inner cuts, found 2",
    PLAN + " --cuts 4,1,6": "strictly increasing layer indices",
    PLAN + " --placement wave --schedule 1f1b": "those that do:",
    PLAN + " --placement ring": "--placement: invalid choice: 'ring'",
    PLAN.replace("plan.json", "."): "cannot write .: it is a directory",
    PLAN.replace("profile.json", "broken.json"): "broken.json: not a JSON file",
}


@pytest.mark.parametrize("line", ERRORS)
def test_unusable_input_is_one_line_and_status_2(line: str, planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (planned / "broken.json").write_text("{")
    (planned / "other.json").write_text((planned / "profile.json").read_text().replace("block0", "blockX"))
    before = {path.name: path.read_bytes() for path in planned.iterdir()}
    assert run(line) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ds_pulse: error: ")
    assert printed.err.count("\n") == 1
    assert ERRORS[line] in printed.err
    assert {path.name: path.read_bytes() for path in planned.iterdir()} == before


@pytest.mark.parametrize("field", ["schedule", "name", "format", "surprise"])
def test_an_error_about_a_huge_field_is_a_line_that_can_be_read(
    field: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads((planned / "plan.json").read_text())
    huge: dict[str, Any] = {"schedule": [["0F0" * 40_000], []], "name": ["x" * 100_000], "format": "x" * 100_000}
    (planned / "plan.json").write_text(
        json.dumps({**plan, field + "x" * 100_000 * (field == "surprise"): huge.get(field)})
    )
    for line in (f"check plan.json {COSTS}", "show plan.json", f"show {'x' * 100_000}"):
        assert run(line) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and len(said) < 1100 and said.startswith("ds_pulse: error: ")


def test_a_plan_that_cannot_run_says_what_is_wrong(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads((planned / "plan.json").read_text())
    plan["schedule"][1].remove("1F2")
    (planned / "plan.json").write_text(json.dumps(plan))
    assert run("show plan.json --out a.png") == 2
    assert "plan.json: the plan cannot run: schedule of rank 1: never runs: 1F2" in capsys.readouterr().err
    assert not Path("a.png").exists()


@pytest.mark.usefixtures("folder")
def test_a_failed_plan_leaves_the_old_one() -> None:
    Path("plan.json").write_text("precious")
    assert run(PLAN + " --memory-gb 0.001") == 2
    assert Path("plan.json").read_text() == "precious"


def test_version_and_help_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    for line, text in (("--version", "ds_pulse 0.1.0"), ("--help", "commands"), ("plan --help", "--pipeline-ranks")):
        with pytest.raises(SystemExit) as stopped:
            run(line)
        assert stopped.value.code == 0
        assert text in capsys.readouterr().out


def process(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_pulse", *line.split()],
        capture_output=True,
        text=True,
        timeout=280,  # of wall time, where a search may take a minute of the processor's
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.usefixtures("planned")
def test_starts_without_what_takes_seconds_to_load() -> None:
    result = process("show plan.json", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0, result.stderr
    loaded = {line.rsplit("|", 1)[1].strip().partition(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "deepspeed_pulse" in loaded
    slow = {"torch", "deepspeed", "diffusers", "transformers", "scipy", "highspy", "matplotlib", "pydantic"}
    assert not loaded & slow


@pytest.mark.usefixtures("planned")
def test_reader_that_stops_early_and_plain_encodings_are_no_errors() -> None:
    assert process("show plan.json", PYTHONIOENCODING="ascii").returncode == 0
    line = f"{sys.executable} -m deepspeed_pulse show plan.json | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.usefixtures("planned")
def test_show_says_of_given_costs_what_simulate_says(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = json.loads(Path("cluster.json").read_text())
    for link in ("intra_node", "inter_node"):
        cluster[link] |= {"latency_us": 5000.0, "bandwidth_gb_per_s": 0.001}
    Path("slow.json").write_text(json.dumps(cluster))
    figures = []
    for command in ("simulate", "show"):
        assert run(f"{command} plan.json --profile profile.json --cluster slow.json") == 0
        text = " ".join(capsys.readouterr().out.split())
        found = re.search(r"step ([\d.]+ m?s)", text), re.search(r"bubble ([\d.]+ %)", text)
        figures.append([one[1] for one in found if one is not None])
        assert "proven optimal" not in text
    assert figures[0] == figures[1] and len(figures[0]) == 2


@pytest.mark.usefixtures("planned")
def test_show_counts_sums_over_the_given_links(capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas of a whole model send nothing in the order, and sum gradients behind it."""
    assert run(PLAN.replace("--pipeline-ranks 2", "--pipeline-ranks 1 --data-parallel 2")) == 0
    cluster = json.loads(Path("cluster.json").read_text())
    for link in ("intra_node", "inter_node"):
        cluster[link] |= {"bandwidth_gb_per_s": 1e-6}
    Path("slow.json").write_text(json.dumps(cluster))
    capsys.readouterr()
    steps = []
    for command, machines in (("simulate", "slow"), ("show", "slow"), ("show", "cluster")):
        assert run(f"{command} plan.json --profile profile.json --cluster {machines}.json") == 0
        steps += re.findall(r"step ([\d.]+ m?s)", " ".join(capsys.readouterr().out.split()))[:1]
    assert steps[0] == steps[1] != steps[2], steps


@pytest.mark.usefixtures("folder")
def test_names_of_layers_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    profile = json.loads(Path("profile.json").read_text())
    profile["layers"][0]["name"], profile["layers"][-1]["name"] = "a[/b]", "[red]x"
    Path("profile.json").write_text(json.dumps(profile))
    assert run(PLAN) == 0
    text = capsys.readouterr().out
    assert "a[/b]" in text and "[red]x" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (PLAN.replace("--out plan.json", "--out profile.json"), "profile.json is read and would be written"),
        (f"show plan.json {COSTS} --out a.png --out ./a.png", "a.png and ./a.png are one file"),
        (f"show plan.json {COSTS} --out plan.json", "plan.json is read and would be written"),
        (f"show plan.json {COSTS} --memory --out a.html", "--memory is drawn in pictures"),
        (f"{PLAN} --placement linear --waves 2", "--waves goes with a wave or a loop"),
        (
            f"tune profile.json --global-batch 8 {CLUSTER} --verify 1 --model plan.json --out plan.json",
            "plan.json is read and would be written",
        ),
        (
            f"tune profile.json --global-batch 8 {CLUSTER} --verify-seconds 9",
            "goes with --verify",
        ),
        (f"tune profile.json --global-batch 1000000007 {CLUSTER}", "at most 1000000 samples"),
        (
            f"tune profile.json --global-batch 8 {CLUSTER} --out x.json --config x.json",
            "x.json and x.json are one file",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_done(
    planned: Path, line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in planned.iterdir()}
    assert run(line) == 2
    assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in planned.iterdir()} == before


def test_gigabytes_are_whole_bytes() -> None:
    assert memory_bytes(argparse.Namespace(memory_gb=1.001)) == 1_001_000_000


@pytest.mark.usefixtures("planned")
def test_a_terminal_that_takes_nothing_is_one_line() -> None:
    line = [sys.executable, "-m", "deepspeed_pulse", "show", "plan.json"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (
        found.returncode == 2 and found.stderr == "ds_pulse: error: cannot write to stdout: No space left on device\n"
    )
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *line], stderr=subprocess.PIPE, text=True, timeout=100, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")
