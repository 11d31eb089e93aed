"""Who may import whom. Read from the sources (lazy imports included), then tried in a subprocess.

The last tests feed the same checks a bad tree, so that they are known to be able to fail.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import deepspeed_pulse

PACKAGE = Path(deepspeed_pulse.__file__).parent
ROOT = "deepspeed_pulse"

ALLOWED = {
    "": (),
    "errors": (),
    "config": ("errors",),
    "__main__": ("cli",),
    "ir": ("errors", "ir"),
    "planner": ("", "errors", "ir", "planner"),
    "report": ("errors", "ir", "report"),
    "runtime": ("errors", "ir", "runtime"),
    "models": ("errors", "ir", "models", "engine.specs", "engine.rules", "engine.sharing.patched"),
    "engine": ("errors", "config", "ir", "runtime", "engine", "report", "planner"),
    "cli": (
        "cli",
        "",
        "errors",
        "config",
        "ir",
        "planner",
        "report",
        "engine.observation.environment",
        "engine.plans.profiles",
        "engine.verifying",
        "models.catalogue.sources",
    ),
}
"""Per part of the package, the modules (by prefix) it may import from the package."""

BELOW_ENGINE = {
    "engine.measure": (
        "engine.measure",
        "engine.collectives",
        "engine.communicator",
        "engine.device",
        "engine.seat",
    ),
}
"""Per folder of the engine that needs no engine, the modules of the engine it may import."""

FRAMEWORKS = ("torch", "deepspeed", "diffusers", "transformers", "matplotlib")
FORBIDDEN = {
    "errors": FRAMEWORKS,
    "config": FRAMEWORKS,
    "ir": FRAMEWORKS,
    "planner": FRAMEWORKS,
    "cli": FRAMEWORKS,
    "report": ("torch", "deepspeed", "diffusers", "transformers"),
    "runtime": ("deepspeed", "diffusers", "transformers", "matplotlib"),
    "models": ("deepspeed", "matplotlib"),
    "engine": ("diffusers", "transformers", "matplotlib"),
}
"""Per part, third-party packages that it never imports, not even within a function."""

ONE_MODULE = {("engine", f"{ROOT}.planner"): "makes a Plan when the user gave none", ("planner", "highspy"): "solver"}
"""Imports that one module of a part has at most."""


def imports(source: Path, module: str) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, at any depth, with its line; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if source.name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            base = ".".join(filter(None, (package, node.module))) if node.level else str(node.module)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            yield from ((a.value, node.lineno) for a in node.args if isinstance(a, ast.Constant))


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    for source in sorted(package.rglob("*.py")):
        parts = source.relative_to(package).with_suffix("").parts
        yield ".".join((ROOT, *(part for part in parts if part != "__init__"))), source


def forbidden_imports(package: Path) -> list[str]:
    """``file:line: why`` of every import against the arrows."""
    found: list[str] = []
    users: dict[tuple[str, str], set[str]] = {}
    for module, source in modules(package):
        part = module.removeprefix(ROOT).lstrip(".").partition(".")[0]
        for target, line in imports(source, module):
            where = f"{source.relative_to(package)}:{line}"
            if within(target, ROOT) and not _is_allowed(part, target):
                found.append(f"{where}: {part or ROOT} must not import {target}")
            if any(within(target, name) for name in FORBIDDEN.get(part, ())):
                found.append(f"{where}: {part} must not import {target}")
            for folder, allowed in BELOW_ENGINE.items():
                within_engine = within(module, f"{ROOT}.{folder}") and within(target, f"{ROOT}.engine")
                if within_engine and not any(within(target, f"{ROOT}.{name}") for name in allowed):
                    found.append(f"{where}: {folder} must not import {target}")
            for key in ONE_MODULE:
                if part == key[0] and within(target, key[1]):
                    users.setdefault(key, set()).add(module)
            if part == "ir" and not within(target, ROOT) and target.split(".")[0] not in sys.stdlib_module_names:
                found.append(f"{where}: ir is stdlib only, found {target}")
    for (part, name), names in users.items():
        if len(names) > 1:
            found.append(f"{part}: one module at most imports {name}, found {', '.join(sorted(names))}")
    return found


def _is_allowed(part: str, target: str) -> bool:
    """``from deepspeed_pulse import __version__`` is the root itself; anything else goes by prefix."""
    if target in (ROOT, f"{ROOT}.__version__"):
        return "" in ALLOWED[part]
    return any(allowed and within(target, f"{ROOT}.{allowed}") for allowed in ALLOWED[part])


def loaded_by(names: Sequence[str], banned: Sequence[str], search: Path = PACKAGE.parent) -> list[str]:
    """Banned packages that a fresh interpreter has loaded after importing ``names``."""
    code = (
        "import importlib, sys\n"
        f"for name in {list(names)!r}: importlib.import_module(name)\n"
        f"print(*[b for b in {list(banned)!r} if any(m == b or m.startswith(b + '.') for m in sys.modules)])"
    )
    environment = {**os.environ, "PYTHONPATH": str(search), "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def names_of(*parts: str) -> list[str]:
    return [module for module, _ in modules(PACKAGE) if any(within(module, f"{ROOT}.{part}") for part in parts)]


def test_arrows_between_the_parts() -> None:
    assert forbidden_imports(PACKAGE) == []


def test_every_part_has_a_rule() -> None:
    parts = {module.removeprefix(ROOT).lstrip(".").partition(".")[0] for module, _ in modules(PACKAGE)}
    assert parts - set(ALLOWED) == set()


def test_core_and_command_line_load_no_framework() -> None:
    names = [ROOT, *names_of("errors", "config", "ir", "planner", "cli")]
    assert loaded_by(names, FRAMEWORKS) == []


def test_package_alone_loads_nothing_heavy() -> None:
    heavy = (*FRAMEWORKS, "numpy", "scipy", "highspy", "pydantic", "rich")
    assert loaded_by([ROOT, f"{ROOT}.cli"], heavy) == []


def test_report_loads_no_torch() -> None:
    assert loaded_by(names_of("report"), FORBIDDEN["report"]) == []


def test_runtime_loads_neither_deepspeed_nor_planner() -> None:
    assert loaded_by(names_of("runtime"), (*FORBIDDEN["runtime"], f"{ROOT}.planner")) == []


BAD_TREE = {
    "__init__.py": "",
    "errors.py": "from deepspeed_pulse.ir import plan",
    "ir/__init__.py": "",
    "ir/plan.py": "def late():\n    import torch.nn",
    "ir/table.py": "import numpy",
    "planner/__init__.py": "from .. import cli",
    "planner/cost.py": "import importlib\nimportlib.import_module('matplotlib.figure')",
    "planner/a.py": "import highspy",
    "planner/b.py": "from highspy import Highs",
    "runtime/rank.py": "from deepspeed_pulse.planner import make_plan\nimport deepspeed.comm",
    "engine/one.py": "from deepspeed_pulse.planner import make",
    "engine/two.py": "from ..planner.make import make_plan",
    "engine/measure/links.py": "from deepspeed_pulse.engine.module import PipelineModule",
    "models/unet.py": "from deepspeed_pulse.engine.specs import spec\nfrom deepspeed_pulse.engine.module import x",
    "report/grid.py": "from deepspeed_pulse.planner.simulator import simulate",
    "cli.py": "from deepspeed_pulse.engine import module",
}


def test_the_check_can_fail(tmp_path: Path) -> None:
    for name, text in BAD_TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert forbidden_imports(tmp_path) == [
        "cli.py:1: cli must not import deepspeed_pulse.engine.module",
        "engine/measure/links.py:1: engine.measure must not import deepspeed_pulse.engine.module.PipelineModule",
        "errors.py:1: errors must not import deepspeed_pulse.ir.plan",
        "ir/plan.py:2: ir must not import torch.nn",
        "ir/plan.py:2: ir is stdlib only, found torch.nn",
        "ir/table.py:1: ir is stdlib only, found numpy",
        "models/unet.py:2: models must not import deepspeed_pulse.engine.module.x",
        "planner/__init__.py:1: planner must not import deepspeed_pulse.cli",
        "planner/cost.py:2: planner must not import matplotlib.figure",
        "report/grid.py:1: report must not import deepspeed_pulse.planner.simulator.simulate",
        "runtime/rank.py:1: runtime must not import deepspeed_pulse.planner.make_plan",
        "runtime/rank.py:2: runtime must not import deepspeed.comm",
        "engine: one module at most imports deepspeed_pulse.planner, found "
        "deepspeed_pulse.engine.one, deepspeed_pulse.engine.two",
        "planner: one module at most imports highspy, found deepspeed_pulse.planner.a, deepspeed_pulse.planner.b",
    ]


def test_the_subprocess_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("import json")
    (tmp_path / "loud.py").write_text("import quiet, matplotlib")
    assert loaded_by(["quiet"], ("matplotlib", "torch"), tmp_path) == []
    assert loaded_by(["loud"], ("matplotlib", "torch"), tmp_path) == ["matplotlib"]


MOST_PARAMETERS = 7
LONG_SIGNATURES = {
    "engine.common.load_checkpoint",
    "models.families.to_layers",
    "models.unets.audioldm2.to_layers",
    "models.unets.unet_2d.to_layers",
    "models.weights.lazy.from_config",
    "models.weights.lazy.from_pretrained",
    "models.weights.export.save_pretrained",
    "models.weights.lora.save_lora",
}
"""Of calls that users make, in the words of DeepSpeed and diffusers."""


def test_functions_take_few_parameters() -> None:
    found = {
        f"{module.removeprefix(f'{ROOT}.')}.{function.name}"
        for module, path in modules(PACKAGE)
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name != "__init__"
        if _count_parameters(function.args) > MOST_PARAMETERS
    }
    assert found == LONG_SIGNATURES


def _count_parameters(arguments: ast.arguments) -> int:
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len([*named, *rest]) - len({"self", "cls"}.intersection(named))


def test_public_names() -> None:
    assert deepspeed_pulse.__all__ == [
        "Backbone",
        "FrozenSpec",
        "LayerSpec",
        "PipelineModule",
        "PulseError",
        "SelfConditioning",
        "TiedLayerSpec",
        "__version__",
        "spec",
    ]


@pytest.mark.parametrize("name", sorted(set(deepspeed_pulse.__all__) - {"__version__"}))
def test_public_name_is_defined_where_the_package_looks(name: str) -> None:
    source = dict(modules(PACKAGE))[deepspeed_pulse._LAZY[name]]
    body = ast.parse(source.read_text(encoding="utf-8")).body
    assert name in [n.name for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PipelineModul'"):
        _ = deepspeed_pulse.PipelineModul
