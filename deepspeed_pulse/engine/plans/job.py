"""What a module is to run, and with which config: settled before upstream numbers the ranks, then planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import ProcessTopology

from deepspeed_pulse.config import PulseConfig, parse_pulse
from deepspeed_pulse.engine.backbones import INPUT, Head, backbone_layers, joint_graph, own_graph
from deepspeed_pulse.engine.collectives import agree, everywhere
from deepspeed_pulse.engine.conditioning import DeclaredConditioning
from deepspeed_pulse.engine.data.batches import BatchForm, SplitBatch
from deepspeed_pulse.engine.data.resizing import num_samples
from deepspeed_pulse.engine.device import emptied_after, same_random_numbers
from deepspeed_pulse.engine.frozen import DeclaredParts
from deepspeed_pulse.engine.gradients.memory import is_fused
from deepspeed_pulse.engine.gradients.own_steps import refusal
from deepspeed_pulse.engine.gradients.reduction import reduces_early
from deepspeed_pulse.engine.gradients.scaling import trained_dtype
from deepspeed_pulse.engine.observation import figures
from deepspeed_pulse.engine.plans.asked import AUTO, asked_of, layout_of, num_stages_of, settled, trial_config
from deepspeed_pulse.engine.plans.choosing import Chosen, choose
from deepspeed_pulse.engine.plans.content import frozen_content
from deepspeed_pulse.engine.plans.costs import PlanRequest
from deepspeed_pulse.engine.plans.kept import check_folder, with_kept_times
from deepspeed_pulse.engine.plans.planning import Planned, plan_job
from deepspeed_pulse.engine.recomputing import RecomputeArguments, Recomputing
from deepspeed_pulse.engine.rules import EntryRules, rules_of
from deepspeed_pulse.engine.starting.start import load_config
from deepspeed_pulse.engine.waist.older import cast_of_buffers
from deepspeed_pulse.errors import BatchError, ConfigError, GraphError, RunError
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.rules import PLAIN, Rules
from deepspeed_pulse.runtime.recomputing import Checkpoint


class TrainingJob:
    """Layers with the arguments and the config that their plan depends on; ``given`` to ``PipelineModule``.

    A PulseError where the layers, the config, the frozen parts or the example batch are wrong.

    Attributes:
        heads: of the backbones; one where there is one.
        batch_form: what batches have.
        config: DeepSpeed's, with numbers in place of "auto" once settled; None where there is none.
        pulse: its block; None where the layers run as upstream runs them.
        chosen: what was chosen for "auto"; None where nothing was.
        recomputing: which layers run again in backward, and how; known once planned.
    """

    def __init__(self, layers: Sequence[Any], heads: Sequence[Head], given: Mapping[str, Any]) -> None:
        self.layers, self.heads = layers, tuple(heads)
        self.graph = joint_graph(layers, heads)
        frozen, example_batch = given["frozen"], given["example_batch"]
        conditioned = given["self_conditioning"]
        self.conditioning = None if conditioned is None else DeclaredConditioning(conditioned, self.graph, heads)
        self.frozen = DeclaredParts(frozen, self.graph, heads, self.conditioning) if frozen else None
        self.batch_form = BatchForm(
            graph=self.reading_graph,
            heads=self.heads,
            made=() if self.frozen is None else tuple(self.frozen.makes_inputs.values()),
            rules=tuple(map(self._rules_of, self.heads)),
        )
        self.config = load_config(given["config"])
        self.pulse = self._resolve_pulse()
        self.chosen: Chosen | None = None
        self.recomputing: Recomputing
        self._example = None if example_batch is None else self._split(example_batch)
        self._partition_method: str | Sequence[int | str] | None = given["partition_method"]
        self.keeps_cuts = False
        self._recompute_arguments = RecomputeArguments(
            interval=given["activation_checkpoint_interval"],
            function=given["activation_checkpoint_func"],
            checkpointable=given["checkpointable_layers"],
        )
        self._layout = Layout.PIPE_MAJOR

    @property
    def enabled(self) -> bool:
        """True when the layers run by a plan; False when they run the upstream way."""
        return self.pulse is not None and self.pulse.enabled

    @property
    def reading_graph(self) -> Graph:
        """The model's layers behind its frozen parts: its batch entries are what the data must have."""
        return self._behind_estimates(self.graph if self.frozen is None else self.frozen.reading_graph)

    @property
    def encoded_graph(self) -> Graph:
        """The same for data that has what frozen parts would give."""
        return self._behind_estimates(self.graph)

    def _behind_estimates(self, graph: Graph) -> Graph:
        return graph if self.conditioning is None else self.conditioning.behind(graph)

    @property
    def entry_rules(self) -> Sequence[EntryRules]:
        """What the models that the layers of the only backbone were made of say about the entries of a batch."""
        return self.batch_form.rules[0]

    def _rules_of(self, head: Head) -> Sequence[EntryRules]:
        own = self.layers[head.layers.start : head.layers.stop]
        return rules_of(own, [value.name for value in own_graph(self.reading_graph, head).batch_entries])

    def _resolve_pulse(self) -> PulseConfig | None:
        if self.config is None:
            return PulseConfig() if self.graph.uses_names else None
        return parse_pulse(self.config.get("pulse"))

    def _split(self, example_batch: Any) -> SplitBatch:
        try:
            return self.batch_form.split(example_batch)
        except BatchError as problem:
            raise BatchError(f"example_batch: {problem}") from None

    def bring_config(self, config: dict[str, Any]) -> None:
        """A config that comes after the module was made without a block."""
        self.config = config
        self.pulse = self._resolve_pulse()

    def keep_cuts(self, cuts: Sequence[int]) -> None:
        """Plan these inner cuts, one stage a rank, whatever else the block leaves open: the layers are cut already.

        A ConfigError where the block asks for several stages a rank.
        """
        assert self.pulse is not None
        several = self.pulse.placement in ("wave", "loop")
        if several or self.pulse.waves not in (1, AUTO):
            key = "placement" if several else "waves"
            raise ConfigError(
                f'the "pulse" block asks for {key} {getattr(self.pulse, key)!r}, but the layers are already cut into '
                "one stage a rank: by a subclass of PipelineModule, or because the block came only with "
                "deepspeed.initialize; pass config= to PipelineModule and leave its cuts to the plan, or leave the key "
                "out"
            )
        self._partition_method, self.keeps_cuts = list(cuts), True

    def check(self, num_stages: Any, topology: Any, *, dynamic_shape: bool) -> Any:
        """The number of pipeline ranks as given here or in the config, or "auto"; before there are ranks.

        A ConfigError where it is none, or something does not go with pulse or with frozen parts.
        """
        num_stages = num_stages_of(num_stages, self.config)
        is_number = isinstance(num_stages, int) and not isinstance(num_stages, bool) and num_stages >= 1
        if not is_number and num_stages not in (None, AUTO):
            raise ConfigError(
                f'num_stages: expected the number of pipeline ranks, an integer >= 1 or "auto", found {num_stages!r}'
            )
        wrong = [*self._unsupported(topology), *self._against_frozen(num_stages, dynamic_shape)]
        if wrong:
            raise ConfigError(wrong[0])
        return num_stages

    def _unsupported(self, topology: Any) -> Iterator[str]:
        if len(self.heads) > 1 and not self.enabled:
            yield (
                'backbones: several backbones train by a plan: expected a config with a "pulse" block that is not '
                'disabled, found none; add "pulse": {}, or train each backbone alone'
            )
        if self.conditioning is not None and not self.enabled:
            yield (
                'self_conditioning: extra forwards run by a plan: expected a config with a "pulse" block that is not '
                'disabled, found none; add "pulse": {}, or leave self_conditioning= out'
            )
        if not self.enabled:
            return
        if topology is not None and "model" in topology.get_axis_names() and topology.get_dim("model") > 1:
            yield "topology: tensor-parallel ('model') dimensions are not supported under pulse; use pipe x data"
        if not self.layers:
            yield "layers: expected at least one layer, found none"

    def _against_frozen(self, num_stages: Any, dynamic_shape: bool) -> Iterator[str]:
        if self.frozen is None:
            return
        both = (
            []
            if self.conditioning is None
            else [x.entry for x in self.conditioning.planned if x.entry in self.frozen.names]
        )
        if both:
            yield f"self_conditioning: {both[0]!r} is the name of a frozen part too; rename one of them"
        if not self.enabled:
            yield "frozen: parts run in the idle time of a plan: turn pulse on, or encode in the data"
        if num_stages == AUTO:
            yield 'frozen beside num_stages="auto": expected a number; `ds_pulse plan --frozen` tries one'
        if self.pulse is not None and not self.pulse.receive_ahead:
            yield (
                'frozen beside "receive_ahead": false: ranks hand results of frozen parts on while layers run; leave '
                "it out, or encode in the data"
            )
        if dynamic_shape:
            yield "frozen beside dynamic_shape=True: what encoders give must have one shape; leave one out"
        if self._example is None and (self.pulse is None or self.pulse.plan is None):
            yield "frozen: pass example_batch=, on which the layers of frozen parts are measured"

    def settle(self, num_stages: Any, topology: Any, doing: Callable[[str], None]) -> Any:
        """The number of pipeline ranks, everything that is "auto" chosen; all ranks call it and get the same.

        ``doing`` is told what comes next.
        """
        pulse = self.pulse
        plan: Plan | None = None
        path, folder = (pulse.plan, pulse.plan_cache) if pulse is not None and pulse.enabled else (None, None)
        if path is not None:
            plan = agree(lambda: Plan.load(path), "planning")
            self._layout = plan.layout
        elif folder is not None:
            agree(lambda: check_folder(folder), "planning")
        asked = asked_of(num_stages, topology, self.config, pulse, plan=plan, world=dist.get_world_size())
        if self.config is not None and asked is None:
            self.config = self.settled_config(self.config)
        if asked is None:
            return num_stages
        assert self.config is not None
        if len(self.heads) > 1 and plan is None:
            raise ConfigError(
                f'backbones beside {asked.names[0]} "auto": expected numbers; `ds_pulse plan` takes a profile of each'
            )
        if self.conditioning is not None and plan is None:
            raise ConfigError(f'self_conditioning beside {asked.names[0]} "auto": expected numbers')
        if self.frozen is not None and plan is None:
            raise ConfigError(
                f'frozen beside {asked.names[0]} "auto": expected numbers; `ds_pulse plan --frozen` tries some'
            )
        example = 1 if self._example is None else num_samples(self._example.input_of(0))
        config = self.config
        request = everywhere(
            lambda: self._request(_parsed(trial_config(config), None), microbatch_size=example),
            'what "auto" is chosen from',
            RunError,
        )
        self.chosen = choose(request, asked, doing)
        if dist.get_rank() == 0:
            figures.print_chosen(self.chosen)
        self.config = self.settled_config(self.config)
        self._layout = self.chosen.choice.layout
        return self.chosen.choice.pipeline_ranks

    def settled_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`PipelineModule.settled_config`."""
        return settled(config, None if self.chosen is None else (self.chosen.asked, self.chosen.choice))

    def topology(self, num_stages: Any) -> ProcessTopology | None:
        """How ranks are numbered; None for upstream's own way."""
        if not self.enabled or self._layout is Layout.PIPE_MAJOR:
            return None
        return ProcessTopology(axes=["data", "pipe"], dims=[dist.get_world_size() // num_stages, num_stages])

    def plan(self, grid: Any, topology: ProcessTopology, doing: Callable[[str], None]) -> Planned:
        """The plan and what it was made from; all ranks call it and get the same, or the same error.

        ``grid`` and ``topology`` are upstream's, of this module; ``doing`` is told what comes next.
        """
        request = everywhere(lambda: self._whole_request(grid, topology), "what a plan is made from", RunError)
        chosen = None if self.chosen is None else self.chosen.planned
        planned = plan_job(request, doing) if chosen is None else chosen
        if self.frozen is not None:
            assert planned.plan.fill is not None
            self.frozen.check_planned(planned.plan.fill.parts, planned.costs)
        if self.conditioning is not None:
            self.conditioning.check_planned(planned.plan, planned.costs)
        elif planned.plan.conditioning:
            raise ConfigError(
                f"{planned.costs}: the plan has self_conditioning, the module has none; plan anew, or pass "
                "PipelineModule(..., self_conditioning=)"
            )
        return planned

    def upstream_checkpoint(self) -> Checkpoint:
        """What layers that run the upstream way are checkpointed with."""
        return self._recompute_arguments.of_upstream(relays=self.graph.uses_names, planned=self.enabled)

    def recomputed_every(self, interval: int) -> tuple[int, ...]:
        """The layers that an interval applies to."""
        layers = self._recompute_arguments.every(interval, self.layers).layers
        assert not isinstance(layers, str)
        return layers

    def recompute_every(self, interval: int, function: Checkpoint | None) -> None:
        """What a program asks for after the plan was made; interval 0: nothing recomputed; function None: as before."""
        found = self._recompute_arguments.every(interval, self.layers)
        self.recomputing = replace(found, function=function or self.recomputing.function)

    @property
    def planned_pulse(self) -> PulseConfig:
        """The block as plans are made by it; a ConfigError for steps of their own that backbones cannot make."""
        assert self.pulse is not None
        steps = self.pulse.backbone_steps
        reason = None if steps == "together" else refusal(self.config)
        if reason is not None and steps == "each":
            raise ConfigError(f'"backbone_steps": "each": {reason}; or use "together"')
        changes: dict[str, Any] = {"backbone_steps": "together" if reason else steps}
        return self.pulse.model_copy(update=changes | ({"placement": "linear"} if self.keeps_cuts else {}))

    @property
    def may_step_apart(self) -> bool:
        """True where there are several backbones, which may make optimizer steps of their own."""
        return len(self.heads) > 1 and self.planned_pulse.backbone_steps != "together"

    def _whole_request(self, grid: Any, topology: ProcessTopology) -> PlanRequest:
        parsed = _parsed(self.config, grid)
        size = 1 if parsed is None else int(parsed.train_micro_batch_size_per_gpu)
        return replace(
            self._request(parsed, microbatch_size=size),
            pipeline_ranks=topology.get_dim("pipe"),
            data_parallel=grid.data_parallel_size,
            microbatches=1 if parsed is None else int(parsed.gradient_accumulation_steps),
            layout=layout_of(topology),
        )

    def _request(self, parsed: deepspeed.DeepSpeedConfig | None, *, microbatch_size: int) -> PlanRequest:
        """For one pipeline rank; costs do not depend on how many there are."""
        assert self.pulse is not None
        self.recomputing = self._recompute_arguments.resolve(self.layers, {} if parsed is None else parsed.pipeline)
        device = torch.device(get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))
        example, parts = self._measured_example(device)
        rules = PLAIN
        if parsed is not None:
            stage, early = int(parsed.zero_optimization_stage), reduces_early(parsed)
            rules = Rules(zero_stage=stage, reduce_early=early, fused_optimizer=is_fused(self.config))
        dtype = None if parsed is None else trained_dtype(parsed)
        return PlanRequest(
            graph=self.graph,
            layers=self.layers,
            backbones=backbone_layers(self.heads),
            pulse=self.planned_pulse,
            pipeline_ranks=1,
            data_parallel=dist.get_world_size(),
            microbatches=1,
            microbatch_size=microbatch_size,
            partition_method=self._partition_method or "profile",
            example=example,
            device=device,
            dtype=dtype,
            buffer_dtype=cast_of_buffers(parsed, dtype),
            frozen=parts,
            has_frozen=self.frozen is not None,
            conditioning=() if self.conditioning is None else self.conditioning.planned,
            recompute=self.recomputing.layers,
            rules=rules,
        )

    def _measured_example(
        self, device: torch.device
    ) -> tuple[tuple[Any, dict[str, Any]] | None, tuple[FrozenPart, ...]]:
        """The example as the first layer finds it, what frozen parts give included, and what those cost."""
        if self._example is None:
            return None, ()
        entries = dict(self._example.entries)
        inputs = {index: self._example.input_of(index) for index in range(len(self.heads))}
        parts: tuple[FrozenPart, ...] = ()
        if self.frozen is not None:
            with same_random_numbers(device), emptied_after(device):
                parts, given = self.frozen.measure(entries, device)
            parts = self._with_kept_times(parts, entries, device)
            inputs |= {index: given.pop(name) for index, name in self.frozen.makes_inputs.items()}
            entries |= given
        if self.conditioning is not None:
            entries |= self.conditioning.zeros(inputs)
        # of further backbones, the first layer finds its input among the values
        entries |= {head.value(INPUT): inputs[index] for index, head in enumerate(self.heads) if index}
        return (inputs[0], entries), parts

    def _with_kept_times(
        self, parts: tuple[FrozenPart, ...], entries: Mapping[str, Any], device: torch.device
    ) -> tuple[FrozenPart, ...]:
        """Those of an earlier run where there is a ``plan_cache``; collective then."""
        assert self.frozen is not None and self.pulse is not None
        folder = self.pulse.plan_cache
        if folder is None:
            return parts
        frozen = self.frozen

        def kept() -> tuple[FrozenPart, ...]:
            try:
                content = frozen_content(frozen.described, frozen.given, entries, device)
            except GraphError:  # a part that can be built, but not without memory: measured in every run
                return parts
            return with_kept_times(folder, content, parts)

        return agree(kept, "planning")


def _parsed(config: dict[str, Any] | None, grid: Any) -> deepspeed.DeepSpeedConfig | None:
    if config is None:
        return None
    try:
        return deepspeed.DeepSpeedConfig(deepcopy(config), grid)
    except Exception as problem:  # upstream raises assertions, ValueErrors and pydantic's errors
        raise ConfigError(f"DeepSpeed refuses the config: {problem}") from problem
