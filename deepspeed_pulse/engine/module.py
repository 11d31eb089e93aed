"""``PipelineModule``: DeepSpeed's, with named values and a plan."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import module as upstream
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import safe_get_full_fp32_param

from deepspeed_pulse.config import PulseConfig, parse_pulse
from deepspeed_pulse.engine import hook
from deepspeed_pulse.engine.checkpointing import resolve
from deepspeed_pulse.engine.communicator import carry_to_host
from deepspeed_pulse.engine.data.agreement import agree
from deepspeed_pulse.engine.data.batches import DEFAULT_INPUT, SplitBatch
from deepspeed_pulse.engine.data.resizing import num_samples
from deepspeed_pulse.engine.frozen import DeclaredParts, FrozenSpec
from deepspeed_pulse.engine.gradients.placeholders import add_placeholder
from deepspeed_pulse.engine.gradients.reduction import reduces_early
from deepspeed_pulse.engine.gradients.scaling import trained_dtype
from deepspeed_pulse.engine.observation import figures
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.engine.plans.asked import AUTO, asked_of, num_stages_of, settled, trial_config
from deepspeed_pulse.engine.plans.choosing import choose
from deepspeed_pulse.engine.plans.costs import PlanRequest
from deepspeed_pulse.engine.relay.tuples import RelayLayer, relay_layers
from deepspeed_pulse.engine.specs import TiedCall, describe, unwrap
from deepspeed_pulse.engine.start import Config, check_world, init_distributed, load_config
from deepspeed_pulse.engine.upstream import check_version
from deepspeed_pulse.errors import BatchError, ConfigError, FileError
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.runtime.stage import BoundLayer, Stage
from deepspeed_pulse.runtime.usage import Usage


class PipelineModule(upstream.PipelineModule):
    """DeepSpeed's ``PipelineModule`` for layers that stash and pop named values.

    Takes every argument of upstream's, and:

    Args:
        num_stages: number of pipeline ranks, as upstream, or "auto": chosen together with whatever else is "auto"; left
            out, the config's ``pipeline.stages``.
        partition_method: ``"profile"`` (the default under pulse), upstream's values, or a list of inner
            cuts: the first layer of each stage but the first, by index or by name.
        activation_checkpoint_interval: recompute layers in backward, so many in a row from one input; 0: as few as the
            memory needs, none if it is enough.
        activation_checkpoint_func: under pulse torch's non-reentrant checkpoint is the default;
            ``deepspeed.checkpointing.checkpoint`` is reentrant, which works too.
        checkpointable_layers: class names of the layers that an interval applies to.
        seed_layers: as upstream: initial weights depend on the layer, and random numbers in it on layer and microbatch,
            not on the plan.
        dynamic_shape: shapes of batches may change from one microbatch to the next. The first rank then draws all
            microbatches of a step at its start and tells the others their shapes; a shape met before costs no more
            than that. Shapes inside the model must follow from the shapes of what is read of the batch (and from whole
            numbers and words in it).
        config: what ``deepspeed.initialize`` takes (path or dict); left out, the file named by
            ``--deepspeed_config`` on the command line.
        example_batch: one batch ``(inputs, labels)``; layer costs are measured on it at start.
        input: name of the first layer's input when a batch's inputs are a dict; left out, it is "hidden" where there
            is such an entry, else the first; a frozen part's name makes its result the input. Entries of
            nested dicts have dotted names (``added_cond_kwargs.text_embeds``), here and in ``pop``; an entry that is
            None is absent.
        frozen: encoders by the name under which layers pop their results
            (:class:`~deepspeed_pulse.engine.frozen.FrozenSpec`). They run in the pipeline's idle time, one step ahead,
            so data is read one step ahead too. Every rank reads data; batches have one shape.

    Raises:
        PulseError: anything known to be wrong before the first step, the same on every rank.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Any = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int | str] | None = None,
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        config: Config | None = None,
        example_batch: Any = None,
        input: str = DEFAULT_INPUT,
        frozen: Mapping[str, FrozenSpec] | None = None,
    ) -> None:
        check_version()
        self.layer_list = list(layers)
        self.graph = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(self.layer_list)))
        self.input_name = input
        self.frozen = DeclaredParts(frozen, self.graph, input) if frozen else None
        self.ds_config = load_config(config)
        self.pulse = self._resolve_pulse()
        self.plan: Plan | None = None
        self.full_precision_copies: dict[torch.Tensor, torch.Tensor] = {}
        self._relay: list[RelayLayer] | None = None
        self._example = None if example_batch is None else self._split_example(example_batch)
        self._partition_method = partition_method
        self._checkpoint_arguments = (activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers)
        num_stages = num_stages_of(num_stages, self.ds_config)
        if self.pulse_enabled:
            self._refuse_unsupported(num_stages, topology)
        if self.frozen is not None:
            self._refuse_with_frozen(num_stages, dynamic_shape)
        init_distributed(self.pulse.timeout_seconds if self.pulse else None)
        num_stages = self._settle(num_stages, topology)
        check_world(num_stages, topology)
        if topology is None and self.pulse_enabled:
            topology = self._planned_topology(num_stages)
        hook.install()
        super().__init__(
            layers=[unwrap(layer) for layer in self.layer_list],
            num_stages=num_stages,
            topology=topology,
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            partition_method=partition_method if isinstance(partition_method, str) else "parameters",
            activation_checkpoint_interval=activation_checkpoint_interval,
            activation_checkpoint_func=self._upstream_checkpoint(activation_checkpoint_func),
            checkpointable_layers=checkpointable_layers,
            dynamic_shape=dynamic_shape,
        )

    # -- configuration -----------------------------------------------------------------------

    @property
    def pulse_enabled(self) -> bool:
        """True when the layers run by a plan; False when they run the upstream way."""
        return self.pulse is not None and self.pulse.enabled

    def engine_class(self) -> type[deepspeed.PipelineEngine]:
        """The engine that ``deepspeed.initialize`` builds for this module."""
        from deepspeed_pulse.engine.engine import PulseEngine
        from deepspeed_pulse.engine.relay.engine import RelayEngine

        return PulseEngine if self.pulse_enabled else RelayEngine

    def _resolve_pulse(self) -> PulseConfig | None:
        if self.ds_config is None:
            return PulseConfig() if self.graph.uses_names else None
        return parse_pulse(self.ds_config.get("pulse"))

    def _upstream_checkpoint(self, given: Any) -> Any:
        """What layers that run the upstream way are checkpointed with.

        A reentrant checkpoint runs forward without gradients, where the relayed tuple looks different.
        """
        upstreams = upstream.checkpointing
        if not self.graph.uses_names:
            return given or upstreams.checkpoint
        if given is upstreams.checkpoint and not self.pulse_enabled:
            raise ConfigError(
                "activation_checkpoint_func: values relayed in the tuple need a non-reentrant checkpoint, found "
                "deepspeed.checkpointing.checkpoint; leave it out, or turn pulse on"
            )
        return given or upstreams.non_reentrant_checkpoint

    def _split_example(self, example_batch: Any) -> SplitBatch:
        try:
            made = self.frozen is not None and self.frozen.makes_input
            return SplitBatch(example_batch, self.reading_graph, self.input_name, input_made=made)
        except BatchError as problem:
            raise BatchError(f"example_batch: {problem}") from None

    def _refuse_unsupported(self, num_stages: Any, topology: Any) -> None:
        if num_stages not in (None, AUTO) and (
            isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1
        ):
            raise ConfigError(
                f'num_stages: expected the number of pipeline ranks, an integer >= 1 or "auto", found {num_stages!r}'
            )
        if topology is not None and "model" in topology.get_axis_names() and topology.get_dim("model") > 1:
            raise ConfigError(
                "topology: tensor-parallel ('model') dimensions are not supported under pulse; use pipe x data"
            )
        if not self.layer_list:
            raise ConfigError("layers: expected at least one layer, found none")

    def _refuse_with_frozen(self, num_stages: Any, dynamic_shape: bool) -> None:
        if not self.pulse_enabled:
            raise ConfigError("frozen: parts run in the idle time of a plan: turn pulse on, or encode in the data")
        if num_stages == AUTO:
            raise ConfigError('frozen beside num_stages="auto": expected a number; `ds_pulse plan --frozen` tries one')
        if dynamic_shape:
            raise ConfigError("frozen beside dynamic_shape=True: what encoders give must have one shape; leave one out")
        assert self.pulse is not None
        if self._example is None and self.pulse.plan is None:
            raise ConfigError("frozen: pass example_batch=, on which the layers of frozen parts are measured")

    @property
    def reading_graph(self) -> Graph:
        """The model's layers behind its frozen parts: its batch entries are what the data must have."""
        return self.graph if self.frozen is None else self.frozen.reading_graph

    def _settle(self, num_stages: Any, topology: Any) -> Any:
        """The number of pipeline ranks, everything that is "auto" chosen."""
        pulse, self.chosen = self.pulse, None
        self._planned_layout = Layout.PIPE_MAJOR
        plan: Plan | None = None
        if pulse is not None and pulse.enabled and pulse.plan is not None:
            path = pulse.plan
            plan = agree(lambda: Plan.load(path), "planning")
            self._planned_layout = plan.layout
        asked = asked_of(num_stages, topology, self.ds_config, pulse, plan=plan, world=dist.get_world_size())
        if self.ds_config is not None and asked is None:
            self.ds_config = self.settled_config(self.ds_config)
        if asked is None:
            return num_stages
        assert self.ds_config is not None
        if self.frozen is not None and plan is None:
            raise ConfigError(
                f'frozen beside {asked.names[0]} "auto": expected numbers; `ds_pulse plan --frozen` tries some'
            )
        parsed = self._parsed(trial_config(self.ds_config), None)
        example = 1 if self._example is None else num_samples(self._example.inputs)
        self.chosen = choose(self._request_of(parsed, microbatch_size=example), asked)
        if dist.get_rank() == 0:
            figures.print_chosen(self.chosen)
        self.ds_config = self.settled_config(self.ds_config)
        self._planned_layout = self.chosen.choice.layout
        return self.chosen.choice.pipeline_ranks

    def settled_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config, for example what ``deepspeed.initialize`` brings, with numbers in place of "auto".

        Raises:
            ConfigError: it asks for something else than the config that the module was given.
        """
        return settled(config, None if self.chosen is None else (self.chosen.asked, self.chosen.choice))

    def mpu(self) -> Any:
        """Upstream's grid, through which a config is settled before it is parsed (see the hook)."""
        grid = super().mpu()
        grid.settled_config = self.settled_config
        return grid

    def _planned_topology(self, num_stages: Any) -> ProcessTopology | None:
        """None for upstream's own numbering of ranks."""
        if self._planned_layout is Layout.PIPE_MAJOR:
            return None
        return ProcessTopology(axes=["data", "pipe"], dims=[dist.get_world_size() // num_stages, num_stages])

    def _layout(self) -> Layout:
        axes = list(self._topo.get_axis_names())
        return Layout.PIPE_MAJOR if axes.index("pipe") < axes.index("data") else Layout.DATA_MAJOR

    # -- plan and layers ---------------------------------------------------------------------

    def _partition_layers(self, method: str = "uniform") -> None:
        self._check_divides()
        if self.pulse_enabled:
            request = self._request()
            chosen = None if self.chosen is None else self.chosen.planned
            self.planned = planning.plan_job(request) if chosen is None else chosen
            self.plan = self.planned.plan
            if self.frozen is not None:
                assert self.plan.fill is not None
                self.frozen.check_planned(self.plan.fill.parts, self.planned.costs)
            self.parts = list(self.plan.boundaries)
            self._local_layers = list(self.plan.layers_of(self.stage_id))
            self._set_bounds(start=0, stop=len(self._local_layers))
            return
        if self._partition_method is None or isinstance(self._partition_method, str):
            super()._partition_layers(method)
        else:
            self.parts = self._explicit_parts(self._partition_method)
        # numpy integers break random.seed under seed_layers
        self.parts = [int(part) for part in self.parts]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])
        self._local_layers = list(range(self._local_start, self._local_stop))

    def _count_layer_params(self) -> Any:
        """As upstream, which builds every layer; layers that would read files are counted on the meta device."""
        reads = any(getattr(layer, "reads_files", False) for layer in self.layer_list)
        with torch.device("meta") if reads else nullcontext():
            return super()._count_layer_params()

    def _check_divides(self) -> None:
        if self.num_stages > self._num_layers:
            raise ConfigError(
                f"{self.num_stages} pipeline ranks for {self._num_layers} layers: expected at least one layer a rank; "
                "use fewer ranks (num_stages) or finer layers"
            )

    def _explicit_parts(self, cuts: Sequence[int | str]) -> list[int]:
        indices = [cut if isinstance(cut, int) else self.graph.index_of(cut) for cut in cuts]
        parts = [0, *indices, self._num_layers]
        if len(parts) != self.num_stages + 1 or any(a >= b for a, b in itertools.pairwise(parts)):
            raise ConfigError(
                f"partition_method: expected {self.num_stages - 1} increasing cuts inside the {self._num_layers} "
                f"layers, found {list(cuts)}"
            )
        return parts

    def _parsed(self, config: dict[str, Any] | None, grid: Any) -> deepspeed.DeepSpeedConfig | None:
        if config is None:
            return None
        try:
            return deepspeed.DeepSpeedConfig(deepcopy(config), grid)
        except Exception as problem:  # upstream raises assertions, ValueErrors and pydantic's errors
            raise ConfigError(f"DeepSpeed refuses the config: {problem}") from problem

    def _request(self) -> PlanRequest:
        parsed = self._parsed(self.ds_config, self._grid)
        return replace(
            self._request_of(
                parsed, microbatch_size=1 if parsed is None else int(parsed.train_micro_batch_size_per_gpu)
            ),
            pipeline_ranks=self.num_stages,
            data_parallel=self._grid.data_parallel_size,
            microbatches=1 if parsed is None else int(parsed.gradient_accumulation_steps),
            layout=self._layout(),
        )

    def _request_of(self, parsed: deepspeed.DeepSpeedConfig | None, *, microbatch_size: int) -> PlanRequest:
        """For one pipeline rank; costs do not depend on how many there are."""
        assert self.pulse is not None
        pipeline = {} if parsed is None else parsed.pipeline
        self.checkpointing = resolve(self.layer_list, *self._checkpoint_arguments, pipeline)
        example = None if self._example is None else (self._example.inputs, dict(self._example.entries))
        device = torch.device(get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))
        parts: tuple[FrozenPart, ...] = ()
        if self.frozen is not None and example is not None:
            parts, given = self.frozen.measure(example[1], device)
            inputs = given.pop(self.input_name) if self.frozen.makes_input else example[0]
            example = (inputs, {**example[1], **given})
        return PlanRequest(
            graph=self.graph,
            layers=self.layer_list,
            pulse=self.pulse,
            pipeline_ranks=1,
            data_parallel=dist.get_world_size(),
            microbatches=1,
            microbatch_size=microbatch_size,
            partition_method=self._partition_method or "profile",
            example=example,
            device=device,
            dtype=None if parsed is None else trained_dtype(parsed),
            frozen=parts,
            has_frozen=self.frozen is not None,
            recompute=self.checkpointing.layers,
            reduce_early=parsed is None or reduces_early(parsed),
            shard_optimizer=parsed is not None and parsed.zero_optimization_stage == 1,
        )

    def _build(self) -> None:
        if not self.pulse_enabled:
            super()._build()
            self._adopt_tied_calls()
            return
        assert self.plan is not None
        for stage in self.plan.stages_of(self.stage_id):
            self._set_bounds(start=self.plan.boundaries[stage], stop=self.plan.boundaries[stage + 1])
            self._build_tied()
            super()._build()
        self._set_bounds(start=0, stop=len(self.forward_funcs))
        self._adopt_tied_calls()
        if not any(p.requires_grad for p in self.parameters()):
            # Optimizers refuse an empty parameter list; a rank of frozen layers still takes part.
            add_placeholder(self)

    def _build_tied(self) -> None:
        """Build tied modules as their first layer would be, so that initial weights do not depend on the plan."""
        for layer in self._layer_specs[self._local_start : self._local_stop]:
            if not isinstance(layer, upstream.TiedLayerSpec) or layer.key in self.tied_modules:
                continue
            first = next(
                i
                for i, other in enumerate(self._layer_specs)
                if isinstance(other, upstream.TiedLayerSpec) and other.key == layer.key
            )
            if self.seed_layers:
                (self.seed_fn or upstream.ds_utils.set_random_seed)(self.base_seed + first)
            self.tied_modules[layer.key] = module = self._layer_specs[first].build()
            # The layers share the module, so every parameter of it is tied.
            self.tied_weight_attrs[layer.key] = [name for name, _ in module.named_parameters()]

    def _adopt_tied_calls(self) -> None:
        """A tied layer with a ``forward_fn`` saves and loads its module's state too."""
        for position, function in enumerate(self.forward_funcs):
            if isinstance(function, partial) and function.func is not None and len(function.args) == 1:
                module = function.args[0]
                if any(module is tied for tied in self.tied_modules.values()):
                    self.forward_funcs[position] = TiedCall(module, function.func)

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()

    def stage_owner(self, layer_idx: int) -> int:
        """Pipeline rank that holds a layer."""
        return super().stage_owner(layer_idx) if self.plan is None else self.plan.rank_of_layer(layer_idx)

    def local_layers(self) -> list[tuple[int, Any]]:
        """(layer index, built module or function) of every layer on this rank, in forward order."""
        return list(zip(self._local_layers, self.forward_funcs, strict=True))

    def bound_layers(self) -> dict[int, BoundLayer]:
        """Layers on this rank with their declarations, by layer index."""
        recompute = () if self.plan is None else self.plan.recompute
        seeded = self.seed_layers and self.plan is not None  # without a plan upstream seeds them
        return {
            index: BoundLayer(
                self.graph.layers[index],
                function,
                recompute=index in recompute,
                seed=partial(self._seed_layer, index) if seeded else None,
            )
            for index, function in self.local_layers()
        }

    def _seed_layer(self, index: int, number: int) -> None:
        """As upstream under ``seed_layers``: random numbers depend on layer and microbatch, not on the plan."""
        seed = (self.base_seed * (number + 2) + index) % 2**32
        (self.seed_fn or upstream.ds_utils.set_random_seed)(seed)

    def stages(self, usage: Usage) -> dict[int, Stage]:
        """The stages of this rank, ready to run."""
        assert self.plan is not None
        bound = self.bound_layers()
        return {
            stage: Stage(
                [bound[i] for i in self.plan.stage_layers(stage)],
                usage.exports(stage),
                checkpoint=self.checkpointing.function,
                interval=max(1, self.checkpointing.interval),
            )
            for stage in self.plan.stages_of(self.stage_id)
        }

    def set_checkpoint_interval(self, interval: int) -> None:
        """As upstream without pulse; the plan counts on what is recomputed, so under pulse it is fixed at the start."""
        if self.pulse_enabled and interval != self.checkpointing.interval:
            raise ConfigError(
                f"set_checkpoint_interval({interval}): under pulse the plan counts on what is recomputed; pass "
                "activation_checkpoint_interval to PipelineModule instead"
            )
        super().set_checkpoint_interval(interval)

    # -- forward, checkpoints, gathering -----------------------------------------------------

    def forward(self, forward_input: Any) -> Any:
        """The layers of this rank, the upstream way; named values travel in the tuple."""
        if not self.graph.uses_names:
            return super().forward(forward_input)
        if self._relay is None:
            self._relay = relay_layers(self.graph, self.bound_layers())
        with self._relaying():
            return super().forward(forward_input)

    @contextmanager
    def _relaying(self) -> Iterator[None]:
        """Layers between relayed tuples, also where a checkpoint runs them again."""
        before = self.forward_funcs, self.activation_checkpoint_func
        checkpoint = self.activation_checkpoint_func

        def relayed_checkpoint(function: Any, *args: Any) -> Any:
            def relayed(*inputs: Any) -> Any:
                with self._relaying():
                    return function(*inputs)

            return checkpoint(relayed, *args)

        self.forward_funcs, self.activation_checkpoint_func = self._relay, relayed_checkpoint
        try:
            yield
        finally:
            self.forward_funcs, self.activation_checkpoint_func = before

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Upstream's file name of a layer, found by its index in the model."""
        return str(super().ckpt_layer_path(ckpt_dir, self._local_layers[local_layer_idx] - self._local_start))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Files of a layer; of one that shares its weights where it has none, as upstream saves no tied ``forward_fn``.

        Raises:
            FileError: the checkpoint has neither.
        """
        index = self._local_layers[local_layer_idx]
        for layer in (index, *self._sharing_weights(index)):
            found = list(super().ckpt_layer_path_list(ckpt_dir, layer - self._local_start))
            if found:
                return found
        raise FileError(
            f"{ckpt_dir}: expected a file layer_{index:02d}-model_states.pt with the weights of layer "
            f"{self.graph.layers[index].name}, found none; the checkpoint was written by another model, or not whole"
        )

    def _sharing_weights(self, index: int) -> list[int]:
        key = getattr(self._layer_specs[index], "key", None)
        if key is None:
            return []
        return [i for i, other in enumerate(self._layer_specs) if getattr(other, "key", None) == key]

    def gather_to_first(self, item: Any) -> list[Any] | None:
        """``item`` of every rank of the pipeline, in order, on its first rank; None on the others."""
        group = self._grid.get_pipe_parallel_group()
        first = self.global_rank == self._grid.pp_group[0]
        found: list[Any] | None = [None] * len(self._grid.pp_group) if first else None
        torch.distributed.gather_object(item, found, dst=self._grid.pp_group[0], group=group)
        return found

    def decide_on_first(self, make: Callable[[], Any], what: str) -> Any:
        """What ``make`` gives on global rank 0, on every rank of the world; its error likewise."""
        return agree(make, what)

    def bring_to_first(
        self, tensor: torch.Tensor | None, *, owner: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A tensor of pipeline rank ``owner``, on the CPU of global rank 0; None on the others.

        Args:
            tensor: on the owner in the first pipeline, that tensor; ignored on other ranks.
            shape, dtype: of the tensor, known to all.
        """
        if self._grid.data_parallel_id != 0:
            return None
        return carry_to_host(
            tensor,
            shape=shape,
            dtype=dtype,
            source=self._grid.pp_group[owner],
            target=self._grid.pp_group[0],
            group=self._grid.get_pipe_parallel_group(),
            device=torch.device(get_accelerator().device_name(self.local_rank)),
        )

    def full_precision(self, parameter: torch.Tensor) -> torch.Tensor:
        """The optimizer's fp32 master copy of a parameter, where it has one; all data-parallel replicas call it."""
        if parameter in self.full_precision_copies:
            return self.full_precision_copies[parameter].clone()
        master = safe_get_full_fp32_param(parameter)
        return parameter.detach().float() if master is None else master
