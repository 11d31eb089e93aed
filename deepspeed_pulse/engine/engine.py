"""The engine that runs a plan inside DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads, ReduceTiedGrads

from deepspeed_pulse.engine import schedule
from deepspeed_pulse.engine.checkpoints.preemption import EXIT_STATUS, Preemption, Stopped, without_worker
from deepspeed_pulse.engine.common import CommonEngine
from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.conditioning import Estimates
from deepspeed_pulse.engine.data.agreement import check_batch_size
from deepspeed_pulse.engine.data.frozen_ahead import FrozenAhead
from deepspeed_pulse.engine.data.reading import Reading
from deepspeed_pulse.engine.device import EngineDevice
from deepspeed_pulse.engine.gradients.clipping import OwnNorms
from deepspeed_pulse.engine.gradients.completion import (
    bucket_holds_no_more_than_there_is,
    complete,
    mark_replicated,
    norm_of_nothing_is_zero,
    sum_tied,
)
from deepspeed_pulse.engine.gradients.memory import held_always, held_in_bucket, held_in_step
from deepspeed_pulse.engine.gradients.missed import Missed
from deepspeed_pulse.engine.gradients.own_steps import OwnSteps, counting_only, split_groups, split_optimizer
from deepspeed_pulse.engine.gradients.placeholders import check_groups, completed
from deepspeed_pulse.engine.gradients.reduction import EarlyReduction
from deepspeed_pulse.engine.gradients.scaling import UNSCALED, is_unscaled
from deepspeed_pulse.engine.gradients.stepped import Stepped
from deepspeed_pulse.engine.gradients.whole_model import check_optimizer
from deepspeed_pulse.engine.groups import GroupOptions
from deepspeed_pulse.engine.losses import Losses
from deepspeed_pulse.engine.observation import figures, notes
from deepspeed_pulse.engine.observation.breakdown import Breakdown
from deepspeed_pulse.engine.observation.events import share_monitor
from deepspeed_pulse.engine.observation.observer import Observer
from deepspeed_pulse.engine.observation.progress import DeviceProgress
from deepspeed_pulse.engine.observation.unfinished import Unfinished
from deepspeed_pulse.engine.observation.watchdog import Watchdog, hint
from deepspeed_pulse.engine.orders import Orders
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.engine.replaced import Instructions, replaced_instructions
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.engine.sharing.unseen import check_buffers
from deepspeed_pulse.engine.starting.kernels import compile_kernel
from deepspeed_pulse.engine.starting.sameness import check_same, config_facts
from deepspeed_pulse.engine.starting.setting_up import watched_start
from deepspeed_pulse.engine.starting.supported import check_data, check_same_block, check_supported
from deepspeed_pulse.engine.step import Lowering, Steps
from deepspeed_pulse.engine.waist.older import EngineWithSeams
from deepspeed_pulse.ir.program import Step
from deepspeed_pulse.ir.run import RUN_FILE, RankFigures
from deepspeed_pulse.ir.schedule import FORWARDS
from deepspeed_pulse.ir.timeline import AnySpan, Timeline
from deepspeed_pulse.runtime.autocast import Autocast
from deepspeed_pulse.runtime.rank import RankRuntime


class PulseEngine(CommonEngine, EngineWithSeams):
    """``PipelineEngine`` whose schedule, placement and messages come from the module's plan."""

    _first_apart = 0
    """Steps that were over when backbones began to make their own."""
    _started = False
    """False while upstream's ``__init__`` runs: there "first" and "last" mean the topology."""
    losses: dict[str, Any]
    """By backbone, the mean loss of the last step over microbatches and replicas, where there are several."""
    _compute_loss = True
    """Upstream sets it in every ``train_batch`` and ``eval_batch``."""
    _told_unscaled = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module, config = kwargs["model"], kwargs.get("config")
        self._watchdog: Watchdog = module.watchdog
        with watched_start(self._watchdog, module.pulse, "deepspeed.initialize"):
            if dist.get_world_size() > 1:
                check_same(config_facts(config if isinstance(config, dict) else None), "deepspeed.initialize")
            check_same_block(module, config)
            if isinstance(config, dict):
                kwargs["config"] = module.settled_config(config)
            check_supported(kwargs["config_class"], module)
            check_data(kwargs["config_class"], kwargs.get("training_data"))
            super().__init__(*args, **kwargs)
            self._prepare_running(module)

    def _prepare_running(self, module: Any) -> None:
        """Everything that upstream's engine does not know of."""
        seat, watchdog, timeout = Seat.of(self), self._watchdog, module.pulse.timeout_seconds
        self._losses = Losses(
            self, module.job.heads, lambda name, m: self._runtime.named(name, m), lambda: self._runtime.number
        )
        losses = self._losses
        self._own_norms = OwnNorms(self, module.backbone_of, len(module.job.heads)) if module.has_several else None
        self._own_steps: OwnSteps | None = None
        if self._own_norms is not None and module.job.may_step_apart:
            self._own_steps = OwnSteps(self, self._own_norms, lambda held: self._runtime.holdings.count_step(held))
        self._missed = Missed([str(head.name) for head in module.job.heads])
        self._micro_batches_begun = self.micro_batches
        self._unfinished = Unfinished(self)
        self._device = EngineDevice(seat.device, losses.accumulating, losses.scale)
        self._breakdown = Breakdown(self)
        self._orders = Orders(module, watchdog)
        communicator = PipelineCommunicator(seat, GroupOptions.of(module.pulse), watchdog.got_on)
        reading = Reading(self, seat, module.plan, watchdog, self._breakdown.drawing)
        lowering = Lowering(module, seat, self._orders, reading, communicator)
        lowering.part(self.micro_batches, "train", (True,) * self.num_stages)
        declared = module.job.conditioning
        estimates = None if declared is None else Estimates(declared, module.job.heads)
        self._all_parameters = tuple(module.parameters())
        self._runtime = RankRuntime(
            rank=seat.rank,
            communicator=communicator,
            device=self._device,
            finish=losses.finish,
            estimates=None if estimates is None else estimates.of_step,
            parameters=self._all_parameters,
            state_bytes=self._held_bytes(),
            fresh_gradients=not self.using_bf16_optimizer,
            bucket_bytes=held_in_bucket(self),
            timeout_seconds=timeout,
        )
        self._ahead: FrozenAhead | None = None
        if module.frozen is not None:
            count = partial(self._runtime.holdings.count, "frozen")
            self._ahead = FrozenAhead(module, seat, communicator, self._device, timeout, count)
        self._reduction = EarlyReduction(self, timeout, partial(self._runtime.holdings.count, "gradients"))
        share_monitor(self)
        self._observer = Observer(self, self._device)
        watchdog.device = None if self._device.runs_at_once else DeviceProgress()
        watchdog.hint = hint(module.plan.placement, seat.ranks)
        watchdog.stop_request.ignore()  # from now on a step ends first
        self._preemption = Preemption(timeout)
        self._reading = reading
        self._steps = Steps(
            engine=self,
            watchdog=watchdog,
            preemption=self._preemption,
            observer=self._observer,
            orders=self._orders,
            lowering=lowering,
            reading=reading,
            ahead=self._ahead,
            runtime=self._runtime,
            reduction=self._reduction,
            stepped=Stepped(self._all_parameters),
            estimates=estimates,
        )
        self._replaced: Instructions = {}
        self._started = True
        if self.global_rank == 0:
            figures.print_plan(module.planned, module.graph, module.layer_list)
            notes.print_notes(self)

    def destroy(self) -> None:
        """As upstream, once; SIGTERM no longer waits for a step of this engine."""
        super().destroy()
        if self._started:
            self._preemption.end()

    def _held_bytes(self) -> int:
        """State of the layers and of the frozen parts on this rank."""
        fill = self.module.plan.fill
        return held_always(self) + (0 if fill is None else int(fill.param_bytes(self.stage_id)))

    def _aggregate_total_loss(self) -> Any:
        """As upstream; of several backbones the sum of their means."""
        if self.module.has_several:
            return self._losses.gather(self.micro_batches, self._steps_ended())
        return super()._aggregate_total_loss()

    def _steps_ended(self) -> dict[int, int] | None:
        """By backbone the last step that it has ended; None where all have ended the last one."""
        if not self._runtime.runs_on:
            return None
        parts, last = self._orders.of(self._micro_batches_begun).backbones, int(self.global_steps)
        ended = {index: last - bool(part.carried) for index, part in enumerate(parts)}
        return {index: number for index, number in ended.items() if number > self._first_apart}

    def _reduce_outputs(self, outputs: Any, reduce: str | None = "avg", **options: Any) -> Any:
        """As upstream; losses of several backbones are put together where they are broadcast."""
        return None if self.module.has_several else super()._reduce_outputs(outputs, reduce, **options)

    def _bcast_pipe_scalar(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, after an evaluation; of several backbones the sum of their means."""
        if self.module.has_several:
            return self._losses.gather(self._evaluated)
        return super()._bcast_pipe_scalar(*args, **kwargs)

    def is_first_stage(self) -> bool:
        """True on the rank that holds the first stage."""
        return bool(self.stage_id == self.module.plan.placement[0] if self._started else super().is_first_stage())

    def is_last_stage(self) -> bool:
        """True on the rank that computes the loss, of several backbones the last one's."""
        return bool(self.stage_id == self.module.plan.placement[-1] if self._started else super().is_last_stage())

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self.module.plan.placement[-1]))

    def set_dataloader(self, loader: Any) -> None:
        """Every rank that is given a loader reads its own data."""
        self.training_dataloader, self.data_iterator = loader, None if loader is None else iter(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Every rank that is given an iterator draws from it."""
        self.training_dataloader, self.data_iterator = None, iterator

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As upstream; another number of microbatches plans the order anew, at the start of the next step.

        Local: all ranks call it, and the next ``train_batch`` sees to it that they did.
        """
        size, replicas = self.train_micro_batch_size_per_gpu(), self.dp_world_size
        check_batch_size(train_batch_size, size, replicas)
        self._orders.check_may_run(train_batch_size // (size * replicas))
        super().set_train_batch_size(train_batch_size)

    def _train_schedule(self) -> schedule.PulseSchedule:
        return self._schedule(self.micro_batches, "train")

    def _inference_schedule(self, micro_batches: int) -> schedule.PulseSchedule:
        self._evaluated = micro_batches
        return self._schedule(micro_batches, "eval" if self._compute_loss else "forward")

    def _schedule(self, micro_batches: int, mode: str) -> schedule.PulseSchedule:
        """A step; what the program has put in the place of upstream's instructions runs in it."""
        found = replaced_instructions(schedule.FROM_UPSTREAM)
        if found != self._replaced:
            self._replaced = found
            self.__dict__["_INSTRUCTION_MAP"] = {**PulseEngine._INSTRUCTION_MAP, **found}
        norms = self._own_norms if mode == "train" else None
        self._steps.meet(micro_batches, mode, None if norms is None else norms.problem())
        if self._runtime.runs_on and (mode != "train" or micro_batches != self._micro_batches_begun):
            self.finish_backbones()  # now that all ranks are known to begin such a step
        runs_on = self._runtime.runs_on
        self._losses.begin(micro_batches, runs_on=runs_on)
        begun = self._steps.begin(micro_batches, mode)
        if mode == "train":
            self._micro_batches_begun = micro_batches
            if self._runtime.runs_on:
                self._begin_apart(runs_on)
        return begun

    def _begin_apart(self, runs_on: bool) -> None:
        assert self._own_steps is not None
        self._own_steps.begin(anew=not runs_on)
        if not runs_on:
            self._first_apart = self.global_steps
        self._autocast = Autocast.now([torch.device(self.device).type])
        left = self._steps.lowering.updates(self._micro_batches_begun)
        self._unfinished.begin([str(self.module.job.heads[index].name) for index in left], self.global_steps + 1)

    def finish_backbones(self) -> None:
        """End the steps that backbones are in the midst of (``"backbone_steps"``); collective, nothing where none is.

        Saving, loading and evaluating do it first. A script that reads or changes weights between two ``train_batch``
        calls, or after the last one, calls it itself. ``losses`` then has what the last step gave.
        """
        if not self._started or not self._runtime.runs_on:
            return
        assert self._own_steps is not None
        micro_batches, was_training = self._micro_batches_begun, self.module.training
        # what ends now began in a call of train_batch
        with self._watchdog.watching("finish_backbones"), torch.enable_grad(), self._autocast.restored():
            self.module.train()
            for step in self._steps.begin_last(micro_batches):
                self._exec_run_step(step)
            self._runtime.finish()
            last = {index: int(self.global_steps or 0) for index in self._steps.lowering.updates(micro_batches)}
            for index in last:
                self._own_steps.end(index, earlier=False)
            self._global_grad_norm = self._own_steps.norm()
            ended = dict(self.losses)
            self._losses.gather(micro_batches, last)
            self.losses = {**ended, **self.losses}
            self._unfinished.end()
            self.module.train(was_training)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        if self.module.has_several and self.module.job.may_step_apart:
            if hasattr(client_optimizer, "param_groups"):
                split_optimizer(self.module, client_optimizer, self.client_lr_scheduler)
            else:
                model_parameters = split_groups(self.module, list(model_parameters))
        super()._configure_optimizer(*completed(client_optimizer, model_parameters, self, self.param_names))
        check_optimizer(self)
        norm_of_nothing_is_zero(self.optimizer)
        bucket_holds_no_more_than_there_is(self.optimizer)

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> Any:
        compile_kernel(
            self.optimizer_name(),
            self.optimizer_params(),
            offloads=bool(self.zero_use_cpu_optimizer()),
            is_first=self.global_rank == 0,
        )
        optimizer = super()._configure_basic_optimizer(model_parameters)
        check_groups(optimizer, self)
        return optimizer

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; of several backbones, each is clipped by its own norm before."""
        if self._runtime.runs_on:  # each has made its own step, or will
            assert self._own_steps is not None
            with counting_only(self):
                super()._take_model_step(*args, **kwargs)
            self._global_grad_norm = self._own_steps.norm()
            return
        squares, skipped = None if self._own_norms is None else self._own_norms.clip(), self.skipped_steps
        self._runtime.holdings.count_step(held_in_step(self))
        super()._take_model_step(*args, **kwargs)
        if squares is not None:
            self._global_grad_norm = squares.sum().sqrt()
        if self.module.has_several and self.skipped_steps > skipped and not self.fp16_enabled():
            said = self._missed.told(self.global_steps, squares)
            if said is not None and self.global_rank == 0:
                print(f"pulse: {said}", flush=True)

    def clip_fp32_gradients(self) -> None:
        """As upstream, unless several backbones have been clipped already."""
        if self._own_norms is None:
            super().clip_fp32_gradients()

    def train_batch(self, data_iter: Any = None) -> Any:
        """As upstream: one step over the global batch; returns the mean loss."""
        torch.clear_autocast_cache()  # a script's autocast may last, and keeps casts of the weights before
        if not self._told_unscaled and is_unscaled(self):
            self._told_unscaled = True
            if self.global_rank == 0:
                print(f"pulse: warning: {UNSCALED}", flush=True)
        with self._watchdog.watching("the start of train_batch", meets=True):
            try:
                loss = super().train_batch(data_iter)
            except Stopped:
                # at the start of a step: what the script does after one (logs, averaged weights) is done by now
                self.timers(TRAIN_BATCH_TIMER).reset()
                self._save_and_exit()
            except Exception as problem:
                self._break_off()
                told = without_worker(problem, heard=self._preemption.heard)
                if told is not None:
                    raise told from problem
                raise
            self._watchdog.gave()
            self._watchdog.enter("the figures after a step")
            self._observer.end_step(self._orders.of(self.micro_batches))
        return loss

    def zero_grad(self) -> None:
        """As upstream, which goes through the whole module by name at the end of every step."""
        for parameter in self._all_parameters:
            parameter.grad = None

    def _break_off(self) -> None:
        """Leave nothing of a step that failed: a script that mends a refused batch goes on."""
        self._reduction.join()
        for timer in self.timers.get_timers().values():  # upstream leaves them running
            if timer.started_:
                timer.reset()
        if self._own_steps is None:
            self.zero_grad()
            if self.optimizer is not None:
                self.optimizer.zero_grad()  # bf16's has sums of its own

    def _save_and_exit(self) -> NoReturn:
        """End a run that was asked to stop: a checkpoint where and as the last one went, then exit status 143."""
        saved = "nothing saved: this run has not saved a checkpoint yet, so it is not known where to"
        if self._saving.last is not None:
            save_dir, more = self._saving.last
            self.save_checkpoint(save_dir, **more)
            saved = f"saved {save_dir}/global_step{self.global_steps}"
            if more["client_state"]:
                saved += " with the client state that the last save was given"
        if self.global_rank == 0:
            print(f"pulse: SIGTERM after step {self.global_steps}: {saved}; exit", flush=True)
        raise SystemExit(EXIT_STATUS)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, forward only."""
        torch.clear_autocast_cache()
        with self._watchdog.watching("the start of eval_batch", meets=True):
            found = super().eval_batch(*args, **kwargs)
            self._watchdog.gave()
            return found

    def save_checkpoint(self, save_dir: Any, *args: Any, **kwargs: Any) -> bool:
        """As upstream; beside the checkpoints lies a run file, what ``ds_pulse report`` reads."""
        self.finish_backbones()
        with self._watchdog.watching_patiently("save_checkpoint"):
            saved = super().save_checkpoint(save_dir, *args, **kwargs)
            if self.global_rank == 0:
                figures.write_run(Path(save_dir) / RUN_FILE, self._observer.run())
            return saved

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As upstream; data that was read ahead is dropped, so that the next step reads its own."""
        self.finish_backbones()
        with self._watchdog.watching_patiently("load_checkpoint"):
            found = super().load_checkpoint(*args, **kwargs)
            self._reading.forget()
            if self._ahead is not None:
                self._ahead.take()
            return found

    @property
    def microbatches_ahead(self) -> int:
        """Microbatches that frozen parts have read for the next step: the data's own position is that far ahead."""
        return 0 if self._ahead is None else self._ahead.microbatches_ahead

    def pulse_stats(self) -> dict[str, Any]:
        """What this rank counted in the last step; local, no communication. An accelerator ends the step first.

        ``p2p_bytes`` by channel (``hidden``, ``hidden_grad``, ``value:NAME``, ``value_grad:NAME``),
        ``local_value_bytes``, ``peak_live_bytes``, ``idle_ms``, ``metadata_bytes``.
        """
        frozen_ms = 0.0 if self._ahead is None else self._ahead.idle_ms
        return {**asdict(self._runtime.stats), "idle_ms": self._runtime.stopwatch.idle_ms + frozen_ms}

    def pulse_timeline(self) -> Timeline | None:
        """The last step as it ran on this pipeline, on its first rank; None on the others, and before any. Collective.

        Times are those of the device; it ends the step first.
        """
        with self._watchdog.watching("pulse_timeline"):
            found = self.gather_figures()
        return None if found is None else found[0]

    def gather_figures(self) -> tuple[Timeline, list[RankFigures]] | None:
        """The last step's timeline and every rank's figures, on the pipeline's first rank. Collective."""
        spans: list[AnySpan] = [*self._runtime.stopwatch.spans, *([] if self._ahead is None else self._ahead.spans)]
        counted = self.pulse_stats()
        del counted["metadata_bytes"]
        rows = self.module.ranks.gather_to_first((spans, figures.clock(), RankFigures(**counted)))
        if rows is None or not any(spans for spans, *_ in rows):
            return None
        return figures.joined_timeline([(spans, clock) for spans, clock, _ in rows]), [found for *_, found in rows]

    def pulse_planned_timeline(self) -> Timeline | None:
        """The step as the simulator predicts it; None when layer costs were not measured. Local.

        After ``set_train_batch_size`` None until the next ``train_batch`` has planned the order.
        """
        plan = self._orders.made(self.micro_batches)
        return None if plan is None else planning.planned_timeline(self.module.planned, plan)

    def _exec_run_step(self, step: Step) -> None:
        action = step.action
        self._watchdog.enter(f"action {action} (stage {action.stage}, microbatch {action.microbatch})")
        self._runtime.run(step, self._breakdown.of_steps)
        if action.op not in FORWARDS and not self._reduction.expects:
            self._losses.drop_gradients()
        self._watchdog.gave()

    def _exec_run_frozen(self, position: int) -> None:
        assert self._ahead is not None
        self._watchdog.enter(f"frozen work before its action number {position}")
        self._ahead.run(position)
        self._watchdog.gave()

    def _exec_expect_stage_grads(self, stage: int) -> None:
        assert self._reduction.sums is not None
        self._reduction.sums.expect(stage)

    def _exec_reduce_stage_grads(self, stage: int) -> None:
        assert self._reduction.sums is not None
        self._reduction.sums.start(stage)
        self._losses.drop_gradients()  # not before: it has looked for some that came too late

    def _exec_finish_step(self) -> None:
        self._watchdog.enter("the end of the step (last sends, gradient reduction, optimizer)")
        self._steps.finish()

    def _exec_end_backbone(self, backbone: int, earlier: bool) -> None:
        assert self._own_steps is not None
        self._watchdog.enter(f"the end of a step of backbone {self.module.job.heads[backbone].name}")
        with self._breakdown.reducing():
            self._own_steps.end(backbone, earlier=earlier)

    def _exec_count_step(self) -> None:
        self._exec_optimizer_step()

    def _exec_complete_grads(self) -> None:
        check_buffers(self.module.shared)
        complete(self.optimizer)
        mark_replicated(self.module, self.optimizer)

    def _exec_reduce_tied_grads(self) -> None:
        with self._breakdown.reducing():
            sum_tied(self.module.get_tied_weights_and_groups(), self.optimizer)

    def _exec_reduce_grads(self) -> None:
        with self._breakdown.reducing():
            if not self._reduction.is_on:
                super()._exec_reduce_grads()
                return
            assert self._reduction.sums is not None
            rest = self._reduction.sums.finish()
            if rest:
                self.buffered_allreduce_fallback(grads=rest)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.RunStep: _exec_run_step,
        schedule.RunFrozen: _exec_run_frozen,
        schedule.ExpectStageGrads: _exec_expect_stage_grads,
        schedule.ReduceStageGrads: _exec_reduce_stage_grads,
        schedule.FinishStep: _exec_finish_step,
        schedule.EndBackbone: _exec_end_backbone,
        schedule.CountStep: _exec_count_step,
        schedule.CompleteGrads: _exec_complete_grads,
        ReduceTiedGrads: _exec_reduce_tied_grads,
        ReduceGrads: _exec_reduce_grads,
    }
