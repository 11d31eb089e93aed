"""The engine that runs a plan inside DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads, ReduceTiedGrads

from deepspeed_pulse.engine.checkpoints.engine import CheckpointingEngine
from deepspeed_pulse.engine.checkpoints.preemption import EXIT_STATUS, Preemption
from deepspeed_pulse.engine.communicator import EngineDevice, PipelineCommunicator
from deepspeed_pulse.engine.data.agreement import (
    agree,
    check_batch_size,
    check_same_block,
    check_same_step,
    check_zero_stage,
)
from deepspeed_pulse.engine.data.encoding import Encoding
from deepspeed_pulse.engine.data.evaluation import EvaluatingEngine
from deepspeed_pulse.engine.data.reading import MODES, ReadingEngine, entry_routes
from deepspeed_pulse.engine.discovery import Discovery
from deepspeed_pulse.engine.gradients.clipping import clip_over_pipeline
from deepspeed_pulse.engine.gradients.completion import complete_tied, mark_replicated, norm_of_nothing_is_zero
from deepspeed_pulse.engine.gradients.coverage import covering
from deepspeed_pulse.engine.gradients.placeholders import with_groups
from deepspeed_pulse.engine.gradients.reduction import StageReduction, stage_reduction
from deepspeed_pulse.engine.gradients.scaling import check_precision
from deepspeed_pulse.engine.instructions import (
    CompleteTiedGrads,
    ComputeAction,
    FinishStep,
    ReceiveMessages,
    ReduceStageGrads,
    RunFrozen,
    SendMessages,
)
from deepspeed_pulse.engine.losses import LossEngine
from deepspeed_pulse.engine.observation import figures, notes
from deepspeed_pulse.engine.observation.breakdown import Breakdown
from deepspeed_pulse.engine.observation.observer import Observer
from deepspeed_pulse.engine.observation.watchdog import Watchdog
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.engine.replaced import Instructions, clipping_is_replaced, replaced_instructions
from deepspeed_pulse.engine.schedule import FROM_UPSTREAM, PulseSchedule
from deepspeed_pulse.engine.sharing.unseen import check_buffers
from deepspeed_pulse.engine.starting.kernels import compile_kernel
from deepspeed_pulse.engine.starting.sameness import check_same, config_facts
from deepspeed_pulse.engine.starting.setting_up import watched_start
from deepspeed_pulse.engine.waist.older import EngineWithSeams
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.channels import Traffic, make_traffic
from deepspeed_pulse.ir.effects import Effects, with_versions
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.ir.program import Step
from deepspeed_pulse.ir.routes import make_routes
from deepspeed_pulse.ir.run import RUN_FILE
from deepspeed_pulse.ir.timeline import FrozenSpan, Span, Timeline
from deepspeed_pulse.runtime.rank import RankRuntime, Stats
from deepspeed_pulse.runtime.stage import Stage
from deepspeed_pulse.runtime.state import state_bytes
from deepspeed_pulse.runtime.usage import Usage


@dataclass(frozen=True)
class _Lowered:
    """A plan for one number of microbatches and one way of getting the data, ready to run."""

    plan: Plan
    traffic: Traffic
    usage: Usage
    stages: dict[int, Stage]


class PulseEngine(CheckpointingEngine, EvaluatingEngine, ReadingEngine, LossEngine, EngineWithSeams):
    """``PipelineEngine`` whose schedule, placement and messages come from the module's plan."""

    _started = False
    """False while upstream's ``__init__`` runs: there "first" and "last" mean the topology."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module, config = kwargs["model"], kwargs.get("config")
        self._watchdog: Watchdog = module.watchdog
        with watched_start(self._watchdog, "deepspeed.initialize"):
            if dist.get_world_size() > 1:
                check_same(config_facts(config if isinstance(config, dict) else None), "deepspeed.initialize")
            check_same_block(module, config)
            if isinstance(config, dict):
                kwargs["config"] = module.settled_config(config)
            _check_supported(kwargs["config_class"], module)
            super().__init__(*args, **kwargs)
            self._prepare_running(module)

    def _prepare_running(self, module: Any) -> None:
        """Everything that upstream's engine does not know of."""
        self._pulse = module.pulse
        self._plan: Plan = module.plan
        self._prepare_reading()
        self._plans = {self._plan.microbatches: self._plan}
        """By number of microbatches; all ranks have the same."""
        self._lowered: dict[Any, _Lowered] = {}
        timeout = self._pulse.timeout_seconds
        self._communicator = PipelineCommunicator(
            self.grid.pp_group, self.grid.get_pipe_parallel_group(), torch.device(self.device)
        )
        self._engine_device = EngineDevice(torch.device(self.device), self._run_backward, self._scale_loss)
        self._effects: dict[bool, tuple[Effects, ...]] = {}
        """What layers change in place, in training and in evaluation; found before the first step of each kind."""
        self._lower(self.micro_batches, "train", (True,) * self.num_stages)
        self._runtime = RankRuntime(
            rank=self.stage_id,
            communicator=self._communicator,
            device=self._engine_device,
            finish=self._finish_microbatch,
            parameters=tuple(module.parameters()),
            state_bytes=state_bytes(
                module.parameters(), shards=self.dp_world_size if self.zero_optimization_stage() == 1 else 1
            )
            + (0 if self._plan.fill is None else self._plan.fill.param_bytes(self.stage_id)),
            replay_bytes=planning.replay_bytes(module.planned, module.job.checkpointing.interval),
            timeout_seconds=timeout,
        )
        self._encoding = None if module.frozen is None else Encoding(self)
        self._reduction = self._made_reduction()
        self._replaced: Instructions = {}
        self._asked = (module.job.checkpointing.interval, module.activation_checkpoint_func)
        """Of activation checkpointing, when the plan was made or changed last."""
        self._observer = Observer(self)
        self._breakdown = Breakdown(self)
        self._watchdog.hint = _hint(self._plan, self.grid.pp_group)
        self._watchdog.stop_request.ignore()  # from now on a step ends first
        self._preemption = Preemption()
        self._started = True
        if self.global_rank == 0:
            figures.print_plan(module.planned, module.graph, module.layer_list)
            notes.print_notes(self)

    # -- seams of upstream -------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """True on the rank that holds the first stage."""
        return self.stage_id == self._plan.placement[0] if self._started else super().is_first_stage()

    def is_last_stage(self) -> bool:
        """True on the rank that computes the loss."""
        return self.stage_id == self._plan.placement[-1] if self._started else super().is_last_stage()

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self._plan.placement[-1]))

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As upstream; another number of microbatches plans the order anew, at the start of the next step.

        Local: all ranks call it, and the next ``train_batch`` sees to it that they did.
        """
        check_batch_size(train_batch_size, self.train_micro_batch_size_per_gpu(), self.dp_world_size)
        self._check_may_run(train_batch_size // (self.train_micro_batch_size_per_gpu() * self.dp_world_size))
        super().set_train_batch_size(train_batch_size)

    def _train_schedule(self) -> PulseSchedule:
        return self._begin(self.micro_batches, "train")

    def _inference_schedule(self, micro_batches: int) -> PulseSchedule:
        return self._begin(micro_batches, "eval" if self._compute_loss else "forward")

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        optimizer, filled = with_groups(client_optimizer, model_parameters, self, self.param_names)
        super()._configure_optimizer(covering(optimizer, filled, self.module), filled)
        norm_of_nothing_is_zero(self.optimizer)

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> Any:
        compile_kernel(
            self.optimizer_name(),
            self.optimizer_params(),
            offloads=bool(self.zero_use_cpu_optimizer()),
            is_first=self.global_rank == 0,
        )
        return super()._configure_basic_optimizer(model_parameters)

    def train_batch(self, data_iter: Any = None) -> Any:
        """As upstream: one step over the global batch; returns the mean loss."""
        with self._watchdog.watching("the start of train_batch", meets=True):
            # here, not at the end: what the script does after a step (logs, averaged weights) is done by now
            if self._preemption.agreed():
                self.save_and_exit()
            self._engine_device.begin_step(exact=self._observer.begin_step())
            start = self._engine_device.now_ms()
            try:
                loss = super().train_batch(data_iter)
            except Exception:
                # upstream leaves it running, and a script that mends a refused batch could not go on
                self.timers(TRAIN_BATCH_TIMER).reset()
                raise
            step_ms = self._engine_device.end_step() - start
            self._watchdog.enter("the figures after a step")
            self._observer.end_step(step_ms, self._plan_for(self.micro_batches))
        return loss

    def save_and_exit(self) -> NoReturn:
        """End a run that was asked to stop: a checkpoint where the last one went, then exit status 143."""
        saved = "nothing saved: this run has not saved a checkpoint yet, so it is not known where to"
        if self._last_save is not None:
            save_dir, more = self._last_save
            self.save_checkpoint(save_dir, **more)
            saved = f"saved {save_dir}/global_step{self.global_steps}"
        if self.global_rank == 0:
            print(f"pulse: SIGTERM after step {self.global_steps}: {saved}; exit", flush=True)
        raise SystemExit(EXIT_STATUS)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, forward only."""
        with self._watchdog.watching("the start of eval_batch", meets=True):
            self._preemption.agreed()  # a stop waits for train_batch, but ranks in different calls do not
            self._engine_device.begin_step(exact=False)
            return super().eval_batch(*args, **kwargs)

    def save_checkpoint(self, save_dir: Any, *args: Any, **kwargs: Any) -> bool:
        """As upstream; beside the checkpoints lies a run file, what ``ds_pulse report`` reads."""
        with self._watchdog.watching_patiently("save_checkpoint"):
            saved = super().save_checkpoint(save_dir, *args, **kwargs)
            if self.global_rank == 0:
                figures.write_run(Path(save_dir) / RUN_FILE, self._observer.run())
            return saved

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As upstream; data that was read ahead is dropped, so that the next step reads its own."""
        with self._watchdog.watching_patiently("load_checkpoint"):
            found = super().load_checkpoint(*args, **kwargs)
            if self._encoding is not None:
                self._encoding.forget()
            return found

    @property
    def microbatches_ahead(self) -> int:
        """Microbatches that frozen parts have read for the next step: the data's own position is that far ahead."""
        return 0 if self._encoding is None else self._encoding.microbatches_ahead

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all pipeline ranks, tied weights once; a program's own clipping goes first."""
        if clipping_is_replaced(PulseEngine):
            super().clip_fp32_gradients()
            return
        self._global_grad_norm = clip_over_pipeline(
            self.module.parameters(), self.gradient_clipping(), self.grid.get_pipe_parallel_group()
        )

    # -- one step ----------------------------------------------------------------------------

    def _begin(self, micro_batches: int, mode: str) -> PulseSchedule:
        self._mode, training = mode, mode == "train"
        self._follow_program()
        if training:
            self.module.shared.watch_buffers()
        check_same_step(mode, micro_batches, self.train_micro_batch_size_per_gpu(), self._preemption._group)
        self._watchdog.go_on("the start of a step")
        self._begin_reading(micro_batches, mode)
        if self._encoding is not None and training:
            self._batches = self._encoding.take() or self._batches
        readers = self._agree_on_data(mode)
        lowered = self._lower(micro_batches, mode, readers)
        frozen_at = self._begin_encoding(lowered.plan, mode)
        keys = self._agree_on_shapes() if self.module.dynamic_shape else [MODES.index(mode)] * micro_batches
        if training not in self._effects:
            self._effects[training] = self._discovered(lowered.plan)
            self._lowered.clear()
            lowered = self._lower(micro_batches, mode, readers)
        self._runtime.begin(
            lowered.plan,
            lowered.traffic,
            lowered.usage,
            self._batches,
            training=training,
            shape_keys=keys,
            stages=lowered.stages,
            first_number=self.global_steps * self.micro_batches,
            number=self.global_steps + 1,
        )
        # 1-bit optimizers turn upstream's reduction off in the middle of a run
        self._reducing_early = training and self._may_reduce_early()
        if self._reducing_early:
            self._reduction.begin()
        return PulseSchedule(
            lowered.traffic.program[self.stage_id],
            training=training,
            reduce_early=self._reducing_early,
            micro_batches=micro_batches,
            stages=self.num_stages,
            stage_id=self.stage_id,
            frozen_at=frozen_at,
        )

    def _follow_program(self) -> None:
        """What the program has put in the place of upstream's instructions runs."""
        found = replaced_instructions(FROM_UPSTREAM)
        if found != self._replaced:
            self._replaced = found
            vars(self)["_INSTRUCTION_MAP"] = {**PulseEngine._INSTRUCTION_MAP, **found}
        asked = (self.module.activation_checkpoint_interval, self.module.activation_checkpoint_func)
        if asked != self._asked:
            self._recompute_every(asked[0], None if asked[1] is self._asked[1] else asked[1])
            self._asked = asked

    def _recompute_every(self, interval: int, function: Any) -> None:
        """Other layers run again in backward from now on: memory is predicted anew."""
        module = self.module
        module.job.checkpoint_every(interval, function)
        layers = module.job.checkpointing.layers
        self._plans = {m: planning.recomputing(module.planned, plan, layers) for m, plan in self._plans.items()}
        self._plan = module.plan = planning.recomputing(module.planned, self._plan, layers)
        module.planned = replace(module.planned, plan=self._plan)
        self._lowered.clear()
        self._runtime.replay_bytes = planning.replay_bytes(module.planned, interval)
        if self.global_rank == 0:
            figures.print_recomputing(module.planned, interval)

    def _may_reduce_early(self) -> bool:
        """Not where a program reduces gradients by itself."""
        if not self.pipeline_enable_backward_allreduce or ReduceGrads in self._replaced:
            return False
        if self._reduction_made_for != (self.optimizer, self.communication_data_type):
            self._reduction = self._made_reduction()
        return self._reduction is not None

    def _made_reduction(self) -> StageReduction | None:
        """For the optimizer and the dtype of now: a program may set others after ``deepspeed.initialize``."""
        self._reduction_made_for = (self.optimizer, self.communication_data_type)
        return stage_reduction(self, self._pulse.timeout_seconds)

    def _begin_encoding(self, plan: Plan, mode: str) -> frozenset[int]:
        """This step's data is encoded, the next one's begun; before which of the rank's actions there is work on it."""
        if self._encoding is None or self._is_encoded[mode]:
            return frozenset()
        self._watchdog.enter("encoding before the step")
        self._encoding.encode(self._batches, plan.microbatches, mode)
        if mode != "train" or plan.fill is None:
            return frozenset()
        following = self._step_batches(plan.microbatches, mode, self._steps[mode] + 1)
        if not self._encoding.start(self._batches, following):
            return frozenset()
        return frozenset(filling.position for filling in plan.fill.rows[self.stage_id])

    def _discovered(self, plan: Plan) -> tuple[Effects, ...]:
        """What the layers change in place, tried on the first microbatch."""
        self._watchdog.enter("trying the layers before the first step")
        return Discovery(
            plan=plan,
            graph=self.module.graph,
            layers=self.module.bound_layers(),
            encoded=() if self.module.frozen is None else self.module.frozen.names,
            rank=self.stage_id,
            global_ranks=self.grid.pp_group,
            group=self.grid.get_pipe_parallel_group(),
            device=torch.device(self.device),
            number=self.global_steps * self.micro_batches,
        ).run(self._batches)

    def _lower(self, micro_batches: int, mode: str, readers: tuple[bool, ...]) -> _Lowered:
        key = (micro_batches, mode, readers, self._reads_labels)
        if key not in self._lowered:
            if mode != "train":
                plan = planning.evaluation_plan(self.module.planned, self._pulse, micro_batches)
            else:
                plan = self._plan_for(micro_batches)
            effects = self._effects.get(mode == "train", ())
            graph = with_versions(self.module.graph, effects)
            entries = self._entries(graph)
            routes = plan.routes if graph is self.module.graph else _routes(plan, graph)
            plan = replace(plan, routes=(*routes, *entry_routes(plan, entries, readers)))
            traffic = make_traffic(plan)
            self._communicator.open(list(traffic.channels), self._pipelines, self._pipelines.index(self.grid.pp_group))
            usage = Usage(plan, [*graph.values, *entries], self.stage_id)
            self._lowered[key] = _Lowered(plan, traffic, usage, self.module.stages(usage, graph, effects))
        return self._lowered[key]

    def _plan_for(self, micro_batches: int) -> Plan:
        """The plan for so many microbatches, made if there is none yet: collective then."""
        if micro_batches not in self._plans:
            self._check_may_run(micro_batches)
            with self._watchdog.watching_patiently(f"planning the order of {micro_batches} microbatches on rank 0"):
                self._plans[micro_batches] = agree(
                    lambda: planning.reorder(self.module.planned, self._pulse, micro_batches), "planning"
                )
        return self._plans[micro_batches]

    def _check_may_run(self, micro_batches: int) -> None:
        """Plans with frozen parts, and given ones, are for one number of microbatches."""
        if micro_batches in self._plans:
            return
        if self.module.frozen is not None:
            raise ConfigError(
                f"{micro_batches} microbatches: with frozen parts expected {self._plan.microbatches} as planned, "
                "because the data of a step is encoded during the one before; set gradient_accumulation_steps in the "
                "config"
            )
        planning.check_may_differ(self.module.planned, self._pulse, micro_batches)

    def _exec_receive_messages(self, step: Step) -> None:
        self._watchdog.enter(f"action {step.action} (stage {step.action.stage}, microbatch {step.action.microbatch})")
        with self._breakdown.receiving(step):
            self._runtime.receive(step)

    def _exec_compute_action(self, step: Step) -> None:
        with self._breakdown.computing(step):
            self._runtime.compute(step)

    def _exec_send_messages(self, step: Step) -> None:
        with self._breakdown.sending(step):
            self._runtime.send(step)

    def _exec_run_frozen(self, position: int) -> None:
        self._watchdog.enter(f"frozen work before its action number {position}")
        self._encoding.run(position)

    def _exec_reduce_stage_grads(self, stage: int) -> None:
        self._reduction.start(stage)

    def _exec_reduce_grads(self) -> None:
        with self._breakdown.reducing():
            if not self._reducing_early:
                super()._exec_reduce_grads()
                return
            rest = self._reduction.finish()
            if rest:
                self.buffered_allreduce_fallback(grads=rest)

    def _exec_finish_step(self) -> None:
        self._watchdog.enter("the end of the step (last sends, gradient reduction, optimizer)")
        self._batches.finish()
        stats = self._runtime.finish()
        if self._encoding is not None:
            self._encoding.finish()
            stats.p2p_bytes.update(self._encoding.sent_bytes)
            stats.idle_ms += self._encoding.waited_ms
        self._compare_data(self._mode)

    def _exec_reduce_tied_grads(self) -> None:
        with self._breakdown.reducing():
            super()._exec_reduce_tied_grads()

    def _exec_complete_tied_grads(self) -> None:
        check_buffers(self.module.shared)
        complete_tied(self.module, self.optimizer)
        mark_replicated(self.module, self.optimizer)

    # -- loss and backward -------------------------------------------------------------------

    def _run_backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        if self.using_bf16_optimizer:
            # To None, not to zero: after backward the optimizer adds whatever is there, of every stage.
            self.optimizer.clear_lp_grads(set_to_none=True)
        # The flag tells upstream's hooks that prologue and epilogue are called here.
        self._running_engine_backward = True
        try:
            self._backward_prologue()
            torch.autograd.backward(roots, gradients)
            self._backward_epilogue()
        finally:
            self._running_engine_backward = False

    # -- figures -----------------------------------------------------------------------------

    def pulse_stats(self) -> dict[str, Any]:
        """What this rank counted in the last step; local, no communication.

        ``p2p_bytes`` by channel (``hidden``, ``hidden_grad``, ``value:NAME``, ``value_grad:NAME``),
        ``local_value_bytes``, ``peak_live_bytes``, ``idle_ms``, ``metadata_bytes``.
        """
        return asdict(self._runtime.stats)

    def pulse_timeline(self) -> Timeline | None:
        """The last step as it ran on this pipeline, on its first rank; None on the others. Collective.

        On an accelerator that runs asynchronously, times are those of the device in steps that are traced, and of the
        host that hands it the work in others.
        """
        with self._watchdog.watching("pulse_timeline"):
            found = self.gather_figures()
        return None if found is None else found[0]

    def gather_figures(self) -> tuple[Timeline, list[Stats]] | None:
        """The last step's timeline and every rank's counts, on the pipeline's first rank. Collective."""
        rows = self.module.gather_to_first((self._all_spans(), figures.clock(), self._runtime.stats))
        if rows is None:
            return None
        return figures.joined_timeline([(spans, clock) for spans, clock, _ in rows]), [stats for *_, stats in rows]

    def _all_spans(self) -> list[Span | FrozenSpan]:
        """Of the last step, frozen work included."""
        return [*self._runtime.spans, *([] if self._encoding is None else self._encoding.spans)]

    def pulse_planned_timeline(self) -> Timeline | None:
        """The step as the simulator predicts it; None when layer costs were not measured. Local.

        After ``set_train_batch_size`` None until the next ``train_batch`` has planned the order.
        """
        plan = self._plans.get(self.micro_batches)
        return None if plan is None else planning.planned_timeline(self.module.planned, plan)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ReceiveMessages: _exec_receive_messages,
        ComputeAction: _exec_compute_action,
        SendMessages: _exec_send_messages,
        FinishStep: _exec_finish_step,
        CompleteTiedGrads: _exec_complete_tied_grads,
        ReduceStageGrads: _exec_reduce_stage_grads,
        RunFrozen: _exec_run_frozen,
        ReduceTiedGrads: _exec_reduce_tied_grads,
        ReduceGrads: _exec_reduce_grads,
    }


def _routes(plan: Plan, graph: Graph) -> tuple[Route, ...]:
    return make_routes(plan.boundaries, plan.placement, graph.values)


def _hint(plan: Plan, ranks: Sequence[int]) -> str:
    """For a program that sends data between the ranks that it takes for the first and the last."""
    first, last = plan.placement[0], plan.placement[-1]
    if first != last:
        return ""
    return (
        f". Under this wave pipeline rank {first} (rank {ranks[first]}) holds the first and the last stage, so "
        "is_first_stage() and is_last_stage() are true on it alone: a loader that sends labels between the two has no "
        "partner. Let that rank's loader give whole batches, dicts or pairs (inputs, labels), and send nothing: what "
        'other ranks read is sent to them; or set "placement": "linear" in the "pulse" block'
    )


def _check_supported(config: Any, module: Any) -> None:
    check_zero_stage(int(config.zero_optimization_stage))
    if config.wall_clock_breakdown and config.steps_per_print is None:
        raise ConfigError(
            "wall_clock_breakdown: expected steps_per_print beside it, which says how often upstream prints the "
            "breakdown; found none"
        )
    check_precision(config)
    interval, planned = config.pipeline["activation_checkpoint_interval"], module.job.checkpointing.interval
    if interval and interval != planned:
        raise ConfigError(
            f"pipeline.activation_checkpoint_interval: the module was planned with {planned}, "
            f"deepspeed.initialize brings {interval}; pass config= to PipelineModule, the same as to initialize"
        )
