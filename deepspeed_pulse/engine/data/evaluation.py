"""Evaluation: upstream's options, refused where they would hang, and the training data left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.data.batches import kind
from deepspeed_pulse.errors import ConfigError


class EvaluatingEngine(PipelineEngine):
    """``PipelineEngine`` whose ``eval_batch`` checks what is asked before any rank waits for another."""

    _broadcasts = False
    """True while an evaluation runs whose loss every rank of the pipeline receives."""

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As upstream, forward only.

        Args:
            data_iter: batches ``(inputs, labels)``; training goes on with its own afterwards.
            return_logits: also return the last layer's output of the last microbatch, on the last stage's rank.
            compute_loss: False returns outputs instead of losses, and reads no labels.
            reduce_output: ``"avg"`` over microbatches and replicas, or None: the last stage's rank gets the list of
                all microbatches, the others None.
            bcast_loss: every rank gets the loss.
            num_micro_batches: any number; as in training when left out.

        Raises:
            ConfigError: an option is unknown, or what would be broadcast is no scalar.
        """
        _check_options(compute_loss, reduce_output, bcast_loss, num_micro_batches)
        training_data = self.data_iterator
        with self._monitoring(compute_loss and reduce_output is not None):
            self._broadcasts = compute_loss and (bcast_loss or self.monitor.enabled)
            # upstream would add what comes out to the last training loss, whatever its shape
            self.total_loss = None
            try:
                return super().eval_batch(
                    data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
                )
            finally:
                self.data_iterator, self.total_loss = training_data, None
                self.eval_return_logits = self._broadcasts = False

    @contextmanager
    def _monitoring(self, wanted: bool) -> Iterator[None]:
        """Upstream hands the monitor whatever comes out, on rank 0 only; outputs and lists are no loss to log."""
        before = self.monitor.enabled
        self.monitor.enabled = before and wanted
        try:
            yield
        finally:
            self.monitor.enabled = before

    def _reduce_outputs(self, outputs: Any, reduce: str | None = "avg", **options: Any) -> Any:
        """As upstream, on the last stage's rank; several losses are averaged each."""
        if self._broadcasts:
            _check_scalar(outputs[0])
        if reduce is None or isinstance(outputs[0], torch.Tensor):
            return super()._reduce_outputs(outputs, reduce, **options)
        columns = zip(*outputs, strict=True)
        return [super(EvaluatingEngine, self)._reduce_outputs(list(column), reduce, **options) for column in columns]


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


def _check_scalar(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else kind(loss)
    raise ConfigError(
        f"eval_batch: expected a scalar loss to give to every rank, found {found}; return one scalar from loss_fn, or "
        "pass bcast_loss=False (compute_loss=False for outputs without a loss) and read it on the last stage's rank; a "
        "monitor broadcasts too, to log the loss"
    )
