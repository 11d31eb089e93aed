"""Saving and resuming: upstream's files, whole or absent, under any plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.checkpoints.files import CheckpointFolder, SafeCheckpointEngine, check_whole, find_tag
from deepspeed_pulse.engine.checkpoints.optimizer_state import (
    full_precision_copies,
    parameter_names,
    read_state,
    write_state,
)
from deepspeed_pulse.engine.checkpoints.record import CHOICE_FILE, PLAN_FILE, CheckpointRecord
from deepspeed_pulse.engine.data.agreement import raise_everywhere, told_by_all
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.plans.pinned import pinned
from deepspeed_pulse.errors import ConfigError, FileError, PlanError
from deepspeed_pulse.ir.fields import write_json


class CheckpointingEngine(PipelineEngine):
    """``PipelineEngine`` whose checkpoints are atomic and can be resumed under another plan.

    Layer files and optimizer files are upstream's. Beside them lies ``pulse_checkpoint.json``, which
    says what each rank held; when another layout resumes, optimizer state is found by parameter name.
    """

    _last_save: tuple[Any, dict[str, Any]] | None = None
    """Folder and client state of the last save, for a run that is asked to stop."""

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if type(self.checkpoint_engine) is not TorchCheckpointEngine:
            raise ConfigError(
                f"checkpoint: expected upstream's default writer, found {type(self.checkpoint_engine).__name__}: other "
                "writers finish after save_checkpoint() returns, so a save could not be complete or absent; remove "
                '"checkpoint.writer" (and "nebula"/"datastates") from the config'
            )
        self.checkpoint_engine = SafeCheckpointEngine(self._config)
        self.module.full_precision_copies = full_precision_copies(self.optimizer)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As upstream; the checkpoint appears under its name when all of it is on disk.

        Data-parallel replicas share the writing of layers.
        """
        folder = CheckpointFolder(save_dir, f"global_step{self.global_steps}" if tag is None else str(tag))
        record = self._record()
        leader = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
        self.module.checkpoint_parallel_write_pipeline = True
        if leader:
            folder.clear()
        dist.barrier()
        super().save_checkpoint(str(save_dir), folder.writing, client_state or {}, False, exclude_frozen_parameters)
        if leader:
            self._write_record(folder, record)
            folder.commit(save_latest=save_latest)
        dist.barrier()
        self._last_save = save_dir, client_state or {}
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """As upstream, from a checkpoint of any plan, number of ranks or placement, or of stock 1F1B.

        Raises:
            PlanError: optimizer state cannot be carried over; says why and the way round.
            FileError: a file is missing, damaged, or holds objects that are not read.
        """
        where, problem, saved = str(load_dir), None, None
        wants_state = load_optimizer_states and not load_module_only and self.optimizer is not None
        try:
            tag = self._settled_tag(load_dir, tag)
            if tag is not None and wants_state:
                where = str(Path(load_dir) / tag)
                saved = CheckpointRecord.read(Path(where))
            if tag is not None and self.global_rank == 0:
                check_whole(Path(load_dir) / tag)
        except (FileError, OSError) as found:
            problem = found if isinstance(found, FileError) else FileError(f"{where}: {found}")
        raise_everywhere(problem, "the checkpoint cannot be read", dist.get_world_size())
        mine = self._record()
        by_name = wants_state and tag is not None and (saved is None or not saved.same_layout(mine))
        found = super().load_checkpoint(
            str(load_dir),
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states and not by_name,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        if by_name and found[0] is not None:
            self._load_by_name(saved, mine, where)
        return found

    # -- parts -------------------------------------------------------------------------------

    def _settled_tag(self, load_dir: str | os.PathLike[str], tag: Any) -> str | None:
        tag = find_tag(load_dir, tag)
        if tag is not None and self.global_rank == 0:
            CheckpointFolder(load_dir, tag).recover()
        dist.barrier()
        if tag is not None and not (Path(load_dir) / tag).is_dir():
            tags = sorted(p.parent.name for p in Path(load_dir).glob("*/*_model_states.pt"))
            raise FileError(
                f"{load_dir}: expected a checkpoint {tag!r}, found {', '.join(dict.fromkeys(tags)) or 'none'}; "
                "give the tag of one that is there"
            )
        return tag

    def _load_by_name(self, saved: CheckpointRecord | None, mine: CheckpointRecord, where: str) -> None:
        problem: Exception | None = None
        by_rank = self._told_by_pipeline({name: p.numel() for p, name in self.param_names.items()})
        sizes = {name: size for rank in by_rank for name, size in rank.items()}
        try:
            if saved is None:
                raise PlanError(
                    f"{where}: written without deepspeed_pulse, so nothing says which rank trained which parameter; "
                    "load weights only (load_optimizer_states=False)"
                )
            saved.check_fits(mine, where)
            wanted = {n for group in mine.parameters[self.stage_id] for n in group if not is_placeholder(n)}
            state = read_state(saved, wanted, lambda rank, replica: self._file(where, rank, replica), where, sizes)
            write_state(self.optimizer, self.param_names, state)
        except Exception as found:
            problem = found
        raise_everywhere(problem, "optimizer state cannot be loaded", dist.get_world_size())

    def _file(self, where: str, rank: int, replica: int | None) -> Path:
        """Upstream's name of the optimizer file of a pipeline rank (and replica)."""
        if replica is None:
            return Path(self._get_ckpt_name(where, "", mp_placeholder=f"{rank:02d}"))
        return Path(self._get_rank_zero_ckpt_name(where, "", rank, replica, bf16_mode=self.bfloat16_enabled()))

    def _record(self) -> CheckpointRecord:
        """This job's layout. Collective in the pipeline."""
        module, optimizer = self.module, self.optimizer
        mine = () if optimizer is None else parameter_names(optimizer, self.param_names)
        plan = module.plan
        return CheckpointRecord(
            pipeline_ranks=self.num_stages,
            data_parallel=self.grid.data_parallel_size,
            boundaries=tuple(module.parts),
            placement=tuple(range(self.num_stages)) if plan is None else plan.placement,
            layers=tuple(layer.name for layer in module.graph.layers),
            zero_stage=int(self.zero_optimization_stage()),
            dtype="bfloat16" if self.bfloat16_enabled() else "float16" if self.fp16_enabled() else "float32",
            optimizer=type(self.basic_optimizer).__name__,
            parameters=tuple(self._told_by_pipeline(mine)),
        )

    def _told_by_pipeline(self, item: Any) -> list[Any]:
        return told_by_all(item, self.num_stages, self.grid.get_pipe_parallel_group())

    def _write_record(self, folder: CheckpointFolder, record: CheckpointRecord) -> None:
        where, module = folder.save_dir / folder.writing, self.module
        record.write(where)
        if module.plan is not None:
            (where / PLAN_FILE).write_text(module.plan.to_json(), encoding="utf-8")
        if module.job.chosen is not None:
            plan = folder.save_dir.resolve() / folder.tag / PLAN_FILE
            (where / CHOICE_FILE).write_text(
                write_json(pinned(self.config, module.job.chosen, str(plan))), encoding="utf-8"
            )
