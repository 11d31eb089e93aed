"""``PipelineModule``: DeepSpeed's, with named values and a plan."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod

import deepspeed
import torch
from deepspeed.runtime.pipe import module as upstream
from deepspeed.utils import safe_get_full_fp32_param

from deepspeed_pulse.engine import hook
from deepspeed_pulse.engine.backbones import DEFAULT_INPUT, Backbone, Head, index_of, layers_of
from deepspeed_pulse.engine.collectives import as_pulse_error, raise_everywhere
from deepspeed_pulse.engine.conditioning import SelfConditioning
from deepspeed_pulse.engine.frozen import FrozenSpec
from deepspeed_pulse.engine.gradients.placeholders import add_placeholder
from deepspeed_pulse.engine.memory_order import flattened
from deepspeed_pulse.engine.ranks import Ranks
from deepspeed_pulse.engine.relay.forward import RelayStage, explicit_parts, relay_stage
from deepspeed_pulse.engine.relay.tuples import Headers
from deepspeed_pulse.engine.sharing.shared import adopt_tied_calls, build_tied, tie_all_parameters
from deepspeed_pulse.engine.sharing.unseen import check_builds
from deepspeed_pulse.engine.specs import in_a_row, unwrap
from deepspeed_pulse.engine.starting.kernels import skip_inference_kernel
from deepspeed_pulse.engine.starting.late import plan_own_cuts, take_late_block
from deepspeed_pulse.engine.starting.setting_up import set_up, watched_start
from deepspeed_pulse.engine.starting.start import Config, check_world
from deepspeed_pulse.engine.unheld import move_to_host
from deepspeed_pulse.errors import ConfigError, FileError, PulseError, RunError
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.units import gigabytes
from deepspeed_pulse.runtime.payload import map_tensors, plainly
from deepspeed_pulse.runtime.stage import module_of

skip_inference_kernel()


class PipelineModule(upstream.PipelineModule):
    """DeepSpeed's ``PipelineModule`` for layers that stash and pop named values.

    Takes every argument of upstream's, and:

    Args:
        num_stages: number of pipeline ranks, as upstream, or "auto": chosen together with whatever else is "auto"; left
            out, the config's ``pipeline.stages``.
        partition_method: ``"profile"`` (the default under pulse), upstream's values (a linear placement then has
            upstream's stages), or a list of inner cuts: the first layer of each stage but the first, by index or by
            name.
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
            so data is read one step ahead too. Every rank reads data; batches have one shape. With several backbones
            names have the backbone's before them: ``"base.text"``.
        backbones: in place of ``layers``: several models by name, each a
            :class:`~deepspeed_pulse.engine.backbones.Backbone`, that train together, each as if it were alone. A batch
            is ``(inputs, labels)``, both a dict by backbone.

        self_conditioning: some microbatches run one more forward first, whose result they read
            (:class:`~deepspeed_pulse.engine.conditioning.SelfConditioning`); with several backbones a dict of these by
            backbone. Every rank reads data.

    Raises:
        PulseError: anything known to be wrong before the first step, the same on every rank.
    """

    unusable: str | None = None
    """Why weights and optimizer state do not belong together."""
    synchronizes_tied_weights = True
    """False while a checkpoint's layers are loaded: ranks meet over tied weights when all have theirs."""

    def __init__(
        self,
        layers: Sequence[Any] | None = None,
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
        backbones: Mapping[str, Backbone] | None = None,
        self_conditioning: SelfConditioning | Mapping[str, SelfConditioning] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.job, self.shared, num_stages, self.watchdog = set_up(type(self), given)
        self.layer_list, self.graph, self.pulse = self.job.layers, self.job.graph, self.job.pulse
        self.frozen = self.job.frozen
        self.plan: Plan | None = None
        self.full_precision_copies: dict[torch.Tensor, torch.Tensor] = {}
        self.ranks = Ranks(self)
        self._relay: RelayStage | None = None
        self.headers = Headers()
        """Of tuples that relay named values."""
        self._partition_method = partition_method
        self._problem: PulseError | None = None
        self._is_made = False
        self._owners: dict[int, int] = {}
        hook.install()
        hook.guard()
        with watched_start(self.watchdog, self.pulse, 'PipelineModule(): settling what is "auto"'):
            num_stages = self.job.settle(num_stages, topology, self._doing)
            check_world(num_stages, topology)
            self._doing("PipelineModule(): making process groups")
            super().__init__(
                layers=[unwrap(layer) for layer in self.layer_list],
                num_stages=num_stages,
                topology=self.job.topology(num_stages) if topology is None else topology,
                loss_fn=loss_fn,
                seed_layers=seed_layers,
                seed_fn=seed_fn,
                base_seed=base_seed,
                partition_method=partition_method if isinstance(partition_method, str) else "parameters",
                activation_checkpoint_interval=activation_checkpoint_interval,
                activation_checkpoint_func=self.job.upstream_checkpoint(),
                checkpointable_layers=checkpointable_layers,
                dynamic_shape=dynamic_shape,
            )

    def _doing(self, what: str) -> None:
        """Say what comes next while the module is made."""
        if self.watchdog is not None:
            self.watchdog.go_on(what)

    @property
    def pulse_enabled(self) -> bool:
        """True when the layers run by a plan; False when they run the upstream way."""
        return self.job.enabled

    @property
    def has_several(self) -> bool:
        """True where several backbones train together."""
        return len(self.job.heads) > 1

    def loss_function(self, head: Head) -> Any:
        """Of one backbone; where there is one, a program may set ``loss_fn`` at any time."""
        return self.loss_fn if head.name is None else head.loss_fn

    def backbone_parameters(self, name: str) -> list[torch.nn.Parameter]:
        """The parameters of a backbone that are on this rank, for an optimizer's groups; there may be none.

        Raises:
            ConfigError: there is no such backbone; says which there are.
        """
        index = index_of(self.job.heads, name)
        return [p for p in self.parameters() if self.backbone_of(p) == index]

    def backbone_layers(self, name: str | None, what: str = "backbone_layers()") -> range:
        """Layers of a backbone in the list of all; ``name`` None: of the one there is.

        Raises:
            ConfigError: ``what`` asks for no backbone where there are several, or for one that there is not.
        """
        return layers_of(self.job.heads, name, what)

    def backbone_of(self, parameter: torch.Tensor) -> int | None:
        """Index of the backbone that a parameter on this rank belongs to; None for what stands in for one."""
        if not self._owners:
            modules = [(i, module_of(layer)) for i, layer in self.local_layers()]
            found = [(p, i) for i, layer in modules if layer is not None for p in layer.parameters()]
            self._owners = {id(p): self.graph.backbone_of(i) for p, i in found}
        return self._owners.get(id(parameter))

    def engine_class(self) -> type[deepspeed.PipelineEngine]:
        """The engine that ``deepspeed.initialize`` builds for this module."""
        from deepspeed_pulse.engine.engine import PulseEngine
        from deepspeed_pulse.engine.relay.engine import RelayEngine

        return PulseEngine if self.pulse_enabled else RelayEngine

    def settled_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config, for example what ``deepspeed.initialize`` brings, with numbers in place of "auto".

        Raises:
            ConfigError: it asks for something else than the config that the module was given.
        """
        if self.pulse is None and self._is_made:
            take_late_block(self, config)
        return self.job.settled_config(config)

    def mpu(self) -> Any:
        """Upstream's grid, through which a config is settled before it is parsed (see the hook).

        Upstream keeps the last grid for ever, so the grid must not keep the module, which has the engine.
        """
        grid = super().mpu()
        grid.settled_config = WeakMethod(self.settled_config)
        return grid

    def _partition_layers(self, method: str = "uniform") -> None:
        if self.num_stages > self._num_layers:
            raise ConfigError(
                f"{self.num_stages} pipeline ranks for {self._num_layers} layers: expected at least one layer a rank; "
                "use fewer ranks (num_stages) or finer layers",
                more="too-few-layers",
            )
        if self.pulse_enabled:
            self.make_plan()
            return
        if self._partition_method is None or isinstance(self._partition_method, str):
            super()._partition_layers(method)
        else:
            self.parts = explicit_parts(self.graph, self._partition_method, self.num_stages)
        # numpy integers break random.seed under seed_layers
        self.parts = [int(part) for part in self.parts]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def make_plan(self) -> None:
        """Plan, and take the layers that the plan gives to this rank; collective in the world."""
        self._doing("PipelineModule(): planning")
        self.planned = self.job.plan(self._grid, self._topo, self._doing)
        self.plan = self.planned.plan
        self.parts = list(self.plan.boundaries)
        self._local_layers = list(self.plan.layers_of(self.stage_id))
        self._set_bounds(start=0, stop=len(self._local_layers))

    def _count_layer_params(self) -> Any:
        """As upstream, which builds every layer; layers that would read files are counted on the meta device."""
        reads = any(getattr(layer, "reads_files", False) for layer in self.layer_list)
        with torch.device("meta") if reads else nullcontext():
            return super()._count_layer_params()

    def _build(self) -> None:
        self._doing("PipelineModule(): building layers")
        if self.pulse_enabled and self.plan is None:
            plan_own_cuts(self)  # a subclass's _partition_layers
        with self._keeping_problem("while its layers are built"):
            self._build_layers()

    def to(self, *args: Any, **kwargs: Any) -> PipelineModule:
        """As upstream; what goes wrong while the module is made is told to all ranks."""
        with nullcontext() if self._is_made else self._keeping_problem("while its layers are moved to the device"):
            super().to(*args, **kwargs)
        return self

    @contextmanager
    def _keeping_problem(self, when: str) -> Iterator[None]:
        """What one rank meets is raised by all where they meet next; without pulse, upstream's way."""
        try:
            yield
        except Exception as problem:
            if self.pulse is None:
                raise
            self._problem = self._problem or as_pulse_error(problem, f"rank {self.global_rank}, {when}")

    def _index_tied_modules(self) -> Any:
        """As upstream, the first that ranks do together once all have built their layers."""
        self._doing("PipelineModule(): waiting for the others to build their layers")
        self._is_made = True
        if self.pulse is not None:
            raise_everywhere(self._problem, "building layers")
        self._doing("PipelineModule(): tying weights")
        self.shared.connect(self)
        return super()._index_tied_modules()

    def _build_layers(self) -> None:
        if self.plan is None:
            self._local_layers = list(range(self._local_start, self._local_stop))
            self._build_in_bounds()
        else:
            for stage in self.plan.stages_of(self.stage_id):
                self._set_bounds(start=self.plan.boundaries[stage], stop=self.plan.boundaries[stage + 1])
                build_tied(self, range(self._local_start, self._local_stop))
                self._build_in_bounds()
            self._set_bounds(start=0, stop=len(self.forward_funcs))
        adopt_tied_calls(self.forward_funcs, self.tied_modules)
        if self.pulse is not None:
            if self.plan is None:
                tie_all_parameters(self)
            check_builds(self)
        moved = move_to_host(self)
        if moved and self.global_rank == 0:
            print(
                f"pulse: {gigabytes(moved)} GB of layers of other ranks lay on the device of rank 0 and are on the CPU "
                "now; a model that is built there, and not moved before it is cut, saves the way",
                flush=True,
            )
        if self.plan is not None and not any(p.requires_grad for p in self.parameters()):
            # Optimizers refuse an empty parameter list; a rank of frozen layers still takes part.
            add_placeholder(self)

    def _build_in_bounds(self) -> None:
        with in_a_row(self.layer_list[self._local_start : self._local_stop]):
            super()._build()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As torch; a weight that several layers share has the name of the first of them, also where that is not."""
        named: Iterator[Any] = super().named_parameters(prefix, recurse, remove_duplicate)
        if not remove_duplicate:
            return named
        start = f"{prefix}." if prefix else ""
        return ((start + self.shared.names.get(p, name.removeprefix(start)), p) for name, p in named)

    def train(self, mode: bool = True) -> PipelineModule:
        """As torch. Upstream calls it in every step, where few modules if any have another mode."""
        if not isinstance(mode, bool):  # torch says what it expects
            return super().train(mode)
        set_mode(self, mode)
        return self

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, Any]]:
        """Trainable weights that other ranks of the pipeline hold too, and the groups of these ranks."""
        tied = [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]
        return [*tied, *self.shared.weights_and_groups()]

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        if self.synchronizes_tied_weights:
            with flattened(p for tied in self.tied_modules.values() for p in tied.parameters()):
                super()._synchronize_tied_weights()
            self.shared.synchronize()

    def stage_owner(self, layer_idx: int) -> int:
        """Pipeline rank that holds a layer."""
        return super().stage_owner(layer_idx) if self.plan is None else self.plan.rank_of_layer(layer_idx)

    def local_layers(self) -> list[tuple[int, Any]]:
        """(layer index, built module or function) of every layer on this rank, in forward order."""
        return list(zip(self._local_layers, self.forward_funcs, strict=True))

    def forward(self, forward_input: Any) -> Any:
        """The layers of this rank, the upstream way; named values travel in the tuple.

        Raises:
            ConfigError: the module has a plan, by which a rank's layers do not follow one another.
        """
        if self.pulse_enabled:
            raise ConfigError(
                "a PipelineModule with a plan was called directly, or by another engine than its own: its ranks hold "
                "layers that do not follow one another; use engine.train_batch or engine.eval_batch of the engine that "
                'deepspeed.initialize(model=module) returns, or set "enabled": false in the "pulse" block',
                more="called-directly",
            )
        if not self.graph.uses_names:
            found = super().forward(forward_input)
            # upstream sends rows only: channels_last weights make other activations
            return map_tensors(found, plainly) if isinstance(found, (torch.Tensor, tuple)) else found
        self._relay = relay_stage(self, self._relay)
        self.micro_offset += 1
        return self._relay(forward_input, self.micro_offset - 1)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Upstream's file name of a layer, found by its index in the model."""
        return str(super().ckpt_layer_path(ckpt_dir, self._local_layers[local_layer_idx] - self._local_start))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Files of a layer; of one that shares its weights where it has none, as upstream saves no tied ``forward_fn``.

        Raises:
            FileError: the checkpoint has neither.
        """
        return self.layer_files(ckpt_dir, self._local_layers[local_layer_idx])

    def layer_files(self, ckpt_dir: str, index: int, shift: int = 0) -> list[str]:
        """Files of the layer of that index, which has another one in the checkpoint: ``shift`` more.

        Raises:
            FileError: the checkpoint has none.
        """
        keys = [getattr(spec, "key", None) for spec in self._layer_specs]
        sharing = [i for i, key in enumerate(keys) if key == keys[index] and key is not None]
        for layer in (index, *sharing):
            found = list(super().ckpt_layer_path_list(glob.escape(ckpt_dir), layer + shift - self._local_start))
            if found:
                return found
        raise FileError(
            f"{ckpt_dir}: expected a file layer_{index + shift:02d}-model_states.pt with the weights of layer "
            f"{self.graph.layers[index].name}, found none; the checkpoint was written by another model, or not whole"
        )

    def check_usable(self, what: str) -> None:
        """Raise a :class:`RunError`, the same on every rank, when a checkpoint was loaded by halves."""
        if self.unusable is not None:
            raise RunError(f"{what}: {self.unusable}; load a whole checkpoint first")

    def full_precision(self, parameter: torch.Tensor) -> torch.Tensor:
        """The optimizer's fp32 master copy of a parameter, where it has one; all data-parallel replicas call it."""
        if parameter in self.full_precision_copies:
            return self.full_precision_copies[parameter].clone()
        master = safe_get_full_fp32_param(parameter)
        return parameter.detach().float() if master is None else master


def set_mode(module: torch.nn.Module, mode: bool) -> None:
    """``module.train(mode)`` of a module, leaving alone what is in that mode; who has a method of their own run it."""
    if module.training is not mode:
        module.training = mode
    for child in module._modules.values():
        if child is None:
            continue
        if type(child).train is torch.nn.Module.train and "train" not in child.__dict__:
            set_mode(child, mode)
        else:
            child.train(mode)
