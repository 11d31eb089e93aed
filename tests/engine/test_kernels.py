"""What DeepSpeed would compile on a CPU is said before it starts; nothing is compiled here."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_pulse.engine.starting import kernels
from deepspeed_pulse.engine.starting.kernels import compile_kernel, kernel_of
from deepspeed_pulse.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "params", "offloads", "kernel"),
    [
        ("adam", {}, False, "FusedAdamBuilder"),
        ("AdamW", {}, False, "FusedAdamBuilder"),
        ("adamw", {"torch_adam": False}, True, "CPUAdamBuilder"),
        ("adam", {"torch_adam": True}, False, None),
        ("adam", {"torch_adam": True}, True, None),
        ("muon", {}, False, "FusedAdamBuilder"),
        ("lamb", {}, False, "FusedLambBuilder"),
        ("lion", {}, False, "FusedLionBuilder"),
        ("lion", {}, True, "CPULionBuilder"),
        ("adagrad", {}, False, None),
        ("adagrad", {}, True, "CPUAdagradBuilder"),
        ("sgd", {}, False, None),
    ],
)
def test_which_optimizers_need_a_kernel(name: str, params: dict[str, Any], offloads: bool, kernel: str | None) -> None:
    assert kernel_of(name, params, offloads=offloads) == kernel


def test_every_optimizer_of_upstream_that_has_a_kernel_is_known() -> None:
    """Upstream's own source: what it imports from ``deepspeed.ops``, optimizer by optimizer."""
    choosing = ("_configure_basic_optimizer", "get_optimizer_configuration")  # the second is younger than 0.18
    found = [getattr(DeepSpeedEngine, name) for name in choosing if hasattr(DeepSpeedEngine, name)]
    sources = "".join(map(inspect.getsource, found))
    imported = set(re.findall(r"from deepspeed\.ops\.(\w+) import", sources))
    assert imported == {"adam", "adagrad", "lamb", "lion"}


class Builder:
    name = "fused_adam"

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem, self.loads = problem, 0

    def load(self) -> None:
        self.loads += 1
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder()
    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: made, raising=False)
    monkeypatch.setattr(kernels, "everywhere", lambda act, what: act())
    return made


def test_one_line_before_it_compiles(builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    compile_kernel("adam", {"lr": 0.1}, offloads=False, is_first=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("pulse: ") and "compiles its CPU kernel fused_adam now" in line
    assert '"torch_adam": true' in line and "a torch optimizer" in line
    compile_kernel("adam", {"lr": 0.1}, offloads=False, is_first=False)
    assert builder.loads == 2 and not capsys.readouterr().out


def test_no_line_where_it_is_there(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OpBuilder._loaded_ops, "fused_adam", object())
    compile_kernel("adam", None, offloads=False, is_first=True)
    compile_kernel("adam", {"torch_adam": True}, offloads=False, is_first=True)
    compile_kernel(None, None, offloads=False, is_first=True)
    assert builder.loads == 1 and not capsys.readouterr().out


@pytest.mark.parametrize(("name", "knob"), [("adam", '"torch_adam": true'), ("lion", "pass a torch optimizer")])
def test_a_kernel_that_cannot_be_compiled(builder: Builder, name: str, knob: str) -> None:
    builder.problem = RuntimeError("Ninja is required to load C++ extensions")
    with pytest.raises(ConfigError, match="cannot compile one") as told:
        compile_kernel(name, {}, offloads=False, is_first=True)
    assert "Ninja is required" in str(told.value) and knob in str(told.value)


def _configs() -> list[tuple[str, dict[str, Any]]]:
    """Every DeepSpeed config of the repository: files, and snippets of its pages."""
    files = [path for path in ROOT.glob("*/**/*.json") if path.parts[len(ROOT.parts)] in ("examples", "benchmarks")]
    found = [(str(path.relative_to(ROOT)), path.read_text()) for path in files]
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/**/README.md")):
        if ".venv" not in str(page):
            snippets = re.findall(r'```json(?: title="[^"]+")?\n(.*?)```', page.read_text(), re.DOTALL)
            found += [(page.name, snippet) for snippet in snippets]
    parsed = [(name, json.loads(text)) for name, text in found]
    return [(name, config) for name, config in parsed if isinstance(config, dict) and "optimizer" in config]


def test_nothing_that_is_shown_compiles() -> None:
    configs = _configs()
    assert {"tutorial.md", "examples/unet/ds_config.json"} <= {name for name, _ in configs}
    for name, config in configs:
        optimizer = config["optimizer"]
        assert kernel_of(optimizer["type"], optimizer.get("params", {}), offloads=False) is None, name


def test_the_import_alone_keeps_upstream_from_compiling_its_inference_kernel() -> None:
    """A script may start the process group itself, before it makes a module."""
    program = (
        "import deepspeed, deepspeed_pulse\n"
        "before = deepspeed.ops.__compatible_ops__.get('deepspeed_shm_comm')\n"
        "deepspeed_pulse.PipelineModule\n"
        "print('kernel', before, deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "kernel True False" in done.stdout
