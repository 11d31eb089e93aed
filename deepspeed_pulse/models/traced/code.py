"""A piece of a trace as something that runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models.traced.batch import Entry
from deepspeed_pulse.models.traced.cutting import Dependencies, Piece
from deepspeed_pulse.models.traced.names import pytree
from deepspeed_pulse.models.traced.recording import (
    BUFFER,
    CONSTANT,
    ENTRY,
    PARAMETER,
    Call,
    Group,
    Here,
    Ref,
    Setting,
    Size,
    Value,
    autocast_around,
)

SIZES = "batch sizes"
"""Name of the value whose shapes are the sizes of the batch; it has no content."""

TOGETHER = 3
"""Sizes in one shape: torch multiplies them, and the product of a few always fits."""

_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


@dataclass(frozen=True)
class Measured:
    """An argument: a number computed from sizes of values that are at hand, (value, dimension) for each symbol."""

    expr: Any
    symbols: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]


class Sizes:
    """Numbers from expressions over sizes; what was computed is kept."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}

    def number(self, one: Measured, env: Mapping[int, Tensor]) -> Any:
        sizes = tuple(env[value].shape[dim] for value, dim in one.places)
        key = (one.expr, one.symbols, sizes)
        if key not in self._found:
            if len(self._found) > 10_000:
                self._found.clear()
            self._found[key] = evaluated(one.expr, dict(zip(one.symbols, sizes, strict=True)))
        return self._found[key]


def evaluated(expr: Any, sizes: Mapping[Any, int]) -> Any:
    """An expression as a Python number or truth."""
    found = expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    if found in (sympy.true, sympy.false):
        return bool(found)
    if not getattr(found, "is_number", False):
        return found
    return int(found) if found.is_integer else float(found)


@dataclass(frozen=True)
class Step:
    """A call with what its arguments are now.

    ``checks``: sizes that its results must have, by value. ``frees``: values that nothing after it reads.
    """

    call: Call
    arguments: tuple[Any, ...]
    checks: Mapping[int, tuple[Any, ...]]
    frees: tuple[int, ...] = ()


class LayerCode:
    """What one layer does: popped values in, calls, hidden state and stashed values out.

    ``entries``: of the batch, that it pops beside ``piece.pops``. ``with_sizes``: what the sizes that layers are told
    are in this trace; None: layers are told none.
    Raises :class:`GraphError` where a number that a call needs is not to be had in this layer.
    """

    def __init__(self, depends: Dependencies, piece: Piece, *, first: bool, with_sizes: tuple[Any, ...] | None) -> None:
        self._trace, self.piece, self._first, self._sizes = depends.trace, piece, first, with_sizes
        self._anywhere = depends.anywhere
        self._given = self._trace.given
        self._used = self._read(depends)
        self.entries = self._entries()
        self._bound = self._tensors_of_entries()
        self._fresh = len(self._trace.values)
        self._numbers = Sizes()
        at_hand = self._at_hand()
        self._makes = {call: self._step(self._trace.calls[call], at_hand) for call in piece.makes}
        self._roots = self._made_roots(depends)
        steps = []
        for index in piece.calls:
            call = self._trace.calls[index]
            steps.append(self._step(call, at_hand))
            for value in (*(v for _, v in call.outputs), *(new for _, new in call.changes)):
                self._offer(value, at_hand)
        self._steps = self._freeing(steps, depends)
        popped = {*piece.pops.values(), *(piece.takes or ())}
        self._loads = [self._trace.values[v] for v in sorted(self._used - popped)]
        self._constants: dict[tuple[int, torch.device], Tensor] = {}

    # ------------------------------------------------------------------------------------------ what it needs

    def _read(self, depends: Dependencies) -> set[int]:
        """All values that are read here, and those that are handed on."""
        calls = [self._trace.calls[index] for index in (*self.piece.makes, *self.piece.calls)]
        found = {value for call in calls for value in depends.reads(call)}
        return found | set(self.piece.gives) | set(self.piece.stashes.values())

    def _entries(self) -> tuple[Entry, ...]:
        """Batch entries that are popped; by the first layer all tensors, whose sizes it looks at."""
        read = {self._trace.values[v].name for v in self._used if self._trace.values[v].kind == ENTRY}
        others = [one for one in self._given.entries if one.name != self._given.first and one.forms]
        return tuple(one for one in others if self._first or one.name in read)

    def _tensors_of_entries(self) -> dict[str, list[tuple[int, int]]]:
        """Of the entries that are read: value and index in the entry."""
        found: dict[str, list[tuple[int, int]]] = {}
        for one in self._trace.values:
            if one.kind == ENTRY:
                found.setdefault(one.name, []).append((one.index, one.at))
        return found

    @staticmethod
    def _freeing(steps: list[Step], depends: Dependencies) -> list[Step]:
        """The steps, each with the results of earlier ones that it is the last to read."""
        made = {v for s in steps for v in (*(v for _, v in s.call.outputs), *(new for _, new in s.call.changes))}
        seen, found = set[int](), list[Step]()
        for step in reversed(steps):
            sizes = itertools.chain(step.arguments, *step.checks.values())
            measured = (value for value, _ in LayerCode._places(sizes))
            reads = {*depends.reads(step.call), *measured} & made
            found.append(replace(step, frees=tuple(sorted(reads - seen))))
            seen |= reads
        return found[::-1]

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        """Kind and path of weights and buffers that are read between leaves."""
        return tuple((one.kind, one.name) for one in self._loads if one.kind in (PARAMETER, BUFFER))

    @property
    def measures(self) -> bool:
        """Whether a call is given a number that follows from sizes."""
        steps = (*self._makes.values(), *self._steps)
        return any(step.checks or [*self._places(step.arguments)] for step in steps)

    @property
    def leaves(self) -> tuple[str, ...]:
        calls = [self._trace.calls[index] for index in (*self.piece.makes, *self.piece.calls)]
        return tuple(dict.fromkeys(call.path for call in calls if call.path is not None))

    # ------------------------------------------------------------------------------------------ sizes

    def _at_hand(self) -> dict[Any, tuple[int, int]]:
        """Sizes by expression that are known before the first call."""
        found: dict[Any, tuple[int, int]] = {}
        entries = {entry.name for entry in self.entries} | ({self._given.first} if self._first else set())
        for value in self._trace.values:
            if value.kind == ENTRY and value.name in entries:
                self._offer(value.index, found)
        for index in (*(self.piece.takes or ()), *self.piece.pops.values()):
            self._offer(index, found)
        for dim, symbol in enumerate(self._sizes or ()):
            if not isinstance(symbol, int) and symbol.free_symbols:
                found.setdefault(symbol, (self._fresh + dim // TOGETHER, dim % TOGETHER))
        return found

    def _offer(self, value: int, at_hand: dict[Any, tuple[int, int]]) -> None:
        for dim, expr in enumerate(self._trace.shape(value)):
            if not isinstance(expr, int):
                at_hand.setdefault(expr, (value, dim))

    def _step(self, call: Call, at_hand: Mapping[Any, tuple[int, int]]) -> Step:
        arguments = tuple(self._resolved(one, at_hand, call) for one in call.arguments)
        checked = [value for _, value in call.outputs] if call.tried else []
        checks = {v: tuple(self._measured(s, at_hand, call) for s in self._trace.shape(v)) for v in checked}
        return Step(call, arguments, checks)

    def _resolved(self, one: Any, at_hand: Mapping[Any, tuple[int, int]], call: Call) -> Any:
        if isinstance(one, Group):
            return Group(one.kind, tuple(self._resolved(part, at_hand, call) for part in one.parts))
        return self._measured(one.expr, at_hand, call) if isinstance(one, Size) else one

    def _measured(self, expr: Any, at_hand: Mapping[Any, tuple[int, int]], call: Call) -> Any:
        expr = self._trace.shape_env.replace(sympy.sympify(expr))
        if not expr.free_symbols:
            return evaluated(expr, {})
        if expr in at_hand:
            whole = sympy.Dummy("size", integer=True)
            return Measured(whole, (whole,), (at_hand[expr],))
        symbols = tuple(sorted(expr.free_symbols, key=str))
        if missing := [symbol for symbol in symbols if symbol not in at_hand]:
            raise Unknown(missing, call)
        return Measured(expr, symbols, tuple(at_hand[symbol] for symbol in symbols))

    # ------------------------------------------------------------------------------------------ running

    def _made_roots(self, depends: Dependencies) -> dict[int, tuple[int, ...]]:
        """Values made anywhere that calls of this layer read, each with the batch entries' tensors it is made of."""
        wanted = {v for index in self.piece.calls for v in depends.reads(self._trace.calls[index])}
        wanted |= {*self.piece.gives, *self.piece.stashes.values()}
        values = self._trace.values
        return {v: self._sources(v) for v in sorted(wanted & self._anywhere) if values[v].call is not None}

    def _sources(self, value: int) -> tuple[int, ...]:
        found, seen, waiting = list[int](), set[int](), [value]
        while waiting:
            one = self._trace.values[waiting.pop()]
            if one.index not in seen:
                seen.add(one.index)
                if one.kind == ENTRY:
                    found.append(one.index)
                if one.call is not None:
                    waiting += self._trace.calls[one.call].reads
        return tuple(sorted(found))

    def run(self, unit: Any, hidden: Any, popped: Mapping[str, Any], kept: Kept) -> dict[int, Any]:
        """All values after the last call, by number; ``popped`` by name."""
        env: dict[int, Any] = {}
        model = unit.origin.model_class.__name__
        if self._first:
            self._bind(self._given[self._given.first], hidden, env, model)
        elif self.piece.takes:
            parts = (hidden,) if isinstance(hidden, Tensor) else hidden
            env.update(zip(self.piece.takes, parts, strict=True))
        for entry in self.entries:
            self._bind(entry, popped[entry.name], env, model)
        for name, value in self.piece.pops.items():
            env[value] = popped[name]
        if self._sizes is not None and not self._first:
            env.update(enumerate(popped[SIZES], start=self._fresh))
        device = next((one.device for one in env.values() if isinstance(one, Tensor)), torch.device("cpu"))
        for one in self._loads:
            self._load(one, unit, env, device)
        for value, sources in self._roots.items():
            env[value] = self._made(value, sources, unit, env, device, kept)
        handed_on = {*self.piece.gives, *self.piece.stashes.values()}
        for step in self._steps:
            self._call(step, unit, env, device)
            for value in step.frees:
                if value not in handed_on:
                    del env[value]
        return env

    def _bind(self, entry: Entry, value: Any, env: dict[int, Any], model: str) -> None:
        tensors = entry.tensors(value, model)
        env.update((index, tensors[at]) for index, at in self._bound[entry.name])

    def _load(self, one: Value, unit: Any, env: dict[int, Any], device: torch.device) -> None:
        if one.kind == PARAMETER:
            env[one.index] = unit.get_parameter(one.name)
        elif one.kind == BUFFER:
            env[one.index] = unit.get_buffer(one.name)
        elif one.kind == CONSTANT and one.constant is not None:
            if (one.index, device) not in self._constants:
                self._constants[one.index, device] = one.constant.to(device)
            env[one.index] = self._constants[one.index, device]

    def _made(
        self, value: int, sources: Sequence[int], unit: Any, env: dict[int, Any], device: torch.device, kept: Kept
    ) -> Any:
        def make() -> Any:
            own = dict(env)
            for index in self._trace.calls_behind([value]):
                self._call(self._makes[index], unit, own, device)
            return own[value]

        tensors = [env[source] for source in sources]
        if not tensors or torch.is_inference_mode_enabled() or any(one.is_inference() for one in tensors):
            return make()
        places = {
            place for index in self._trace.calls_behind([value]) for place in self._places(self._makes[index].arguments)
        }
        sizes = tuple(int(env[v].shape[dim]) for v, dim in sorted(places))
        return kept.get((id(self._trace), value), make, tensors, (device, sizes, autocast_around(device)))

    @staticmethod
    def _places(arguments: Iterable[Any]) -> Iterator[tuple[int, int]]:
        for one in arguments:
            if isinstance(one, Measured):
                yield from one.places
            elif isinstance(one, Group):
                yield from LayerCode._places(one.parts)

    def _call(self, step: Step, unit: Any, env: dict[int, Any], device: torch.device) -> None:
        call = step.call
        arguments = [self._argument(one, env, device) for one in step.arguments]
        args, kwargs = pytree.tree_unflatten(arguments, call.spec)
        function: Callable[..., Any] = call.function or unit.get_submodule(call.path)
        given = [one for one in arguments if isinstance(one, Tensor)] if call.tried else []
        before = [one._version for one in given]
        if call.setting is None:
            result = function(*args, **kwargs)
        else:
            with ExitStack() as stack:
                _enter(stack, call.setting)
                result = function(*args, **kwargs)
        if any(one._version != version for one, version in zip(given, before, strict=True)):
            raise BatchError(
                f"{call.name} changed an argument in place, which it did not with the numbers that it was tried with "
                f"({call.line}), so it cannot be a layer"
            )
        for old, new in call.changes:
            if old in env:
                env[new] = env[old]
        if len(call.outputs) == 1 and isinstance(result, Tensor):
            env[call.outputs[0][1]] = result
        elif call.outputs:
            found = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
            if call.tried and len(found) != len(call.outputs):
                raise BatchError(
                    f"{call.name} gave {len(found)} tensors, where the trace expects {len(call.outputs)}: what it "
                    f"gives follows from the numbers it is given ({call.line}), so it cannot be a layer"
                )
            for place, value in call.outputs:
                env[value] = found[place]
        for value, sizes in step.checks.items():
            expected = [self._argument(size, env, device) for size in sizes]
            if list(env[value].shape) != expected:
                raise BatchError(
                    f"{call.name} gave the shape {list(env[value].shape)}, where the trace expects {expected}: the "
                    f"sizes of its result follow from the numbers it is given ({call.line}), so it cannot be a layer"
                )

    def _argument(self, one: Any, env: Mapping[int, Any], device: torch.device) -> Any:
        if isinstance(one, Ref):
            return env[one.value]
        if isinstance(one, Measured):
            return self._numbers.number(one, env)
        if isinstance(one, Group):
            return one.kind(*(self._argument(part, env, device) for part in one.parts))
        return device if isinstance(one, Here) else one

    # ------------------------------------------------------------------------------------------ comparing

    @property
    def signature(self) -> tuple[Any, ...]:
        """What it does, without the numbers that values have in one trace: two of the same do the same."""
        numbers: dict[int, int] = {}

        def number(value: int) -> int:
            return numbers.setdefault(value, len(numbers))

        def told(one: Any) -> Any:
            if isinstance(one, Ref):
                return ("value", number(one.value))
            if isinstance(one, Measured):
                names = {symbol: sympy.Symbol(f"n{i}") for i, symbol in enumerate(one.symbols)}
                return (str(one.expr.xreplace(names)), tuple((number(v), dim) for v, dim in one.places))
            if isinstance(one, Group):
                return tuple(map(told, one.parts))
            if isinstance(one, Tensor):
                return ("tensor", tuple(one.shape), one.dtype)
            return one.__class__.__name__ if isinstance(one, (nn.Module, Here)) else repr(one)

        for name in sorted(self.piece.pops):
            number(self.piece.pops[name])
        for value in self.piece.takes or ():
            number(value)
        found: list[Any] = []
        for step in (*self._makes.values(), *self._steps):
            call = step.call
            what = call.path if call.path is not None else getattr(call.function, "__name__", "")
            known = [
                (one.kind, one.name, number(one.index))
                for one in (self._trace.values[v] for v in call.reads)
                if one.kind is not None
            ]
            changes = tuple((number(old), number(new)) for old, new in call.changes)
            outputs = tuple((place, number(v)) for place, v in call.outputs)
            found.append(
                (what, tuple(map(told, step.arguments)), str(call.spec), outputs, changes, call.setting, known)
            )
        return (*found, self.interface)

    @property
    def interface(self) -> tuple[Any, ...]:
        """What goes in and out."""
        piece = self.piece
        return (
            piece.name,
            None if piece.takes is None else len(piece.takes),
            len(piece.gives),
            tuple(piece.pops),
            tuple(piece.stashes),
            tuple(entry.name for entry in self.entries),
        )


def as_shapes(sizes: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
    """Sizes as the shapes of empty tensors, which every device knows without reading memory."""
    groups = (sizes[at : at + TOGETHER] for at in range(0, len(sizes), TOGETHER))
    return tuple(like.new_zeros((*group, 0), dtype=torch.bool) for group in groups)


def as_numbers(dtypes: Iterable[torch.dtype]) -> tuple[int, ...]:
    """Dtypes as small numbers, which can be told as sizes are."""
    return tuple(map(_DTYPES.index, dtypes))


def from_numbers(numbers: Iterable[int]) -> tuple[torch.dtype, ...]:
    """The dtypes that :func:`as_numbers` was given."""
    return tuple(_DTYPES[number] for number in numbers)


def from_shapes(shapes: Sequence[Tensor]) -> tuple[int, ...]:
    """The sizes that :func:`as_shapes` was given."""
    return tuple(size for one in shapes for size in one.shape[:-1])


class Unknown(Exception):
    """A layer does not know a size."""

    def __init__(self, symbols: Sequence[Any], call: Call) -> None:
        super().__init__(symbols)
        self.symbols, self.call = symbols, call


class Kept:
    """What layers of one rank have made from batch entries alone: once for a microbatch."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Any, ...]] = {}

    def get(self, name: Any, make: Callable[[], Any], sources: Sequence[Tensor], others: Any) -> Any:
        """``make()``, or what it gave last for the same objects with the same content."""
        versions = [one._version for one in sources]
        before = self._found.get(name)
        if before is not None:
            had, had_versions, had_others, result = before
            same = len(had) == len(sources) and all(a is b for a, b in zip(had, sources, strict=True))
            if same and had_versions == versions and had_others == others:
                return result
        result = make()
        self._found[name] = (tuple(sources), versions, others, result)
        return result


def _enter(stack: ExitStack, setting: Setting) -> None:
    stack.enter_context(torch.set_grad_enabled(setting.gradients and torch.is_grad_enabled()))
    if setting.autocast is None:
        return
    for kind, enabled, dtype in setting.autocast.states:
        if enabled != torch.is_autocast_enabled(kind) or enabled:
            keeps = setting.autocast.keeps
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=keeps))


def first_unknown(problem: Unknown, model: str) -> GraphError:
    """The error for a size that no layer knows beforehand."""
    return GraphError(
        f"{model}: {problem.call.line} uses a number that follows from the content of a tensor, not from sizes; name "
        "the module around that line with blocks=[...] or the function around it with glue=[...], so that it is "
        "kept whole"
    )
