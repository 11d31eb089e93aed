"""What a leaf gives that looks at the numbers in tensors: it is run with some numbers, and its sizes are recognised.

Such a leaf cannot run without numbers, but it is called as it is when its layer runs; the trace needs the sizes of its
result only. They are those of its arguments, as far as the numbers that were tried show; the layer checks it each time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.traced.names import FakeTensor, pytree, unset_fake_temporarily


class Unrecognised(Exception):
    """A leaf's result cannot be told from its arguments."""


def tried(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The result of a leaf, without numbers, by a run with random weights and arguments.

    Raises :class:`Unrecognised` where that run fails, or a size of its result is no size of an argument.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [one for one in leaves if isinstance(one, Tensor)]
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = [*module.parameters(), *module.buffers()]
        memo: dict[int, Any] = {id(one): _weight(one) for one in weights if isinstance(one, FakeTensor)}
        real_args, real_kwargs = pytree.tree_unflatten([_numbers(one) for one in leaves], spec)
        try:
            result = copy.deepcopy(module, memo).forward(*real_args, **real_kwargs)
        except Exception as problem:
            raise Unrecognised from problem
    found, form = pytree.tree_flatten(result)
    return pytree.tree_unflatten([_recognised(one, given) for one in found], form)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _weight(fake: Tensor) -> Tensor:
    made = _filled(tuple(fake.shape), fake.dtype)
    return nn.Parameter(made, requires_grad=False) if isinstance(fake, nn.Parameter) else made


def _numbers(one: Any) -> Any:
    if isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return one.node.hint
    return _filled(tuple(map(_hint, one.shape)), one.dtype) if isinstance(one, FakeTensor) else one


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers on the CPU: random ones, or ones where they may be counts, places or switches."""
    return (
        torch.randn(shape).to(dtype) if dtype.is_floating_point or dtype.is_complex else torch.ones(shape, dtype=dtype)
    )


def _recognised(one: Any, given: Sequence[Tensor]) -> Any:
    if not isinstance(one, Tensor):
        if one is None:
            return None
        raise Unrecognised  # a number or a word that follows from the content
    shape = [_size(size, dim, given) for dim, size in enumerate(one.shape)]
    return torch.empty(shape, dtype=one.dtype, device=given[0].device)


def _size(size: int, dim: int, given: Iterable[Tensor]) -> Any:
    """The argument's size that a size is: at the same place first; a number where all of that size are fixed."""
    alike = [(at, found) for one in given for at, found in enumerate(one.shape) if _hint(found) == size]
    free = {str(found): found for _, found in alike if isinstance(found, torch.SymInt)}
    here = [found for at, found in alike if at == dim and isinstance(found, torch.SymInt)]
    if here:
        return here[0]
    if len(free) > 1:
        raise Unrecognised
    return next(iter(free.values()), size)
