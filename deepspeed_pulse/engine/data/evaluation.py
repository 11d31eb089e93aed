"""Evaluation: upstream's options, refused where they would hang, and the training data left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_pulse.engine.data.batches import kind
from deepspeed_pulse.errors import ConfigError


class Evaluation:
    """What an engine's ``eval_batch`` does besides upstream's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._broadcasts = False
        """True while an evaluation runs whose loss every rank of the pipeline receives."""

    @contextmanager
    def under_way(
        self,
        compute_loss: bool,
        reduce_output: str | None,
        bcast_loss: bool,
        num_micro_batches: int | None,
        return_logits: bool,
    ) -> Iterator[None]:
        """Around upstream's ``eval_batch``; an unknown option is a :class:`ConfigError` before any rank waits."""
        _check_options(compute_loss, reduce_output, bcast_loss, num_micro_batches)
        engine = self._engine
        if engine.module.has_several:
            _check_for_several(compute_loss, reduce_output, bcast_loss, return_logits)
        training_data, monitors = engine.data_iterator, engine.monitor.enabled
        # upstream hands the monitor whatever comes out, on rank 0 only; outputs and lists are no loss to log
        engine.monitor.enabled = monitors and compute_loss and reduce_output is not None
        self._broadcasts = compute_loss and (bcast_loss or engine.monitor.enabled)
        # upstream would add what comes out to the last training loss, whatever its shape
        engine.total_loss = None
        try:
            yield
        finally:
            engine.data_iterator, engine.total_loss = training_data, None
            engine.eval_return_logits = self._broadcasts = False
            engine.monitor.enabled = monitors

    def reduced(self, outputs: Any, reduce: str | None, mean: Callable[[Any], Any]) -> Any:
        """Outputs of all microbatches as one, by upstream's ``mean`` of a list of tensors; several losses one by one.

        Raises a :class:`ConfigError` where what would be broadcast is no scalar.
        """
        if self._broadcasts:
            _check_scalar(outputs[0])
        if reduce is None or isinstance(outputs[0], torch.Tensor):
            return mean(outputs)
        return [mean(list(column)) for column in zip(*outputs, strict=True)]


def _check_options(compute_loss: bool, reduce_output: Any, bcast_loss: bool, num_micro_batches: Any) -> None:
    if reduce_output is not None and str(reduce_output).lower() != "avg":
        raise ConfigError(f'eval_batch(reduce_output=): expected "avg" or None, found {reduce_output!r}')
    if reduce_output is None and compute_loss and bcast_loss:
        raise ConfigError(
            "eval_batch(reduce_output=None): expected bcast_loss=False with it, found True: the losses of all "
            "microbatches are a list on the last stage's rank, which is not broadcast"
        )
    if num_micro_batches is not None and (
        isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1
    ):
        raise ConfigError(
            f"eval_batch(num_micro_batches=): expected an integer >= 1, or None for as many as in training, found "
            f"{num_micro_batches!r}"
        )


def _check_for_several(compute_loss: bool, reduce_output: Any, bcast_loss: bool, return_logits: bool) -> None:
    """Backbones give outputs on several ranks, and one number stands for all of them."""
    wanted: dict[str, tuple[Any, Any]] = {"compute_loss": (compute_loss, True), "bcast_loss": (bcast_loss, True)}
    wanted |= {"reduce_output": (reduce_output, "avg"), "return_logits": (return_logits, False)}
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ConfigError(
                f"eval_batch({name}=): expected {expected!r} with several backbones, found {found!r}: they give "
                "outputs on several ranks; engine.losses has the loss of each; for outputs save one and run it alone"
            )


def _check_scalar(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else kind(loss)
    raise ConfigError(
        f"eval_batch: expected a scalar loss to give to every rank, found {found}; return one scalar from loss_fn, or "
        "pass bcast_loss=False (compute_loss=False for outputs without a loss) and read it on the last stage's rank; a "
        "monitor broadcasts too, to log the loss"
    )
