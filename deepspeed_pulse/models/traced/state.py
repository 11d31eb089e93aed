"""What a forward leaves in the attributes of opened modules, for its next run or for the script: layers would not."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.traced.attributes import Change
from deepspeed_pulse.models.traced.names import FakeTensor
from deepspeed_pulse.models.traced.recording import ENTRY, Recorder

_MOVES = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "clone", "detach"}
)
"""Functions of torch's that give the numbers of their first argument again."""

_FORMS = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)
"""Those that look at no numbers of their first argument."""


def check_state(name: str, recorder: Recorder, modules: Iterable[nn.Module], made: Collection[str]) -> None:
    """Refuse counters, and tensors that a forward leaves in place of numbers or of tensors; a filled cache is none.

    ``made``: paths of attributes that an earlier forward has left. Raises :class:`GraphError`.
    """
    for change in recorder.changes(modules):
        path = recorder.told(change)
        if _is_counter(change):
            raise GraphError(
                f"{name} changes {path} in its forward (from {change.before!r} to {change.now!r}), which layers would "
                "not; keep such a counter outside of forward, or name the module around it with blocks=[...]"
            )
        if _is_result(change, recorder, path in made):
            raise GraphError(
                f"{name} sets {path} to a tensor that its forward computes, which layers would not; return it with the "
                "output, or name the module around that line with blocks=[...]; where nothing reads it after a "
                "forward, make it None before to_layers()"
            )


def _is_counter(change: Change) -> bool:
    plain = (int, float, str, bool, type(None))
    both = isinstance(change.before, plain) and isinstance(change.now, plain)
    return both and len(change.key) == 1 and bool(change.before != change.now)


def _is_result(change: Change, recorder: Recorder, was_made: bool) -> bool:
    """Whether a tensor is one that somebody may read after the forward."""
    before, now = change.before, change.now
    if not isinstance(now, Tensor) or (len(change.key) > 1 and change.key[0] not in ("_parameters", "_buffers")):
        return False
    if not isinstance(before, Tensor):
        return isinstance(before, (int, float, str))
    old, new = recorder.known(before), recorder.known(now)
    if was_made and old is None:
        return False
    return isinstance(now, FakeTensor) if new is None else _has_numbers_of(recorder, new, old)


def _has_numbers_of(recorder: Recorder, new: int, old: int | None) -> bool:
    """Whether a value follows from numbers of the batch, or from those of ``old``; ``old`` itself, cast, does not."""
    sources, seen, waiting, moved_only = set[int](), set[int](), [new], True
    while waiting:
        value = recorder.values[waiting.pop()]
        if value.index in seen:
            continue
        seen.add(value.index)
        if value.call is None:
            sources.add(value.index)
            continue
        call = recorder.calls[value.call]
        moves, forms = (call.path is None and call.name in names for names in (_MOVES, _FORMS))
        moved_only = moved_only and moves
        waiting += () if forms else call.reads[:1] if moves else call.reads
    if any(recorder.values[source].kind == ENTRY for source in sources):
        return True
    return old in sources and not moved_only
