"""A model and a batch without numbers: what a trace runs on.

The model is a copy whose weights are stand-ins of the same shapes; caches and counters of the model itself stay as
they are. Sizes of the batch are symbols.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.traced.names import (
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from deepspeed_pulse.models.traced.recording import HERE, TORCH_FOLDER

_LOGGING = str(Path(logging.__file__).parent)
_PLAIN_NUMBER: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class Cast(NamedTuple):
    """Dtypes that floating weights were given since the trace, parameters and buffers; None: they were not."""

    parameters: torch.dtype | None = None
    buffers: torch.dtype | None = None


NO_CAST = Cast()


class Bare:
    """A copy of a model without weights, of which every trace takes a copy.

    ``made``: paths of attributes that a forward has left.
    """

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
        self.made = set[str]()
        for path, module in model.named_modules():
            for name, kept in vars(module).items():
                if isinstance(kept, Tensor) and kept.grad_fn is not None:
                    memo[id(kept)] = kept.detach()
                    self.made.add(f"{path}.{name}".lstrip("."))
        try:
            self.model = copy.deepcopy(model, memo)
        except Exception as problem:
            raise GraphError(
                f"tracing needs a copy of {type(model).__name__} (its weights are shared), and copy.deepcopy() of it "
                f"fails: {type(problem).__name__}: {problem}"
            ) from problem

    def stand_in(self, mode: Any, device: torch.device, cast: Cast, training: bool) -> nn.Module:
        """A copy for one trace, in a mode and with floating weights in ``cast``; None leaves dtypes as they are."""
        memo: dict[int, Any] = {}
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            wanted = cast.parameters if isinstance(tensor, nn.Parameter) else cast.buffers
            dtype = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
                memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
        made: nn.Module = copy.deepcopy(self.model, memo)
        return made.train(training)


def new_mode() -> Any:
    """Where tensors have no numbers and sizes are symbols, each its own."""
    return FakeTensorMode(shape_env=ShapeEnv(duck_shape=False, specialize_zero_one=False), allow_non_fake_inputs=True)


def symbolic(mode: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor every size of which is a symbol."""
    real = torch.empty(shape, dtype=dtype, device="meta")
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * real.ndim)
    fake = mode.from_tensor(real, symbolic_context=context)
    with mode:
        return torch.empty(fake.shape, dtype=dtype, device=device)


@contextmanager
def sizes_can_be_keys() -> Iterator[None]:
    """While a size may be looked up in a dict or a cache, which fixes it; what caches took in is thrown out again."""
    unhashable = torch.SymInt.__hash__
    with _caches_of_before() as before:
        torch.SymInt.__hash__ = lambda size: hash(size.node.guard_int("", 0))  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.SymInt.__hash__ = unhashable  # type: ignore[method-assign]
            for one, misses in (*before, *((one, 0) for one in _listed_caches())):
                if one.cache_info().misses != misses:
                    one.cache_clear()


@contextmanager
def sizes_can_be_texts() -> Iterator[None]:
    """While the model's code may write a size into a text, which fixes it: texts of shapes may be compared.

    What torch and this package write for themselves stays as it is.
    """
    known = {kind: kind.__repr__ for kind in _PLAIN_NUMBER}

    def written(size: Any, how: str = "") -> str:
        kind = type(size)
        return known[kind](size) if _is_own_text() else format(_PLAIN_NUMBER[kind](size), how)

    for kind in known:
        kind.__repr__ = kind.__format__ = written
    try:
        yield
    finally:
        for kind, plain in known.items():
            kind.__repr__ = plain
            del kind.__format__


def _is_own_text() -> bool:
    """Whether the text that is being written is of torch or of this package, for a log too."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LOGGING):
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith((TORCH_FOLDER, HERE))


@contextmanager
def _caches_of_before() -> Iterator[list[tuple[Any, int]]]:
    """All caches of this process, and how often each has missed; inside, only those made since are listed.

    So all that is here is frozen inside. Where the program has frozen what it imported, it is thawed to be listed.
    """
    frozen = gc.get_freeze_count()
    if frozen:
        gc.collect()  # else garbage would be kept from now on
        gc.unfreeze()
    try:
        found = [(one, one.cache_info().misses) for one in _listed_caches()]
    finally:
        gc.freeze()
    try:
        yield found
    finally:
        if not frozen:
            gc.unfreeze()


def _listed_caches() -> list[Any]:
    """Those that are not frozen."""
    kind = type(functools.lru_cache(lambda: None))
    return [one for one in gc.get_objects() if type(one) is kind]
