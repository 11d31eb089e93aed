"""One run of a model's forward without numbers, and what came of it."""

from __future__ import annotations

import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import BatchError, GraphError, PulseError, did_you_mean
from deepspeed_pulse.models.families import PlanCache
from deepspeed_pulse.models.traced import names
from deepspeed_pulse.models.traced.batch import Given, on_device
from deepspeed_pulse.models.traced.content import file_of
from deepspeed_pulse.models.traced.draws import Draws, drawing
from deepspeed_pulse.models.traced.glue import kept_whole
from deepspeed_pulse.models.traced.keeping import Leaves, kept_leaves
from deepspeed_pulse.models.traced.names import CONTENT, FakeTensor, enable_python_dispatcher, pytree
from deepspeed_pulse.models.traced.outline import Outline
from deepspeed_pulse.models.traced.recording import (
    BUFFER,
    ENTRY,
    PARAMETER,
    SEED_ELSEWHERE,
    Call,
    Recorder,
    Scope,
    Value,
    autocast_around,
    calling,
    line_of,
)
from deepspeed_pulse.models.traced.standins import (
    NO_CAST,
    Bare,
    Cast,
    new_mode,
    sizes_can_be_keys,
    sizes_can_be_texts,
    symbolic,
)
from deepspeed_pulse.models.traced.state import check_state

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """``outputs``: the tensors that the model returned. ``symbols``: each to entry, index in it and dimension.

    ``guards``: what must hold for sizes that the trace is right for; ``branches``: those of them that the model's own
    code asked for. ``reads``: of "training", "dtype", "device" (its kind) and "autocast", what that code looked at or
    set.
    """

    given: Given
    calls: Sequence[Call] = field(repr=False)
    values: Sequence[Value] = field(repr=False)
    scopes: Sequence[Scope] = field(repr=False)
    outputs: tuple[int, ...]
    symbols: Mapping[Any, tuple[str, int, int]]
    guards: tuple[Any, ...]
    branches: tuple[Any, ...]
    reads: frozenset[str]
    shape_env: Any = field(repr=False)

    def calls_behind(self, values: Iterable[int]) -> tuple[int, ...]:
        """The calls that make some values, and those that make what these read, in order."""
        found, waiting = set[int](), [self.values[value].call for value in values]
        while waiting:
            call = waiting.pop()
            if call is not None and call not in found:
                found.add(call)
                waiting += [self.values[value].call for value in self.calls[call].reads]
        return tuple(sorted(found))

    def expr(self, size: Any) -> Any:
        """A size as an expression of symbols, or the number that it is fixed to."""
        return self.shape_env.replace(size.node.expr) if isinstance(size, torch.SymInt) else size

    def shape(self, value: int) -> tuple[Any, ...]:
        return tuple(self.expr(size) for size in self.values[value].fake.shape)

    def is_like(self, other: Trace) -> bool:
        """Whether it has the same calls, of and with the same values: they may be cut alike."""
        return bool(self._told == other._told)

    @cached_property
    def _told(self) -> Any:
        values = [(value.call, value.kind, value.name, value.at) for value in self.values]
        calls = [(call.name, call.reads, call.outputs, call.changes, call.once, call.scopes) for call in self.calls]
        gradients = [call.setting is None or call.setting.gradients for call in self.calls]
        return values, calls, gradients, self.outputs

    def num_bytes(self, value: int) -> int:
        """Of a value, at the sizes of the example."""
        fake, count = self.values[value].fake, 1
        for size in fake.shape:
            if isinstance(size, torch.SymInt):
                hint = size.node.hint
                count *= 1 if hint is None else int(hint)
            else:
                count *= size
        return count * fake.element_size()


def trace(
    bare: Bare,
    outline: Outline,
    given: Given,
    *,
    training: bool,
    cast: Cast = NO_CAST,
    plan_cache: PlanCache = None,
) -> Trace:
    """Run the model once without numbers. Raises :class:`GraphError` naming the line that cannot be traced.

    ``plan_cache``: folder where what its leaves gave is kept by content.
    """
    around = autocast_around(given.device)
    path = None if plan_cache is None else file_of(plan_cache, bare.model, outline, given, cast, training, around)
    with kept_leaves(path) as leaves, drawing() as draws:
        return _traced(bare, outline, given, cast, training, leaves, draws)


def _traced(
    bare: Bare,
    outline: Outline,
    given: Given,
    cast: Cast,
    training: bool,
    leaves: Leaves | None,
    draws: Draws,
) -> Trace:
    mode, device = new_mode(), given.device
    model = bare.stand_in(mode, device, cast, training)
    name = type(model).__name__
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    reads = set[str]()
    stateful = {path for path, module in modules.items() if not _can_be_repeated(module)}
    recorder = Recorder(paths, outline.opened, device, mode.shape_env, lambda path: path in stateful, draws, leaves)
    positional, keywords, symbols = _arguments(mode, recorder, given, inspect.signature(model.forward).parameters)
    if leaves is not None:
        leaves.begin([*symbols], mode.shape_env)
    _add_weights(model, recorder)
    if "return_dict" in inspect.signature(model.forward).parameters and "return_dict" not in keywords:
        keywords["return_dict"] = False
    _check_arguments(model, positional, keywords)
    try:
        with (
            _quietly(),
            torch.enable_grad(),
            _without_checkpoints(),
            _noting_training(paths, recorder, reads),
            sizes_can_be_keys(),
            sizes_can_be_texts(),
            enable_python_dispatcher(),
            mode,
        ):
            with calling(recorder), kept_whole(outline.glue, model, recorder.call_glue):
                recorder.start(modules.values())
                result = nn.Module.__call__(model, *positional, **keywords)
            recorder.finish()
    except PulseError:
        raise
    except CONTENT as problem:
        raise GraphError(_content(name, problem, recorder.leaf)) from problem
    except Exception as problem:
        raise GraphError(
            f"{name} cannot be traced with this example_batch: its forward fails at {line_of(problem)}: "
            f"{type(problem).__name__}: {_with_sizes(str(problem), symbols, given)}; where the model runs "
            "with this batch, name the module around that line with blocks=[...], so that it is kept whole"
        ) from problem
    _check_draws(name, draws)
    check_state(name, recorder, [modules[path] for path in sorted(outline.opened)], bare.made)
    reads |= recorder.reads
    env = mode.shape_env
    return Trace(
        given=given,
        calls=recorder.calls,
        values=recorder.values,
        scopes=recorder.scopes,
        outputs=_outputs(name, result, recorder),
        symbols=symbols,
        guards=tuple(dict.fromkeys(one.expr for one in env.guards if one.expr.free_symbols <= symbols.keys())),
        branches=tuple(dict.fromkeys(guard.expr for guard in recorder.branches)),
        reads=frozenset(reads),
        shape_env=env,
    )


def _check_draws(name: str, draws: Draws) -> None:
    """Raises a :class:`GraphError` for what layers would not draw as the model does."""
    if draws.others is not None:
        raise GraphError(
            f"{name} draws from {draws.others}'s random in its forward, and a trace would fix what was drawn once; "
            "draw in the data, or inside a block named with blocks=[...]"
        )
    if draws.seeded:
        raise GraphError(
            f"{name} seeds torch's random numbers in its forward (torch.manual_seed), which layers would not; "
            f"{SEED_ELSEWHERE}"
        )


def _arguments(
    mode: Any, recorder: Recorder, given: Given, parameters: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], dict[Any, Any]]:
    """What forward, which has these parameters, is called with; and the symbols."""
    symbols: dict[Any, Any] = {}
    keywords: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for entry in given.entries:
        value, fakes = entry.plain, []
        for at, form in enumerate(entry.forms):
            fake = symbolic(mode, form.shape, form.dtype, on_device(form.device))
            sizes: Iterable[Any] = fake.shape
            symbols |= {size.node.expr: (entry.name, at, dim) for dim, size in enumerate(sizes)}
            recorder.add(fake, kind=ENTRY, name=entry.name, at=at)
            fakes.append(fake)
        values[entry.name] = value = pytree.tree_unflatten(fakes, entry.spec) if fakes else value
        _put(keywords, entry.keys, value)
    for keys in given.empty:
        _put(keywords, keys, {})
    for keys in given.absent:
        if keys[0] in keywords or keys[0] in parameters:
            _put(keywords, keys, None)
    if given.positional:
        inputs = values[given.first]
        return (list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]), {}, symbols
    return [], keywords, symbols


def _check_arguments(model: nn.Module, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raises a :class:`BatchError` for entries that forward does not take, and for those that it lacks."""
    called = f"{type(model).__name__}.forward"
    parameters = inspect.signature(model.forward).parameters.values()
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        for name in keywords:
            if name not in named:
                raise BatchError(
                    f"example_batch: {called} takes no {name!r}{did_you_mean(name, named)}; it takes {', '.join(named)}"
                )
    needed = [one.name for one in parameters if one.default is one.empty and one.name in named][len(positional) :]
    if lacking := [name for name in needed if name not in keywords]:
        found = ", ".join(keywords) or "a tensor"
        raise BatchError(f"example_batch: {called} needs {', '.join(map(repr, lacking))}, too; found {found}")


def _put(at: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for key in keys[:-1]:
        at = at.setdefault(key, {})
    at[keys[-1]] = value


def _add_weights(model: nn.Module, recorder: Recorder) -> None:
    for path, parameter in model.named_parameters():
        recorder.add(parameter, kind=PARAMETER, name=path)
    for path, buffer in model.named_buffers():
        recorder.add(buffer, kind=BUFFER, name=path)


def _outputs(name: str, result: Any, recorder: Recorder) -> tuple[int, ...]:
    leaves = [one for one in pytree.tree_leaves(result) if one is not None]
    if not leaves or not all(isinstance(one, Tensor) for one in leaves):
        kinds = ("Tensor" if isinstance(one, Tensor) else type(one).__name__ for one in leaves)
        found = ", ".join(dict.fromkeys(kinds)) or "nothing"
        raise GraphError(f"{name}: expected its forward to return a tensor or a structure of tensors, found {found}")
    return tuple(recorder.value_of(one, f"what {name} returns") for one in leaves)


def _with_sizes(text: str, symbols: Mapping[Any, tuple[str, int, int]], given: Given) -> str:
    """A message of torch with the example's sizes in place of symbols."""
    sizes = {str(symbol): given[name].forms[at].shape[dim] for symbol, (name, at, dim) in symbols.items()}
    return re.sub(r"\bs\d+\b", lambda found: str(sizes.get(found[0], found[0])), text)


@contextmanager
def _quietly() -> Iterator[None]:
    """While torch does not log what it raises, too."""
    logger = logging.getLogger(FakeTensor.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _content(name: str, problem: BaseException, leaf: str | None) -> str:
    what = f"{name} reads the numbers in a tensor at {line_of(problem)}, and what it then does depends on them, so it "
    if leaf is not None:
        return what + (
            f"cannot be fixed beforehand; that lies in {leaf}, which is kept whole, but without numbers the sizes of "
            "its result cannot be told: hand over what is computed there as a batch entry, or write the layer list "
            "yourself: spec(module, stash=..., pop=..., name=...) for each layer, in forward order"
        )
    return what + (
        "cannot be fixed beforehand; name the module around that line with blocks=[...] or the function around it with "
        "glue=[...], so that it is kept whole, or hand over what is computed there as a batch entry"
    )


class _Training:
    """Stands for ``training`` of all modules while forwards are traced, and lets these know when it is read."""

    def __init__(self) -> None:
        self._lock, self._notes = threading.Lock(), list[Callable[[nn.Module], None]]()

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None or "training" not in vars(module):
            raise AttributeError("training")
        for note in tuple(self._notes):
            note(module)
        return vars(module)["training"]

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)["training"] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)["training"]

    @contextmanager
    def noted(self, note: Callable[[nn.Module], None]) -> Iterator[None]:
        """While ``note`` gets every module that is asked, by any thread."""
        with self._lock:
            self._notes.append(note)
            nn.Module.training = self  # type: ignore[assignment]
        try:
            yield
        finally:
            with self._lock:
                self._notes.remove(note)
                if not self._notes:
                    del nn.Module.training


_TRAINING = _Training()


@contextmanager
def _noting_training(paths: Mapping[int, str], recorder: Recorder, reads: set[str]) -> Iterator[None]:
    """While modules tell when code between blocks asks whether they train."""
    thread = threading.get_ident()

    def note(module: nn.Module) -> None:
        if id(module) in paths and not recorder.is_inside and threading.get_ident() == thread:
            reads.add("training")

    with _TRAINING.noted(note):
        yield


def _can_be_repeated(module: nn.Module) -> bool:
    """A module without saved tensors, that draws no random numbers, in training either: it may be traced before."""
    buffers = (name in one._non_persistent_buffers_set for one in module.modules() for name in one._buffers)
    draws = any(isinstance(one, DROPOUTS) and one.p > 0 for one in module.modules())
    return next(module.parameters(), None) is None and all(buffers) and not draws


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """While ``torch.utils.checkpoint.checkpoint`` calls its function and keeps what autograd keeps."""

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            return function(*args)

    def unchanged(*args: Any, **kwargs: Any) -> Iterator[None]:
        warnings.warn(
            "the model's own checkpoints around its blocks are bypassed by a layer list: let the pipeline recompute "
            "layers instead (activation_checkpoint_interval, or the plan)",
            stacklevel=2,
        )
        yield

    found = {name: getattr(names.checkpoint, name) for name in names.CHECKPOINTS}
    stand_ins = dict(zip(names.CHECKPOINTS, (Plain, unchanged), strict=True))
    for name in found:
        setattr(names.checkpoint, name, stand_ins[name])
    try:
        yield
    finally:
        for name, one in found.items():
            setattr(names.checkpoint, name, one)
