"""What all ranks must agree on: the config block, the first batch, the data itself."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import largest_of_all, raise_everywhere, told_by_all
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import BatchError, ConfigError, RunError


def check_batch_size(size: Any, microbatch_size: int, replicas: int) -> None:
    """A global batch is a whole number of microbatches on every replica."""
    share = microbatch_size * replicas
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % share:
        raise ConfigError(
            f"set_train_batch_size: expected a multiple of {share} (microbatches of {microbatch_size} on {replicas} "
            f"data-parallel replicas), found {size!r}"
        )


def agree_on_step(
    kind: str,
    microbatches: int,
    microbatch_size: int,
    group: Any,
    *,
    asked_to_stop: bool,
    trains_anew: bool,
    problem: Exception | None,
) -> tuple[bool, bool]:
    """Whether any rank was asked to stop, and whether any has other weights that train than in the step before.

    Collective, a few numbers, once at the start of a step.

    ``kind``: of step; ``group``: over the host's memory; None: the world's; ``problem``: this rank's, with the data.

    Raises:
        BatchError: ranks begin different steps, with the numbers; or a rank has no first batch, with what it met. The
            same on every rank of the world.
        StopIteration: no rank was asked to stop, and the data of one is over.
    """
    is_over = isinstance(problem, StopIteration)
    met = 0 if problem is None else 1 if is_over else 2
    mine = (zlib.crc32(kind.encode()), microbatches, microbatch_size)
    flags = (int(asked_to_stop), int(trains_anew), met)
    told = torch.tensor([*flags, *(sign * number for number in mine for sign in (1, -1))])
    stops, anew, worst, *numbers = largest_of_all(told, group).tolist()
    if all(high == -low for high, low in zip(numbers[::2], numbers[1::2], strict=True)):
        if worst == 2:
            raise_everywhere(None if is_over else problem, "the first batch cannot be drawn")
        if worst and not stops:
            raise StopIteration(
                "the data iterator of a rank is over: catch this at the end of an epoch, or pass one that goes on "
                "(deepspeed.runtime.dataloader.RepeatingLoader)"
            )
        return bool(stops), bool(anew)
    steps = told_by_all(f"{microbatches} microbatches of {microbatch_size} samples ({kind})", group)
    other = next(rank for rank, step in enumerate(steps) if step != steps[0])
    raise BatchError(
        f"ranks begin different steps: rank 0 one of {steps[0]}, rank {other} one of {steps[other]}; call train_batch, "
        "eval_batch(num_micro_batches=) and set_train_batch_size with the same numbers on every rank"
    )


def check_optimizer(optimizer: Any) -> None:
    """Every rank must have one to train; ``optimizer``: this rank's, or None."""
    if not all(told_by_all(optimizer is not None)):
        raise ConfigError(
            'train_batch: expected an optimizer, found none; add an "optimizer" block to the config, or pass '
            "optimizer= to deepspeed.initialize"
        )


def check_something_trains(module: Any) -> None:
    """Some rank of the world must have a trainable parameter, of each backbone; ``module``: this rank's."""
    if module.has_several:
        _check_each_trains(module)
        return
    mine = any(p.requires_grad and not is_placeholder(name) for name, p in module.named_parameters())
    if not any(told_by_all(mine)):
        raise ConfigError(
            "no layer has a trainable parameter: the loss depends on no trainable parameter; unfreeze some layer"
        )


def check_same_weights_train(module: Any) -> None:
    """Replicas, and copies of a tied weight, train the same; ``module``: this rank's. Collective in the world."""
    mine = {name: p.requires_grad for name, p in module.named_parameters() if not is_placeholder(name)}
    first: dict[str, tuple[int, bool]] = {}
    for rank, found in enumerate(told_by_all(mine)):
        for name, trains in found.items():
            other, expected = first.setdefault(name, (rank, trains))
            if trains is not expected:
                trained, frozen = (rank, other) if trains else (other, rank)
                raise RunError(
                    f"parameter {name} trains on rank {trained} and is frozen on rank {frozen}; freeze it, or let it "
                    "train, on every rank that holds it: in each replica, and each copy of a tied weight"
                )


def _check_each_trains(module: Any) -> None:
    mine = {module.backbone_of(p) for p in module.parameters() if p.requires_grad}
    trained = set[int | None]().union(*told_by_all(mine))
    still = next((head.name for index, head in enumerate(module.job.heads) if index not in trained), None)
    if still is not None:
        raise ConfigError(
            f"backbone {still}: no layer has a trainable parameter: its loss depends on no trainable parameter; "
            "unfreeze some layer, or leave the backbone out"
        )


def who_has_data(has_iterator: bool, first_rank: int, pipelines: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Which ranks of a pipeline were given an iterator: the same in every pipeline, and the first rank always.

    ``first_rank``: pipeline rank of the first stage; ``pipelines``: global ranks of every pipeline.
    """
    found = told_by_all(has_iterator)
    patterns = [tuple(found[rank] for rank in ranks) for ranks in pipelines]
    if any(not pattern[first_rank] for pattern in patterns):
        raise BatchError(
            "the first pipeline rank was given no data: pass data_iter to train_batch (or training_data to "
            "deepspeed.initialize) on every rank, or at least on the first",
            more="no-data",
        )
    if len(set(patterns)) > 1:
        with_data = (str([rank for rank, has in enumerate(pattern) if has]) for pattern in patterns)
        raise BatchError(
            "some pipeline ranks were given a data iterator in one pipeline and none in another: pass data_iter on the "
            f"same pipeline ranks everywhere (by data-parallel index, ranks with data: {'; '.join(with_data)})"
        )
    return patterns[0]


def same_data(mine: Sequence[int | None] | None) -> list[int]:
    """Pipelines whose first ranks have read the same as another's before; none where each has its own data.

    Collective in the world. ``mine``: checksums of what this rank has read, on the first rank of each pipeline.
    """
    read = [found for found in told_by_all(None if mine is None else list(mine)) if found is not None]
    return [index for index, found in enumerate(read) if found in read[:index]]


def difference_in_data(
    names: Sequence[str], checksums: Sequence[int | None], *, first_rank: int, seat: Seat
) -> tuple[str, int] | None:
    """A batch entry that a rank has read otherwise than the first rank, and that rank; None where there is none.

    Collective in the pipeline; every rank gets the same. ``names``: batch entries in one order everywhere;
    ``checksums``: this rank's checksum of each; None where it read none of its own.
    """
    mine = torch.tensor([-1 if c is None else c for c in checksums], dtype=torch.int64, device=seat.device)
    found = [torch.empty_like(mine) for _ in seat.ranks]
    dist.all_gather(found, mine, group=seat.group)
    first = found[first_rank].tolist()
    for rank, others in enumerate(found):
        for name, expected, value in zip(names, first, others.tolist(), strict=True):
            if value not in (-1, expected):
                return name, rank
    return None
