"""Layers that borrow the submodules of a model, weights and names included.

A :class:`Unit` registers submodules and parameters of the model under the path they have there, so the unit's
parameters are the model's own and its state-dict keys are the model's keys: the state dicts of all
units together are the state dict of the model, which is what :mod:`.weights.export` writes.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.engine.rules import EntryRules
from deepspeed_pulse.engine.specs import Declared, keys_not_loaded, spec
from deepspeed_pulse.errors import ConfigError, GraphError


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A model with adapters of peft: the one that became layers, or a part of it that had them put on for itself.

    ``path``: of the part, empty for the whole. ``name``: the same without peft's own modules around it.
    ``configs``: by name of the adapter.
    """

    path: str
    name: str
    model_class: type[nn.Module]
    configs: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where units come from; every unit knows it, so that any rank can write the model's config.

    ``config_json``: empty for a model that is none of diffusers'. ``state_keys``: of the model's state dict.
    ``base_keys``: those without the adapters' (all, when there are none), each to the key it has in the folder of a
    model without adapters. ``adapted``: what has adapters. ``scales``: what each adapter is multiplied with, by path of
    its module and by name. ``processors``: the class of what a module attends with, by path. ``is_quantized``:
    its config says so, or modules of it save what they do not load.
    """

    model_class: type[nn.Module]
    config_json: str = field(repr=False)
    state_keys: tuple[str, ...] = field(repr=False)
    base_keys: Mapping[str, str] = field(repr=False)
    adapted: tuple[Adapted, ...] = field(repr=False)
    scales: Mapping[str, Mapping[str, float]] = field(repr=False, default_factory=dict)
    processors: Mapping[str, type] = field(repr=False, default_factory=dict)
    is_quantized: bool = False

    @classmethod
    def of(cls, model: Any) -> Origin:
        """The origin of the units of a diffusers ``ModelMixin``, or of a module of any other kind."""
        return cls(
            model_class=type(model),
            config_json=model.to_json_string() if hasattr(model, "to_json_string") else "",
            state_keys=tuple(model.state_dict()),
            base_keys=base_keys(model),
            adapted=tuple(_adapted(model)),
            scales={path: dict(module.scaling) for path, module in _with_scales(model)},
            processors=processors_of(model),
            is_quantized=_is_quantized(model),
        )

    @property
    def adapter_names(self) -> list[str]:
        """Of all its adapters; parts may have some of one name."""
        return list(dict.fromkeys(name for part in self.adapted for name in part.configs))

    @property
    def is_of_diffusers(self) -> bool:
        """Its config says how such a model is made."""
        return bool(self.config_json)

    def dtype_of(self, key: str, dtype: torch.dtype) -> torch.dtype:
        """``dtype``, or float32 for a weight that diffusers keeps in it (a part of its name says so)."""
        kept = getattr(self.model_class, "_keep_in_fp32_modules", None) or ()
        return torch.float32 if any(part in kept for part in key.split(".")) else dtype

    def __deepcopy__(self, memo: Any) -> Origin:
        return self  # copies of a unit come from the same model


class Unit(nn.Module):
    """A layer whose children are submodules or parameters of ``model``, each under its path in the model.

    ``PARTS``: the paths of a kind of layer that always has the same, but for those in ``OPTIONAL`` that a model lacks.
    """

    PARTS: tuple[str, ...] = ()
    OPTIONAL: Collection[str] = ()
    keywords: tuple[str, ...] = ()
    skip = False

    def __init__(self, model: nn.Module, origin: Origin, *paths: str) -> None:
        super().__init__()
        self.origin = origin
        lacking = {name for name in self.OPTIONAL if getattr(model, name, None) is None}
        self.paths = paths or tuple(path for path in self.PARTS if path not in lacking)
        self.entry_rules: EntryRules | None = None
        for path in self.paths:
            hold_part(self, model, path)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # modules of diffusers are not typed

    def get_submodule(self, target: str) -> nn.Module:
        first, _, rest = target.partition(".")
        found = self._modules.get(first)
        return super().get_submodule(target) if found is None else found.get_submodule(rest)

    def get_parameter(self, target: str) -> nn.Parameter:
        found = self._parameters.get(target)
        return super().get_parameter(target) if found is None else found

    def get_buffer(self, target: str) -> Tensor:
        found = self._buffers.get(target)
        return super().get_buffer(target) if found is None else found

    def part(self, path: str | None = None) -> Any:
        """The submodule at ``path``; without one, the first that the unit was made of."""
        return self.get_submodule(path or self.paths[0])

    def given(self, popped: tuple[Any, ...]) -> dict[str, Any]:
        """The popped values under the keywords they were declared with."""
        return dict(zip(self.keywords, popped, strict=True))

    def leave(self, hidden: Tensor) -> Any:
        """The output, and once more when a later layer pops it as its skip."""
        return (hidden, hidden) if self.skip else hidden

    def extra_repr(self) -> str:
        return ", ".join(self.paths)


class Whole(Unit):
    """One submodule, called as the model calls it, with popped values by keyword."""

    def forward(self, hidden: Tensor, *popped: Any) -> Any:
        return self.leave(self.part()(hidden, **self.given(popped)))


class Piece(Unit):
    """Those ``CHILDREN`` of one block of the model that it has, and parts from elsewhere at their paths."""

    CHILDREN: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, origin: Origin, at: str, *elsewhere: str) -> None:
        block = model.get_submodule(at)
        present = (f"{at}.{child}" for child in self.CHILDREN if getattr(block, child, None) is not None)
        super().__init__(model, origin, *present, *elsewhere)
        self.at = at

    @property
    def block(self) -> Any:
        """Holds the children under the names they have in the block."""
        return self.get_submodule(self.at)


def declare(
    unit: Unit,
    *,
    pop: Mapping[str, str] = MappingProxyType({}),
    skip: str | None = None,
    stash: tuple[str, ...] = (),
    name: str = "",
) -> Declared:
    """Declare a unit's names.

    ``pop``: keyword of the unit to the name of the value that it is given. ``skip``: the name under which the unit's
    output is stashed. ``stash``: other names that it stashes.
    """
    unit.keywords, unit.skip = tuple(pop), skip is not None
    stash = (*((skip,) if skip else ()), *stash)
    return spec(unit, stash=stash, pop=tuple(pop.values()), name=name or unit.paths[0])


def same(*names: str) -> dict[str, str]:
    """Values whose keyword is their name."""
    return {name: name for name in names}


def bias_of_mask(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask ``(batch, keys)`` of 1 = keep as what is added to attention scores: ``(batch, 1, keys)``, 0 or -10000."""
    return ((1 - mask.to(hidden.dtype)) * -10000.0).unsqueeze(1)


def unit_of(layer: Any) -> Unit | None:
    """The unit of a layer of a list, declared, plain or yet to be built; None for layers of another make."""
    bare = getattr(layer, "layer", layer)
    return next((found for found in (bare, getattr(layer, "unit", None)) if isinstance(found, Unit)), None)


def origin_of(layer_list: Iterable[Any], what: str, model_class: type[nn.Module] | None = None) -> Origin:
    """The one model of a list, or the one of ``model_class``; ``what`` asks and is named in the error."""
    units = [unit for unit in map(unit_of, layer_list) if unit is not None]
    origins = {id(unit.origin): unit.origin for unit in units}.values()
    found = [one for one in origins if issubclass(one.model_class, model_class or nn.Module)]
    found = [one for one in found if one.model_class is model_class] or found
    if len(found) == 1:
        return found[0]
    if not origins:
        raise ConfigError(
            f"{what} gives a model back; no layer of this list was made of one by to_layers(), from_pretrained() or "
            "from_config(): use engine.save_checkpoint() for other lists"
        )
    kinds = ", ".join(one.model_class.__name__ for one in origins)
    asked, advice = "which one was not said", "pass model_class="
    if model_class is not None:
        asked = f"{len(found) or 'none'} of them {'is' if not found else 'are'} a {model_class.__name__}"
        advice = (
            "pass the class of one of them" if not found else "make a class of its own of each, or train them apart"
        )
    raise ConfigError(f"{what} gives one model back; the layers were made of {kinds}, and {asked}; {advice}")


def check_cover(layers: Iterable[Declared], origin: Origin) -> None:
    """Every entry of the model's state dict belongs to exactly one of its layers; else a :class:`GraphError`."""
    units: list[Any] = [declared.layer for declared in layers]
    held = Counter(key for unit in units if unit.origin is origin for key in unit.state_dict())
    problems = [f"{key} belongs to {held[key]} layers, expected one" for key in origin.state_keys if held[key] != 1]
    if problems:
        raise GraphError(
            f"the layers do not make up the {origin.model_class.__name__}; it has parts this module does not know:\n  "
            + "\n  ".join(problems)
        )


def refuse(model: nn.Module, problems: Iterable[str]) -> None:
    """Raise a :class:`GraphError` that lists all problems, if there are any."""
    if found := list(problems):
        raise GraphError(f"this {type(model).__name__} cannot become a layer list:\n  " + "\n  ".join(found))


def foreign(model: nn.Module, paths: Iterable[str], kinds: tuple[type[nn.Module], ...]) -> Iterator[str]:
    """Lines about submodules that are none of ``kinds``: they may read or return something else."""
    for path in paths:
        module = model.get_submodule(path)
        if not isinstance(module, kinds):
            yield f"{path} is a {type(module).__name__}, supported: {', '.join(kind.__name__ for kind in kinds)}"


def classes_beside(model_class: type[nn.Module], *names: str) -> tuple[type[nn.Module], ...]:
    """Classes by the names they have where a model is written; those that this diffusers has."""
    home = sys.modules[model_class.__module__]
    return tuple(getattr(home, name) for name in names if hasattr(home, name))


def numbered(model: Any, path: str) -> list[str]:
    """The paths of the items of a ``ModuleList``."""
    return [f"{path}.{index}" for index in range(len(model.get_submodule(path)))]


def told(found: Mapping[str, list[str]]) -> Iterator[str]:
    """A line for each problem, with the first of the modules that have it, by path."""
    for what, paths in found.items():
        if paths:
            yield f"{paths[0]} {what}" + (f"; so {len(paths)} modules" if len(paths) > 1 else "")


_PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Wrappers of torch around a model, which average or shard gradients."""


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside peft's ``PeftModel``, adapters included, or in what ``torch.compile`` gives; others as they are.

    Raises :class:`GraphError` for a model inside what averages or shards gradients by itself.
    """
    kind = type(model).__name__
    if kind in _PARALLEL and isinstance(inside := getattr(model, "module", None), nn.Module):
        raise GraphError(
            f"to_layers() takes the model itself, found {kind} around a {type(inside).__name__}: replicas are the "
            "pipeline's, so pass the model inside (.module), and leave it out of accelerate's prepare()"
        )
    if kind == "OptimizedModule" and isinstance(inside := getattr(model, "_orig_mod", None), nn.Module):
        warnings.warn(
            f"torch.compile({type(inside).__name__}) is bypassed: layers call the model's parts; compile those "
            "instead (.compile()), for example its resnets and transformer blocks",
            stacklevel=3,
        )
        model = inside
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def _is_quantized(model: Any) -> bool:
    config = getattr(model, "config", None)
    return getattr(config, "quantization_config", None) is not None or bool(keys_not_loaded(model))


def _adapted(model: nn.Module) -> Iterator[Adapted]:
    """The outermost modules that peft has put adapters on: it leaves their configs there."""
    paths: list[str] = []
    for path, module in model.named_modules():
        inside = any(not above or path.startswith(f"{above}.") for above in paths)
        configs = None if inside or base_name(module) is not None else getattr(module, "peft_config", None)
        if isinstance(configs, dict) and configs:
            paths.append(path)
            name = _base_key(model, path) or ""
            yield Adapted(path=path, name=name, model_class=type(module), configs=dict(configs))


def _with_scales(model: nn.Module) -> Iterator[tuple[str, Any]]:
    adapted = ((path, module) for path, module in model.named_modules() if base_name(module) is not None)
    return ((path, one) for path, one in adapted if isinstance(getattr(one, "scaling", None), dict))


def processors_of(model: nn.Module) -> dict[str, type]:
    """Class of the object without weights that a module hands its attention to, by path, where a user may set it."""
    found = ((path, getattr(module, "processor", None)) for path, module in model.named_modules())
    return {path: type(one) for path, one in found if one is not None and not isinstance(one, nn.Module)}


def base_keys(model: nn.Module) -> dict[str, str]:
    """Key in the state dict to the key it has without adapters; the adapters' own entries are left out."""
    return {key: base for key in model.state_dict() if (base := _base_key(model, key)) is not None}


def base_name(module: nn.Module) -> str | None:
    """Of the child that was there before peft put an adapter around it; None for a module without an adapter."""
    for home, kind, name in _AROUND:
        if home in sys.modules and isinstance(module, getattr(sys.modules[home], kind, ())):
            return name
    return None


_AROUND = (
    ("peft.tuners.tuners_utils", "BaseTunerLayer", "base_layer"),
    ("peft.utils.other", "AuxiliaryTrainingWrapper", "original_module"),
    ("peft.peft_model", "PeftModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
)
"""Where peft has its classes of modules around others; without peft, or with one that lacks them, no model does."""


def _base_key(model: nn.Module, key: str) -> str | None:
    kept: list[str] = []  # peft wraps a module that it changes: to_q.weight becomes to_q.base_layer.weight
    module: Any = model
    for part in key.split("."):
        base = base_name(module)
        if base is None:
            kept.append(part)
        elif part != base:
            return None
        module = getattr(module, part, None)
    return ".".join(kept)


def hold_part(unit: nn.Module, model: nn.Module, path: str) -> None:
    """Register the model's module or parameter at ``path`` in ``unit``, under the same path."""
    part, (owner, name) = _part_of(model, path), _owner(unit, path)
    (owner._modules if isinstance(part, nn.Module) else owner._parameters)[name] = part


def hold_buffer(unit: nn.Module, model: nn.Module, path: str) -> None:
    """The same of a buffer, which is saved where the model saves it."""
    owner, name = _owner(unit, path)
    owner._buffers[name] = model.get_buffer(path)
    if name in model.get_submodule(path.rpartition(".")[0])._non_persistent_buffers_set:
        owner._non_persistent_buffers_set.add(name)


def _part_of(model: nn.Module, path: str) -> nn.Module | nn.Parameter:
    parent, _, last = path.rpartition(".")
    part = getattr(model.get_submodule(parent), last)
    if not isinstance(part, (nn.Module, nn.Parameter)):
        raise GraphError(
            f"this {type(model).__name__} cannot become a layer list: {path} is computed (a parametrization), and no "
            f"layer would compute it; call torch.nn.utils.parametrize.remove_parametrizations(MODULE, {last!r}) first"
        )
    return part


def _owner(unit: nn.Module, path: str) -> tuple[Any, str]:
    """Who holds what is at the path, and its name there.

    What is put there is not registered by torch's functions: those refuse a name that a layer has for itself
    (``skip``), and models have such parts, too.
    """
    first, owner = path.partition(".")[0], unit
    if first in (*vars(unit), *inspect.get_annotations(type(unit))):
        raise GraphError(
            f"layers have an attribute {first!r} of their own, and the model has a part of that name ({path}); give "
            "the part another name"
        )
    *parents, last = path.split(".")
    for name in parents:
        owner = owner._modules.setdefault(name, nn.Module())  # type: ignore[assignment]
    return owner, last
