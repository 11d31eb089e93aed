"""What becomes of a microbatch's output: a loss, checked, kept for the mean, scaled for backward."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.data.batches import LABELS
from deepspeed_pulse.engine.gradients.scaling import scaled
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.runtime.rank import RankRuntime


class LossEngine(PipelineEngine):
    """``PipelineEngine`` with upstream's books of losses, kept where a plan computes them."""

    _runtime: RankRuntime

    _compute_loss = True
    """Upstream sets it in every ``train_batch`` and ``eval_batch``."""

    def _finish_microbatch(self, output: Any, microbatch: int) -> Any:
        loss_fn = self.module.loss_fn
        if self._compute_loss and loss_fn is not None:
            loss = loss_fn(output, self._runtime.named(LABELS, microbatch))
        else:
            loss = output
        if torch.is_grad_enabled():
            _check_loss(loss, loss_fn)
        if self.eval_return_logits:
            self.outputs = output
        self.fwd_outputs.append(loss.detach() if isinstance(loss, torch.Tensor) else [part.detach() for part in loss])
        self.total_loss = _added(self.total_loss, loss)
        self._add_additional_losses()
        return loss

    def _add_additional_losses(self) -> None:
        additional = self.module.get_additional_losses()
        if additional is not None:
            if self.total_additional_losses is None:
                self.total_additional_losses = OrderedDict()
            for name, loss in additional.items():
                self.total_additional_losses[name] = _added(self.total_additional_losses.get(name), loss)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return scaled(loss / self.gradient_accumulation_steps(), self.optimizer)


def _check_loss(loss: Any, loss_fn: Any) -> None:
    source = "the last layer (there is no loss_fn)" if loss_fn is None else "loss_fn"
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        knob = "pass loss_fn= to PipelineModule" if loss_fn is None else "return the mean over the microbatch"
        raise ConfigError(f"{source}: expected a scalar loss, found {found}; {knob}")
    if not loss.requires_grad:
        raise ConfigError(f"{source}: the loss depends on no trainable parameter; unfreeze some layer")


def _added(total: Any, loss: Any) -> Any:
    if isinstance(loss, torch.Tensor):
        return loss.detach().clone() if total is None else total + loss.detach()
    if total is None:
        return [part.detach().clone() for part in loss]
    return [before + part.detach() for before, part in zip(total, loss, strict=True)]
