"""The baseline engine: upstream's 1F1B with named values relayed in the tuple, and bytes counted."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule as upstream_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.common import CommonEngine
from deepspeed_pulse.engine.data.batches import SplitBatch, warn_of_unread
from deepspeed_pulse.engine.device import DeviceClock
from deepspeed_pulse.engine.gradients.completion import complete, mark_replicated, norm_of_nothing_is_zero, sum_tied
from deepspeed_pulse.engine.gradients.scaling import scaled_without_zero
from deepspeed_pulse.engine.observation import events, notes
from deepspeed_pulse.engine.relay.changed import ChangedWeights
from deepspeed_pulse.engine.relay.tuples import bytes_by_label, live_after, pack_batch
from deepspeed_pulse.engine.replaced import replaced_instructions
from deepspeed_pulse.engine.sharing.unseen import check_buffers
from deepspeed_pulse.engine.starting.supported import check_data, check_same_block
from deepspeed_pulse.engine.waist.older import EngineDividingOnce
from deepspeed_pulse.errors import did_you_mean


class RelayEngine(CommonEngine, EngineDividingOnce):
    """Upstream's engine for our module without a plan.

    Without a ``"pulse"`` block clipping and loss scaling are upstream's. With ``"enabled": false`` clipping is over all
    ranks, tied weights once, and fp16 without ZeRO multiplies the loss by the scale that its gradients are divided by.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_same_block(kwargs["model"], kwargs.get("config"))
        check_data(kwargs["config_class"], kwargs.get("training_data"))
        super().__init__(*args, **kwargs)
        norm_of_nothing_is_zero(self.optimizer)
        if self.module.pulse is not None:
            events.share_monitor(self)
        self._changed = ChangedWeights(self)
        self._sent: Counter[str] = Counter()
        self._warned = self.global_rank != 0
        self._clock = DeviceClock(torch.device(self.device))
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=events.MOST_STEPS)
        """Of the device at the ends of each step since the last event."""
        graph = self.module.graph
        self._names_in = live_after(graph, self.module._local_layers[0] - 1)
        self._names_out = live_after(graph, self.module._local_layers[-1])
        if self.global_rank == 0:
            print(f"pulse: off: 1F1B, named values relayed through every stage in the tuple; {self._why}", flush=True)
            notes.print_notes(self)

    @property
    def _why(self) -> str:
        """Why it is off, and how it is switched on."""
        if self.module.pulse is not None:
            return '"enabled" is false in the "pulse" block'
        given = (key for key in self._config._param_dict if did_you_mean(key, ["pulse"]))
        near = "".join(f", but {key!r}" for key in given)
        return f'the config has no "pulse" block{near}: "pulse": {{}} switches it on'

    def train_batch(self, data_iter: Any = None) -> Any:
        torch.clear_autocast_cache()  # a script's autocast may last, and keeps casts of the weights before
        self.__dict__["_INSTRUCTION_MAP"] = {**RelayEngine._INSTRUCTION_MAP, **replaced_instructions()}
        self._sent.clear()
        self.module.shared.watch_buffers()
        start = self._clock.mark()
        loss = super().train_batch(data_iter)
        if self.module.pulse is not None and self.monitor.enabled:
            self._marks.append((start, self._clock.mark()))
            if events.due(self, self.global_steps):
                self._write_events()
        return loss

    def _write_events(self) -> None:
        """The baseline's figures under the names that a plan's have. Collective in the pipeline."""
        rows = self.module.ranks.gather_to_first(dict(self._sent))
        if rows is not None and self.global_rank == 0:
            sent: Counter[str] = sum((Counter(row) for row in rows), Counter())
            events.write(self, {"step_ms": self._clock.mean_ms(self._marks), **events.bytes_figures(sent)})
        self._marks.clear()

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        torch.clear_autocast_cache()
        # Without gradients the tuple looks different, so shapes are agreed on anew.
        self.reset_activation_shape()
        try:
            return super().eval_batch(*args, **kwargs)
        finally:
            self.reset_activation_shape()

    def pulse_stats(self) -> dict[str, Any]:
        """Bytes this rank sent in the last ``train_batch``, by channel."""
        return {"p2p_bytes": dict(self._sent)}

    def _next_batch(self) -> Any:
        batch = super()._next_batch()
        graph = self.module.graph
        if batch is None or not (graph.uses_names or isinstance(batch[0], dict)):
            return batch
        split = SplitBatch(batch, graph, self.module.job.heads[0].input, rules=self.module.job.entry_rules)
        if not self._warned:
            warn_of_unread(split)
            self._warned = True
        entries = {value.name: split.entries[value.name] for value in graph.batch_entries}
        return pack_batch(split.inputs, entries), split.labels

    def _allocate_or_extend_buffers(self, idx: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        # Upstream's pool ignores the dtype; relayed tuples mix dtypes.
        buffer: torch.Tensor = self._allocate_buffer(shape, dtype=dtype, num_buffers=1)[0]
        return buffer

    def _exec_forward_pass(self, buffer_id: int) -> None:
        with nullcontext() if self.module.pulse is None else self._changed.watching():
            super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self.module.pulse is not None and self.is_last_stage():
            self.loss: Any = scaled_without_zero(self.loss, self.optimizer)
        super()._exec_backward_pass(buffer_id)

    def _exec_reduce_tied_grads(self) -> None:
        if self.module.pulse is not None:
            check_buffers(self.module.shared)
            self._changed.check()
        complete(self.optimizer)
        sum_tied(self.module.get_tied_weights_and_groups(), self.optimizer)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        if self.module.pulse is not None:
            mark_replicated(self.module, self.optimizer)
        super()._exec_optimizer_step(lr_kwargs)

    def _exec_send_activations(self, buffer_id: int) -> None:
        state = self.pipe_buffers["outputs"][buffer_id]
        self._sent.update(bytes_by_label(state, self._names_out, self.module.headers, gradients=False))
        super()._exec_send_activations(buffer_id)

    def _exec_send_grads(self, buffer_id: int) -> None:
        state = self.pipe_buffers["inputs"][buffer_id]
        self._sent.update(bytes_by_label(state, self._names_in, self.module.headers, gradients=True))
        super()._exec_send_grads(buffer_id)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        upstream_schedule.ForwardPass: _exec_forward_pass,
        upstream_schedule.BackwardPass: _exec_backward_pass,
        upstream_schedule.OptimizerStep: _exec_optimizer_step,
        upstream_schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        upstream_schedule.SendActivation: _exec_send_activations,
        upstream_schedule.SendGrad: _exec_send_grads,
    }
