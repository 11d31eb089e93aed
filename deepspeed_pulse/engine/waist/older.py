"""What older versions of DeepSpeed lack, on top of what they have.

Each adapter stands where a feature is missing, whatever the version calls itself. Elsewhere its name is upstream's.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.comm import comm
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import TrainSchedule

from deepspeed_pulse.errors import ConfigError

_HAS_SEAMS = hasattr(PipelineEngine, "_train_schedule")
_LOSES_STATE = "bfloat16_enabled" in PipelineEngine._save_checkpoint.__code__.co_names
_DIVIDES_ONCE = "_backward_prologue_per_tensor" in vars(PipelineEngine)


class _Stepping(PipelineEngine):
    """``PipelineEngine`` whose ZeRO-1 steps: torch takes its gather for a change of a differentiable view.

    0.18.4 with bf16 and neither ZeRO nor sums in fp32 writes its optimizer's state into no file of a checkpoint.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain_bf16 = self.bfloat16_enabled() and not self.zero_optimization() and not self.using_bf16_optimizer
        if _LOSES_STATE and plain_bf16 and self.module.pulse is not None:
            raise ConfigError(
                f"bf16 without ZeRO: DeepSpeed {deepspeed.__version__} does not save the optimizer state then; set "
                '"zero_optimization": {"stage": 1} or "data_types": {"grad_accum_dtype": "fp32"}, or take a newer one'
            )

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            super()._take_model_step(*args, **kwargs)


class _WithSeams(_Stepping):
    """``PipelineEngine`` that asks itself for its schedule and for the rank of the loss."""

    def eval_batch(
        self, data_iter: Any, return_logits: Any, compute_loss: bool, reduce: Any, bcast: bool, num_micro_batches: Any
    ) -> Any:
        # asked for here, where newer versions ask: before upstream's barrier, which ranks that train do not come to
        training: Any = self.data_iterator
        self.data_iterator: Any = data_iter
        self._compute_loss = compute_loss
        self.module.eval()
        self._evaluating = self._inference_schedule(num_micro_batches or self.micro_batches)
        self.data_iterator = training
        return super().eval_batch(data_iter, return_logits, compute_loss, reduce, bcast, num_micro_batches)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        trains = isinstance(pipe_schedule, TrainSchedule)
        super()._exec_schedule(self._train_schedule() if trains else self._evaluating)

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, **options: Any) -> Any:
        source = self._loss_stage_global_rank() if src_rank is None else src_rank
        return super()._bcast_pipe_scalar(data, source, **options)

    def _aggregate_total_loss(self) -> Any:
        # upstream takes the loss from the last of so many ranks, and reads the number for nothing else there
        num_stages: int = self.num_stages
        self.num_stages: int = self.grid.pp_group.index(self._loss_stage_global_rank()) + 1
        try:
            return super()._aggregate_total_loss()
        finally:
            self.num_stages = num_stages


class _DividingOnce(_Stepping):
    """``PipelineEngine`` that divides gradients by the accumulation steps in the last stage only.

    Before 0.19.3 every stage does it to what it gets from the next one. Without a ``"pulse"`` block that is upstream's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _DIVIDES_ONCE or self.global_rank != 0:
            return
        by_itself = f"DeepSpeed {deepspeed.__version__} by itself does it in every stage"
        if self.module.pulse is not None:
            print(f"pulse: gradients are divided by the accumulation steps once; {by_itself}", flush=True)
        elif self.num_stages > 1 and self.micro_batches > 1:
            print(
                f"pulse: gradients are divided by the accumulation steps more than once: {by_itself}; "
                '"pulse": {"enabled": false} in the config mends that',
                flush=True,
            )

    def _exec_backward_pass(self, buffer_id: int) -> None:
        # 0.18.4 takes the backward of an inner stage for one that the user called
        self._running_engine_backward = True
        try:
            super()._exec_backward_pass(buffer_id)
        finally:
            self._running_engine_backward = False

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        if self.module.pulse is None or self.is_last_stage():
            return super()._backward_prologue_per_tensor(grad)
        return grad


EngineWithSeams: Any = PipelineEngine if _HAS_SEAMS else _WithSeams
"""``PipelineEngine`` with ``_train_schedule``, ``_inference_schedule`` and ``_loss_stage_global_rank``."""

EngineDividingOnce: Any = PipelineEngine if _HAS_SEAMS else _DividingOnce
"""``PipelineEngine`` whose gradients are right with several microbatches."""


def cast_of_buffers(config: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """What upstream casts buffers to beside parameters in ``dtype``; None: they stay as they are.

    Older versions cast all of them, newer ones where ``data_types.buffer_dtype`` says so.
    """
    if dtype is None or not hasattr(config, "buffer_dtype"):
        return dtype
    return None if config.buffer_dtype is None else DtypeEnum(config.buffer_dtype).value


isend, irecv = comm.isend, comm.irecv

if not _HAS_SEAMS:  # up to 0.19.5 these two wait for the message

    @comm.timed_op
    def isend(tensor: Any, dst: int, group: Any = None, tag: int = 0, log_name: str = "isend") -> Any:
        return comm.cdb.isend(tensor=tensor, dst=dst, group=group, tag=tag)

    @comm.timed_op
    def irecv(tensor: Any, src: int, group: Any = None, tag: int = 0, log_name: str = "irecv") -> Any:
        return comm.cdb.irecv(tensor=tensor, src=src, group=group, tag=tag)
