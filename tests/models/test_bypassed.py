"""What a list computes in its own code is the family's own: every other override and hook is refused, or runs."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.every_family import FAMILIES, GRANULARITIES, forward, layers_of
from support.families import _loss, interpret
from support.small_controlnet import Both
from torch import nn

from deepspeed_pulse.errors import GraphError

HOLDERS = (nn.ModuleList, nn.ModuleDict)
ALL = [(family, granularity) for family in FAMILIES for granularity in GRANULARITIES]
FINE_IN_SOAK = [pytest.param(*case, marks=[pytest.mark.soak] if case[1] == "fine" else []) for case in ALL]
Ran = set[tuple[str, str]]


def methods_run(model: nn.Module, run: Callable[[], Any]) -> Ran:
    """Paths of modules and names of their methods that were called, by Python's own account."""
    paths = {id(module): (path, type(module)) for path, module in model.named_modules()}
    found: Ran = set()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_argcount:
            path, kind = paths.get(id(frame.f_locals.get(code.co_varnames[0])), ("", None))
            name = None if kind is None else names_of(kind).get(code)
            if name:
                found.add((path, name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


_NAMES: dict[type, dict[types.CodeType, str]] = {}


def names_of(kind: type) -> dict[types.CodeType, str]:
    """Code of the methods and properties of a class to their names."""
    if kind not in _NAMES:
        _NAMES[kind] = {
            code: name for owner in reversed(kind.__mro__) for name, item in vars(owner).items() for code in codes(item)
        }
    return _NAMES[kind]


def codes(item: Any) -> Iterator[types.CodeType]:
    item = getattr(item, "fget", item)
    while isinstance(item, types.FunctionType):
        yield item.__code__
        item = getattr(item, "__wrapped__", None)


LOOKING_AROUND = ("named_modules", "named_parameters", "_named_members")
"""Methods of torch's that a model asks for its dtype with; every module answers."""


def refusal(model: nn.Module, granularity: str) -> str:
    """The error of ``to_layers``; empty where it takes the model."""
    try:
        layers_of(model, granularity)
    except GraphError as problem:
        return str(problem)
    return ""


@contextlib.contextmanager
def derived(module: nn.Module, **changes: Any) -> Iterator[None]:
    """A module of a class derived from its own."""
    kind = type(module)
    module.__class__ = type(f"My{kind.__name__}", (kind,), changes)
    try:
        yield
    finally:
        module.__class__ = kind


@contextlib.contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    had, before = name in vars(target), vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)


def changed(kind: type, name: str) -> Any:
    """A method, or property, that does what that of ``kind`` does."""
    item = next(vars(owner)[name] for owner in kind.__mro__ if name in vars(owner))
    if isinstance(item, property):
        return property(lambda self: item.fget(self))
    return lambda self, *args, **kwargs: item(self, *args, **kwargs)


def changes_of(model: nn.Module, path: str, name: str) -> Iterator[tuple[str, Any]]:
    """Every way in which users change a method of a module."""
    module = model.get_submodule(path)
    change = changed(type(module), name)
    yield "overridden", derived(module, **{name: change})
    if not isinstance(change, property):
        if not name.startswith("_"):
            yield "set on the instance", patched(module, name, types.MethodType(change, module))
        owner = next(owner for owner in type(module).__mro__ if name in vars(owner))
        if owner is not nn.Module:
            yield "set on the class", patched(owner, name, change)


@pytest.fixture(scope="module")
def small() -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """A family's model and batch; the model is made once."""
    made: dict[str, Any] = {}

    def get(family: str) -> tuple[Any, dict[str, Any]]:
        make, make_batch = FAMILIES[family]
        if family not in made:
            made.clear()
            made[family] = make()
        return made[family], make_batch()

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_that_a_list_replaces(family, small):
    """Found by running both: what the model calls and the list does not is refused when it is changed."""
    model, batch = small(family)
    accepted: list[str] = []
    seen: set[tuple[type, str]] = set()
    for granularity in GRANULARITIES:
        for path, name in replaced_methods(model, batch, granularity):
            kind = type(model.get_submodule(path))
            if kind is not Both and (kind, name) not in seen:
                seen.add((kind, name))
                accepted += accepted_changes(model, granularity, path, name)
        assert not refusal(model, granularity)
    assert len(seen) > 5
    assert not accepted, "\n".join(accepted)


def replaced_methods(model: nn.Module, batch: dict[str, Any], granularity: str) -> list[tuple[str, str]]:
    ran = methods_run(model, lambda: forward(model, batch))
    layers = layers_of(model, granularity)
    ran -= methods_run(model, lambda: interpret(layers, batch))
    return sorted(
        (path, name)
        for path, name in ran
        if name not in LOOKING_AROUND and ((path, "forward") in ran or isinstance(model.get_submodule(path), HOLDERS))
    )


def accepted_changes(model: nn.Module, granularity: str, path: str, name: str) -> Iterator[str]:
    """A line for every change of a method that is not refused by name."""
    where = path.removeprefix("unet").removeprefix("controlnet").removeprefix(".")
    for how, change in changes_of(model, path, name):
        with change:
            message = refusal(model, granularity)
        named = re.escape(where or "the model itself")
        if not re.search(rf"^  {named} has a {name} |a {name} .*; so \d+ modules$", message, re.MULTILINE):
            yield f"{path or 'the model'}: {name} {how}: {message or 'accepted'}"


@pytest.mark.parametrize(("family", "granularity"), ALL)
def test_classes_that_override_nothing_else(family, granularity, small):
    """Derived classes on every level: with other methods, other constructors, other names."""
    model, _ = small(family)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, HOLDERS):
                stack.enter_context(derived(module, description=lambda self: "mine", extra_repr=lambda self: "mine"))
        assert not refusal(model, granularity)


def test_a_train_of_its_own_is_refused_where_no_layer_calls_it(small):
    model, _ = small(next(iter(FAMILIES)))
    called = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with patched(called, "train", lambda mode=True: called):
        assert not refusal(model, "block")
    with derived(model, train=lambda self, mode=True: nn.Module.train(self, mode)):
        assert re.search(
            r"  the model itself has a train of its own \(.*, and no layer calls it", refusal(model, "block")
        )


HOOKS = {
    "forward hooks": "register_forward_hook",
    "forward pre-hooks": "register_forward_pre_hook",
    "backward hooks": "register_full_backward_hook",
    "backward pre-hooks": "register_full_backward_pre_hook",
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("family", "granularity"), FINE_IN_SOAK)
def test_every_hook_is_refused_or_runs(family, granularity, small):
    model, batch = small(family)
    called = {path for path, name in methods_run(model, lambda: forward(model, batch)) if name == "forward"}
    layers = layers_of(model, granularity)
    runs = called & {path for path, _ in methods_run(model, lambda: interpret(layers, batch))}
    one_each = {type(model.get_submodule(path)): path for path in sorted(called - runs, reverse=True)}
    one_each.pop(Both, None)  # the test's own
    missed = [
        f"{path or 'the model'}: {what}"
        for path in one_each.values()
        for what in HOOKS
        if what not in _refuses(model, granularity, model.get_submodule(path), what)
    ]
    assert not missed
    wanted = _hooks_that_run(model, runs, lambda: forward(model, batch))
    found = _hooks_that_run(model, runs, lambda: interpret(layers_of(model, granularity), batch))
    assert {what for _, what in wanted} == set(HOOKS)
    assert sorted(wanted - found) == []


def _refuses(model: nn.Module, granularity: str, module: nn.Module, what: str) -> str:
    handle = getattr(module, HOOKS[what])(lambda *_: None)
    try:
        return refusal(model, granularity)
    finally:
        handle.remove()


def _hooks_that_run(model: nn.Module, paths: Any, run: Callable[[], Any]) -> Ran:
    ran: Ran = set()

    def noting(path: str, what: str) -> Callable[..., None]:
        return lambda *_: ran.add((path, what))

    handles = [
        getattr(model.get_submodule(path), method)(noting(path, what))
        for path in paths
        for what, method in HOOKS.items()
    ]
    try:
        _loss(run()).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return ran
