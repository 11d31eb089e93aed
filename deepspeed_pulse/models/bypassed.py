"""What of a model no layer calls: modules that a layer list takes apart, and what users have set or changed of them.

A list computes in its own code what such modules compute in their ``forward`` and in the methods that it calls. That
is right only as long as these are the family's own: an override would silently not run, and neither would a hook.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from deepspeed_pulse.models.units import refuse, told, unit_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Identity)
"""Modules that models only hold, and never call (an identity stands where a block has no attention)."""

CALLING = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__", "forward"})
"""What a call of any module runs, and how it finds its submodules."""

HOLDING = frozenset(
    {"__getitem__", "__iter__", "__len__", "__contains__", "keys", "items", "values", "_get_abs_string_index"}
)
"""How a model reaches what a container holds."""

HOOKS = ("forward_pre", "forward", "backward_pre", "backward")
"""Kinds of hooks, as torch names them; hooks on the state dict run as ever."""

OWN = ("torch", "diffusers", "deepspeed_pulse", "contextlib", "functools")
"""Packages whose functions methods of models are made of, decorators included."""

CHECKPOINTING = (
    ("is_activation_checkpointing", "gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    ("is_gradient_checkpointing", "gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    ("is_gradient_checkpointing", "enable_gradient_checkpointing", "disable_gradient_checkpointing"),
)
"""By library, whether a model recomputes blocks, and how that is switched on and off."""

SETTING_MODES = ("torch", "diffusers", "transformers", "peft")
"""Packages whose models' ``train`` sets the mode of all modules, as torch's does, and none of them apart."""


def check_bypassed(model: nn.Module, layers: Iterable[Any], kinds: Sequence[type[nn.Module]]) -> None:
    """Refuse hooks and changed methods on modules that no layer calls: the model itself and what lists take apart.

    ``kinds`` are the classes that the list ``layers`` was written to take apart, the model's included. Raises
    :class:`GraphError` naming each module with what was changed. Classes derived from ``kinds`` pass as long as they
    override nothing that the list computes in its own code.
    """
    called = _called(layers)
    found = _by_problem(_bypassed(model, called), lambda module: _problems(module, (*kinds, *CONTAINERS)))
    refuse(model, told({**found, **_global_hooks()}))
    _warn_of_compiled(model, called)


def check_modes(model: nn.Module, layers: Iterable[Any]) -> None:
    """Refuse a ``train`` of modules that no layer calls: an engine sets the mode of layers, at every step."""
    refuse(model, told(_by_problem(_bypassed(model, _called(layers)), _mode_problems)))


def _warn_of_compiled(model: nn.Module, called: Collection[int]) -> None:
    """Of modules inside a model that were compiled, and that no layer calls."""
    modules = dict(model.named_modules())
    paths = [path for path, x in modules.items() if path and x._compiled_call_impl is not None and id(x) not in called]
    if paths:
        inner = (path for path, x in modules.items() if path.startswith(f"{paths[0]}.") and id(x) in called)
        more = f" (so {len(paths)} modules)" if len(paths) > 1 else ""
        warnings.warn(
            f"{paths[0]}.compile() is bypassed{more}: layers call parts of it; compile those instead, for "
            f"example {next(inner, 'what layers are named after')}",
            stacklevel=4,
        )


def check_hooks(model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse hooks on modules at ``paths``, which no layer calls, a ``train`` of theirs, and hooks on all modules."""
    bypassed = {path: model.get_submodule(path) for path in sorted(paths)}
    found = _by_problem(bypassed, lambda module: (*_hook_problems(module), *_mode_problems(module)))
    refuse(model, told({**found, **_global_hooks()}))


def check_switches(model: nn.Module) -> None:
    """Raise a :class:`GraphError` naming every switch for sampling; warn of checkpointing and of a compiled model."""
    refuse(model, _for_sampling(model))
    known = {*dir(type(model))}
    checkpointing = next((names for names in CHECKPOINTING if known.issuperset(names)), None)
    if checkpointing is not None and getattr(model, checkpointing[0]):
        _, enable, disable = checkpointing
        warnings.warn(
            f"{type(model).__name__}.{enable}() works on whole blocks, which a layer list takes "
            f"apart: most of it is bypassed. Call model.{disable}() and let the pipeline recompute "
            "layers instead (activation_checkpoint_interval, or the plan)",
            stacklevel=3,
        )
    if model._compiled_call_impl is not None:
        warnings.warn(
            f"{type(model).__name__}.compile() is bypassed: layers call the model's parts; compile those instead, for "
            "example its blocks",
            stacklevel=3,
        )


def changed_methods(module: nn.Module, kind: type, start: str) -> Iterator[str]:
    """Lines about what the user has changed of ``start``, a method of ``kind``, and of what it reads of the module."""
    for name in sorted(methods_of(kind, start)):
        if change := _change(module, kind, name):
            yield (
                f"{change}, and no layer calls it: layers compute what {kind.__name__}.{name} does in their own code; "
                "take the change back, or make it on what layers are named after"
            )


@cache
def methods_of(kind: type[nn.Module], start: str = "forward") -> frozenset[str]:
    """Names of ``kind`` that a method of it reads of the module, and that the methods and properties found so read."""
    if kind in CONTAINERS:
        return CALLING | HOLDING
    found, waiting = {start, *CALLING}, [start]
    while waiting:
        name = waiting.pop()
        for owner in kind.__mro__:
            for function in _functions(vars(owner).get(name)):
                new = _reads(function) - found if owner.__module__.partition(".")[0] != "torch" else set()
                found |= new
                waiting += new
    return frozenset(found)


def _for_sampling(model: Any) -> Iterator[str]:
    """One line per kind of switch, with the first module that has it on."""
    found: dict[str, list[str]] = {
        "runs in chunks; call model.disable_forward_chunking() (it is for sampling)": [],
        "runs in slices; call model.set_default_attn_processor() (slicing is for sampling)": [],
        "has fused projections; call model.unfuse_qkv_projections() (they are for sampling)": [],
    }
    chunks, slices, fused = found.values()
    for path, module in model.named_modules():
        processor = type(getattr(module, "processor", None)).__name__
        if getattr(module, "_chunk_size", None) is not None:
            chunks.append(path)
        if processor.startswith("Sliced"):
            slices.append(path)
        # Attention without unfuse_projections keeps its flag when only the processors are put back.
        if processor.startswith("Fused") or (
            getattr(module, "fused_projections", False) and hasattr(module, "unfuse_projections")
        ):
            fused.append(path)
    if getattr(model, "is_cache_enabled", False):
        yield "a cache of block outputs is on; call model.disable_cache() (it is for sampling)"
    yield from told(found)


def _global_hooks() -> dict[str, list[str]]:
    problem = (
        "has a hook of torch's register_module_{}_hook, which would run for layers in place of modules; "
        "remove it, and register it again behind to_layers() if that is what you want"
    )
    return {problem.format(k): ["every module"] for k in HOOKS if getattr(torch_module, f"_global_{k}_hooks")}


def _hook_problems(module: nn.Module) -> Iterator[str]:
    if hooks := " and ".join(f"{kind} hooks" for kind in HOOKS if getattr(module, f"_{kind}_hooks")):
        hooks = hooks.replace("_pre ", " pre-")
        yield f"has {hooks}, and no layer calls it: remove them, or put them on what layers are named after"


def _mode_problems(module: nn.Module) -> Iterator[str]:
    if not _has_known_train(module) and (change := _change(module, nn.Module, "train")):
        yield (
            f"{change}, and no layer calls it: steps would put all modules in training mode; take the change back, and "
            "keep modules that layers call in evaluation mode one by one: module.eval(), then module.train = lambda "
            "mode=True: module"
        )


def _has_known_train(module: nn.Module) -> bool:
    """Whether the class's ``train`` is of one of SETTING_MODES; transformers' also takes kernels for the mode."""
    if getattr(module, "use_kernels", False):
        return False
    sources = {_source(function).partition(".")[0] for function in _functions(_lookup(type(module), "train"))}
    return "train" not in vars(module) and bool(sources) and sources <= {*SETTING_MODES}


def _by_problem(
    modules: Mapping[str, nn.Module], problems: Callable[[nn.Module], Iterable[str]]
) -> dict[str, list[str]]:
    """Problems, each with the paths of the modules that have it."""
    found: dict[str, list[str]] = {}
    for path, module in modules.items():
        for problem in problems(module):
            found.setdefault(problem, []).append(path or "the model itself")
    return found


def _problems(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> Iterator[str]:
    """What about one module no layer would see."""
    yield from _hook_problems(module)
    kind = next((known for known in type(module).__mro__ if known in kinds), None)
    if kind is None:
        names = ", ".join(known.__name__ for known in kinds if known not in CONTAINERS)
        yield f"is a {type(module).__name__}, which no layer calls; layers stand in for {names}"
    else:
        yield from changed_methods(module, kind, "forward")


def _change(module: nn.Module, kind: type[nn.Module], name: str) -> str | None:
    """What the user has made of an attribute of ``kind``; None where it is the class's own."""
    own, found = _lookup(kind, name), _lookup(type(module), name)
    if found is not own:
        return f"has a {name} of its own ({type(module).__name__}'s)"
    if name in vars(module) and any(_functions(own)) and not isinstance(own, property):
        patched = vars(module)[name]
        return None if getattr(patched, "__func__", None) is own else f"has a {name} set on the instance"
    if foreign := [function for function in _functions(own) if _source(function).partition(".")[0] not in OWN]:
        return f"has a {name} that was replaced by {_source(foreign[0])}'s {foreign[0].__code__.co_name}"
    if name == "forward" and not any(_functions(own)):
        return f"has a {name} that was replaced by a {type(own).__name__}"
    return None


def _lookup(kind: type, name: str) -> Any:
    return next((vars(owner)[name] for owner in kind.__mro__ if name in vars(owner)), None)


def _functions(attribute: Any) -> Iterator[FunctionType]:
    """The functions that an attribute of a class is made of: decorators, outermost first, and what they decorate."""
    attribute = getattr(attribute, "fget", attribute)
    waiting, seen = [getattr(attribute, "__func__", attribute)], set()
    while waiting:
        function = waiting.pop()
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            yield function
            waiting += inspect.getclosurevars(function).nonlocals.values()


def _source(function: FunctionType) -> str:
    """The module that a function was written in; a decorated one names another in ``__module__``."""
    return str(function.__globals__.get("__name__", ""))


def _called(layers: Iterable[Any]) -> set[int]:
    return {id(module) for layer in layers for module in _modules(layer)}


def _bypassed(model: nn.Module, called: Collection[int]) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if id(module) not in called}


def _modules(layer: Any) -> Iterator[nn.Module]:
    """Everything that a layer of a list calls, or holds."""
    found = unit_of(layer) or getattr(layer, "layer", layer)
    return found.modules() if isinstance(found, nn.Module) else iter(())


@cache
def _reads(function: FunctionType) -> frozenset[str]:
    """Attributes that a method reads of its module, ``super()`` included; all names it has where the source is gone."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return frozenset(function.__code__.co_names)
    first = function.__code__.co_varnames[:1]
    return frozenset(
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_module(node.value, first)
    )


def _is_module(node: ast.expr, first: tuple[str, ...]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in first
