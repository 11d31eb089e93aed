"""What all ranks must agree on: the config block, the first batch, the data itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from deepspeed_pulse.config import PulseConfig, parse_pulse
from deepspeed_pulse.errors import BatchError, ConfigError, FileError, PulseError, RunError, in_words

T = TypeVar("T")


def check_same_block(module: Any, config: Any) -> None:
    """The block that ``deepspeed.initialize`` brings must be the one the module was planned with."""
    block = config.get("pulse") if isinstance(config, dict) else None
    brought = parse_pulse(block)
    if module.job.config is None and brought is None:
        return
    if brought != module.pulse:
        raise ConfigError(
            'deepspeed.initialize brings another "pulse" block than PipelineModule was planned with: expected '
            f"{_show(module.pulse)}, found {_show(brought)}; pass config= to PipelineModule, the same as to initialize"
        )


def _show(pulse: PulseConfig | None) -> str:
    return "none" if pulse is None else str(pulse.model_dump(exclude_defaults=True) or "defaults")


def check_zero_stage(stage: int) -> None:
    """Refuse ZeRO stages that cut gradients or weights."""
    if stage >= 2:
        raise ConfigError(
            f"zero_optimization.stage: expected 0 or 1, found {stage}: ZeRO-2 and ZeRO-3 cut gradients and weights "
            "after every backward, while a pipeline accumulates gradients over its microbatches; use stage 1"
        )


def check_batch_size(size: Any, microbatch_size: int, replicas: int) -> None:
    """A global batch is a whole number of microbatches on every replica."""
    share = microbatch_size * replicas
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % share:
        raise ConfigError(
            f"set_train_batch_size: expected a multiple of {share} (microbatches of {microbatch_size} on {replicas} "
            f"data-parallel replicas), found {size!r}"
        )


def check_same_step(kind: str, microbatches: int, microbatch_size: int, group: Any) -> None:
    """All ranks of the world must begin the same step; collective, a few numbers.

    Args:
        kind: of step.
        microbatches: that it has.
        group: over the host's memory; None: the world's.

    Raises:
        BatchError: they differ; the same on every rank, with the numbers.
    """
    world = dist.get_world_size()
    mine = (zlib.crc32(kind.encode()), microbatches, microbatch_size)
    largest = torch.tensor([sign * number for number in mine for sign in (1, -1)])
    if world > 1:
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    if all(high == -low for high, low in largest.view(-1, 2).tolist()):
        return
    steps = [
        f"{count} microbatches of {size} samples ({name})"
        for name, count, size in told_by_all((kind, microbatches, microbatch_size), world, group)
    ]
    other = next(rank for rank, step in enumerate(steps) if step != steps[0])
    raise BatchError(
        f"ranks begin different steps: rank 0 one of {steps[0]}, rank {other} one of {steps[other]}; call train_batch, "
        "eval_batch(num_micro_batches=) and set_train_batch_size with the same numbers on every rank"
    )


def agree(make: Callable[[], Any], what: str) -> Any:
    """Run ``make`` on rank 0; every rank gets its result, or raises the same error, which names ``what``."""
    outcome: list[Any] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [make()]
        except PulseError as problem:
            outcome = [problem]
        except Exception as problem:  # a layer's own, met while it is built or measured
            cause, outcome = problem, [RunError(f"{what} on rank 0: {type(problem).__name__}: {problem}")]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], PulseError):
        raise outcome[0] from cause
    return outcome[0]


def told_by_all(item: Any, group_size: int, group: Any = None) -> list[Any]:
    """``item`` of every rank of a group (None: the world), in order."""
    found = [item] * group_size
    if group_size > 1:
        # not deepspeed.comm's: its logger (comms_logger) does not know this operation and ends the process
        torch.distributed.all_gather_object(found, item, group=group)
    return found


def raise_everywhere(
    problem: Exception | None, what: str, group_size: int, kind: type[PulseError] = BatchError
) -> None:
    """Raise the first error any rank of the world has, on every rank.

    Args:
        problem: this rank's error; one that is no PulseError (a loader's own) is told as one of ``kind``.
        what: names what failed then.
        group_size: ranks of the world.
    """
    told = problem
    if problem is not None and not isinstance(problem, PulseError):
        told = kind(f"rank {dist.get_rank()}: {what}: {type(problem).__name__}: {problem}")
    if group_size > 1:
        told = next((p for p in told_by_all(told, group_size) if p is not None), None)
    if told is not None:
        raise told from (None if problem is told else problem)


def everywhere(act: Callable[[], T], what: str, kind: type[PulseError] = FileError) -> T:
    """Run ``act`` on every rank of the world; what one rank meets is raised by all.

    Args:
        act: makes no collective calls that a rank which fails would leave out.
        what: names what failed, for an error that is no PulseError: it is told as one of ``kind``.
    """
    problem: Exception | None = None
    try:
        result = act()
    except Exception as found:
        problem = found
    raise_everywhere(problem, what, dist.get_world_size(), kind)
    return result


def as_pulse_error(problem: Exception, what: str) -> PulseError:
    """An error that can be told to other ranks; it names ``what`` where it is none of this package's."""
    if isinstance(problem, PulseError):
        return problem
    told = RunError(f"{what}: {in_words(problem)}")
    told.__cause__ = problem
    return told


def check_something_trains(parameters: Iterable[torch.nn.Parameter], group_size: int) -> None:
    """Some rank of the world must have a trainable parameter.

    Args:
        parameters: this rank's, without the placeholder.
        group_size: ranks of the world.
    """
    mine = any(p.requires_grad for p in parameters)
    if not any(told_by_all(mine, group_size)):
        raise ConfigError(
            "no layer has a trainable parameter: the loss depends on no trainable parameter; unfreeze some layer"
        )


def told_by_first(make: Callable[[], Any] | None, first: int, group: Any) -> Any:
    """What ``make`` returns on the first rank of a pipeline, on all of them; or its error, on all of them.

    Args:
        make: None on the other ranks.
        first: global rank of the first rank.
        group: the pipeline's process group; None when it is alone.
    """
    outcome: list[Any] = [None]
    cause: Exception | None = None
    if make is not None:
        try:
            outcome = [make()]
        except (PulseError, StopIteration) as problem:
            outcome = [problem]
        except Exception as problem:  # whatever a loader raises
            cause, outcome = problem, [BatchError(f"rank {dist.get_rank()}: {type(problem).__name__}: {problem}")]
    if group is not None:
        dist.broadcast_object_list(outcome, src=first, group=group)
    if isinstance(outcome[0], Exception):
        raise outcome[0] from cause
    return outcome[0]


def who_has_data(has_iterator: bool, first_rank: int, pipelines: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Which ranks of a pipeline were given an iterator: the same in every pipeline, and the first rank always.

    Args:
        first_rank: pipeline rank of the first stage.
        pipelines: global ranks of every pipeline.
    """
    found = told_by_all(has_iterator, dist.get_world_size())
    patterns = [tuple(found[rank] for rank in ranks) for ranks in pipelines]
    if any(not pattern[first_rank] for pattern in patterns):
        raise BatchError(
            "the first pipeline rank was given no data: pass data_iter to train_batch (or training_data to "
            "deepspeed.initialize) on every rank, or at least on the first"
        )
    if len(set(patterns)) > 1:
        raise BatchError(
            "some pipeline ranks were given a data iterator in one pipeline and none in another: pass data_iter on the "
            f"same pipeline ranks everywhere (by data-parallel index, ranks with data: {_with_data(patterns)})"
        )
    return patterns[0]


def _with_data(patterns: Sequence[Sequence[bool]]) -> str:
    return "; ".join(str([rank for rank, has in enumerate(pattern) if has]) for pattern in patterns)


def difference_in_data(
    names: Sequence[str],
    checksums: Sequence[int | None],
    *,
    first_rank: int,
    group: Any,
    size: int,
    device: torch.device,
) -> tuple[str, int] | None:
    """A batch entry that a rank has read otherwise than the first rank, and that rank; None where there is none.

    Collective in the pipeline; every rank gets the same.

    Args:
        names: batch entries in one order everywhere.
        checksums: this rank's checksum of each; None where it read none of its own.
    """
    mine = torch.tensor([-1 if c is None else c for c in checksums], dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=group)
    first = found[first_rank].tolist()
    for rank, others in enumerate(found):
        for name, expected, value in zip(names, first, others.tolist(), strict=True):
            if value not in (-1, expected):
                return name, rank
    return None
