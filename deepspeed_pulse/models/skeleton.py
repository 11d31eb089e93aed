"""A diffusers model without its weights, and the initial weights of any part of it.

The model's own constructor runs as usual, on the CPU, but every parameter moves to the meta device at
the moment a module registers it (what ``accelerate.init_empty_weights`` does, and so every diffusers
model is used to it). What a constructor computes and does not save (rotary tables, position tables) is
therefore there, exactly; what it would only fill with random numbers costs nothing.

**Initial weights.** The constructor runs again, and this time the wanted parameters stay. Each random
operation in it is seeded by the user's seed and its position in the constructor, so a parameter gets
the same values whichever others stay with it, on whichever rank. The distribution is the constructor's
own, special initialisations included (zeroed projections, scaled tables), because no other code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_pulse.errors import GraphError

_STRIDE = 0x9E3779B1
"""Seeds of operations are this far apart: the CPU generator takes 32 bits, and all are different."""


class Skeleton:
    """A model whose saved tensors are on the meta device; everything else in it is real.

    Args:
        make: calls the constructor.
        seed: of the initial weights.
        dtype: the default floating type while the constructor runs.
        cast: gives the new model other dtypes, in place.

    Attributes:
        model: the skeleton itself.
        entries: key in the state dict to the tensor on the meta device.

    Raises:
        GraphError: the model has one parameter under two names.
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
        if len(self._keys) < len(self.entries):
            raise GraphError(
                f"{type(self.model).__name__} has one parameter under two names; such a model cannot be built layer by "
                "layer: build it whole, then use to_layers()"
            )

    def key_of(self, tensor: Tensor) -> str | None:
        """The key that a tensor of the skeleton had at first; None for one that was added to the model since."""
        return self._keys.get(id(tensor))

    def initial(self, keys: Collection[str]) -> Mapping[str, Tensor]:
        """Initial values of some entries, in the dtypes they have in the skeleton."""
        model, _ = self._construct(keep={self._numbers[key] for key in keys if key in self._numbers})
        state = model.state_dict()
        return {key: state[key].to(self.entries[key].dtype) for key in keys}

    def _construct(self, keep: Collection[int]) -> tuple[Any, dict[int, int]]:
        """The model with the parameters numbered in ``keep``, and the number of each by its id."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.device("cpu"),
                _parameters_on_meta(keep) as numbers,
                _SeededOperations(self._seed),
            ):
                return self._make(), numbers
        finally:
            torch.set_default_dtype(default)


class _SeededOperations(TorchDispatchMode):
    """Seeds each random operation by its position among them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._next = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(self._next % 2**32)
            self._next += _STRIDE
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta(keep: Collection[int]) -> Iterator[dict[int, int]]:
    """Parameters move to the meta device when they are registered, but for those numbered in ``keep``.

    Yields the number of every registered parameter by its id. Not for several threads at once.
    """
    numbers: dict[int, int] = {}
    alive: list[nn.Parameter] = []  # an id is one parameter's only while that parameter lives
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or id(parameter) in numbers:
            return
        if len(alive) not in keep:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = parameter
        numbers[id(parameter)] = len(alive)
        alive.append(parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield numbers
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _empty_saved_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
