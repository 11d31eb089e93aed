"""What a program has put in the place of upstream's own: it is called, or an error says that it cannot be.

Training programs change DeepSpeed from outside: another clipping, another reduction of gradients. Engines that override
the same would hide that without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.errors import ConfigError

Instructions = Mapping[type, Any]
"""Kinds of instruction to the functions that run them, as upstream's ``_INSTRUCTION_MAP``."""


def _is_upstreams(function: Any, owner: type) -> bool:
    """False for a function of another module, and for a wrapper that only says it is upstream's."""
    return getattr(function, "__module__", "") == owner.__module__ and not hasattr(function, "__wrapped__")


def clipping_is_replaced() -> bool:
    """True when upstream's ``clip_fp32_gradients`` is a program's own."""
    return not _is_upstreams(PipelineEngine.clip_fp32_gradients, DeepSpeedEngine)


def own_clipping(engine: Any) -> str | None:
    """The name of what a program has put in the place of ``clip_fp32_gradients``, of upstream's or an engine's own."""
    if clipping_is_replaced():
        return _name_of(PipelineEngine.clip_fp32_gradients)
    found = engine.clip_fp32_gradients
    package = __name__.partition(".")[0]
    is_ours = getattr(found, "__module__", "").startswith(f"{package}.") and not hasattr(found, "__wrapped__")
    return None if is_ours else _name_of(found)


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def replaced_instructions(runs: Collection[type] | None = None) -> Instructions:
    """The functions that a program has assigned into ``PipelineEngine._INSTRUCTION_MAP``.

    A ConfigError for one that would never run: none of upstream's that the engine's schedules have (None: all).
    """
    known = PipelineEngine._INSTRUCTION_MAP.items()
    found = {kind: function for kind, function in known if not _is_upstreams(function, PipelineEngine)}
    for kind, function in found.items():
        if runs is not None and kind not in runs:
            raise ConfigError(
                f"PipelineEngine._INSTRUCTION_MAP[{kind.__name__}] was replaced by {_name_of(function)}, which would "
                "never run, as the steps of a plan have no such instruction: expected none but "
                f"{', '.join(run.__name__ for run in runs)} to be replaced; leave it out, or set "
                '"enabled": false in the "pulse" block'
            )
    return found
