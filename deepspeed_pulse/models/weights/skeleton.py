"""A diffusers model without its weights, and the initial weights of any part of it.

The model's own constructor runs as usual, on the CPU, but every parameter moves to the meta device at
the moment a module registers it (what ``accelerate.init_empty_weights`` does, and so every diffusers
model is used to it). What a constructor computes and does not save (rotary tables, position tables) is
therefore there, exactly; what it would only fill with random numbers costs nothing.

**Initial weights.** The constructor runs again, and this time the wanted parameters stay. Random numbers for a
parameter are seeded by the user's seed, by which parameter it is and by how often it was filled before, so it gets the
same values whichever others stay with it, on whichever rank. The distribution is the constructor's own, special
initialisations included (zeroed projections, scaled tables), because no other code runs. That takes half a second for
SDXL however little stays, so where layers are built in a row, those of several stay at a time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_pulse.errors import ConfigError, GraphError

Prepare = Callable[[Any], Any]
"""Is given a model and changes it in place."""

AHEAD = 1 / 16
"""Of the model's bytes, initial values that are made before they are asked for. A rank holds them beside its own."""

_ADVICE = (
    "prepare= may freeze parameters, add modules and set options; for more build the model whole and use to_layers()"
)


class Skeleton:
    """A model whose saved tensors are on the meta device; everything else in it is real.

    ``make`` calls the constructor, ``seed`` is that of the initial weights, ``dtype`` the default floating type while
    the constructor runs, ``cast`` gives the new model other dtypes, in place. ``entries`` of the ``model`` are its
    tensors on the meta device by key in the state dict. Raises :class:`GraphError` for one parameter under two names.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        cast: Callable[[Any], Any] = lambda model: None,
    ) -> None:
        self._make, self._seed, self._dtype = make, seed, dtype
        self.model, numbers = self._construct(keep=())
        _empty_saved_buffers(self.model)
        cast(self.model)
        self.entries: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        self._numbers = {key: numbers[id(t)] for key, t in self.entries.items() if id(t) in numbers}
        self._keys = {id(tensor): key for key, tensor in self.entries.items()}
        self._coming: dict[str, None] = {}
        self._ahead: dict[str, Tensor] = {}
        if len(self._keys) < len(self.entries):
            raise GraphError(
                f"{type(self.model).__name__} has one parameter under two names; such a model cannot be built layer by "
                "layer: build it whole, then use to_layers()"
            )

    def key_of(self, tensor: Tensor) -> str | None:
        """The key that a tensor of the skeleton had at first; None for one that was added to the model since."""
        return self._keys.get(id(tensor))

    @contextmanager
    def coming(self, keys: Iterable[str]) -> Iterator[None]:
        """Meanwhile initial values of these entries are asked for, part by part and in this order."""
        self._coming |= dict.fromkeys(keys)
        try:
            yield
        finally:
            self._coming.clear()
            self._ahead.clear()

    def initial(self, keys: Collection[str]) -> Mapping[str, Tensor]:
        """Initial values of some entries, in the dtypes they have in the skeleton."""
        for key in keys:
            self._coming.pop(key, None)
        if missing := [key for key in keys if key not in self._ahead]:
            room = AHEAD * self._bytes(self.entries) - self._bytes([*missing, *self._ahead])
            self._ahead |= self._drawn([*missing, *self._next(room)])
        return {key: self._ahead.pop(key) for key in keys}

    def _next(self, room: float) -> Iterator[str]:
        """What is asked for next and takes no more bytes."""
        for key in self._coming:
            if key not in self._ahead:
                room -= self._bytes([key])
                if room < 0:
                    return
                yield key

    def _bytes(self, keys: Iterable[str]) -> int:
        return sum(self.entries[key].numel() * self.entries[key].element_size() for key in keys)

    def _drawn(self, keys: Sequence[str]) -> dict[str, Tensor]:
        model, _ = self._construct(keep={self._numbers[key] for key in keys if key in self._numbers})
        state = model.state_dict()
        if copied := next((key for key in keys if state[key].is_meta), None):
            raise GraphError(
                f"{type(model).__name__}: {copied} has no initial values: the constructor copies weights, as "
                "torch.nn.TransformerEncoder does, so such a model cannot be built layer by layer: build it whole, "
                "then use to_layers()"
            )
        return {key: state[key].to(self.entries[key].dtype) for key in keys}

    def prepare(self, change: Prepare) -> None:
        """Let a user's ``change`` freeze, add adapters to or set options of the model.

        While it runs, parameters without values look as if they were on the CPU, because adapters go where the weights
        beside them are. Each is one NaN that fills the whole shape, so that a value computed from it shows. Random
        numbers are the same on every rank. Raises :class:`ConfigError` when weights were replaced, changed, cast, or
        used.
        """
        real = {}
        for module, name, parameter in _parameters(self.model):
            if self.key_of(parameter) is not None:
                module._parameters[name] = stand_in = _stand_in(parameter)
                real[id(stand_in)] = (stand_in, parameter)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)  # not those of devices, which nothing puts back
            change(self.model)
        for module, name, parameter in _parameters(self.model):
            if id(parameter) in real:
                stand_in, parameter = real.pop(id(parameter))
                if stand_in.dtype != parameter.dtype:
                    raise ConfigError(
                        f"prepare: a parameter {name!r} was cast from {parameter.dtype} to {stand_in.dtype}, which the "
                        f"weights, read later, would not be; pass dtype={stand_in.dtype} beside prepare= in its place"
                    )
                if stand_in.is_floating_point() and not bool(stand_in.flatten()[:1].isnan().all()):
                    raise ConfigError(
                        f"prepare: the values of a parameter {name!r} were changed, but are not there yet; {_ADVICE}"
                    )
                module._parameters[name] = parameter
                parameter.requires_grad_(stand_in.requires_grad)
        for key, tensor in self.model.state_dict(keep_vars=True).items():
            if self.key_of(tensor) is None and (tensor.is_meta or bool(tensor.isnan().any())):
                raise ConfigError(
                    f"prepare: {key} is computed from weights that are not there yet, or replaces some; {_ADVICE}"
                )
        if real:
            raise ConfigError(f"prepare: {len(real)} parameters are no longer part of the model; {_ADVICE}")

    def _construct(self, keep: Collection[int]) -> tuple[Any, dict[int, int]]:
        """The model with the parameters numbered in ``keep``, and the number of each by its id."""
        registry = _Registry(keep)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.device("cpu"),
                registry.registering(),
                _SeededDraws(self._seed, registry),
            ):
                return self._make(), {id(parameter): number for number, parameter in enumerate(registry.parameters)}
        finally:
            torch.set_default_dtype(default)


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    one = torch.full((), float("nan") if parameter.is_floating_point() else 0, dtype=parameter.dtype)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)


class _Registry:
    """Numbers parameters in the order in which modules register them, and moves all but some to the meta device."""

    def __init__(self, keep: Collection[int]) -> None:
        self._keep = keep
        self.parameters: list[nn.Parameter] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, tensor: Tensor) -> int | None:
        """Number of the parameter whose memory a tensor is, or is a part of."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    @contextmanager
    def registering(self) -> Iterator[None]:
        """While parameters are registered in this registry. Not for several threads at once."""
        register = nn.Module.register_parameter

        def register_here(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if param is not None and self.number_of(param) is None:
                module._parameters[name] = self._add(param)

        nn.Module.register_parameter = register_here  # type: ignore[assignment, method-assign]  # on purpose
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]

    def _add(self, parameter: nn.Parameter) -> nn.Parameter:
        if len(self.parameters) not in self._keep:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        self._numbers[parameter.untyped_storage()._cdata] = len(self.parameters)
        self.parameters.append(parameter)
        return parameter


class _SeededDraws(TorchDispatchMode):
    """Seeds every random operation by what it is for: a parameter, or else its place among the others.

    Some functions of ``torch.nn.init`` draw into a tensor of their own first, and not at all for a
    parameter on the meta device; such a draw counts for the parameter that the function was given.
    """

    def __init__(self, seed: int, registry: _Registry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates all but its constructor
        self._seed, self._registry = seed, registry
        self._drawn: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            purpose = self._purpose(args)
            place = (purpose + 1) * 4096 + self._drawn[purpose]
            self._drawn[purpose] += 1
            # The CPU generator takes 32 bits; odd factors keep all places apart.
            torch.default_generator.manual_seed((place * 0x9E3779B1 + self._seed * 0x85EBCA77) % 2**32)
        return func(*args, **(kwargs or {}))

    def _purpose(self, args: Sequence[Any]) -> int:
        for given in (args[0] if args else None, _given_to_init()):
            number = self._registry.number_of(given) if isinstance(given, Tensor) else None
            if number is not None:
                return number
        return -1


def _given_to_init() -> Any:
    """What the function of ``torch.nn.init`` which is running, if any, was given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == nn.init.__name__:
            return frame.f_locals.get("tensor")
        frame = frame.f_back
    return None


def _empty_saved_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
