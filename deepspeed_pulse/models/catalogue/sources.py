"""What ``ds_pulse profile MODEL`` may be given, as a layer list with an example batch.

Nothing is downloaded and no weight is read: diffusers models are built on the meta device from their config alone.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_pulse.engine.specs import Workload
from deepspeed_pulse.errors import ConfigError, FileError, GraphError, PulseError, did_you_mean
from deepspeed_pulse.models.catalogue.examples import EXAMPLES
from deepspeed_pulse.models.catalogue.published import PUBLISHED
from deepspeed_pulse.models.families import FAMILIES, Granularity, class_of, construct, family_of, to_layers
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.weights.folder import read_object

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BACKBONES = ("unet", "transformer")
"""Where a diffusers pipeline's folder keeps the model to train."""


def find_workload(
    model: str, *, microbatch_size: int | None = None, dtype: str | None = None, granularity: Granularity | None = None
) -> Workload:
    """The layers and example batch that ``model`` names.

    ``model`` is a name in :data:`PUBLISHED`, a diffusers model (or pipeline) folder, a config.json, or
    ``package.module:function`` for a function that returns ``(layers, example_batch)``. Defaults are 1, bfloat16 and
    "block"; a function is called with those of the three that are given, and needs parameters of these names then.

    Raises a :class:`PulseError` that says what was found instead.
    """
    if model in PUBLISHED or Path(model).exists():
        config = PUBLISHED[model] if model in PUBLISHED else _read_config(Path(model))
        microbatch_size, dtype = microbatch_size or 1, dtype or "bfloat16"
        built = build_model(config, dtype=dtype, where=model)
        batch = example_batch(built, microbatch_size=microbatch_size, dtype=DTYPES[dtype])
        example = batch if family_of(built) is None else None
        layers = to_layers(built, granularity=granularity or "block", example_batch=example)
        return Workload(name=model, layers=layers, batch=(batch, None), microbatch_size=microbatch_size)
    given = {"microbatch_size": microbatch_size, "dtype": dtype, "granularity": granularity}
    if ":" in model:
        return _called(model, {name: value for name, value in given.items() if value is not None})
    raise ConfigError(
        f"{model}: expected a diffusers model folder, a config.json, package.module:function or one of "
        f"{', '.join(PUBLISHED)}; found neither a file nor a name{did_you_mean(model, PUBLISHED)}"
    )


def build_model(config: Mapping[str, Any], *, dtype: str = "float32", where: str = "config") -> nn.Module:
    """A diffusers model on the meta device."""
    with torch.device("meta"):
        kind = class_of(config, where, traced=config.get("_class_name") in EXAMPLES)
        model: nn.Module = construct(kind, config, where)
    # Some models make parameters from numbers, which stay on the CPU.
    return nn.Module.to(model, torch.device("meta"), DTYPES[dtype])


def example_batch(model: nn.Module, *, microbatch_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the model's ``forward`` by the sizes in its config, as a training script would hand them to it.

    They are on the meta device; the first is the first layer's input. Raises :class:`GraphError` for an unknown model.
    """
    found, name = family_of(model), type(model).__name__
    if found is None and name not in EXAMPLES:
        raise GraphError(
            f"no example batch is known for {name}, only for {', '.join([*FAMILIES, *EXAMPLES])}; "
            "write a function that returns a layer list and an example batch and give it as package.module:function"
        )
    make = EXAMPLES[name] if found is None else found[1].example
    batch: dict[str, Any] = make(Shapes(model, microbatch_size, dtype))
    return batch


def _read_config(path: Path) -> dict[str, Any]:
    """The config of a model's file or folder, or of the backbone in a pipeline's folder."""
    if path.is_dir():
        folders = [path, *(path / name for name in BACKBONES)]
        found = [folder / "config.json" for folder in folders if (folder / "config.json").is_file()]
        if not found:
            expected = f"in the folder or in its {' or '.join(BACKBONES)}/"
            raise FileError(f"{path}: expected config.json {expected}; found none")
        path = found[0]
    return read_object(path)


def _called(model: str, given: dict[str, Any]) -> Workload:
    function = _function(model)
    parameters = inspect.signature(function).parameters
    for name in given:
        if name not in parameters:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{model} takes no {name}: leave {option} out, or let the function have a parameter of that name"
            )
    try:
        made = function(**given)
    except PulseError:
        raise
    except Exception as problem:
        raise ConfigError(f"{model} failed: {type(problem).__name__}: {problem}") from problem
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], (list, tuple)):
        raise ConfigError(f"{model}: expected it to return (layers, example_batch), found {type(made).__name__}")
    return Workload(name=model, layers=made[0], batch=made[1], microbatch_size=given.get("microbatch_size"))


def check_takes_sizes(model: str) -> None:
    """Raise a :class:`ConfigError` for a function that makes microbatches of one size only."""
    if ":" in model and "microbatch_size" not in inspect.signature(_function(model)).parameters:
        raise ConfigError(
            f"--verify: {model} takes no microbatch_size, and choices have several: let the function have a parameter "
            "of that name"
        )


def _function(model: str) -> Callable[..., Any]:
    module, _, name = model.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`: a module beside the caller
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as problem:
        raise ConfigError(f"{model}: cannot import {module}: {problem}") from None
    except AttributeError:
        raise ConfigError(f"{model}: module {module} has no {name!r}") from None
    except Exception as problem:
        raise ConfigError(f"{model}: {module} fails on import: {type(problem).__name__}: {problem}") from problem
    if not callable(function):
        raise ConfigError(f"{model}: expected a function, found {type(function).__name__}")
    return function
