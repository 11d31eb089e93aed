"""What becomes of a microbatch's output: a loss, checked, kept for the mean, scaled and differentiated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.backbones import Head
from deepspeed_pulse.engine.gradients.scaling import scaled
from deepspeed_pulse.errors import ConfigError


class Losses:
    """Upstream's books of losses, kept where a plan computes them, and upstream's backward.

    ``labels`` gives those of a microbatch, ``number`` the step that the microbatch is of.
    """

    def __init__(
        self, engine: Any, heads: Sequence[Head], labels: Callable[[str, int], Any], number: Callable[[], int]
    ) -> None:
        self._engine, self._heads, self._labels, self._number = engine, heads, labels, number
        self._totals: dict[tuple[int, int], torch.Tensor] = {}
        """By backbone and step."""
        self._micro_batches = 1
        engine.losses = {}

    def begin(self, micro_batches: int, *, runs_on: bool = False) -> None:
        """A step of any kind begins, of so many microbatches; ``runs_on``: into it, one of training of as many."""
        self._micro_batches = micro_batches
        if not runs_on:
            self._totals.clear()

    def finish(self, output: Any, microbatch: int, backbone: int) -> Any:
        """The loss of a microbatch, from the last layer's output; the output itself where no loss is asked for.

        In training, a ConfigError where it is no scalar or depends on nothing that trains.
        """
        engine, head = self._engine, self._heads[backbone]
        loss_fn, loss = engine.module.loss_function(head), output
        if engine._compute_loss and loss_fn is not None:
            loss = loss_fn(output, self._labels(head.labels, microbatch))
        if torch.is_grad_enabled():
            _check_loss(loss, loss_fn, head)
        if head.name is not None:
            self._add(backbone, loss)
            return loss
        if engine.eval_return_logits:
            engine.outputs = output
        _check_output(loss, "the last layer" if loss is output else "loss_fn")
        engine.fwd_outputs.append(_kept(loss) if isinstance(loss, torch.Tensor) else list(map(_kept, loss)))
        if torch.is_grad_enabled():  # in an evaluation nobody reads the sum, and outputs may differ in shape
            engine.total_loss = _added(engine.total_loss, loss)
        additional, totals = engine.module.get_additional_losses(), engine.total_additional_losses
        if additional is not None:
            totals = OrderedDict() if totals is None else totals
            totals.update({name: _added(totals.get(name), part) for name, part in additional.items()})
            engine.total_additional_losses = totals
        return loss

    def _add(self, backbone: int, loss: Any) -> None:
        """Of several backbones; a ConfigError for losses beside the loss, which nothing says whose they are."""
        if self._engine.module.get_additional_losses() is not None:
            raise ConfigError(
                "get_additional_losses(): expected None with several backbones, each of which has one loss; add what "
                "it returns to the loss of its backbone"
            )
        place = backbone, self._number()
        before = self._totals.get(place)
        self._totals[place] = _added(before, loss)

    def gather(self, micro_batches: int, ended: Mapping[int, int] | None = None) -> torch.Tensor:
        """The sum of the backbones' mean losses, the same on every rank; collective. ``engine.losses`` has each.

        ``ended``: by backbone, the number of the last step that it has ended; None: the step's. One that has ended none
        is left out.
        """
        engine, count = self._engine, len(self._heads)
        found = torch.zeros(count, dtype=torch.float32, device=engine.device)
        for (index, number), total in list(self._totals.items()):
            if ended is None or ended.get(index) == number:
                found[index] = total.float() / micro_batches
            if ended is None or number <= ended.get(index, 0):
                del self._totals[index, number]
        dist.all_reduce(found, group=engine.grid.get_pipe_parallel_group())
        engine.dp_group_loss = found.sum()
        if engine.is_data_parallel:
            dist.all_reduce(found, group=engine.mpu.get_data_parallel_group())
            found = found / engine.dp_world_size
        known = [index for index in range(count) if ended is None or index in ended]
        engine.losses = {str(self._heads[index].name): found[index].clone() for index in known}
        return found.sum()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the optimizer expects the sum of its gradients over a step."""
        return scaled(loss / self._micro_batches, self._engine.optimizer)

    def drop_gradients(self) -> None:
        """Those that DeepSpeed's bf16 optimizer has added to its own; it adds all that is there, of every stage."""
        if self._engine.using_bf16_optimizer:
            self._engine.optimizer.clear_lp_grads(set_to_none=True)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """What upstream does before and after a backward."""
        engine = self._engine
        self.drop_gradients()  # of a step that broke off
        # The flag tells upstream's hooks that prologue and epilogue are called here.
        engine._running_engine_backward = True
        try:
            engine._backward_prologue()
            yield
            engine._backward_epilogue()
        finally:
            engine._running_engine_backward = False


def _check_loss(loss: Any, loss_fn: Any, head: Head) -> None:
    source = "the last layer (there is no loss_fn)" if loss_fn is None else "loss_fn"
    source = source if head.name is None else f"backbone {head.name}: {source}"
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        knob = "pass loss_fn= to PipelineModule" if loss_fn is None else "return the mean over the microbatch"
        raise ConfigError(f"{source}: expected a scalar loss, found {found}; {knob}")
    if not loss.requires_grad:
        raise ConfigError(
            f"{source}: the loss depends on no trainable parameter; unfreeze some layer, or, where a reentrant "
            "checkpoint in a layer has no input that wants a gradient, use use_reentrant=False there"
        )


def _check_output(found: Any, source: str) -> None:
    """What an evaluation gives is a tensor, or several in a row."""
    several = isinstance(found, (tuple, list)) and all(isinstance(one, torch.Tensor) for one in found)
    if not isinstance(found, torch.Tensor) and not several:
        raise ConfigError(
            f"{source}: expected a tensor or a tuple of tensors to give to the caller, found {type(found).__name__}; "
            "return one of these"
        )


def _kept(loss: torch.Tensor) -> torch.Tensor:
    """To be summed: a loss in fp32, or a sum of many would stand still."""
    found = loss.detach()
    return found.float() if found.numel() == 1 and found.dtype in (torch.bfloat16, torch.float16) else found


def _added(total: Any, loss: Any) -> Any:
    if not isinstance(loss, torch.Tensor):
        totals = [None] * len(loss) if total is None else total
        return [_added(before, part) for before, part in zip(totals, loss, strict=True)]
    return _kept(loss).clone() if total is None else total + _kept(loss)
