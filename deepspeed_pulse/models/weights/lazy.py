"""Layer lists whose layers get their weights where they are built: on the ranks that hold them.

    from_pretrained(folder)   reads a layer's own tensors from the safetensors files
    from_config(config)       initialises a layer's own parameters

Both make the model without weights (:mod:`.skeleton`), let :func:`~.families.to_layers` cut it, and
wrap every unit in a :class:`LazyLayer`.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import Declared, LayerSpec
from deepspeed_pulse.errors import ConfigError, GraphError
from deepspeed_pulse.models.families import Blocks, Glue, Granularity, PlanCache, class_of, construct, to_layers
from deepspeed_pulse.models.units import Origin, Unit
from deepspeed_pulse.models.weights.folder import CONFIG, WeightFiles, read_config, read_object
from deepspeed_pulse.models.weights.shards import check_dtype
from deepspeed_pulse.models.weights.skeleton import Prepare, Skeleton

Fill = Callable[[Mapping[str, torch.dtype]], Mapping[str, Tensor]]
"""Gives values for some keys of the model's state dict, in the dtypes asked for."""


class LazyLayer(LayerSpec):
    """A unit of a skeleton; ``build`` makes a copy of it with weights.

    Every build is a layer of its own, so costs can be measured on one that is then dropped. Under
    ``torch.device("meta")`` it comes without weights and nothing is read.
    """

    reads_files = True

    def __init__(self, declared: Declared, skeleton: Skeleton, fill: Fill, shared: Mapping[int, nn.Module]) -> None:
        assert isinstance(declared.layer, Unit)
        super().__init__(type(declared.layer), stash=declared.stash, pop=declared.pop, layer_name=declared.name)
        self.unit, self._skeleton, self._fill, self._shared = declared.layer, skeleton, fill, shared

    def build(self, log: bool = False) -> nn.Module:
        """The layer with its weights, on the CPU."""
        built = copy.deepcopy(self.unit, dict(self._shared))
        if torch.get_default_device().type == "meta":
            return built
        with torch.device("cpu"):
            keys = self._keys()
            found = self._fill({key: self._skeleton.entries[key].dtype for key in keys.values()})
            built.load_state_dict({name: found[key] for name, key in keys.items()}, strict=False, assign=True)
        return built

    def coming(self) -> AbstractContextManager[None]:
        """Meanwhile it is built, behind the layers that came before it: see :meth:`.Skeleton.coming`."""
        return self._skeleton.coming(self._keys().values())

    def _keys(self) -> dict[str, str]:
        """The model's key of each entry of the unit's state dict, without those that were added to the model."""
        keys = {name: self._skeleton.key_of(tensor) for name, tensor in self.unit.state_dict(keep_vars=True).items()}
        return {name: key for name, key in keys.items() if key is not None}

    def __repr__(self) -> str:
        return f"{self.typename.__name__}({self.unit.extra_repr()})"


def from_pretrained(
    folder: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    dtype: torch.dtype | None = None,
    torch_dtype: torch.dtype | None = None,
    variant: str | None = None,
    model_class: type[nn.Module] | None = None,
    prepare: Prepare | None = None,
    granularity: Granularity = "block",
    example_batch: Any = None,
    blocks: Blocks = "auto",
    trace: bool = False,
    glue: Glue = (),
    plan_cache: PlanCache = None,
    **what_the_batch_has: Any,
) -> list[Any]:
    """The layer list of a diffusers model folder; each rank reads the weights of its own layers only.

    Called on every rank, before ``PipelineModule``. All files are checked here, from their headers;
    tensors are read when a layer is built. The weights are those that the model's own
    ``from_pretrained(folder, torch_dtype=dtype)`` gives, tables that are computed and not saved included;
    layers are in training mode.

    Args:
        folder: a model folder, or with ``subfolder`` a pipeline folder.
        dtype: of the floating-point weights (``torch_dtype`` is the same); parts that the model keeps in
            float32 stay so. Left out, float32, whatever the files hold.
        variant: for example ``"fp16"``, part of the file names.
        model_class: a class derived from a known one; left out, the class that ``config.json`` names.
        prepare: is given the model before it is cut, its weights not read yet: to freeze parameters, add
            adapters or set options (:meth:`.Skeleton.prepare`). What it adds keeps its values.
        granularity, example_batch, blocks, trace, glue, plan_cache, what_the_batch_has: as for
            :func:`~.families.to_layers`.

    Raises:
        FileError: the folder, its config or its weights are missing, damaged or do not fit together.
        GraphError: the model cannot become a layer list.
    """
    path = Path(folder) / (subfolder or "")
    dtype = _dtype(dtype, torch_dtype)
    config = read_config(path)
    where = str(path / CONFIG)
    kind: Any = model_class or class_of(config, where, traced=example_batch is not None)
    skeleton = Skeleton(
        lambda: construct(kind, config, where),
        dtype=dtype or torch.float32,
        cast=lambda model: None if dtype is None else _cast_saved(model, dtype),
    )
    skeleton.model.register_to_config(_name_or_path=str(path))
    files = WeightFiles.find(path, variant, skeleton.model._fix_state_dict_keys_on_load)
    files.check(skeleton.entries, ignored=kind._keys_to_ignore_on_load_unexpected or (), what=kind.__name__)
    how = {"granularity": granularity, "blocks": blocks, "trace": trace, "glue": glue, "plan_cache": plan_cache}
    return _lazy_layers(skeleton, files.read, prepare, {**how, **what_the_batch_has}, example_batch)


def from_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    torch_dtype: torch.dtype | None = None,
    model_class: type[nn.Module] | None = None,
    prepare: Prepare | None = None,
    granularity: Granularity = "block",
    example_batch: Any = None,
    blocks: Blocks = "auto",
    trace: bool = False,
    glue: Glue = (),
    plan_cache: PlanCache = None,
    **what_the_batch_has: Any,
) -> list[Any]:
    """The layer list of a new model; each rank initialises its own layers only.

    Weights are drawn by the model's own constructor, each parameter with random numbers that depend on
    ``seed`` and on its place in the constructor, not on the plan, the rank, the granularity or
    ``seed_layers`` (see :mod:`.skeleton`). They are not the numbers of one constructor call after
    ``torch.manual_seed(seed)``, which would have to draw all of them on every rank.

    Args:
        config: a config as diffusers has it, or a folder with ``config.json``, or such a file of any name.
        seed: of the weights.
        dtype: as in ``model.to(dtype)`` after the constructor.
        subfolder, model_class, prepare: as for :func:`from_pretrained`.
        granularity, example_batch, blocks, trace, glue, plan_cache, what_the_batch_has: as for
            :func:`~.families.to_layers`.

    Raises:
        FileError: no usable config.
        GraphError: the model cannot become a layer list.
    """
    dtype = _dtype(dtype, torch_dtype)
    where, content = _config(config, subfolder)
    kind = model_class or class_of(content, where, traced=example_batch is not None)
    skeleton = Skeleton(
        lambda: construct(kind, content, where),
        seed=seed,
        cast=lambda model: None if dtype is None else model.to(dtype),
    )
    how = {"granularity": granularity, "blocks": blocks, "trace": trace, "glue": glue, "plan_cache": plan_cache}
    return _lazy_layers(skeleton, skeleton.initial, prepare, {**how, **what_the_batch_has}, example_batch)


def _lazy_layers(
    skeleton: Skeleton, fill: Fill, prepare: Prepare | None, options: Mapping[str, Any], example_batch: Any
) -> list[Any]:
    if prepare is not None:
        skeleton.prepare(prepare)
    layers = to_layers(skeleton.model, example_batch=example_batch, **options)
    inside = [module for one in layers if isinstance(one.layer, nn.Module) for module in one.layer.modules()]
    units_of = Counter(map(id, inside))
    # Modules of several units, by id: tables without weights, which a rank holds once.
    shared = {id(module): module for module in inside if units_of[id(module)] > 1}
    if weighty := [module for module in shared.values() if module.state_dict()]:
        raise GraphError(
            f"{type(skeleton.model).__name__} calls one {type(weighty[0]).__name__} in several layers; such a model "
            "cannot be built layer by layer: build it whole, then use to_layers()"
        )
    return [LazyLayer(one, skeleton, fill, shared) if isinstance(one.layer, Unit) else one for one in layers]


def _cast_saved(model: nn.Module, dtype: torch.dtype) -> None:
    """What diffusers casts when it loads: the tensors that are read, not the tables that are computed."""
    origin = Origin.of(model)
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(origin.dtype_of(key, dtype))


def _dtype(dtype: Any, torch_dtype: Any) -> torch.dtype | None:
    given = [one for one in (dtype, torch_dtype) if one is not None]
    if len(set(given)) > 1:
        raise ConfigError(f"dtype and torch_dtype are the same option, found {dtype} and {torch_dtype}; give one")
    found = given[0] if given else None
    check_dtype(found)
    return found


def _config(config: Any, subfolder: str | None) -> tuple[str, Mapping[str, Any]]:
    """Where a config is from, for messages, and its content."""
    if isinstance(config, Mapping):
        return "config", config
    path = Path(config) / (subfolder or "")
    if path.is_file():
        return str(path), read_object(path)
    return str(path), read_config(path.parent if path.name == CONFIG else path)
