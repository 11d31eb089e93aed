"""Saving and resuming: upstream's files, whole or absent, under any plan."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.checkpoints.contents import EMA_FOLDER, LATEST, RESERVED, check_client_state, check_tag
from deepspeed_pulse.engine.checkpoints.digests import SUMS_FILE, digest_of, read_sums, write_sums
from deepspeed_pulse.engine.checkpoints.files import CheckpointFolder, SafeCheckpointEngine, find_tag, sync
from deepspeed_pulse.engine.checkpoints.optimizer_state import (
    Groups,
    SavedState,
    check_state,
    full_precision_copies,
    parameter_names,
    read_state,
    write_state,
)
from deepspeed_pulse.engine.checkpoints.reading import check_layer, check_whole
from deepspeed_pulse.engine.checkpoints.record import CHOICE_FILE, PLAN_FILE, CheckpointRecord
from deepspeed_pulse.engine.checkpoints.universal import (
    LATEST_UNIVERSAL,
    check_kind,
    is_universal,
    name_once,
    own_tensors,
    read_named_state,
    read_weights,
    write_weights,
)
from deepspeed_pulse.engine.data.agreement import agree, everywhere, raise_everywhere, told_by_all
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.plans.pinned import pinned
from deepspeed_pulse.errors import ConfigError, FileError, PlanError, PulseError
from deepspeed_pulse.ir.fields import write_json


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A checkpoint that this rank has read: upstream's part is staged, ``state`` is what goes by parameter name."""

    tag: str
    state: SavedState | None
    weights: dict[str, torch.Tensor] | None = None
    """Of a universal checkpoint, by name; None: upstream reads layer files."""


class CheckpointingEngine(PipelineEngine):
    """``PipelineEngine`` whose checkpoints are atomic and can be resumed under another plan.

    Layer files and optimizer files are upstream's. Beside them lies ``pulse_checkpoint.json``, which
    says what each rank held; when another layout resumes, optimizer state is found by parameter name.
    ``SHA256SUMS`` holds the digest of every file.
    """

    _last_save: tuple[Any, dict[str, Any]] | None = None
    """Folder, client state and averages of the last save, for a run that is asked to stop."""

    _problem: Exception | None = None
    """What this rank met while upstream wrote."""

    _layers_loaded: bool | None = None
    """While a checkpoint is loaded: whether all ranks have their layers; None before they have met over that."""

    _weights: dict[str, torch.Tensor] | None = None
    """While a universal checkpoint is loaded: what it has of this rank's layers."""

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if type(self.checkpoint_engine) is not TorchCheckpointEngine:
            raise ConfigError(
                f"checkpoint: expected upstream's default writer, found {type(self.checkpoint_engine).__name__}: other "
                "writers finish after save_checkpoint() returns, so a save could not be complete or absent; remove "
                '"checkpoint.writer" (and "nebula"/"datastates") from the config'
            )
        name_once(self.optimizer, self.param_names)
        self.checkpoint_engine = SafeCheckpointEngine(self._config)
        self.module.full_precision_copies = full_precision_copies(self.optimizer)

    def load_universal_checkpoint(self) -> bool:
        """False for upstream, which would unpickle: such a checkpoint is read here, when the config asks for it."""
        return False

    # -- saving ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        ema: Any = None,
        checkpoints_total_limit: int | None = None,
    ) -> bool:
        """As upstream; the checkpoint appears under its name when all of it is on disk.

        Data-parallel replicas share the writing of layers. When any rank fails, all raise, and the folder
        is as it was.

        Args:
            ema: a ``deepspeed_pulse.models.EMA``, saved in the checkpoint: both are there, or neither is.
            checkpoints_total_limit: when this checkpoint is there, so many of its series stay, the last written:
                those whose tags differ from this one in the number at their end. Never removed: this one, the one
                that ``latest`` names, and tags of another kind.

        Raises:
            ConfigError: the tag is no name, ranks gave different ones, or client state could not be loaded again.
            FileError: a rank cannot write, or another job saves into the folder.
        """
        self.module.check_usable("save_checkpoint")
        client_state = {} if client_state is None else client_state
        everywhere(lambda: _check_limit(checkpoints_total_limit), "save_checkpoint")
        folder = self._checked_folder(save_dir, tag, client_state)
        record = self._record()
        leader = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0

        def on_leader(act: Callable[[], Any]) -> None:
            everywhere(lambda: _writing(folder.save_dir, act) if leader else None, f"saving {folder.save_dir}")

        on_leader(folder.prepare)
        try:
            digests = self._write_files(folder, client_state, exclude_frozen_parameters)
            if ema is not None:
                ema.save(folder.save_dir / folder.writing / EMA_FOLDER)
            on_leader(lambda: self._write_record(folder, record, digests))
            on_leader(lambda: folder.commit(save_latest=save_latest))
        except PulseError:
            if leader:
                folder.discard()
            raise
        if leader and self.save_zero_checkpoint:
            self._write_recovery_script(save_dir)
        if leader and checkpoints_total_limit is not None:
            _keep(folder, checkpoints_total_limit)
        self._last_save = save_dir, {"client_state": client_state, "ema": ema}
        return True

    def _checked_folder(self, save_dir: Any, tag: Any, client_state: Any) -> CheckpointFolder:
        """Nothing is touched before every rank's arguments are known to be good, and the same tag."""

        def check() -> tuple[str, str]:
            if not isinstance(save_dir, (str, os.PathLike)) or not os.fspath(save_dir):
                raise ConfigError(f"save_checkpoint: save_dir: expected a folder, found {save_dir!r}")
            name = f"global_step{self.global_steps}" if tag is None else str(tag)
            check_tag(name)
            check_client_state(client_state)
            return os.fspath(save_dir), name

        mine = everywhere(check, "save_checkpoint")
        _check_same(mine if not self.use_node_local_storage() else ("", mine[1]), "save_checkpoint")
        return CheckpointFolder(*mine)

    def _write_files(self, folder: CheckpointFolder, client_state: dict[str, Any], exclude: bool) -> dict[str, str]:
        """Upstream's files of all ranks; their digests by name."""
        self._problem = None
        self.module.checkpoint_parallel_write_pipeline = True
        self.checkpoint_engine.digests.clear()
        super().save_checkpoint(str(folder.save_dir), folder.writing, client_state, False, exclude)
        everywhere(lambda: _writing(folder.save_dir, self._raise_problem), f"saving {folder.save_dir}")
        told = told_by_all(self.checkpoint_engine.digests, dist.get_world_size())
        return {name: digest for digests in told for name, digest in digests.items()}

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, which meets the other ranks after it: what goes wrong is kept until all have."""
        write = super()._save_checkpoint
        self._keep_problem(lambda: write(*args, **kwargs))

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        write = super()._save_zero_checkpoint
        if self._problem is None:
            self._keep_problem(lambda: write(*args, **kwargs))

    def _copy_recovery_script(self, save_path: str) -> None:
        """Later: nothing but the checkpoint's own folder is touched before that is whole."""

    def _write_recovery_script(self, save_dir: str | os.PathLike[str]) -> None:
        try:
            super()._copy_recovery_script(os.fspath(save_dir))
        except OSError as problem:
            print(f"pulse: warning: {save_dir}: zero_to_fp32.py is not written: {problem}", flush=True)

    def _keep_problem(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as problem:
            self._problem = problem

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _write_record(self, folder: CheckpointFolder, record: CheckpointRecord, digests: dict[str, str]) -> None:
        where, module = folder.save_dir / folder.writing, self.module
        record.write(where)
        if module.plan is not None:
            (where / PLAN_FILE).write_text(module.plan.to_json(), encoding="utf-8")
        if module.job.chosen is not None:
            plan = folder.save_dir.resolve() / folder.tag / PLAN_FILE
            (where / CHOICE_FILE).write_text(
                write_json(pinned(self.config, module.job.chosen, str(plan))), encoding="utf-8"
            )
        there = {path.name for path in where.iterdir() if path.is_file()}
        missing = sorted(digests.keys() - there)
        if missing and not self.use_node_local_storage():
            raise FileError(
                f"{where}: expected the files of all ranks, {len(missing)} are not seen by rank 0, the first is "
                f"{missing[0]}; save into a folder that all machines share, or set checkpoint.use_node_local_storage"
            )
        write_sums(where, {name: digests.get(name) or digest_of(where / name) for name in there})
        for name in (there - digests.keys()) | {SUMS_FILE}:
            sync(where / name)

    # -- loading -----------------------------------------------------------------------------

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        ema: Any = None,
    ) -> tuple[Any, Any]:
        """As upstream, from a checkpoint of any plan, number of ranks or placement, or of stock 1F1B.

        Every rank reads and verifies its files before any of them changes a weight. The client state is
        what was given to :meth:`save_checkpoint`.

        Args:
            ema: goes on from the averages that were saved with the checkpoint.

        Raises:
            PlanError: optimizer state cannot be carried over; says why and the way round.
            FileError: a file is missing, damaged, or holds objects that are not read.
            ConfigError: the tag is no name, or ranks gave different ones.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: custom_load_fn: expected None: a pipeline's layers load their own files"
            )
        _check_same((str(tag),), "load_checkpoint")
        settled = agree(lambda: self._settled_tag(load_dir, tag), f"loading {load_dir}")
        if settled is None:
            return super().load_checkpoint(str(load_dir))  # says that there is none
        wants_state = load_optimizer_states and not load_module_only and self.optimizer is not None
        mine, sizes = self._record(), self._sizes()
        try:
            found = everywhere(
                lambda: self._read(Path(load_dir), settled, mine, sizes, wants_state, load_module_strict),
                f"{Path(load_dir) / settled} cannot be read",
            )
            averages = everywhere(lambda: _averages(ema, Path(load_dir) / settled), "reading averages")
            loaded = self._apply(
                load_dir,
                found,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states and found.state is None,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
            )
            if ema is not None:
                ema.load_state_dict(averages)
            return loaded
        finally:
            self.checkpoint_engine.end()

    def _settled_tag(self, load_dir: str | os.PathLike[str], tag: Any) -> str | None:
        """On rank 0."""
        universal = self._config.load_universal_checkpoint
        tag = find_tag(load_dir, tag, LATEST_UNIVERSAL if universal else LATEST)
        if tag is None and universal:
            raise FileError(
                f"{load_dir}: expected a universal checkpoint, found no file {LATEST_UNIVERSAL}; make one with "
                "python -m deepspeed.checkpoint.ds_to_universal, or give its tag"
            )
        if tag is None:
            return None
        try:
            CheckpointFolder(load_dir, tag).recover()
        except OSError as problem:
            raise FileError(f"{load_dir}: {tag} cannot be taken back from {problem.filename}: {problem}") from None
        if not (Path(load_dir) / tag).is_dir():
            tags = sorted({path.parent.name for path in Path(load_dir).glob("*/*_model_states.pt")})
            raise FileError(
                f"{load_dir}: expected a checkpoint {tag!r}, found {', '.join(tags) or 'none'}; "
                "give the tag of one that is there"
            )
        return str(tag)

    def _read(
        self, load_dir: Path, tag: str, mine: CheckpointRecord, sizes: dict[str, int], wants_state: bool, strict: bool
    ) -> _Found:
        """Everything that this rank needs, verified; changes nothing."""
        where = load_dir / tag
        if self._config.load_universal_checkpoint or is_universal(where):
            return self._read_universal(load_dir, tag, mine.parameters[self.stage_id] if wants_state else None)
        sums, saved = read_sums(where), CheckpointRecord.read(where)
        self.checkpoint_engine.begin(sums)
        if self.global_rank == 0:
            self._check_folder(where, sums)
        names = self._rank_files(load_dir, tag)
        by_name = wants_state and (saved is None or not saved.same_layout(mine))
        state = self._state_by_name(saved, mine, where, sizes) if by_name else None
        layers = self._layer_files(where)
        optimizer = [self._get_zero_ckpt_name(str(load_dir), tag)] if wants_state and self.zero_optimization() else []
        self.checkpoint_engine.stage(
            map(Path, [names[0], self._own_file(names), *layers, *([] if by_name else optimizer)])
        )
        _check_count(where, names, self.checkpoint_engine.load(names[0]))
        for path, layer in layers.items():
            check_layer(layer, self.checkpoint_engine.load(path), Path(path), strict=strict)
        return _Found(tag=tag, state=state)

    def _read_universal(self, load_dir: Path, tag: str, groups: Groups | None) -> _Found:
        """The same from files by parameter name; a rank's state that is not of parameters lies beside them."""
        where, load = load_dir / tag, self.checkpoint_engine.load
        check_kind(where, asked=self._config.load_universal_checkpoint)
        self.checkpoint_engine.begin(None)
        names = self._rank_files(load_dir, tag)
        self.checkpoint_engine.stage(map(Path, [names[0], self._own_file(names)]))
        _check_count(where, names, load(names[0]))
        weights = read_weights(where, own_tensors(self.module), load)
        state = None if groups is None else read_named_state(where, groups, load)
        if state is not None:
            check_state(self.optimizer, self.param_names, state)
        return _Found(tag=tag, state=state, weights=weights)

    def _rank_files(self, load_dir: Path, tag: str) -> list[str]:
        """Files of the ranks' own state."""
        names = self._get_all_ckpt_names(str(load_dir), tag)
        if not names:
            raise FileError(f"{load_dir / tag}: expected a checkpoint, found no mp_rank_*_model_states.pt")
        return names

    def _own_file(self, names: list[str]) -> str:
        return names[self.mpu.get_model_parallel_rank()] if len(names) == self.mp_world_size else names[0]

    def _check_folder(self, where: Path, sums: dict[str, str] | None) -> None:
        """What no rank reads is looked at too: a checkpoint that is not whole is none."""
        if sums is None:
            check_whole(where)
            return
        missing = sorted(name for name in sums if not (where / name).is_file())
        if missing:
            raise FileError(
                f"{where / missing[0]}: expected a file of the checkpoint, found none ({len(missing)} of {len(sums)} "
                "are missing); it was not copied whole; resume from another checkpoint by its tag"
            )
        for name in (name for name in sums if name.endswith(".json")):
            self.checkpoint_engine.verify(where / name)

    def _layer_files(self, where: Path) -> dict[str, Any]:
        """Path to layer, for what upstream reads on this rank."""
        found: dict[str, Any] = {}
        for index, layer in enumerate(self.module.forward_funcs):
            if hasattr(layer, "load_state_dict"):
                paths = self.module.ckpt_layer_path_list(str(where), index)
                if len(paths) != 1:
                    raise FileError(f"{where}: expected one file for each layer, found {', '.join(paths)}")
                found[paths[0]] = layer
        return found

    def _state_by_name(
        self, saved: CheckpointRecord | None, mine: CheckpointRecord, where: Path, sizes: dict[str, int]
    ) -> SavedState:
        if saved is None:
            raise PlanError(
                f"{where}: written without deepspeed_pulse, so nothing says which rank trained which parameter; "
                "load weights only (load_optimizer_states=False)"
            )
        saved.check_fits(mine, str(where))
        wanted = {n for group in mine.parameters[self.stage_id] for n in group if not is_placeholder(n)}
        state = read_state(saved, wanted, lambda *of: self._saved_content(where, *of), str(where), sizes)
        check_state(self.optimizer, self.param_names, state)
        return state

    def _saved_content(self, where: Path, rank: int, replica: int | None) -> Any:
        """The optimizer file of a pipeline rank (and replica), under upstream's name."""
        if replica is None:
            path = self._get_ckpt_name(str(where), "", mp_placeholder=f"{rank:02d}")
        else:
            path = self._get_rank_zero_ckpt_name(str(where), "", rank, replica, bf16_mode=self.bfloat16_enabled())
        return self.checkpoint_engine.load(path)

    def _apply(self, load_dir: str | os.PathLike[str], found: _Found, **options: Any) -> tuple[Any, Any]:
        """Let upstream load what was staged. A rank that fails now leaves no rank that could train on."""
        where = Path(load_dir) / found.tag
        self.module.unusable = f"loading {where} broke off, so weights and optimizer state are half of that checkpoint"
        self._layers_loaded, self._weights, problem = None, found.weights, None
        try:
            path, client_state = super().load_checkpoint(str(load_dir), found.tag, **options)
            if found.state is not None:
                write_state(self.optimizer, self.param_names, found.state)
        except Exception as one:
            if self._layers_loaded is False:  # told by all already
                raise
            problem = one
        # where this rank failed before its layers, the others meet it there
        raise_everywhere(problem, f"{where} cannot be loaded", dist.get_world_size(), FileError)
        self.module.unusable = None
        return path, {key: value for key, value in client_state.items() if key not in RESERVED}

    def load_module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; ranks meet for tied weights after all of them have loaded their layers."""
        load = super().load_module_state_dict if self._weights is None else self._write_weights
        self._layers_loaded = self.module.synchronizes_tied_weights = False
        try:
            everywhere(lambda: load(*args, **kwargs), "layers cannot be loaded")
        finally:
            self.module.synchronizes_tied_weights = True
        self._layers_loaded = True
        self.module._synchronize_tied_weights()

    def _write_weights(self, *_: Any, **__: Any) -> None:
        write_weights(self._weights or {}, own_tensors(self.module))

    def _get_zero_param_shapes(self) -> list[dict[str, Any]]:
        """As upstream; the converter to universal checkpoints looks for the state of each, so no placeholders."""
        groups = super()._get_zero_param_shapes()
        return [{name: shape for name, shape in group.items() if not is_placeholder(name)} for group in groups]

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        """As upstream, for folders with ``[``, ``*`` or ``?`` in their path too."""
        return list(super()._get_all_ckpt_names(glob.escape(checkpoints_path), glob.escape(tag)))

    # -- what trains and saves only whole state ----------------------------------------------

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.module.check_usable("train_batch")
        return super().train_batch(*args, **kwargs)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.module.check_usable("eval_batch")
        return super().eval_batch(*args, **kwargs)

    # -- parts -------------------------------------------------------------------------------

    def _sizes(self) -> dict[str, int]:
        """Numbers in each parameter of the model. Collective in the pipeline."""
        by_rank = self._told_by_pipeline({name: p.numel() for p, name in self.param_names.items()})
        return {name: size for rank in by_rank for name, size in rank.items()}

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


def _writing(folder: Path, act: Callable[[], Any]) -> None:
    try:
        act()
    except OSError as problem:
        raise FileError(
            f"{problem.filename or folder}: the checkpoint cannot be written: {problem.strerror or problem}; "
            f"{folder} holds what it held before; make room there, or name another folder"
        ) from problem


def _check_limit(limit: Any) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"checkpoints_total_limit: expected a number of checkpoints >= 1 or None, found {limit!r}")


def _keep(folder: CheckpointFolder, limit: int) -> None:
    """The new checkpoint is there whatever happens to old ones."""
    try:
        folder.keep(limit)
    except (OSError, FileError) as problem:
        print(f"pulse: warning: {folder.save_dir}: older checkpoints are not removed: {problem}", flush=True)


def _averages(ema: Any, checkpoint: Path) -> Any:
    """The state of averages in a checkpoint; None without an EMA that wants one."""
    if ema is None:
        return None
    if not (checkpoint / EMA_FOLDER).is_dir():
        raise FileError(
            f"{checkpoint}: expected averages in its folder {EMA_FOLDER}, found none; load it without ema= to let "
            "averages start from its weights, or save with ema="
        )
    return ema.read(checkpoint / EMA_FOLDER)


def _check_same(mine: tuple[str, ...], what: str) -> None:
    """Every rank must ask for the same checkpoint."""
    found = told_by_all(mine, dist.get_world_size())
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        raise ConfigError(
            f"{what}: expected the same folder and tag on every rank, found {', '.join(found[0])} on rank 0 and "
            f"{', '.join(found[other])} on rank {other}"
        )


def _check_count(where: Path, names: list[str], first: Any) -> None:
    if not isinstance(first, dict) or not {"module", "dp_world_size", "mp_world_size", "global_steps"} <= first.keys():
        raise FileError(f"{names[0]}: expected the state of a rank, found something else; it is no checkpoint's file")
    if first["mp_world_size"] != len(names):
        raise FileError(
            f"{where}: expected {first['mp_world_size']} files mp_rank_*_model_states.pt, found {len(names)}; the "
            "checkpoint was not copied whole"
        )
