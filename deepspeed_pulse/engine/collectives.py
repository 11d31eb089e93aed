"""What ranks do together: one decides for all, all tell each other, and what one meets is raised by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import BatchError, FileError, PulseError, RunError, in_words

T = TypeVar("T")


def agree(make: Callable[[], T], what: str) -> T:
    """Run ``make`` on rank 0; every rank gets its result, or raises the same error, which names ``what``.

    One that is none of this package's, a layer's own, met while it is built or measured, is told as a RunError.
    """
    return _decided(make, RunError, f"{what} on rank 0", decider=0)


def decided_in_pipeline(make: Callable[[], T], decider: int, seat: Seat) -> T:
    """What ``make`` returns on pipeline rank ``decider``, on all ranks of the pipeline; or its error, on all.

    One that is none of this package's, whatever a loader raises, is told as a BatchError.
    """
    source = seat.ranks[decider]
    return _decided(make, BatchError, f"rank {source}", decider=source, group=seat.group)


def _decided(make: Callable[[], T], kind: type[PulseError], where: str, *, decider: int, group: Any = None) -> T:
    outcome: list[Any] = [None]
    cause: Exception | None = None
    if dist.get_rank() == decider:
        try:
            outcome = [make()]
        except (PulseError, StopIteration) as problem:
            outcome = [problem]
        except Exception as problem:
            cause, outcome = problem, [kind(f"{where}: {type(problem).__name__}: {problem}")]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(outcome, src=decider, group=group)
    if isinstance(outcome[0], Exception):
        raise outcome[0] from cause
    found: T = outcome[0]
    return found


def told_by_all(item: Any, group: Any = None) -> list[Any]:
    """``item`` of every rank of a group (None: the world), in order."""
    found = [item] * dist.get_world_size(group)
    if len(found) > 1:
        # not deepspeed.comm's: its logger (comms_logger) does not know this operation and ends the process
        torch.distributed.all_gather_object(found, item, group=group)
    return found


_LARGEST_TAG = 3
"""Other messages of this package have smaller ones."""


def largest_of_all(mine: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The largest that any rank of the world has, element by element, in the host's memory.

    Every rank hands what it knows to one that is 1, 2, 4, ... further on: log2(ranks) messages follow one another. An
    all-reduce of gloo's goes round a ring twice however small it is: 1022 messages on 512 ranks, tens of ms a step.

    ``group``: over the host's memory, of all ranks; None: the world's own is.
    """
    known, rank, ranks, ahead = mine, dist.get_rank(), dist.get_world_size(), 1
    while ahead < ranks:
        other = torch.empty_like(known)
        sent = torch.distributed.isend(known, (rank + ahead) % ranks, group=group, tag=_LARGEST_TAG)
        torch.distributed.recv(other, (rank - ahead) % ranks, group=group, tag=_LARGEST_TAG)
        assert sent is not None  # every rank is in the group
        sent.wait()
        known, ahead = torch.maximum(known, other), 2 * ahead
    return known


def raise_everywhere(problem: Exception | None, what: str, kind: type[PulseError] = BatchError) -> None:
    """Raise the first error any rank of the world has, on every rank.

    One that is no PulseError (a loader's own) is told as one of ``kind``, which names ``what`` failed.
    """
    own = None if problem is None else as_pulse_error(problem, f"rank {dist.get_rank()}: {what}", kind)
    told = next((p for p in told_by_all(own) if p is not None), None)
    if told is not None:
        raise told from (None if problem is told else problem)


def everywhere(act: Callable[[], T], what: str, kind: type[PulseError] = FileError) -> T:
    """Run ``act`` on every rank of the world; what one rank meets is raised by all, as :func:`raise_everywhere` does.

    ``act`` makes no collective calls that a rank which fails would leave out.
    """
    problem: Exception | None = None
    try:
        result = act()
    except Exception as found:
        problem = found
    raise_everywhere(problem, what, kind)
    return result


def as_pulse_error(problem: Exception, what: str, kind: type[PulseError] = RunError) -> PulseError:
    """An error that can be told to other ranks: of ``kind``, naming ``what``, where it is none of this package's."""
    if isinstance(problem, PulseError):
        return problem
    told = kind(f"{what}: {in_words(problem)}")
    told.__cause__ = problem
    return told


@contextmanager
def told_as(kind: type[PulseError], what: str = "") -> Iterator[None]:
    """What is raised inside and none of this package's, a layer's own, is told as one of ``kind``, behind ``what``."""
    try:
        yield
    except PulseError:
        raise
    except Exception as problem:
        raise kind(f"{what}{in_words(problem)}") from problem
