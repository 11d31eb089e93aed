"""Optimizer state by parameter name: out of upstream's files of any plan, into this rank's optimizer.

Upstream keeps optimizer state per rank. A plain optimizer numbers its parameters; ZeRO-1 and the
bf16 optimizer keep flat buffers, cut over the data-parallel ranks, with the address of each
parameter's fragment in the file. Either way the name of a parameter leads to its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from deepspeed_pulse.engine.checkpoint_files import load_safely
from deepspeed_pulse.engine.checkpoint_record import CheckpointRecord
from deepspeed_pulse.errors import PlanError

PLACEHOLDER = "pulse_placeholder"
"""The parameter of a rank that has nothing to train."""

MASTER = "fp32"
"""Key of the full-precision copy of a parameter among its state."""

FileOf = Callable[[int, int | None], Path]
"""File of (pipeline rank, data-parallel index; None: the file all replicas share)."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint holds of some parameters.

    Attributes:
        tensors: per parameter, flat tensors by key (``exp_avg``, ..., and :data:`MASTER`).
        scalars: per parameter, everything else (``step``).
        options: per parameter group, learning rate and the like.
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def parameter_names(optimizer: Any, names: Mapping[Any, str]) -> tuple[tuple[str, ...], ...]:
    """Per parameter group of an engine's optimizer, the names of its parameters in order."""
    return tuple(tuple(names[p] for p in group) for group in _groups(optimizer))


def _groups(optimizer: Any) -> list[list[torch.Tensor]]:
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, attribute):
            return [list(group) for group in getattr(optimizer, attribute)]
    return [list(group["params"]) for group in optimizer.param_groups]


# ------------------------------------------------------------------------------------------- read


def read_state(record: CheckpointRecord, wanted: set[str], file_of: FileOf, where: str) -> SavedState:
    """State of the parameters ``wanted``; each file that has some is read once and dropped.

    Raises:
        PlanError: no rank of the checkpoint trained one of the parameters.
    """
    saved, missing = SavedState(), set(wanted)
    for rank, groups in enumerate(record.parameters):
        here = missing & {name for group in groups for name in group}
        if here:
            read = _read_partitioned if record.partitioned else _read_plain
            read(saved, record, rank, here, file_of)
            missing -= here
    if missing:
        raise PlanError(
            f"{where}: no optimizer state of {len(missing)} trainable parameters, the first is {min(missing)}; freeze "
            "the same parameters as then, or load weights only (load_optimizer_states=False)"
        )
    return saved


def _read_plain(saved: SavedState, record: CheckpointRecord, rank: int, names: set[str], file_of: FileOf) -> None:
    state = load_safely(file_of(rank, None))["optimizer"]
    order = [name for group in record.parameters[rank] for name in group]
    for index, name in enumerate(order):
        if name in names:
            _sort_in(saved, name, state["state"].get(index, {}))
            saved.tensors[name] = {key: value.reshape(-1) for key, value in saved.tensors[name].items()}
    _keep_options(saved, state["param_groups"])


def _sort_in(saved: SavedState, name: str, state: Mapping[str, Any]) -> None:
    flat = {key: value for key, value in state.items() if _is_flat(value)}
    saved.tensors[name] = flat
    saved.scalars[name] = {key: value for key, value in state.items() if key not in flat}


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _keep_options(saved: SavedState, groups: list[dict[str, Any]]) -> None:
    if not saved.options:
        saved.options.extend({k: v for k, v in group.items() if k != "params"} for group in groups)


def _read_partitioned(saved: SavedState, record: CheckpointRecord, rank: int, names: set[str], file_of: FileOf) -> None:
    pieces: dict[str, dict[str, list[torch.Tensor]]] = {name: {} for name in names}
    for replica in range(record.data_parallel):
        state = load_safely(file_of(rank, replica))[OPTIMIZER_STATE_DICT]
        base = state[BASE_OPTIMIZER_STATE]
        for index, mapping in enumerate(state[PARAM_SLICE_MAPPINGS]):
            flat = {**base["state"].get(index, {}), MASTER: state[SINGLE_PARTITION_OF_FP32_GROUPS][index]}
            for name, address in mapping.items():
                if name in names:
                    _cut_out(saved, name, address, flat, pieces[name])
        _keep_options(saved, base["param_groups"])
        if LOSS_SCALER in state:
            saved.extra[LOSS_SCALER] = state[LOSS_SCALER]
    for name, found in pieces.items():
        saved.tensors[name] = {key: torch.cat(parts) for key, parts in found.items()}
        saved.scalars.setdefault(name, {})


def _cut_out(
    saved: SavedState, name: str, address: Any, flat: Mapping[str, Any], pieces: dict[str, list[torch.Tensor]]
) -> None:
    """A replica's fragment of one parameter; replicas hold them in order."""
    for key, value in flat.items():
        if _is_flat(value):
            pieces.setdefault(key, []).append(value.reshape(-1)[address.start : address.start + address.numel].clone())
        else:
            saved.scalars.setdefault(name, {})[key] = value


# ------------------------------------------------------------------------------------------ write


def write_state(optimizer: Any, names: Mapping[Any, str], saved: SavedState) -> None:
    """Put saved state into an engine's optimizer, whose parameters have their weights already."""
    if hasattr(optimizer, "bit16_groups"):
        _write_flat(optimizer, optimizer.single_partition_of_fp32_groups, names, saved)
    elif hasattr(optimizer, "bf16_groups"):
        _write_flat(optimizer, optimizer.fp32_groups_flat_partition, names, saved)
    else:
        _write_plain(optimizer, names, saved)
    for group, options in zip(optimizer.param_groups, saved.options, strict=False):
        group.update(options)
    if LOSS_SCALER in saved.extra:
        optimizer.loss_scaler = saved.extra[LOSS_SCALER]


def _write_plain(optimizer: Any, names: Mapping[Any, str], saved: SavedState) -> None:
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(p for group in _groups(optimizer) for p in group):
        name = names[parameter]
        tensors = {k: v.reshape(parameter.shape) for k, v in saved.tensors.get(name, {}).items() if k != MASTER}
        # counters that a file shares between parameters must not stay shared: optimizers count in place
        scalars = {key: _copy(value) for key, value in saved.scalars.get(name, {}).items()}
        if tensors or scalars:
            state[index] = {**scalars, **tensors}
    # torch's own loading casts the state to each parameter's dtype and device
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _write_flat(optimizer: Any, partitions: list[torch.Tensor], names: Mapping[Any, str], saved: SavedState) -> None:
    for group, partition in zip(_groups(optimizer), partitions, strict=True):
        state: dict[str, Any] = {}
        for parameter, fragment in _fragments(group):
            name = names[parameter]
            state.update({key: _copy(value) for key, value in saved.scalars.get(name, {}).items()})
            for key, value in saved.tensors.get(name, {}).items():
                target = partition.data if key == MASTER else state.setdefault(key, torch.zeros_like(partition))
                low, high = fragment.lp_fragment_address, fragment.hp_fragment_address
                target[high.start : high.start + high.numel].copy_(value[low.start : low.start + low.numel])
        if state:
            optimizer.optimizer.state[partition] = state
    # upstream's views into the state point to the old buffers: linked anew now and at the next step
    optimizer._link_all_hp_params()
    optimizer._hp_optimizer_states_linked = False


def _fragments(group: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Any]]:
    for parameter in group:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            yield parameter, mapping


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
