"""The one hook in DeepSpeed: which engine is built for our ``PipelineModule``, and from which config.

``deepspeed.initialize`` builds ``PipelineEngine(...)`` for every ``PipelineModule``. The hook is a
``PipelineEngine.__new__`` that makes an instance of the module's own engine class instead (a subclass, so Python then
runs that class's ``__init__``). ``PipelineEngine`` stays a class, and any other module gets the engine it always got.
``DeepSpeedConfig`` likewise: before it is parsed for a module of ours, "auto" is replaced by what the module has
chosen. An upstream that asks the module itself (see ``patches/``) needs no hook.

Any other engine would run a planned module's layers in another order, so the base of all engines refuses it
(:func:`guard`): a subclass of ``PipelineEngine``, a plugin whose ``__new__`` came later, a plain ``DeepSpeedEngine``.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from deepspeed_pulse.errors import ConfigError


def needed() -> bool:
    """False when DeepSpeed asks a module for its ``engine_class`` by itself."""
    return not hasattr(PipelineModule, "engine_class")


def installed() -> bool:
    """True when the hook is in place."""
    return PipelineEngine.__dict__.get("__new__") is not None


def install() -> None:
    """Teach ``deepspeed.initialize`` about our engines; does nothing when not needed or done before."""
    if needed() and not installed():
        PipelineEngine.__new__ = _make
        deepspeed.DeepSpeedConfig.__new__ = _make_config


def guard() -> None:
    """Teach upstream's engines to refuse a planned module that is not theirs to run; once."""
    genuine = DeepSpeedEngine.__init__
    if hasattr(genuine, "refuses_planned"):
        return

    @functools.wraps(genuine)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_planned(self, kwargs["model"] if "model" in kwargs else args[1] if len(args) > 1 else None)
        genuine(self, *args, **kwargs)

    checked.refuses_planned = True  # type: ignore[attr-defined]
    DeepSpeedEngine.__init__ = checked


def _refuse_planned(engine: Any, model: Any) -> None:
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if getattr(module, "pulse_enabled", False) and not (
            module is model and isinstance(engine, module.engine_class())
        ):
            raise ConfigError(
                f"a PipelineModule with a plan was given to {type(engine).__module__}.{type(engine).__qualname__}, "
                "which would run its layers in another order and train another network: expected the engine that "
                "deepspeed.initialize(model=module) makes for it; leave out what replaces or wraps deepspeed's "
                'PipelineEngine or the module, or set "enabled": false in the "pulse" block'
            )


def _make(cls: type, *args: Any, **kwargs: Any) -> Any:
    model: Any = kwargs.get("model")
    if cls is PipelineEngine and hasattr(model, "engine_class"):
        cls = model.engine_class()
    return object.__new__(cls)


class SettledConfig(deepspeed.DeepSpeedConfig):
    """The config of one of our modules; its grid, which upstream passes as ``mpu``, brings the module's answer."""

    def __init__(self, config: Any, mpu: Any, mesh_device: Any = None) -> None:
        super().__init__(mpu.settled_config()(config), mpu, mesh_device)


def _make_config(cls: type, config: Any = None, mpu: Any = None, mesh_device: Any = None) -> Any:
    if cls is SettledConfig.__base__ and hasattr(mpu, "settled_config"):
        cls = SettledConfig
    return object.__new__(cls)
