"""What a model's own forward does between its leaves, call by call.

A :class:`Recorder` sees every call of torch's functions that Python code makes, as the code made it (``x.reshape``,
``F.interpolate``), and every call of a leaf. Played again in the same order, the same calls give the same bits.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.traced.alike import Alike
from deepspeed_pulse.models.traced.attributes import Attributes, Change, reached
from deepspeed_pulse.models.traced.draws import Draws
from deepspeed_pulse.models.traced.keeping import Leaves
from deepspeed_pulse.models.traced.names import CONTENT, FakeTensor, TorchDispatchMode, free_unbacked_symbols, pytree
from deepspeed_pulse.models.traced.trying import Unrecognised, tried

ENTRY, PARAMETER, BUFFER, CONSTANT = "entry", "parameter", "buffer", "constant"
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_is_autocast_enabled, _device = torch.is_autocast_enabled, FakeTensor.__dict__["device"]
HERE = str(Path(__file__).parent)
TORCH_FOLDER = str(Path(torch.__file__).parent)
SEED_ELSEWHERE = "seed in the script, draw in the data, or name the module around it with blocks=[...]"


@dataclass(frozen=True)
class Ref:
    """An argument: a value of the trace."""

    value: int


@dataclass(frozen=True)
class Size:
    """An argument: a number that follows from sizes, as a sympy expression."""

    expr: Any


@dataclass(frozen=True)
class Here:
    """An argument: the device that the trace took for the model's own."""


@dataclass(frozen=True)
class Group:
    """An argument: arguments together, as a slice or a shape."""

    kind: Callable[..., Any]
    parts: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """For each kind of device whether it is on, and its dtype; and whether casts of weights are kept."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    keeps: bool


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the code between blocks has set around a call: gradients on, and autocast; None where it entered none."""

    gradients: bool
    autocast: Autocast | None


@dataclass(kw_only=True)
class Value:
    """A tensor of the trace. ``kind`` and ``name`` tell where one that no call made comes from.

    ``at``: index among an entry's tensors.
    """

    index: int
    fake: Tensor = field(repr=False)
    call: int | None = None
    kind: str | None = None
    name: str = ""
    at: int = 0
    constant: Tensor | None = field(default=None, repr=False)


@dataclass(kw_only=True)
class Call:
    """A call of a function of torch's, or of the leaf at ``path``.

    ``outputs``: place among the tensors of the result, value. ``changes``: value before and after, of what the call
    changes in place. ``scopes``: numbers of the opened calls around it. ``once``: it has weights or draws
    random numbers. ``line``: of the model's code. ``tried``: the sizes of its result are what a try has shown.
    """

    index: int
    path: str | None
    function: Callable[..., Any] | None
    arguments: tuple[Any, ...]
    spec: Any = field(repr=False)
    outputs: tuple[tuple[int, int], ...]
    changes: tuple[tuple[int, int], ...]
    setting: Setting | None
    scopes: tuple[int, ...]
    once: bool
    line: str
    tried: bool

    @property
    def name(self) -> str:
        """The path of a leaf, or the name of a function."""
        return self.path or str(getattr(self.function, "__name__", self.function))

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(one.value for one in self.arguments if isinstance(one, Ref))


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One call of an opened module: its path, and the values it returned."""

    path: str
    returns: list[int]


class Recorder(TorchFunctionMode):
    """Records while it is active; ``paths`` and ``opened`` say which modules are what.

    Attributes:
        calls, values, scopes: what was recorded.
        leaf: path of the leaf that was called last, if it was the last call.
        branches: guards that Python code of the model met, not what it calls.
        reads: of "dtype", "device" (its kind) and "autocast", what that code looked at or set.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        opened: frozenset[str],
        device: torch.device,
        shape_env: Any,
        is_once: Any,
        draws: Draws,
        leaves: Leaves | None = None,
    ) -> None:
        super().__init__()
        self._leaves = leaves
        self._paths, self._opened, self._device, self._env = paths, opened, device, shape_env
        self._is_once, self._alike, self._draws = is_once, Alike(), draws
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.scopes: list[Scope] = []
        self.branches: list[Any] = []
        self.reads = set[str]()
        self.leaf: str | None = None
        self._ids: dict[int, int] = {}
        self._attributes = Attributes([])
        self._reached: dict[str, list[nn.Module]] = {}
        self._storages: dict[int, list[int]] = {}
        self._kept: list[Any] = []
        self._open_scopes: list[int] = []
        self._inside = 0
        self._tried = False
        self._around, self._nesting = self._autocast(), _nesting()
        self._guards_seen = 0

    # ------------------------------------------------------------------------------------------ what is known

    def add(self, fake: Tensor, **known: Any) -> int:
        """A value, from now on what this tensor is."""
        value = Value(index=len(self.values), fake=fake, **known)
        self.values.append(value)
        self._ids[id(fake)] = value.index
        self._storages.setdefault(fake.untyped_storage()._cdata, []).append(value.index)
        return value.index

    def known(self, tensor: Tensor) -> int | None:
        """The value of a tensor, if it is one."""
        return self._ids.get(id(tensor))

    def value_of(self, tensor: Tensor, where: str) -> int:
        """The value of a tensor; one that is real is a constant."""
        if id(tensor) in self._ids:
            return self._ids[id(tensor)]
        if not isinstance(tensor, FakeTensor):
            if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
                raise GraphError(
                    f"{where}: reads a weight of shape {list(tensor.shape)} that no module of the model has "
                    "registered, so no layer would train it; make it an attribute of a module"
                )
            self._kept.append(tensor)
            self._ids[id(tensor)] = index = len(self.values)
            self.values.append(Value(index=index, fake=tensor, kind=CONSTANT, constant=tensor))
            return index
        raise GraphError(
            f"{where}: reads a tensor that no call of torch's made which can be seen from Python (a custom kernel, a "
            "scripted function, an autograd.Function, or what a block keeps as an attribute); name the module around "
            "it with blocks=[...], so that the line lies inside a block"
        )

    # ------------------------------------------------------------------------------------------ calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        self._python_guards()
        if getattr(func, "__name__", "") == "register_hook":
            raise GraphError(
                f"{_line()}: puts a hook on a tensor between blocks, which layers would lose; name the module around "
                "that line with blocks=[...], so that it is kept whole"
            )
        self.reads |= _asked_of(func)
        return self._recorded(None, func, func, args, kwargs)

    def note(self, what: str) -> None:
        """Code asks for something; what runs inside of a call does not count."""
        if not self._inside:
            self.reads.add(what)

    @property
    def is_inside(self) -> bool:
        """A call runs, so it is not the code between blocks that asks."""
        return self._inside > 0

    def call_glue(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What stands for a function that is kept whole."""
        if self._inside:
            return function(*args, **kwargs)
        self._python_guards()
        modules = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, nn.Module)]
        if modules:
            raise GraphError(
                f"{_line()}: hands a module ({type(modules[0]).__name__}) to the glue function "
                f"{function.__qualname__}, so its layer would not have its weights; hand it tensors, numbers and words"
            )
        with self._draws.of_a_leaf():
            return self._recorded(None, function, functools.partial(self._glue_result, function), args, kwargs)

    def _glue_result(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            if not any(free_unbacked_symbols(one) for one in pytree.tree_leaves(result) if _has_sizes(one)):
                return result
        except CONTENT:
            pass
        self._tried = True
        try:
            return tried(function, args, kwargs)
        except Unrecognised as problem:
            raise GraphError(
                f"{_line()}: the glue function {function.__qualname__} reads the numbers in a tensor, and what it "
                f"gives cannot be told without them: {problem}. Its result must be tensors, each size of which is a "
                "size of an argument or always the same; compute it in the data, as a batch entry, or move more into it"
            ) from problem

    def apply(self, kind: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What stands for the ``apply`` of an ``autograd.Function``: one call, as its backward is its own."""
        if self._inside:
            return plain(*args, **kwargs)
        function = Applied(kind)
        return self._recorded(None, function, function, args, kwargs)

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What stands for a module's ``__call__``; hooks do not run."""
        path = self._paths.get(id(module))
        if self._inside or path is None:
            return module.forward(*args, **kwargs)
        if path not in self._opened:
            return self._call_leaf(path, module, args, kwargs)
        number = len(self.scopes)
        self.scopes.append(Scope(path=path, returns=[]))
        self._open_scopes.append(number)
        try:
            result = module.forward(*args, **kwargs)
        finally:
            self._open_scopes.pop()
        found = (self._ids.get(id(one)) for one in pytree.tree_leaves(result) if isinstance(one, Tensor))
        self.scopes[number].returns.extend(one for one in found if one is not None)
        return result

    def _call_leaf(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if path not in self._reached:
            self._reached[path] = reached(module, self._paths)
        for change in self._attributes.changes(self._reached[path]):
            raise GraphError(
                f"{_line()}: calls {path}, which can read {self.told(change)}, and code between blocks has set that, "
                "which layers would not do; hand it over as an argument, or name the module around that line with "
                "blocks=[...], so that it is kept whole"
            )
        with self._draws.of_a_leaf():
            result = self._recorded(path, None, module.forward, args, kwargs)
        self._attributes.renew(self._reached[path])
        return result

    def told(self, change: Change) -> str:
        """The path of an attribute."""
        return f"{self._paths[id(change.module)]}.{change.name}".lstrip(".")

    def changes(self, modules: Iterable[nn.Module]) -> Iterator[Change]:
        """What code between blocks has set of some modules."""
        return self._attributes.changes(modules)

    def _recorded(self, path: str | None, function: Any, run: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(one, torch.Generator) for one in leaves):
            raise GraphError(f"{_line()}: draws with a torch.Generator, which layers would not seed; {SEED_ELSEWHERE}")
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        before, seeded = [one._version for one in tensors], self._draws.seeded
        self._inside, self.leaf, self._tried = self._inside + 1, path, False
        try:
            result, random = self._result(path, run, args, kwargs, leaves, spec, tensors)
        finally:
            self._inside -= 1
        if random and seeded:
            raise GraphError(
                f"{_line()}: draws random numbers with a seed that code between blocks has set, which layers would "
                f"not; {SEED_ELSEWHERE}"
            )
        was_tried = self._tried  # what is asked of tensors below comes here again
        self._guards_seen = len(self._env.guards)
        changed = [one for one, version in zip(tensors, before, strict=True) if one._version != version]
        given = {id(one) for one in tensors}
        new = {id(one): one for one in changed}
        result = pytree.tree_map_only(
            Tensor, lambda one: _alias(one) if id(one) in given and id(one) not in new else one, result
        )
        results = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        if not results and not changed and path is None:
            return result
        where = _line()
        arguments = tuple(self._argument(one, where) for one in leaves)
        index = len(self.calls)
        changes = self._changes(changed, index, where)
        outputs = []
        for place, one in enumerate(results):
            if id(one) not in new:
                outputs.append((place, self.add(one, call=index)))
        self.calls.append(
            Call(
                index=index,
                path=path,
                function=function,
                arguments=arguments,
                spec=spec,
                outputs=tuple(outputs),
                changes=changes,
                setting=self._setting(),
                scopes=tuple(self._open_scopes),
                once=random or self._is_once(path),
                line=where,
                tried=was_tried,
            )
        )
        self._kept.append((args, kwargs, result))
        return result

    def _result(
        self, path: str | None, run: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Any, tensors: list[Tensor]
    ) -> tuple[Any, bool]:
        """What a call gives, and whether it drew random numbers."""
        key = None if path is None else self._alike.key(run.__self__, leaves, spec)
        if (found := self._alike.find(key)) is not None:
            return found.tensors(), found.once
        name = None if key is None or self._leaves is None else self._leaves.name(str(path), leaves, spec)
        if self._leaves is not None and name is not None and (found := self._leaves.find(name)) is not None:
            self._alike.put(key, found)
            return found.tensors(), found.once
        guards = len(self._env.guards)
        before = [one._version for one in tensors]
        try:
            with _Watch() as watch:
                result = run(*args, **kwargs)
        except CONTENT as problem:
            if path is None:
                raise
            try:
                result = tried(run, args, kwargs)
            except Unrecognised:
                raise problem from None
            self._tried = True
            return result, True
        untouched = all(one._version == version for one, version in zip(tensors, before, strict=True))
        if untouched and path is not None and not any(self._attributes.changes(self._reached[path])):
            kept = self._alike.keep(key, result, tensors, watch.random)
            if kept is not None and name is not None and self._leaves is not None:
                self._leaves.add(name, kept, self._env.guards[guards:])
        return result, watch.random

    def _argument(self, one: Any, where: str) -> Any:
        if isinstance(one, Tensor):
            return Ref(self.value_of(one, where))
        if isinstance(one, _NUMBERS):
            return Size(self._env.replace(one.node.expr))
        if isinstance(one, torch.device) and one == self._device:
            return Here()
        if isinstance(one, nn.Module) and id(one) in self._paths:
            raise GraphError(f"{where}: hands the module {self._paths[id(one)]} to a call; name a block around it")
        if isinstance(one, slice):
            return Group(slice, tuple(self._argument(part, where) for part in (one.start, one.stop, one.step)))
        if isinstance(one, tuple):
            return Group(_together(type(one)), tuple(self._argument(part, where) for part in one))
        if _hides(one):
            raise GraphError(
                f"{where}: hands an object of {type(one).__name__} to a call, with tensors or sizes inside that cannot "
                "be seen; name the module around that line with blocks=[...], so that it is kept whole"
            )
        return one

    def _changes(self, changed: list[Tensor], call: int, where: str) -> tuple[tuple[int, int], ...]:
        """New values for what a call has changed in place, and for all that lies in the same memory."""
        found: list[tuple[int, int]] = []
        for storage in {one.untyped_storage()._cdata: one for one in changed}:
            sharing = {id(self.values[i].fake): i for i in self._storages.get(storage, ())}
            for old in sharing.values():
                value = self.values[old]
                if value.kind in (PARAMETER, BUFFER, CONSTANT):
                    raise GraphError(f"{where}: changes {value.name or 'a constant'} of the model in place")
                new = self.add(value.fake, call=call)
                found.append((old, new))
        if changed and not found:
            raise GraphError(
                f"{where}: changes a tensor in place that is part of the model and no value of its forward"
            )
        return tuple(found)

    def _setting(self) -> Setting | None:
        """What code between blocks has set, if anything; an autocast that sets what is set already counts, too.

        It would not be the same under another one around the model.
        """
        gradients, autocast = torch.is_grad_enabled(), self._autocast()
        entered = autocast != self._around or _nesting() != self._nesting
        if entered:
            self.reads.add("autocast")
        if gradients and not entered:
            return None
        return Setting(gradients=gradients, autocast=autocast if entered else None)

    def _autocast(self) -> Autocast:
        kinds = _kinds(self._device)
        states = tuple((kind, _is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return Autocast(states=states, keeps=torch.is_autocast_cache_enabled())

    def start(self, modules: Iterable[nn.Module]) -> None:
        """Guards so far are not of the model's code, and what modules hold is what they come with."""
        self._attributes.renew(modules)
        self._guards_seen = len(self._env.guards)

    def _python_guards(self) -> None:
        """Guards since the last call: Python code of the model asked for them."""
        self.branches += self._env.guards[self._guards_seen :]
        self._guards_seen = len(self._env.guards)

    def finish(self) -> None:
        self._python_guards()


class Applied:
    """The ``apply`` of an ``autograd.Function``, under the name of that."""

    def __init__(self, kind: Any) -> None:
        self._kind, self.__name__ = kind, kind.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.apply(*args, **kwargs)


_TELL_DTYPE = {"is_floating_point", "is_complex", "is_signed", "element_size", "result_type", "type"}
"""Functions of torch's whose answer follows from a tensor's dtype."""

_TELL_KIND = {f"is_{kind}" for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "xpu")} | {"get_device", "type"}
"""Functions and attributes that follow from the kind of a tensor's device."""


def _asked_of(function: Any) -> set[str]:
    """Of "dtype" and "device", what a function of torch's tells."""
    name = getattr(function, "__name__", "")
    read = getattr(function, "__self__", None) if name == "__get__" else None
    dtype = name in _TELL_DTYPE or any(read is one for one in (Tensor.dtype, Tensor.itemsize, Tensor.nbytes))
    kind = name in _TELL_KIND or getattr(read, "__name__", "") in _TELL_KIND
    return {what for what, asked in (("dtype", dtype), ("device", kind)) if asked}


def _has_sizes(one: Any) -> bool:
    return isinstance(one, (Tensor, *_NUMBERS))


def _together(kind: type) -> Callable[..., Any]:
    return lambda *parts: kind(parts)


def _hides(one: Any, depth: int = 3) -> bool:
    """Whether an object that is no container has tensors without numbers, or sizes, in its attributes."""
    if isinstance(one, (FakeTensor, *_NUMBERS)):
        return True
    if not depth or isinstance(one, (type, nn.Module)) or callable(one):
        return False
    inside = one if isinstance(one, (list, tuple, set)) else list(getattr(one, "__dict__", {}).values())
    inside = list(one.values()) if isinstance(one, dict) else inside
    return any(_hides(part, depth - 1) for part in inside)


class _Watch(TorchDispatchMode):
    """Notices random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _alias(tensor: Tensor) -> Tensor:
    """Another object for the same memory: a call that gave back what it was given may do otherwise next time."""
    return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]


def _line() -> str:
    """The line of the model's code that runs."""
    frame = _frame()
    return "the model" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _frame() -> FrameType | None:
    """Of the model's code that runs."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((HERE, TORCH_FOLDER)):
        frame = frame.f_back
    return frame


def _frames() -> Iterator[FrameType]:
    """The same frame, and those that called it inside the module whose code it is."""
    frame = _frame()
    while frame is not None and not frame.f_code.co_filename.startswith((HERE, TORCH_FOLDER)):
        yield frame
        frame = frame.f_back


def autocast_around(device: torch.device) -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices, of the CPU's and this one's, for which autocast is on, each with its dtype."""
    kinds = [kind for kind in _kinds(device) if _is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _kinds(device: torch.device) -> list[str]:
    return [kind for kind in sorted({"cpu", device.type}) if torch.amp.is_autocast_available(kind)]


def _nesting() -> int:
    """How many autocasts were entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def calling(recorder: Recorder) -> Iterator[None]:
    """While modules and functions of autograd are called as the recorder says, by this thread.

    It is told, too, when code asks for a device whose kind it may look at, or for autocast, as entering one does.
    """
    call, thread = nn.Module.__call__, threading.get_ident()
    apply = torch.autograd.Function.__dict__["apply"]

    def applied(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain = apply.__get__(None, kind)
        if threading.get_ident() != thread:
            return plain(*args, **kwargs)
        return recorder.apply(kind, plain, args, kwargs)

    def recorded(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        return recorder.call_module(module, args, kwargs)

    def device_of(tensor: FakeTensor) -> torch.device:
        is_new = threading.get_ident() == thread and not recorder.is_inside and "device" not in recorder.reads
        # a property, like that of diffusers' models, hands the device to code that looks at it
        if is_new and any("type" in frame.f_code.co_names for frame in _frames()):
            recorder.note("device")
        return _device.fget(tensor)  # type: ignore[no-any-return]

    def is_autocast_enabled(*kind: str, **named: str) -> bool:
        if threading.get_ident() == thread:
            recorder.note("autocast")
        return _is_autocast_enabled(*kind, **named)

    nn.Module.__call__ = recorded  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
    FakeTensor.device = _device.getter(device_of)  # type: ignore[method-assign]
    torch.is_autocast_enabled = is_autocast_enabled
    try:
        with recorder:
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        FakeTensor.device = _device  # type: ignore[method-assign]
        torch.is_autocast_enabled = _is_autocast_enabled


def line_of(problem: BaseException) -> str:
    """The innermost line outside of torch and of this folder in a traceback."""
    found, at = "the model", problem.__traceback__
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if not name.startswith((HERE, TORCH_FOLDER)):
            found = f"{name}:{at.tb_lineno} ({at.tb_frame.f_code.co_name})"
        at = at.tb_next
    return found
