"""What a leaf or glue gives that looks at the numbers in tensors: it is run with some, and its sizes are recognised.

It cannot run without numbers, but it is called as it is when its layer runs; the trace needs the sizes of its
result only. They are those of its arguments, as far as the numbers that were tried show; the layer checks it each time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepspeed_pulse.models.traced.names import FakeTensor, pytree, unset_fake_temporarily


class Unrecognised(Exception):
    """A result cannot be told from its arguments: the message says why."""


def tried(run: Any, args: Any, kwargs: Any) -> Any:
    """The result of a leaf's forward or of a function, without numbers, by runs with random weights and arguments.

    Raises :class:`Unrecognised` where a run fails, or a size of the result is no size of an argument.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [one for one in leaves if isinstance(one, Tensor)]
    module = getattr(run, "__self__", None)
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        function = run if module is None else _with_numbers(module)
        result = _once(function, leaves, spec, whole=1)
        if module is None and not _is_like(result, function, leaves, spec):
            raise Unrecognised("its sizes, or what else it gives, follow from numbers")
    found, form = pytree.tree_flatten(result)
    return pytree.tree_unflatten([_recognised(one, given) for one in found], form)


def _once(run: Any, leaves: Sequence[Any], spec: Any, whole: int) -> Any:
    """``whole``: what whole numbers in tensors are."""
    torch.default_generator.manual_seed(whole)  # not those of devices, which nothing puts back
    random = np.random.default_rng(whole)
    numbers = [_numbers(one, random, whole) for one in leaves]
    tensors = [one for one in numbers if isinstance(one, Tensor)]
    before = [one._version for one in tensors]
    args, kwargs = pytree.tree_unflatten(numbers, spec)
    try:
        result = run(*args, **kwargs)
    except Exception as problem:
        raise Unrecognised(f"with random numbers it fails: {type(problem).__name__}: {problem}") from problem
    if any(one._version != version for one, version in zip(tensors, before, strict=True)):
        raise Unrecognised("it changes an argument in place")
    return result


def _is_like(result: Any, run: Any, leaves: Sequence[Any], spec: Any) -> bool:
    """Whether a function gives the same with other numbers, but for the numbers in tensors; if it takes them."""
    try:
        other = _once(run, leaves, spec, whole=0)
    except Unrecognised:
        return True
    return _told(result) == _told(other)


def _told(result: Any) -> tuple[Any, str]:
    found, form = pytree.tree_flatten(result)
    return [tuple(one.shape) if isinstance(one, Tensor) else repr(one) for one in found], str(form)


def _with_numbers(module: nn.Module) -> Any:
    """The forward of a copy with random weights."""
    random = np.random.default_rng(0)
    weights = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(one): _weight(one, random) for one in weights if isinstance(one, FakeTensor)}
    return copy.deepcopy(module, memo).forward


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _weight(fake: Tensor, random: np.random.Generator) -> Tensor:
    made = _filled(fake, random, 1)
    return nn.Parameter(made, requires_grad=False) if isinstance(fake, nn.Parameter) else made


def _numbers(one: Any, random: np.random.Generator, whole: int) -> Any:
    if isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return one.node.hint
    return _filled(one, random, whole) if isinstance(one, FakeTensor) else one


def _filled(fake: Tensor, random: np.random.Generator, whole: int) -> Tensor:
    """Numbers on the CPU: random ones, or the same ones where they may be counts, places or switches.

    numpy draws them, as what a function draws with torch is noticed.
    """
    shape, dtype = tuple(map(_hint, fake.shape)), fake.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return torch.as_tensor(np.asarray(random.standard_normal(shape))).to(dtype)
    return torch.full(shape, whole, dtype=dtype)


def _recognised(one: Any, given: Sequence[Tensor]) -> Any:
    if not isinstance(one, Tensor):
        if one is None:
            return None
        raise Unrecognised(f"it returns {one!r}, which may follow from numbers, beside tensors")
    if not given:
        raise Unrecognised("it is given no tensor")
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
        raise Unrecognised(f"{size} in the shape of its result may be one of several sizes of its arguments")
    return next(iter(free.values()), size)
