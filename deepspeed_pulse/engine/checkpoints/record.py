"""What a checkpoint says about itself: which rank held what, so that any plan can find its state again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from deepspeed_pulse.engine.backbones import backbone_layers
from deepspeed_pulse.engine.checkpoints.digests import SUMS_FILE
from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.gradients.stepped import parameter_groups
from deepspeed_pulse.errors import FileError, PlanError
from deepspeed_pulse.ir.backbones import BackboneLayers, check_parts
from deepspeed_pulse.ir.codec import Count, File, Form
from deepspeed_pulse.ir.fields import Fields, read_file, read_format

FORMAT = "pulse-checkpoint/2"
UNVERIFIED = "pulse-checkpoint/1"
"""The same without digests of the files."""

RECORD_FILE = "pulse_checkpoint.json"
PLAN_FILE = "pulse_plan.json"
CHOICE_FILE = "pulse_ds_config.json"
"""DeepSpeed's config with what was chosen for "auto" in it."""

SHAPED = ("Adafactor", "Prodigy")
"""Optimizers that keep state of a weight in another shape than the weight's, and of a flat buffer in the buffer's."""

Names = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(File):
    """How a checkpoint is laid out.

    Attributes:
        boundaries: first layer of every stage, and the number of layers.
        placement: pipeline rank of every stage.
        layers: names of the layers.
        zero_stage, dtype, optimizer: decide how upstream writes optimizer state.
        backbones: where there are several, the layers of each.
        parameters: per pipeline rank and parameter group, the names of what the optimizer trains, as its state lies.
    """

    FORMATS = (FORMAT, UNVERIFIED)
    WHAT = "checkpoint"

    pipeline_ranks: Count
    data_parallel: Count
    boundaries: tuple[int, ...]
    placement: tuple[int, ...]
    layers: tuple[str, ...]
    zero_stage: int
    dtype: str
    optimizer: str
    parameters: Annotated[tuple[Names, ...], Form(expected="per rank, lists of parameter names")]
    backbones: Annotated[tuple[BackboneLayers, ...], Form(left_out=True)] = ()

    def check_form(self, fields: Fields) -> None:
        parts = self.backbones
        check_parts(fields, "backbones", [p.layers for p in parts], [p.name for p in parts], len(self.layers))

    @classmethod
    def of(cls, engine: Any) -> CheckpointRecord:
        """How a job's state lies on its ranks. Collective in the pipeline."""
        module, optimizer, plan = engine.module, engine.optimizer, engine.module.plan
        mine = () if optimizer is None else _names_in_state(optimizer, engine.param_names)
        return cls(
            pipeline_ranks=engine.num_stages,
            data_parallel=engine.grid.data_parallel_size,
            boundaries=tuple(module.parts),
            placement=tuple(range(engine.num_stages)) if plan is None else plan.placement,
            layers=tuple(layer.name for layer in module.graph.layers),
            zero_stage=int(engine.zero_optimization_stage()),
            dtype="bfloat16" if engine.bfloat16_enabled() else "float16" if engine.fp16_enabled() else "float32",
            optimizer=type(engine.basic_optimizer).__name__,
            parameters=tuple(told_by_all(mine, engine.grid.get_pipe_parallel_group())),
            backbones=backbone_layers(module.job.heads),
        )

    @property
    def partitioned(self) -> bool:
        """True when every data-parallel rank has a file with its part of flat buffers."""
        return self.zero_stage > 0 or self.dtype == "bfloat16"

    def same_layout(self, other: CheckpointRecord) -> bool:
        """True when upstream's own loading fits rank by rank; it cannot read its bf16 files without ZeRO."""
        if self.dtype == "bfloat16" and not self.zero_stage:
            return False
        mine = self if self.partitioned else replace(self, data_parallel=other.data_parallel)
        return mine == other

    def check_backbones(self, mine: CheckpointRecord, where: str, way: str = "") -> None:
        """Raise a :class:`PlanError` where the checkpoint is of other backbones: their layers would be mixed up.

        ``way``: what is said more of how to load one of them.
        """
        there, here = ([part.name for part in record.backbones] for record in (self, mine))
        if there != here:
            raise PlanError(
                f"{where}: written by a run of {', '.join(there) or 'one backbone'}, this one has "
                f"{', '.join(here) or 'one'}; load one backbone with load_checkpoint(..., backbone=NAME){way}"
            )
        for one, other in zip(self.backbones, mine.backbones, strict=True):
            if one != other:
                first, second = (part.layers[1] - part.layers[0] for part in (one, other))
                raise PlanError(
                    f"{where}: backbone {one.name} has {first} layers there and {second} here, so all layers behind "
                    "would be mixed up; build the same layer list"
                )

    def check_fits(self, mine: CheckpointRecord, where: str) -> None:
        """Raise a :class:`PlanError` when optimizer state cannot be carried over to ``mine``."""
        self.check_layers(mine, where)
        self.check_trained_alike(mine, where)

    def check_layers(self, mine: CheckpointRecord, where: str) -> None:
        """Raise a :class:`PlanError` where the layers have other names."""
        if self.layers != mine.layers:
            pairs = zip_longest(self.layers, mine.layers, fillvalue="none")
            index, (there, here) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            raise PlanError(
                f"{where}: written by a model of {len(self.layers)} layers, this one has {len(mine.layers)}; the first "
                f"that differs is layer {index}: {there} there, {here} here; "
                "build the same layer list",
                more="other-layers",
            )

    def check_trained_alike(self, mine: CheckpointRecord, where: str) -> None:
        """Raise a :class:`PlanError` for optimizer state of another kind than ``mine``."""
        way = "load no optimizer state (load_optimizer_states=False)"
        for name in ("dtype", "optimizer"):
            there, here = getattr(self, name), getattr(mine, name)
            if there != here:
                raise PlanError(
                    f"{where}: {name}: written with {there}, this job runs {here}; use the same, or {way}",
                    more="other-layers",
                )
        if self.optimizer in SHAPED and self.partitioned != mine.partitioned:
            raise PlanError(
                f"{where}: {self.optimizer}: expected ZeRO stage {self.zero_stage}, with which it was written, found "
                f"{mine.zero_stage}: it keeps a weight's state in a shape of its own, and that of the flat buffers of "
                f"ZeRO-1 in theirs; use the same, or {way}",
                more="other-layers",
            )

    @classmethod
    def read(cls, folder: Path) -> CheckpointRecord | None:
        """The record of a checkpoint; None when it was written without this package."""
        path = folder / RECORD_FILE
        if not path.is_file():
            return None
        text = read_file(path)
        if read_format(text, str(path), cls.FORMATS) == FORMAT and not (folder / SUMS_FILE).is_file():
            raise FileError(
                f"{folder / SUMS_FILE}: expected the digests of the checkpoint's files, found none; the checkpoint was "
                "not copied whole"
            )
        return cls.from_json(text, str(path))


def parameter_names(optimizer: Any, names: Mapping[Any, str]) -> Names:
    """Per parameter group of an engine's optimizer, the names of its parameters in order."""
    return tuple(tuple(names[p] for p in group) for group in parameter_groups(optimizer))


def _names_in_state(optimizer: Any, names: Mapping[Any, str]) -> Names:
    """The same in the order in which state is saved: flat buffers may take parameters in turn for each replica."""
    in_turn = getattr(optimizer, "round_robin_bit16_groups", None)
    return parameter_names(optimizer, names) if in_turn is None else tuple(tuple(names[p] for p in g) for g in in_turn)
