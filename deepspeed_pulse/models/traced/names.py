"""Every private name of torch that tracing uses; nothing else in this folder imports one."""

from __future__ import annotations

import torch.utils.checkpoint as checkpoint
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

CONTENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What is raised where code asks for the numbers in a tensor that has none."""

CHECKPOINTS = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
"""What ``torch.utils.checkpoint.checkpoint`` calls, in its module."""

INSTANCE_NAMES = {ShapeEnv: ("guards", "replacements", "replace"), FakeTensorMode: ("from_tensor", "shape_env")}
"""Attributes of instances that are read."""

__all__ = [
    "CHECKPOINTS",
    "CONTENT",
    "INSTANCE_NAMES",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "UnsupportedFakeTensorException",
    "checkpoint",
    "enable_python_dispatcher",
    "pytree",
]
