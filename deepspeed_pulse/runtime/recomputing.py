"""Layers run again in backward: a function of values as a function of tensors, as checkpointing wants it.

Every tensor that goes in is an argument, so that gradients reach popped values also where the checkpoint function
cuts the graph (reentrant), and the random state that is kept belongs to the right devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import get_device_states, set_device_states

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.runtime.autocast import Autocast
from deepspeed_pulse.runtime.owning import released
from deepspeed_pulse.runtime.roots import Root, roots_of

Checkpoint = Callable[..., Any]
"""``checkpoint(function, *tensors)`` returns what ``function`` does and runs it again in backward."""


def non_reentrant(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """torch's, with the random state of the forward; arguments need no gradient."""
    return torch_checkpoint(function, *tensors, use_reentrant=False)


class RunLater:
    """A checkpoint function for layers whose backward runs in halves: the graph that :meth:`again` makes serves both.

    torch's makes what it saved anew for every traversal.
    """

    def __init__(self) -> None:
        self._again: Callable[[], Sequence[torch.Tensor]] = list
        self._first: tuple[Root | None, ...] = ()

    def __call__(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        state = _State.now(tensors)

        def again() -> Sequence[torch.Tensor]:
            with torch.enable_grad(), state.restored():
                return function(*tensors)  # type: ignore[no-any-return]

        self._again = again
        with keeping_nothing():  # of this graph only the roots are looked at
            found = function(*tensors)
        self._first = roots_of(found)
        return found

    def again(self) -> dict[tuple[Any, int], Root]:
        """Run the layers again; for each root of the first run, by node and number, that of this one."""
        pairs = zip(self._first, roots_of(self._again()), strict=True)
        return {(old.node, old.output_nr): new for old, new in pairs if old is not None and new is not None}


def keeping_nothing() -> AbstractContextManager[None]:
    """What runs in it makes a graph that no backward can go through."""
    return torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)


def _nothing(_: Any) -> Any:
    return None


@dataclass(frozen=True)
class _State:
    """What a run of layers depends on beside its arguments: random numbers, and autocast."""

    host: torch.Tensor
    devices: tuple[list[int], list[torch.Tensor]]
    device_type: str
    autocast: Autocast

    @classmethod
    def now(cls, tensors: Sequence[torch.Tensor]) -> _State:
        kind = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")
        return cls(torch.get_rng_state(), get_device_states(*tensors), kind, Autocast.now([kind]))

    @contextmanager
    def restored(self) -> Iterator[None]:
        devices, states = self.devices
        with torch.random.fork_rng(devices, device_type=self.device_type), self.autocast.restored():
            torch.set_rng_state(self.host)
            set_device_states(devices, states, device_type=self.device_type)
            yield


def recomputed(
    checkpoint: Checkpoint,
    function: Callable[[Sequence[Any], bool], Sequence[Any]],
    values: Sequence[Any],
    parameters: Sequence[torch.Tensor],
    name: str,
) -> Sequence[Any]:
    """What ``function(values, False)`` returns, checkpointed; in backward it runs as ``function(values, True)``.

    ``values``: tensors, tuples or lists of them, or anything else; ``parameters``: what ``function`` reads besides;
    ``name``: of the layers, for errors.
    """
    tensors: list[torch.Tensor] = []
    shape = [_take_apart(value, tensors) for value in values]
    # an argument that needs a gradient, handed through: a reentrant checkpoint gives parameters no gradient where no
    # argument needs one, and fails in backward where no result does
    plain = checkpoint is non_reentrant or isinstance(checkpoint, RunLater)
    graded = [] if plain else [t for t in (*tensors, *parameters) if t.requires_grad]
    anchors = [torch.zeros(1, device=t.device, requires_grad=True) for t in graded[:1]]
    outcome: list[Any] = []
    runs = 0

    def flat(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal runs
        runs += 1
        parts = iter(given)
        found: list[torch.Tensor] = []
        results = [_take_apart(r, found) for r in function([_put_together(s, parts) for s in shape], runs > 1)]
        if runs == 1:
            outcome.append(results)
        return (*found, *(anchor.clone() for anchor in parts))

    found = checkpoint(flat, *tensors, *anchors)
    (results,) = outcome
    outcome.clear()  # what is no tensor must not be kept alive by its own graph
    if not plain and any(map(_has_other, results)):
        raise GraphError(f"layers {name}: activation_checkpoint_func takes layers that return tensors only")
    parts = iter((found,) if isinstance(found, torch.Tensor) else found)
    returned = [_put_together(result, parts) for result in results]
    # autograd lets nobody change in place what such a function returns: a node without that rule stands behind it
    return returned if plain else [released(value) for value in returned]


_SLOT = object()
"""Where a tensor was."""


@dataclass(frozen=True)
class _Other:
    value: Any


def _take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _SLOT
    if type(value) in (tuple, list):
        return type(value)(_take_apart(item, tensors) for item in value)
    return _Other(value)


def _put_together(shape: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if shape is _SLOT:
        return next(tensors)
    if isinstance(shape, _Other):
        return shape.value
    return type(shape)(_put_together(item, tensors) for item in shape)


def _has_other(shape: Any) -> bool:
    return isinstance(shape, _Other) if shape is _SLOT or isinstance(shape, _Other) else any(map(_has_other, shape))
