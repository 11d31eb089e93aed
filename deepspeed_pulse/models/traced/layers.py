"""The layer list of any model, from a trace of its own forward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from deepspeed_pulse.engine.rules import EXAMPLE, EntryRules
from deepspeed_pulse.engine.specs import Declared, spec
from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models.bypassed import check_hooks
from deepspeed_pulse.models.families import Glue, PlanCache
from deepspeed_pulse.models.traced.batch import Given, TensorForm, as_given, form_of, on_device
from deepspeed_pulse.models.traced.code import (
    SIZES,
    Kept,
    LayerCode,
    Unknown,
    as_numbers,
    as_shapes,
    evaluated,
    first_unknown,
    from_numbers,
    from_shapes,
)
from deepspeed_pulse.models.traced.cutting import Dependencies, Piece, cut
from deepspeed_pulse.models.traced.glue import functions
from deepspeed_pulse.models.traced.names import pytree
from deepspeed_pulse.models.traced.outline import Blocks, Outline, outline
from deepspeed_pulse.models.traced.recording import autocast_around
from deepspeed_pulse.models.traced.standins import NO_CAST, Bare, Cast
from deepspeed_pulse.models.traced.tracing import Trace, trace
from deepspeed_pulse.models.units import Origin, Unit, base_keys, hold_buffer, hold_part

MOST = 64
"""Traces of one model in one process."""


def traced_layers(
    model: nn.Module,
    origin: Origin,
    example_batch: Any,
    *,
    blocks: Blocks = "auto",
    fine: bool = False,
    glue: Glue = (),
    plan_cache: PlanCache = None,
) -> list[Declared]:
    """The layers of a model, found by running its forward once without numbers.

    ``glue``: functions between blocks that are kept whole. ``plan_cache``: folder where traces that took time are kept
    by content.
    Raises :class:`GraphError` where that is not possible, naming the line of the model's code.
    """
    given, kept, whole = Given.of(example_batch), frozenset[str](), functions(glue)
    while True:
        outlined = replace(outline(model, blocks, fine=fine, kept=kept), glue=whole)
        check_hooks(model, outlined.opened)
        shared = TracedModel(model, given, outlined, plan_cache)
        routing = shared.base.routing() - kept if blocks == "auto" else frozenset()
        if not routing:
            break
        kept |= routing
    _check_glue(shared)
    units = [TracedLayer(model, origin, shared, number) for number in range(len(shared.base.codes))]
    _add_rest(model, units)
    found, rules = [], _rules(model, shared.given)
    for number, unit in enumerate(units):
        unit.entry_rules = rules
        code = shared.base.codes[number]
        stash = [*code.piece.stashes, *([SIZES] if shared.with_sizes and number == 0 else [])]
        found.append(spec(unit, stash=stash, pop=unit.pops, name=code.piece.name))
    return found


def _check_glue(shared: TracedModel) -> None:
    called = {call.function for call in shared.base.trace.calls}
    for function in shared.outline.glue:
        if function not in called:
            raise GraphError(
                f"glue: between its blocks {shared.name} does not call {function.__qualname__} with this "
                "example_batch, or it gives no tensor; leave it out"
            )


class Traced:
    """One trace, cut: the code of each layer.

    ``base``: the first trace of the model; one with the same calls is cut alike, and tells its layers the same.
    """

    def __init__(
        self,
        shared: TracedModel,
        found: Trace,
        base: Traced | None = None,
    ) -> None:
        self.trace = found
        self._depends = depends = Dependencies(found, shared.persistent, shared.weights)
        like = base if base is not None and self._is_like(base) else None
        self.pieces: tuple[Piece, ...] = cut(depends, shared.outline) if like is None else like.pieces
        with_sizes: bool | None = None if base is None else base.with_sizes
        sizes = tuple(found.shape_env.replace(symbol) for symbol in found.symbols)
        if with_sizes is None:
            try:
                self.codes = self._codes(depends, None)
                plain = any(not entry.forms for entry in found.given.entries)
                with_sizes = bool(found.branches) or plain or "dtype" in found.reads
                with_sizes = with_sizes or any(code.measures for code in self.codes[1:])
                with_sizes = with_sizes and len(self.codes) > 1
            except Unknown:
                with_sizes = True
        self.with_sizes: bool = with_sizes
        try:
            self.codes = self._codes(depends, sizes if with_sizes else None)
        except Unknown as problem:
            raise first_unknown(problem, shared.name) from None

    def _codes(self, depends: Dependencies, sizes: tuple[Any, ...] | None) -> list[LayerCode]:
        return [
            LayerCode(depends, piece, first=number == 0, with_sizes=sizes) for number, piece in enumerate(self.pieces)
        ]

    def _is_like(self, other: Traced) -> bool:
        return self.trace.is_like(other.trace) and self._depends.anywhere == other._depends.anywhere

    def routing(self) -> frozenset[str]:
        """Modules that hand on values whose sizes follow from numbers in tensors, as a choice of experts does."""
        handed_on = {v for piece in self.pieces for v in (*piece.gives, *piece.stashes.values())}
        found = set[str]()
        for value in handed_on:
            free = {one for size in self.trace.shape(value) for one in getattr(size, "free_symbols", ())}
            call = self.trace.values[value].call
            if call is not None and free - self.trace.symbols.keys():
                found.update(self.trace.scopes[scope].path for scope in self.trace.calls[call].scopes[-1:])
        return frozenset(found - {""})

    def holds(self, sizes: Mapping[Any, int]) -> bool:
        """Whether sizes, by symbol, keep what the trace took for given."""
        return all(evaluated(guard, sizes) is True for guard in self.trace.guards)


@dataclass(frozen=True, kw_only=True)
class Told:
    """Sizes of a batch, of the model's slots, and dtypes of its tensors."""

    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True)
class Around:
    """What the model runs in: the kind of its device, and autocast that is on, by kind of device."""

    kind: str
    autocast: tuple[tuple[str, torch.dtype], ...]
    device: torch.device = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class State:
    """Of the model beside its batch, as far as its code looks at it; ``training`` None: as in the first trace."""

    cast: Cast
    training: bool | None
    around: Around


class TracedModel:
    """What the layers of one model share: the trace, and those for other sizes, modes and dtypes."""

    def __init__(self, model: nn.Module, given: Given, outlined: Outline, plan_cache: PlanCache = None) -> None:
        self._plan_cache = plan_cache
        self.state = State(cast=NO_CAST, training=None, around=_around(given.device))
        """Of :attr:`base`."""
        self.name, self.outline, self.given = type(model).__name__, outlined, given
        self._bare = Bare(model)
        adapters = model.state_dict().keys() - base_keys(model).keys()
        self.weights = {path: _count(module, path, adapters) for path, module in model.named_modules()}
        saved = model.state_dict().keys()
        self.persistent = frozenset(path for path, _ in model.named_buffers() if path in saved)
        self.training = True
        """The mode of :attr:`base`: what a block draws or changes in place while it trains must be in its calls."""
        self.base = Traced(self, trace(self._bare, outlined, given, training=True, plan_cache=plan_cache))
        self.with_sizes = self.base.with_sizes
        self.slots = tuple(self.base.trace.symbols.values())
        """Entry, index in it and dimension of every size of the batch, in the order in which layers are told."""
        self.dtypes = tuple(form.dtype for entry in given.entries for form in entry.forms)
        """Of the example, in the order in which layers are told those of the batch."""
        self.kept = Kept()
        self.floats = tuple(frozenset(_by_dtype(tensors)) for tensors in _weights(model))
        """Floating dtypes of the model's parameters, and of its buffers."""
        self.layers = (WeakSet[TracedLayer](), WeakSet[TracedLayer]())
        """Those of this process, copies included, with floating parameters, and with floating buffers."""
        self._variants: dict[Any, Traced] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> TracedModel:
        return self

    @property
    def reads(self) -> frozenset[str]:
        return self.base.trace.reads

    def variant(self, told: Told, plain: Mapping[str, Any], state: State) -> Traced:
        """The trace for sizes and dtypes of the batch, other entries, and a state of the model.

        Raises :class:`BatchError` where the model then hands other values from layer to layer.
        """
        key = (told, repr(plain), state)
        with self._lock:
            if key not in self._variants:
                self._variants[key] = self._find(told, plain, state)
            return self._variants[key]

    def _find(self, told: Told, plain: Mapping[str, Any], state: State) -> Traced:
        given = self.given.with_plain(plain).with_forms(self._forms(told, state.around.device))
        asked = (told.dtypes, repr(plain), state)
        for (had, *others), one in [((self.example, repr({}), self.state), self.base), *self._variants.items()]:
            if (had.dtypes, *others) == asked and one.holds(self._by_symbol(one, told.sizes)):
                return one
        if len(set(map(id, self._variants.values()))) >= MOST:
            raise BatchError(
                f"{self.name} was traced {MOST} times for different batches; make numbers that change from batch to "
                f"batch tensors, and sizes fewer; the last: {self._in_words(told, plain)}"
            )
        trains = self.training if state.training is None else state.training
        other = trace(self._bare, self.outline, given, cast=state.cast, training=trains, plan_cache=self._plan_cache)
        found = Traced(self, other, self.base)
        handed, expected = ([code.interface for code in one.codes] for one in (found, self.base))
        if handed != expected:
            raise BatchError(
                f"{self.name} hands other values from layer to layer at {self._in_words(told, plain)}"
                f"{self._where(state)} than with the example_batch that the list was made with, so its layers cannot "
                f"take this batch; make a list with an example_batch like this one{self._where(state)}"
            )
        return found

    def _where(self, state: State) -> str:
        around = state.around
        autocast = [f"torch.autocast({kind!r}, {dtype})" for kind, dtype in around.autocast]
        inside = f" inside {' and '.join(autocast)}" if autocast else " outside of torch.autocast"
        return "" if around == self.state.around else f" on {around.kind}{inside}"

    @cached_property
    def example(self) -> Told:
        """Sizes and dtypes of the example."""
        sizes = (self.given[name].forms[at].shape[dim] for name, at, dim in self.slots)
        return Told(sizes=tuple(sizes), dtypes=self.dtypes)

    def _forms(self, told: Told, device: torch.device) -> dict[tuple[str, int], TensorForm]:
        """Of all entries; ``device``: for what lay on the first layer's in the example."""
        known, dtypes = dict(zip(self.slots, told.sizes, strict=True)), iter(told.dtypes)
        return {
            (entry.name, at): TensorForm(
                shape=tuple(known[entry.name, at, dim] for dim in range(len(form.shape))),
                dtype=next(dtypes),
                device=device if on_device(form.device) == self.given.device else form.device,
            )
            for entry in self.given.entries
            for at, form in enumerate(entry.forms)
        }

    def _by_symbol(self, one: Traced, sizes: tuple[int, ...]) -> dict[Any, int]:
        return dict(zip(one.trace.symbols, sizes, strict=True))

    def _in_words(self, told: Told, plain: Mapping[str, Any]) -> str:
        forms = self._forms(told, self.given.device).items()
        shapes = [f"{name} {list(form.shape)} of {form.dtype}" for (name, _), form in forms]
        return ", ".join([*shapes, *(f"{name} {value!r}" for name, value in plain.items())])


class TracedLayer(Unit):
    """A run of a model's own calls: leaves whole, and what its code does between them."""

    traced: TracedModel
    run_number: int
    pops: tuple[str, ...]

    def __init__(self, model: nn.Module, origin: Origin, shared: TracedModel, number: int) -> None:
        code = shared.base.codes[number]
        parameters = [path for kind, path in code.weights if kind == "parameter" and not _within(path, code.leaves)]
        super().__init__(model, origin, *code.leaves, *parameters)
        self.paths = (*code.leaves, *parameters)
        self.traced, self.run_number = shared, number
        for kind, path in code.weights:
            if kind == "buffer" and not _within(path, code.leaves):
                hold_buffer(self, model, path)
        self.training = model.training
        self._floats = tuple(map(_by_dtype, _weights(self)))
        self._tell()
        plain = [entry.name for entry in shared.given.entries if not entry.forms]
        self._plain = tuple(plain)
        self.pops = (
            *code.piece.pops,
            *(entry.name for entry in code.entries),
            *plain,
            *([SIZES] if shared.with_sizes and number else []),
        )

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._tell()

    def _tell(self) -> None:
        """Of its dtypes, by which others know what the model was cast to."""
        for floats, layers in zip(self._floats, self.traced.layers, strict=True):
            if floats:
                layers.add(self)

    def hold(self, model: nn.Module, path: str) -> None:
        """Take in a weight that the example batch does not use, so that it is trained and saved with the rest."""
        hold_part(self, model, path)
        self.paths = (*self.paths, path)

    def forward(self, hidden: Any, *popped: Any) -> Any:
        shared = self.traced
        values = dict(zip(self.pops, popped, strict=True))
        told = self._told(hidden, values)
        code = self._code(told, values, _first(hidden).device)
        env = code.run(self, hidden, values, shared.kept)
        piece = code.piece
        given = tuple(self._own(env[value]) for value in piece.gives)
        stashed = [self._own(env[value]) for value in piece.stashes.values()]
        output: Any = given[0] if len(given) == 1 else given or _nothing(hidden)
        if shared.with_sizes and self.run_number == 0:
            assert told is not None
            dtypes = as_numbers(told.dtypes) if "dtype" in shared.reads else ()
            stashed.append(as_shapes((*told.sizes, *dtypes), _nothing(hidden)))
        return (output, *stashed) if stashed else output

    @staticmethod
    def _own(value: Any) -> Any:
        """A weight as a value, which autograd knows to come from it."""
        return value.view_as(value) if isinstance(value, nn.Parameter) else value

    def _code(self, told: Told | None, values: Mapping[str, Any], device: torch.device) -> LayerCode:
        shared = self.traced
        training = self.training if "training" in shared.reads and self.training != shared.training else None
        state = State(cast=self._cast(), training=training, around=self._around(device))
        fixed = {entry.name: entry.plain for entry in shared.given.entries if not entry.forms}
        now = {name: as_given(fixed[name], values[name]) for name in self._plain}
        plain = {name: value for name, value in now.items() if value != fixed[name]}
        found = shared.base if told is None and not plain and state == shared.state else None
        if found is None:
            found = shared.variant(told or shared.example, plain, state)
            if self.run_number == 0 and not shared.with_sizes:
                self._check_others(found, plain, state)
        return found.codes[self.run_number]

    def _told(self, hidden: Any, values: Mapping[str, Any]) -> Told | None:
        """Of the batch, where this layer knows it: the first from its entries, others from the first.

        Dtypes are the example's where the model's code looks at none.
        """
        shared = self.traced
        if self.run_number:
            if not shared.with_sizes:
                return None
            numbers, count = from_shapes(values[SIZES]), len(shared.slots)
            return Told(sizes=numbers[:count], dtypes=from_numbers(numbers[count:]) or shared.dtypes)
        forms: dict[tuple[str, int], TensorForm] = {}
        for entry in shared.given.entries:
            if entry.forms:
                value = hidden if entry.name == shared.given.first else values[entry.name]
                tensors = entry.tensors(value, shared.name)
                forms.update({(entry.name, at): form_of(one) for at, one in enumerate(tensors)})
        self._check_forms(forms)
        sizes = tuple(forms[name, at].shape[dim] for name, at, dim in shared.slots)
        found = tuple(form.dtype for form in forms.values())
        return Told(sizes=sizes, dtypes=found if "dtype" in shared.reads else shared.dtypes)

    def _check_forms(self, forms: Mapping[tuple[str, int], TensorForm]) -> None:
        """What no trace for other sizes could take."""
        shared = self.traced
        for entry in shared.given.entries:
            for at, expected in enumerate(entry.forms):
                found = forms[entry.name, at]
                if len(found.shape) != len(expected.shape):
                    raise BatchError(
                        f"batch entry {entry.name!r}: {shared.name} was traced with {len(expected.shape)} dimensions, "
                        f"found the shape {list(found.shape)}; make the list with an example_batch like this one"
                    )

    def _around(self, device: torch.device) -> Around:
        """The trace's own, where the model's code does not look at what is around it now."""
        reads, had = self.traced.reads, self.traced.state.around
        now = _around(had.device if device.type == "meta" else device)
        autocast = now.autocast if reads & {"autocast", "dtype"} else had.autocast
        looks = bool(reads & {"autocast", "device"}) or autocast != had.autocast
        return Around(kind=now.kind, autocast=autocast, device=now.device) if looks else had

    def _cast(self) -> Cast:
        """What weights were cast to since the trace, where the model's code looks at dtypes.

        All are cast alike. A layer that cannot tell by its own, which has none or had that dtype before, looks at what
        became of the others of this process.
        """
        if "dtype" not in self.traced.reads:
            return NO_CAST
        return Cast(*(self._cast_of(number, all_of) for number, all_of in enumerate(self.traced.floats)))

    def _cast_of(self, number: int, all_of: frozenset[torch.dtype]) -> torch.dtype | None:
        found = self._changed(number)
        if found is not None or all_of == self._floats[number].keys():
            return found
        changed = (other._changed(number) for other in list(self.traced.layers[number]))
        return next((one for one in changed if one is not None), None)

    def _changed(self, number: int) -> torch.dtype | None:
        """The dtype of own parameters (0) or buffers (1) that had another one."""
        now = self.get_buffer if number else self.get_parameter
        found = ((dtype, now(name).dtype) for dtype, name in self._floats[number].items())
        return next((new for old, new in found if new != old), None)

    def _check_others(self, found: Traced, plain: Any, state: State) -> None:
        """Layers that know no sizes go on as they are: the trace must say so."""
        shared = self.traced
        base = shared.variant(shared.example, plain, state)
        if found is base:
            return
        for mine, other in zip(base.codes[1:], found.codes[1:], strict=True):
            if mine.signature != other.signature:
                raise BatchError(
                    f"{shared.name} does something else in layer {mine.piece.name} with a batch of these sizes than "
                    "with the example_batch that the list was made with; make the list with an example_batch like "
                    "this one"
                )


def _rules(model: nn.Module, given: Given) -> EntryRules:
    """What a batch of a traced model may have: the entries of its example, which are what layers read."""
    keys = [*(entry.keys for entry in given.entries), *given.empty]
    had = {first for first, *_ in keys}
    parameters = list(inspect.signature(model.forward).parameters.values())
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if given.positional:
        inputs = pytree.tree_unflatten(list(given[given.first].forms), given[given.first].spec)
        named = named[len(inputs) if isinstance(inputs, (tuple, list)) else 1 :]
    return EntryRules(
        model=type(model).__name__,
        numbers={},
        tensors=frozenset(entry.name for entry in given.entries if entry.forms and entry.name != given.first),
        unread=dict.fromkeys((name for name in named if name not in had), EXAMPLE),
        read=frozenset(entry.name for entry in given.entries),
        nested=frozenset(one[0] for one in keys if len(one) > 1 or one in given.empty),
        takes_any=any(one.kind is one.VAR_KEYWORD for one in parameters),
    )


def _nothing(hidden: Any) -> Tensor:
    """A hidden state without content, where a layer hands on named values only."""
    return _first(hidden).detach().new_zeros(0)


def _first(hidden: Any) -> Tensor:
    return next(one for one in pytree.tree_leaves(hidden) if isinstance(one, Tensor))


def _around(device: torch.device) -> Around:
    return Around(kind=device.type, autocast=autocast_around(device), device=device)


def _weights(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return dict(module.named_parameters()), dict(module.named_buffers())


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, str]:
    """The first of each floating dtype."""
    found: dict[torch.dtype, str] = {}
    for name, one in tensors.items():
        if one.is_floating_point():
            found.setdefault(one.dtype, name)
    return found


def _count(module: nn.Module, path: str, adapters: Collection[str]) -> int:
    """Of a module's own parameters: layers are the same with adapters and without."""
    return sum(one.numel() for name, one in module.named_parameters(path) if name not in adapters)


def _within(path: str, leaves: tuple[str, ...]) -> bool:
    return any(path.startswith(f"{leaf}.") for leaf in leaves)


def _add_rest(model: nn.Module, units: list[TracedLayer]) -> None:
    """Give what the model has and this batch does not use to the layer with the nearest parts."""
    held = {key for unit in units for key in unit.state_dict()}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key in held:
            continue
        nearest = max(units, key=lambda unit: max((_common(key, path) for path in unit.paths), default=0))
        if isinstance(tensor, nn.Parameter):
            nearest.hold(model, key)
        else:
            hold_buffer(nearest, model, key)


def _common(one: str, other: str) -> int:
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count
