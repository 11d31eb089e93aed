"""The one hook in DeepSpeed: which engine is built for our ``PipelineModule``, and from which config.

``deepspeed.initialize`` builds ``PipelineEngine(...)`` for every ``PipelineModule``. The hook is a
``PipelineEngine.__new__`` that makes an instance of the module's own engine class instead (a
subclass, so Python then runs that class's ``__init__``). ``PipelineEngine`` stays a class, and any
other module gets the engine it always got. ``DeepSpeedConfig`` likewise: before it is parsed for a module of
ours, "auto" is replaced by what the module has chosen. An upstream that asks the module itself (see
``patches/``) needs no hook.
"""

from __future__ import annotations

from typing import Any

import deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule


def needed() -> bool:
    """False when DeepSpeed asks a module for its ``engine_class`` by itself."""
    return not hasattr(PipelineModule, "engine_class")


def installed() -> bool:
    """True when the hook is in place."""
    return PipelineEngine.__dict__.get("__new__") is not None


def install() -> None:
    """Teach ``deepspeed.initialize`` about our engines; does nothing when not needed or done before."""
    if needed() and not installed():
        PipelineEngine.__new__ = _make  # type: ignore[method-assign]
        deepspeed.DeepSpeedConfig.__new__ = _make_config


def _make(cls: type, *args: Any, **kwargs: Any) -> Any:
    model = kwargs.get("model")
    if cls is deepspeed.PipelineEngine and hasattr(model, "engine_class"):
        cls = model.engine_class()
    return object.__new__(cls)


class SettledConfig(deepspeed.DeepSpeedConfig):  # type: ignore[misc]
    """The config of one of our modules; its grid, which upstream passes as ``mpu``, brings the module's answer."""

    def __init__(self, config: Any, mpu: Any, mesh_device: Any = None) -> None:
        super().__init__(mpu.settled_config(config), mpu, mesh_device)


def _make_config(cls: type, config: Any = None, mpu: Any = None, mesh_device: Any = None) -> Any:
    if cls is deepspeed.DeepSpeedConfig and hasattr(mpu, "settled_config"):
        cls = SettledConfig
    return object.__new__(cls)
