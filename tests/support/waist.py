"""Which names of DeepSpeed the package uses, read from its sources.

Seen are: what is imported from deepspeed, and attributes of it; in subclasses of upstream's classes, attributes of
``self`` and ``super()`` and what they override; attributes of variables and attributes that are called as in ``ROLES``;
and ``getattr`` and its like where the name is written out. Of these a name counts as upstream's where upstream has it.
Not seen are objects that go by other names, arguments of upstream's functions, and what upstream reads of ours.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import deepspeed_pulse
from deepspeed_pulse.engine.waist.check import has

PACKAGE = Path(deepspeed_pulse.__file__).parent

ENGINE = ("deepspeed.runtime.pipe.engine.PipelineEngine",)
MODULE = ("deepspeed.runtime.pipe.module.PipelineModule",)
OPTIMIZERS = (
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
)
SPECS = ("deepspeed.runtime.pipe.module.LayerSpec", "deepspeed.runtime.pipe.module.TiedLayerSpec")
GRID = ("deepspeed.runtime.pipe.topology.PipelineParallelGrid",)
TIMER = ("deepspeed.utils.timer.SynchronizedWallClockTimer.Timer",)
CONFIG = ("deepspeed.runtime.config.DeepSpeedConfig",)
SCALERS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
)
ACCELERATOR = ("deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator",)
MARKS = (*MODULE, *OPTIMIZERS)
"""Who marks parameters."""

ROLES = {
    "engine": ENGINE,
    "_engine": ENGINE,
    "module": MODULE,
    "_module": MODULE,
    "optimizer": OPTIMIZERS,
    "grid": GRID,
    "_grid": GRID,
    "mpu": GRID,
    "topology": ("deepspeed.runtime.pipe.topology.ProcessTopology",),
    "bare": SPECS,
    "spec": SPECS,
    "config": CONFIG,
    "parsed": CONFIG,
    "timer": TIMER,
    "timers": TIMER,
    "engine_timers": ("deepspeed.runtime.engine.EngineTimers",),
    "monitor": ("deepspeed.monitor.monitor.MonitorMaster",),
    "scaler": SCALERS,
    "checkpoint_engine": ("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",),
    "cdb": ("deepspeed.comm.torch.TorchBackend",),
    "parameter": MARKS,
    "weight": MARKS,
    "address": ("deepspeed.utils.tensor_fragment.fragment_address",),
    "bfloat16_config": ("deepspeed.runtime.precision_config.DeepSpeedBF16Config",),
    "float16_config": ("deepspeed.runtime.precision_config.DeepSpeedFP16Config",),
    "accelerator": ACCELERATOR,
    "get_accelerator": ACCELERATOR,
}
"""What variables, attributes and functions of these names hold or return."""


def used() -> dict[str, set[str]]:
    """Owner to names."""
    found: dict[str, set[str]] = {}
    for source in sorted((PACKAGE / "engine").rglob("*.py")):
        for owner, name in _of_file(source):
            found.setdefault(owner, set()).add(name)
    return found


def _of_file(source: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    imported = dict(_imports(tree))
    for path in imported.values():
        yield from _along(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _of_class(node, source)
        elif isinstance(node, ast.Attribute):
            yield from _along(_dotted(node, imported))
            yield from _of_role(_last(node.value), node.attr)
        elif isinstance(node, ast.Call) and _last(node.func) in ("getattr", "hasattr", "setattr"):
            receiver, name, *_ = node.args
            yield from _of_role(_last(receiver), str(getattr(name, "value", "")))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Variable to full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names if _is_upstream(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_upstream(node.module or ""):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _is_upstream(path: str) -> bool:
    return path.partition(".")[0] == "deepspeed"


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    """The full name of an attribute of something imported; else empty."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    base = _dotted(node.value, imported) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base else ""


def _along(path: str) -> Iterator[tuple[str, str]]:
    """Every (owner, name) on the way along a full name, as far as it goes through modules and classes."""
    owner, _, name = path.rpartition(".")
    if not owner:
        return
    yield from _along(owner)
    if has(owner, name) and not isinstance(pkgutil.resolve_name(path), ModuleType):
        yield owner, name


def _of_class(node: ast.ClassDef, source: Path) -> Iterator[tuple[str, str]]:
    module = importlib.import_module(".".join(source.relative_to(PACKAGE.parent).with_suffix("").parts))
    bases = inspect.getmro(getattr(module, node.name))
    upstream = next((base for base in bases if _is_upstream(base.__module__)), None)
    if upstream is None:
        return
    owner = f"{upstream.__module__}.{upstream.__qualname__}"
    names = {name for statement in node.body for name in _defined(statement)}
    names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _last(n.value) in ("self", "super")}
    yield from ((owner, name) for name in sorted(names - {"__init__"}) if has(owner, name))


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _of_role(receiver: str, name: str) -> Iterator[tuple[str, str]]:
    if receiver in ("parameter", "weight") and hasattr(torch.Tensor, name):
        return
    yield from ((owner, name) for owner in ROLES.get(receiver, ()) if has(owner, name))


def _last(node: ast.expr) -> str:
    """``self.a.b`` -> ``b``, ``a(...)`` -> ``a``."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))
