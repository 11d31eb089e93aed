"""Every private name of torch that tracing uses; nothing else in this folder imports one."""

from __future__ import annotations

import torch.utils.checkpoint as checkpoint
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy import functions

CONTENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What is raised where code asks for the numbers in a tensor that has none."""

CHECKPOINTS = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
"""What ``torch.utils.checkpoint.checkpoint`` calls, in its module."""

INSTANCE_NAMES = {
    "mode": "from_tensor shape_env",
    "shape_env": "guards replace evaluate_expr create_symintnode",
    "guard": "expr",
    "size": "node",
    "node": "expr hint guard_int",
    "tensor": "_version",
    "storage": "_cdata",
    "module": "_non_persistent_buffers_set _buffers _modules _parameters",
}
"""Attributes that are read of instances: by what the instance is here."""

__all__ = [
    "CHECKPOINTS",
    "CONTENT",
    "INSTANCE_NAMES",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TorchDispatchMode",
    "checkpoint",
    "enable_python_dispatcher",
    "free_unbacked_symbols",
    "functions",
    "pytree",
    "unset_fake_temporarily",
]
