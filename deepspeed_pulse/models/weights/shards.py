"""Named tensors of many ranks as one safetensors checkpoint, cut into files as diffusers cuts them.

Which tensor goes into which file is decided by ``huggingface_hub``, from shapes alone. Then the files
are made one after the other: the tensors of one file travel to global rank 0, each from the rank that
holds it, are written, and are let go before the next file is begun.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.models.units import Origin, Unit, origin_of
from deepspeed_pulse.models.weights.folder import WEIGHTS, varied

_SHARD = r"-\d{5}-of-\d{5}"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A tensor of the checkpoint and the pipeline rank that sends it."""

    key: str
    owner: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Which tensors go into which file; ``index`` is the text of the index file when there are several."""

    files: dict[str, tuple[_Entry, ...]]
    index: str | None


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a checkpoint's files are called, as in diffusers, and what is in them beside tensors.

    Shards and their index derive their names from the single file's ``name``; a ``variant``, for example ``"fp16"``, is
    put into them. ``metadata`` is that of each safetensors file; ``texts`` are other files of the folder.
    """

    name: str = WEIGHTS
    variant: str | None = None
    max_shard_size: int | str = "10GB"
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def single(self) -> str:
        return varied(self.name, self.variant)

    @property
    def index(self) -> str:
        return varied(f"{self.name}.index.json", self.variant)

    @property
    def pattern(self) -> str:
        """Of the shards; ``{suffix}`` becomes empty or the number."""
        return self.single.replace(".safetensors", "{suffix}.safetensors")

    def is_shard(self, name: str) -> bool:
        """True when a file is a shard of some save under these names."""
        before, after = (re.escape(part) for part in self.pattern.split("{suffix}"))
        return re.fullmatch(before + _SHARD + after, name) is not None


def write_sharded(
    engine: Any,
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    files: Files,
    *,
    dtypes: Mapping[str, torch.dtype],
    keys: Sequence[str] | None = None,
) -> Path:
    """Write tensors that are spread over the ranks into ``folder``; a collective call, every rank makes it.

    Global rank 0 writes. It never holds more than the tensors of one file beyond its own, on the CPU.
    No file is renamed to its final name before all are complete; the index then makes the new weights
    the ones that are read, what an earlier save left is removed, and the files' texts come last.

    Args:
        tensors: what this rank holds, under the names in the files. Parameters with an fp32 master copy
            in the optimizer give that where ``dtypes`` says float32. Of a name on several ranks of a
            pipeline the first one is written; other data-parallel indices send nothing.
        keys: every name to be written, in the model's order; left out, all there are, by alphabet.
        dtypes: name to dtype in the file; other tensors keep theirs.

    Returns the folder, made when it does not exist, complete when the call returns. Raises on every rank
    :class:`ConfigError` when no rank holds one of ``keys`` or ``max_shard_size`` is no size, and :class:`FileError`
    when rank 0 cannot write; the folder then reads as before.
    """
    ranks, folder = engine.module.ranks, Path(folder)
    rows = _rows(engine, tensors, dtypes)
    layout = ranks.decide_on_first(lambda: _layout(_entries(rows, keys), files), "save")
    writer = _Writer(folder, files)
    try:
        for filename, entries in layout.files.items():
            shard = _bring(engine, entries, tensors)
            ranks.decide_on_first(lambda f=filename, s=shard: writer.write(f, s), "save")
        ranks.decide_on_first(lambda: writer.finish(layout), "save")
    finally:
        writer.discard()
    return folder


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of what an engine trains, one model: its ``origin``, and the ``layers`` of the backbone that it is in."""

    origin: Origin
    layers: range

    @classmethod
    def asked(
        cls,
        engine: Any,
        what: str,
        model_class: type[nn.Module] | None,
        backbone: str | None,
        *,
        dtype: Any,
        ema: Any,
    ) -> Part:
        """The one model of a backbone, or the one of ``model_class``; ``what`` asks and is named in errors.

        Collective in the world: all ranks ask for the same, in the same ``dtype`` and with averages or without.
        """
        given = f"backbone={backbone!r}, dtype={dtype}, {'no ema=' if ema is None else 'ema='}"
        engine.module.ranks.check_alike(given, what)
        check_dtype(dtype)
        if ema is not None:
            check_averages(ema)
        layers = engine.module.backbone_layers(backbone, what)
        engine.finish_backbones()
        mine = engine.module.layer_list[layers.start : layers.stop]
        return cls(origin=origin_of(mine, what, model_class), layers=layers)

    def own_states(self, engine: Any, averaged: Mapping[str, Tensor]) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        """This rank's layers of it, each with its tensors; averages in place of weights where there are some."""
        for index, layer in engine.module.local_layers():
            if index in self.layers and isinstance(layer, Unit) and layer.origin is self.origin:
                state, name = layer.state_dict(keep_vars=True), index - self.layers.start
                yield layer, {key: averaged.get(f"{name}.{key}", tensor) for key, tensor in state.items()}

    def own_tables(self, engine: Any) -> dict[str, Tensor]:
        """This rank's buffers of it that no state dict has."""
        saved = frozenset(self.origin.state_keys)
        units = (layer for layer, _ in self.own_states(engine, {}))
        return {name: buffer for unit in units for name, buffer in unit.named_buffers() if name not in saved}

    def own_tensors(self, engine: Any, averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of them, under their names in the model."""
        return {key: tensor for _, state in self.own_states(engine, averaged) for key, tensor in state.items()}


def check_dtype(dtype: Any) -> None:
    """Raises a :class:`ConfigError` for what floating-point weights cannot have; None leaves them theirs."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype: expected a floating-point torch.dtype such as torch.bfloat16, found {dtype!r}")


def gather(
    engine: Any, tensors: Mapping[str, Tensor], *, keys: Sequence[str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Copies of tensors that are spread over the ranks, on the CPU of global rank 0; empty on the others. Collective.

    Arguments and errors are those of :func:`write_sharded`; what there is besides ``keys`` comes, too.
    """
    rows = _rows(engine, tensors, dtypes)
    more = sorted({key for row in rows for key, _, _ in row or ()} - set(keys))
    entries = engine.module.ranks.decide_on_first(lambda: _entries(rows, [*keys, *more]), "gather")
    found = _bring(engine, entries.values(), tensors)
    # what this rank holds itself may have come without a copy
    return {key: t.clone() if entries[key].owner == engine.module.stage_id else t for key, t in found.items()}


def _rows(engine: Any, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> list[Any]:
    """Key, shape and dtype of what each rank sends, on the first rank."""
    mine = [(key, tuple(t.shape), dtypes.get(key, t.dtype)) for key, t in tensors.items()]
    return engine.module.ranks.gather_to_first(mine if engine.grid.data_parallel_id == 0 else None) or []


def _bring(engine: Any, entries: Iterable[_Entry], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some entries on global rank 0; nothing on the others."""
    found = {}
    for entry in entries:
        value = None
        if engine.module.stage_id == entry.owner:
            value = tensors[entry.key]
            if entry.dtype == torch.float32 and value.dtype in (torch.bfloat16, torch.float16):
                value = engine.module.full_precision(value)  # which every replica of the owner takes part in
            value = value.detach().to(entry.dtype) if engine.grid.data_parallel_id == 0 else None
        value = engine.module.ranks.bring_to_first(value, owner=entry.owner, shape=entry.shape, dtype=entry.dtype)
        if value is not None:
            found[entry.key] = value
    return found


def _entries(rows: list[Any], keys: Sequence[str] | None) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for owner, row in enumerate(rows):
        for key, shape, dtype in row or ():
            found.setdefault(key, _Entry(key=key, owner=owner, shape=shape, dtype=dtype))
    keys = sorted(found) if keys is None else keys
    if missing := [key for key in keys if key not in found]:
        raise ConfigError(
            f"no layer of the list holds {len(missing)} of the {len(keys)} entries to be saved, the first is "
            f"{missing[0]}; train the whole list that to_layers() gives"
        )
    if not keys:
        raise ConfigError("no rank holds anything to be saved; expected at least one tensor")
    return {key: found[key] for key in keys}


def _layout(found: dict[str, _Entry], files: Files) -> _Layout:
    shapes = {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in found.items()}
    try:
        split = split_torch_state_dict_into_shards(
            shapes, filename_pattern=files.pattern, max_shard_size=files.max_shard_size
        )
    except (ValueError, TypeError) as problem:
        raise ConfigError(
            f'max_shard_size: expected bytes or text such as "5GB", found {files.max_shard_size!r}: {problem}'
        ) from None
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return _Layout(
        files={file: tuple(found[key] for key in inside) for file, inside in split.filename_to_tensors.items()},
        index=json.dumps(index, indent=2, sort_keys=True) + "\n" if split.is_sharded else None,
    )


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with memory of their own, which safetensors asks for: a shared weight stands under each name."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(list(tensors.items()))}
    return {name: t if first[t.data_ptr()] == name else t.clone() for name, t in tensors.items()}


class _Writer:
    """Files written beside their final names and renamed together at the end; used on rank 0."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._beside: dict[str, Path] = {}

    def write(self, name: str, shard: dict[str, Tensor]) -> None:
        """One file of tensors, beside its final name."""
        self._try(name, lambda path: save_file(apart(shard), path, metadata=dict(self._files.metadata)))

    def finish(self, layout: _Layout) -> None:
        """Make the new files the ones that are read, and remove what an earlier save left.

        Readers go by the index where there is one. New shards whose names an old index knows must not
        appear under it, so that index goes first; otherwise the old weights read until the last rename.
        """
        index = {} if layout.index is None else {self._files.index: layout.index}
        for name, text in {**self._files.texts, **index}.items():
            self._try(name, methodcaller("write_text", text, encoding="utf-8"))
        try:
            if index and any((self._folder / name).exists() for name in layout.files):
                (self._folder / self._files.index).unlink(missing_ok=True)
            self._rename(layout.files)
            self._rename(index)
            self._remove_stale(layout)
            self._rename(self._files.texts)
        except OSError as problem:
            raise FileError(f"{self._folder}: the weights are written but cannot be renamed: {problem}") from problem

    def discard(self) -> None:
        """Remove what was not renamed."""
        for path in self._beside.values():
            path.unlink(missing_ok=True)

    def _try(self, name: str, write: Callable[[Path], Any]) -> None:
        beside = self._folder / f"{name}.tmp{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._beside[name] = beside
            write(beside)
        except (OSError, SafetensorError) as problem:
            raise FileError(
                f"{self._folder / name}: cannot be written: {problem}; what the folder held is untouched"
            ) from problem

    def _rename(self, names: Iterable[str]) -> None:
        for name in names:
            os.replace(self._beside.pop(name), self._folder / name)

    def _remove_stale(self, layout: _Layout) -> None:
        """Shards of another cut, and the single file or the index that the new files take the place of."""
        replaced = self._files.single if layout.index is not None else self._files.index
        (self._folder / replaced).unlink(missing_ok=True)
        for path in list(self._folder.iterdir()):
            if self._files.is_shard(path.name) and path.name not in layout.files:
                path.unlink()


def check_averages(ema: Any) -> None:
    """Raises a :class:`ConfigError` for averages of another kind, diffusers' ``EMAModel`` for one."""
    if not hasattr(ema, "averages_of"):
        kind = f"{type(ema).__module__}.{type(ema).__qualname__}"
        raise ConfigError(
            f"ema: expected a deepspeed_pulse.models.EMA, found {kind}: a rank holds some of the layers only; make "
            "it with EMA(engine, decay=...)"
        )
