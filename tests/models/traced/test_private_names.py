"""The private names of torch that tracing uses: in one place, and there."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import deepspeed_pulse
from deepspeed_pulse.models.traced import names
from deepspeed_pulse.models.traced.standins import new_mode, symbolic

FOLDER = Path(deepspeed_pulse.__file__).parent / "models" / "traced"
PRIVATE = ("torch._", "torch.fx.experimental", "torch.utils._")


def private_imports(source: str) -> list[str]:
    """Modules of torch's own that a file imports."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = [
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in found
        for alias in node.names
    ]
    return [module for module in modules if module.startswith(PRIVATE)]


def test_they_are_imported_in_one_place():
    found = {path.name: private_imports(path.read_text()) for path in FOLDER.glob("*.py")}
    assert found.pop("names.py")
    assert not [*filter(None, found.values())], found
    assert private_imports("from torch.utils import _pytree as pytree"), "the check sees what it is for"


def test_what_is_read_of_instances_is_there():
    mode = new_mode()
    size = symbolic(mode, (3, 4), torch.float32, torch.device("cpu")).shape[0]
    tensor = torch.ones(2)
    with mode:
        assert size > 1
    known = {
        "mode": mode,
        "shape_env": mode.shape_env,
        "guard": mode.shape_env.guards[0],
        "size": size,
        "node": size.node,
        "tensor": tensor,
        "storage": tensor.untyped_storage(),
        "module": torch.nn.Linear(2, 2),
    }
    assert known.keys() == names.INSTANCE_NAMES.keys()
    for kind, instance in known.items():
        for name in names.INSTANCE_NAMES[kind].split():
            assert hasattr(instance, name), (kind, name)
    for name in names.CHECKPOINTS:
        assert hasattr(names.checkpoint, name), name
