"""Resuming: upstream's files of any plan, or a universal checkpoint, read and verified before a weight changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.engine.checkpoints import averages, universal
from deepspeed_pulse.engine.checkpoints.backbone import Match, load_layers, own_names, renamed, weights_as_state
from deepspeed_pulse.engine.checkpoints.digests import read_sums
from deepspeed_pulse.engine.checkpoints.files import LATEST, NO_TAGS, CheckpointFolder, find_tag
from deepspeed_pulse.engine.checkpoints.optimizer_state import (
    SavedState,
    check_state,
    own_parts,
    read_state,
    refresh_copies,
    with_copies,
    write_state,
)
from deepspeed_pulse.engine.checkpoints.reading import RECORD, RESERVED, check_layer, check_whole
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord
from deepspeed_pulse.engine.collectives import agree, everywhere, raise_everywhere, told_by_all
from deepspeed_pulse.engine.memory_order import lay_as_weights
from deepspeed_pulse.errors import ConfigError, FileError, PlanError


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a checkpoint is to be loaded, by upstream's names."""

    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    backbone: str | None = None
    """The one whose state is loaded; None: all of the checkpoint."""

    def options(self) -> dict[str, bool]:
        """As upstream takes them."""
        return {name: value for name, value in vars(self).items() if name != "backbone"}


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A checkpoint that this rank has read: upstream's part is staged, ``state`` is what goes by parameter name."""

    state: SavedState | None
    weights: dict[str, torch.Tensor] | None = None
    """Of a universal checkpoint, by name; None: upstream reads layer files."""
    match: Match | None = None
    """The one backbone that is loaded; None: upstream loads all."""
    layers: dict[str, Any] = field(default_factory=dict)
    """Of it, by the path of what they get."""
    own_file: str = ""
    """With this rank's own state."""
    is_joint: bool = False
    """The checkpoint is of several backbones."""


class Loading:
    """Loads an engine's state; ``load``: upstream's ``load_checkpoint`` of it."""

    def __init__(self, engine: Any, load: Callable[..., Any]) -> None:
        self._engine, self._module, self._load = engine, engine.module, load
        self._layers_loaded: bool | None = None
        """While a checkpoint is loaded: whether all ranks have their layers; None before they have met over that."""
        self._weights: dict[str, torch.Tensor] | None = None
        """While a universal checkpoint is loaded: what it has of this rank's layers."""

    def load(self, load_dir: str | os.PathLike[str], tag: Any, wanted: Wanted, ema: Any) -> tuple[Any, Any]:
        """As the engine's ``load_checkpoint``."""
        self._module.ranks.check_alike(f"tag {str(tag)!r}", "load_checkpoint")
        settled = agree(lambda: self._settled_tag(load_dir, tag), f"loading {load_dir}")
        if settled is None:
            return self._load(str(load_dir))  # type: ignore[no-any-return]  # says that there is none
        self._check_backbone(wanted.backbone)
        mine, sizes = CheckpointRecord.of(self._engine), self._sizes()
        where = Path(load_dir) / settled
        try:
            found = everywhere(lambda: self._read(where, wanted, mine, sizes), f"{where} cannot be read")
            name, is_joint = wanted.backbone, found.is_joint
            states = everywhere(lambda: averages.read(ema, where, is_joint=is_joint, backbone=name), "reading averages")
            loaded = self._apply(load_dir, settled, found, wanted)
            for one, state in zip(averages.listed(ema), states, strict=True):
                one.load_state_dict(state)
            return loaded
        finally:
            self._engine.checkpoint_engine.begin(None)

    def _check_backbone(self, name: Any) -> None:
        """Ranks ask for the same one, if any, in words."""
        told = told_by_all(name)
        if any(one != told[0] for one in told):
            raise ConfigError(f"load_checkpoint: backbone: expected the same on every rank, found {told}")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"load_checkpoint: backbone: expected a name or None, found {name!r}")

    def _sizes(self) -> dict[str, int]:
        """Numbers in each parameter of the model. Collective in the pipeline."""
        mine = {name: p.numel() for p, name in self._engine.param_names.items()}
        by_rank = told_by_all(mine, self._engine.grid.get_pipe_parallel_group())
        return {name: size for rank in by_rank for name, size in rank.items()}

    def _settled_tag(self, load_dir: str | os.PathLike[str], tag: Any) -> str | None:
        """On rank 0."""
        asked = self._engine._config.load_universal_checkpoint
        tag = find_tag(load_dir, tag, universal.LATEST if asked else LATEST)
        if tag is None and asked:
            raise FileError(
                f"{load_dir}: expected a universal checkpoint, found no file {universal.LATEST}; make one with "
                "python -m deepspeed.checkpoint.ds_to_universal, or give its tag"
            )
        if tag is None:
            return None
        try:
            CheckpointFolder(load_dir, tag).recover()
        except OSError as problem:
            raise FileError(f"{load_dir}: {tag} cannot be taken back from {problem.filename}: {problem}") from None
        if not (Path(load_dir) / tag).is_dir():
            folders = {path.parent.name for path in Path(load_dir).glob("*/*_model_states.pt")}
            tags = sorted(name for name in folders if not name.endswith(NO_TAGS))
            raise FileError(
                f"{load_dir}: expected a checkpoint {tag!r}, found {', '.join(tags) or 'none'}; "
                "give the tag of one that is there"
            )
        return str(tag)

    def _read(self, where: Path, wanted: Wanted, mine: CheckpointRecord, sizes: dict[str, int]) -> _Found:
        """Everything that this rank needs, verified; changes nothing."""
        engine, files = self._engine, self._engine.checkpoint_engine
        wants_state = wanted.load_optimizer_states and not wanted.load_module_only and engine.optimizer is not None
        if universal.is_universal(where, asked=engine._config.load_universal_checkpoint):
            if wanted.backbone is not None:
                raise ConfigError(
                    f"load_checkpoint: backbone={wanted.backbone!r}: {where} is a universal checkpoint, of which "
                    "all is loaded; give the checkpoint that it was made of"
                )
            return self._read_universal(where, wanted, mine, wants_state=wants_state)
        sums, saved = read_sums(where), CheckpointRecord.read(where)
        files.begin(sums)
        if engine.global_rank == 0:
            self._check_folder(where, sums)
        names = self._rank_files(where)
        match = self._match(wanted.backbone, saved, mine, where)
        by_name = wants_state and (saved is None or match is not None or not saved.same_layout(mine))
        state = self._state_by_name(saved, mine, where, sizes, match) if by_name else None
        layers = self._layer_files(where, match)
        needed = list(layers)
        if wants_state and not by_name and engine.zero_optimization():
            needed.append(engine._get_zero_ckpt_name(str(where.parent), where.name))
        own = self._stage(where, names, needed)
        if match is None:
            self._check_schedule(own, wanted)
        for path, layer in layers.items():
            check_layer(layer, files.load(path), Path(path), strict=wanted.load_module_strict)
        return _Found(
            state=state,
            match=match,
            layers=layers,
            own_file=own,
            is_joint=saved is not None and bool(saved.backbones),
        )

    def _match(
        self, name: str | None, saved: CheckpointRecord | None, mine: CheckpointRecord, where: Path
    ) -> Match | None:
        """The backbone to be loaded, here and there; None where all are."""
        if name is None:
            if saved is not None:
                saved.check_backbones(mine, str(where))
            return None
        match = Match.of(name, self._module.job.heads, saved, where)
        if saved is not None:
            match.check_layers(saved, mine, where)
        return match

    def _check_schedule(self, own: str, wanted: Wanted) -> None:
        """A learning rate schedule has its state in the rank's own file."""
        engine = self._engine
        if not wanted.load_lr_scheduler_states or wanted.load_module_only or engine.lr_scheduler is None:
            return
        saved = engine.checkpoint_engine.load(own).get("lr_scheduler")
        if saved is None:
            raise FileError(
                f"{own}: expected the state of a learning rate schedule, as this run has one, found none; the run that "
                "wrote it had no schedule: begin one anew with load_lr_scheduler_states=False"
            )
        # torch's schedules would go on with the rates of as many groups as they had
        there = len(saved.get("base_lrs") or ()) if isinstance(saved, dict) else 0
        here = len(getattr(engine.lr_scheduler, "base_lrs", None) or ())
        if self._module.has_several and there and here and there != here:
            raise PlanError(
                f"{own}: expected a learning rate schedule of {here} parameter groups, as this run has, found one of "
                f'{there}: backbones that make steps of their own ("backbone_steps" in the "pulse" block) have groups '
                "of their own; set it as then, or give each backbone a group in both runs "
                "(module.backbone_parameters(name)), or begin the schedule anew with load_lr_scheduler_states=False"
            )

    def _read_universal(self, where: Path, wanted: Wanted, mine: CheckpointRecord, *, wants_state: bool) -> _Found:
        """The same from files by parameter name; a rank's state that is not of parameters lies beside them."""
        engine, files = self._engine, self._engine.checkpoint_engine
        files.begin(None)
        own = self._stage(where, self._rank_files(where))
        text = files.load(own).get(RECORD)
        if text is not None:  # else an older one, or DeepSpeed's
            saved = CheckpointRecord.from_json(str(text), own)
            saved.check_backbones(mine, str(where), " from the checkpoint that this universal one was made of")
            if wants_state:
                saved.check_layers(mine, str(where))
        self._check_schedule(own, wanted)
        weights = universal.read_weights(where, universal.own_tensors(self._module), files.load)
        groups = mine.parameters[engine.stage_id]
        state = universal.read_named_state(where, groups, files.load) if wants_state else None
        if state is not None:
            check_state(engine.optimizer, engine.param_names, state)
        return _Found(state=state, weights=weights)

    def _rank_files(self, where: Path) -> list[str]:
        """Files of the ranks' own state."""
        names: list[str] = self._engine._get_all_ckpt_names(str(where.parent), where.name)
        if not names:
            raise FileError(f"{where}: expected a checkpoint, found no mp_rank_*_model_states.pt")
        return names

    def _stage(self, where: Path, names: list[str], more: Iterable[str] = ()) -> str:
        """Read a rank's own state, which is in one of the files ``names``, and more files; returns that one."""
        engine, files = self._engine, self._engine.checkpoint_engine
        own = names[engine.mpu.get_model_parallel_rank()] if len(names) == engine.mp_world_size else names[0]
        files.stage(map(Path, [names[0], own, *more]))
        first = files.load(names[0])
        expected = {"module", "dp_world_size", "mp_world_size", "global_steps"}
        if not isinstance(first, dict) or not expected <= first.keys():
            raise FileError(
                f"{names[0]}: expected the state of a rank, found something else; it is no checkpoint's file"
            )
        if first["mp_world_size"] != len(names):
            raise FileError(
                f"{where}: expected {first['mp_world_size']} files mp_rank_*_model_states.pt, found {len(names)}; the "
                "checkpoint was not copied whole"
            )
        return own

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
            self._engine.checkpoint_engine.verifier.check(where / name)

    def _layer_files(self, where: Path, match: Match | None) -> dict[str, Any]:
        """Path to layer, for what upstream reads on this rank, or for the layers of one backbone."""
        found: dict[str, Any] = {}
        for index, layer in self._module.local_layers():
            if hasattr(layer, "load_state_dict") and (match is None or index in match.here):
                paths = self._module.layer_files(str(where), index, 0 if match is None else match.shift)
                if len(paths) != 1:
                    raise FileError(f"{where}: expected one file for each layer, found {', '.join(paths)}")
                found[paths[0]] = layer
        return found

    def _state_by_name(
        self,
        saved: CheckpointRecord | None,
        mine: CheckpointRecord,
        where: Path,
        sizes: dict[str, int],
        match: Match | None,
    ) -> SavedState:
        if saved is None:
            raise PlanError(
                f"{where}: written without deepspeed_pulse, so nothing says which rank trained which parameter; "
                "load no optimizer state (load_optimizer_states=False)"
            )
        engine, groups = self._engine, mine.parameters[self._engine.stage_id]
        parts = own_parts(engine.optimizer, engine.param_names)

        def load(rank: int, replica: int | None) -> Any:
            return self._saved_content(where, rank, replica)

        if match is None:
            saved.check_fits(mine, str(where))
            state = read_state(saved, parts, load, str(where), sizes)
        else:
            saved.check_trained_alike(mine, str(where))
            trained = {p: name for p, name in engine.param_names.items() if any(name in group for group in groups)}
            names = own_names(match, trained)
            there = {match.name_there(name) or name: size for name, size in sizes.items()}
            wanted = {name: parts[own] for name, own in names.items()}
            state = renamed(read_state(saved, wanted, load, str(where), there), names, groups, engine.optimizer)
        check_state(engine.optimizer, engine.param_names, state)
        return state

    def _saved_content(self, where: Path, rank: int, replica: int | None) -> Any:
        """The optimizer file of a pipeline rank (and replica), under upstream's name."""
        engine = self._engine
        if replica is None:
            path = engine._get_ckpt_name(str(where), "", mp_placeholder=f"{rank:02d}")
        else:
            path = engine._get_rank_zero_ckpt_name(str(where), "", rank, replica, bf16_mode=engine.bfloat16_enabled())
        return engine.checkpoint_engine.load(path, map_location="cpu")

    def _apply(self, load_dir: str | os.PathLike[str], tag: str, found: _Found, wanted: Wanted) -> tuple[Any, Any]:
        """Let upstream load what was staged. A rank that fails now leaves no rank that could train on."""
        where = Path(load_dir) / tag
        self._module.unusable = f"loading {where} broke off, so weights and optimizer state are half of that checkpoint"
        self._layers_loaded, self._weights, problem = None, found.weights, None
        options = {**wanted.options(), "load_optimizer_states": wanted.load_optimizer_states and found.state is None}
        clip = getattr(self._engine.optimizer, "clip_grad", None)
        try:
            if found.match is None:
                path, client_state = self._load(str(load_dir), tag, **options)
                if found.state is not None:
                    write_state(self._engine.optimizer, self._engine.param_names, found.state)
                elif not wanted.load_optimizer_states:
                    refresh_copies(self._engine.optimizer)
            else:
                path, client_state = self._apply_backbone(found, found.match, strict=wanted.load_module_strict)
        except Exception as one:
            if self._layers_loaded is False:  # told by all already
                raise
            problem = one
        lay_as_weights(self._engine.basic_optimizer)
        if clip is not None:
            self._engine.optimizer.clip_grad = clip  # upstream's state has the norm of the run that saved it
        # where this rank failed before its layers, the others meet it there
        raise_everywhere(problem, f"{where} cannot be loaded", FileError)
        if found.match is not None:
            self._module._synchronize_tied_weights()
        self._module.unusable = None
        return path, {key: value for key, value in client_state.items() if key not in RESERVED}

    def _apply_backbone(self, found: _Found, match: Match, *, strict: bool) -> tuple[Any, Any]:
        """Weights and optimizer state of one backbone; what counts steps stays this run's. Local."""
        engine, files = self._engine, self._engine.checkpoint_engine
        load_layers(found.layers, {path: files.load(path) for path in found.layers}, strict=strict)
        if engine.optimizer is not None:
            names = engine.param_names
            copies = weights_as_state(names, set(own_names(match, names).values()))
            state = copies if found.state is None else with_copies(found.state, copies)
            write_state(engine.optimizer, names, state, keeps=True)
        return found.own_file, files.load(found.own_file)

    def load_layers(self, load: Callable[[], None]) -> None:
        """Upstream's loading of layer files (``load``), or what stands in for it; ranks then meet for tied weights."""
        weights, module = self._weights, self._module
        self._layers_loaded = module.synchronizes_tied_weights = False
        try:
            everywhere(
                load if weights is None else lambda: universal.write_weights(weights, universal.own_tensors(module)),
                "layers cannot be loaded",
            )
        finally:
            module.synchronizes_tied_weights = True
        self._layers_loaded = True
        module._synchronize_tied_weights()
