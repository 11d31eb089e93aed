"""Resuming: upstream's files of any plan, or a universal checkpoint, read and verified before a weight changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.engine.checkpoints import universal
from deepspeed_pulse.engine.checkpoints.digests import read_sums
from deepspeed_pulse.engine.checkpoints.files import EMA_FOLDER, LATEST, CheckpointFolder, check_asked_alike, find_tag
from deepspeed_pulse.engine.checkpoints.optimizer_state import Groups, SavedState, check_state, read_state, write_state
from deepspeed_pulse.engine.checkpoints.reading import RESERVED, check_layer, check_whole
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord
from deepspeed_pulse.engine.collectives import agree, everywhere, raise_everywhere, told_by_all
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.errors import FileError, PlanError


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a checkpoint is to be loaded, by upstream's names."""

    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A checkpoint that this rank has read: upstream's part is staged, ``state`` is what goes by parameter name."""

    state: SavedState | None
    weights: dict[str, torch.Tensor] | None = None
    """Of a universal checkpoint, by name; None: upstream reads layer files."""


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
        check_asked_alike((str(tag),), "load_checkpoint")
        settled = agree(lambda: self._settled_tag(load_dir, tag), f"loading {load_dir}")
        if settled is None:
            return self._load(str(load_dir))  # type: ignore[no-any-return]  # says that there is none
        mine, sizes = CheckpointRecord.of(self._engine), self._sizes()
        where = Path(load_dir) / settled
        try:
            found = everywhere(lambda: self._read(where, wanted, mine, sizes), f"{where} cannot be read")
            averages = everywhere(lambda: _averages(ema, where), "reading averages")
            loaded = self._apply(load_dir, settled, found, wanted)
            if ema is not None:
                ema.load_state_dict(averages)
            return loaded
        finally:
            self._engine.checkpoint_engine.begin(None)

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
            tags = sorted({path.parent.name for path in Path(load_dir).glob("*/*_model_states.pt")})
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
            return self._read_universal(where, mine.parameters[engine.stage_id] if wants_state else None)
        sums, saved = read_sums(where), CheckpointRecord.read(where)
        files.begin(sums)
        if engine.global_rank == 0:
            self._check_folder(where, sums)
        names = self._rank_files(where)
        by_name = wants_state and (saved is None or not saved.same_layout(mine))
        state = self._state_by_name(saved, mine, where, sizes) if by_name else None
        layers = self._layer_files(where)
        needed = list(layers)
        if wants_state and not by_name and engine.zero_optimization():
            needed.append(engine._get_zero_ckpt_name(str(where.parent), where.name))
        self._stage(where, names, needed)
        for path, layer in layers.items():
            check_layer(layer, files.load(path), Path(path), strict=wanted.load_module_strict)
        return _Found(state=state)

    def _read_universal(self, where: Path, groups: Groups | None) -> _Found:
        """The same from files by parameter name; a rank's state that is not of parameters lies beside them."""
        engine, files = self._engine, self._engine.checkpoint_engine
        files.begin(None)
        self._stage(where, self._rank_files(where))
        weights = universal.read_weights(where, universal.own_tensors(self._module), files.load)
        state = None if groups is None else universal.read_named_state(where, groups, files.load)
        if state is not None:
            check_state(engine.optimizer, engine.param_names, state)
        return _Found(state=state, weights=weights)

    def _rank_files(self, where: Path) -> list[str]:
        """Files of the ranks' own state."""
        names: list[str] = self._engine._get_all_ckpt_names(str(where.parent), where.name)
        if not names:
            raise FileError(f"{where}: expected a checkpoint, found no mp_rank_*_model_states.pt")
        return names

    def _stage(self, where: Path, names: list[str], more: Iterable[str] = ()) -> None:
        """Read a rank's own state, which is in one of the files ``names``, and more files."""
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

    def _layer_files(self, where: Path) -> dict[str, Any]:
        """Path to layer, for what upstream reads on this rank."""
        found: dict[str, Any] = {}
        for index, layer in enumerate(self._module.forward_funcs):
            if hasattr(layer, "load_state_dict"):
                paths = self._module.ckpt_layer_path_list(str(where), index)
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
        engine = self._engine
        wanted = {n for group in mine.parameters[engine.stage_id] for n in group if not is_placeholder(n)}
        state = read_state(saved, wanted, lambda *of: self._saved_content(where, *of), str(where), sizes)
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
        options = {**vars(wanted), "load_optimizer_states": wanted.load_optimizer_states and found.state is None}
        try:
            path, client_state = self._load(str(load_dir), tag, **options)
            if found.state is not None:
                write_state(self._engine.optimizer, self._engine.param_names, found.state)
        except Exception as one:
            if self._layers_loaded is False:  # told by all already
                raise
            problem = one
        # where this rank failed before its layers, the others meet it there
        raise_everywhere(problem, f"{where} cannot be loaded", FileError)
        self._module.unusable = None
        return path, {key: value for key, value in client_state.items() if key not in RESERVED}

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
