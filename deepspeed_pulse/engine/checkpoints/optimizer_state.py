"""Optimizer state by parameter name: out of upstream's files of any plan, into this rank's optimizer.

Upstream keeps optimizer state per rank. A plain optimizer numbers its parameters, and so does the one for fp16, which
keeps full-precision copies beside them. ZeRO-1 and the bf16 optimizer keep flat buffers, cut over the data-parallel
ranks, with the address of each parameter's fragment in the file; the fp16 optimizer for fused Adam keeps whole ones in
the order of its parameters. Either way the name of a parameter leads to its state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_pulse.engine.checkpoints.cut import Cut, common
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord, parameter_names
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.gradients.scaling import keep_scale, set_scale
from deepspeed_pulse.engine.gradients.stepped import parameter_groups
from deepspeed_pulse.engine.gradients.whole_model import as_given, estimate_of
from deepspeed_pulse.errors import PlanError

MASTER = "fp32"
"""Key of the full-precision copy of a parameter among its state."""

Load = Callable[[int, int | None], Any]
"""Content of the file of (pipeline rank, data-parallel index; None: the file all replicas share)."""

Groups = Sequence[Sequence[str]]
"""Per parameter group, names of its parameters."""

_GAPS = "param_alignment_paddings"
"""Key of what newer versions put between parameters (``zero_optimization.parameter_alignment``)."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint holds of some parameters.

    Attributes:
        tensors: per parameter, tensors by key (``exp_avg``, ..., and :data:`MASTER`), flat ones out of flat buffers.
        parts: which numbers of a parameter those flat ones are; all of one that is not in here.
        scalars: per parameter that was read, what counts for all of it (``step``); nothing where it has made no step.
        options: per parameter, learning rate and the like of its group.
        scale: where dynamic loss scaling stands; empty without it.
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    parts: dict[str, range] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)


def full_precision_copies(optimizer: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Copies that an fp16 optimizer without ZeRO keeps, by parameter; upstream has no function for them."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    if hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            pieces = flat.data.split([p.numel() for p in group])
            copies.update({p: piece.view(p.shape) for p, piece in zip(group, pieces, strict=True)})
    elif hasattr(optimizer, "fp32_groups"):
        for group, full in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            copies.update({p: copy.data for p, copy in zip(group, full, strict=True)})
    return copies


def address_in_turn(optimizer: Any) -> None:
    """Correct the addresses of weights in flat buffers, where ``round_robin_gradients`` puts them in another order.

    Upstream counts them in the order of their groups, in files too.
    """
    if not (isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.round_robin_gradients):
        return
    link = optimizer._link_all_hp_params

    def link_in_turn() -> None:
        groups = optimizer.bit16_groups
        optimizer.bit16_groups = optimizer.round_robin_bit16_groups
        try:
            link()
        finally:
            optimizer.bit16_groups = groups

    optimizer._link_all_hp_params = link_in_turn
    link_in_turn()
    optimizer._param_slice_mappings = optimizer._create_param_mapping()
    if optimizer.cpu_offload:
        optimizer._create_optimizer_mapping()


def refresh_copies(optimizer: Any) -> None:
    """Take the weights that were just loaded for what an optimizer keeps in full precision, and steps."""
    if hasattr(optimizer, "refresh_fp32_params"):
        optimizer.refresh_fp32_params()


def with_copies(saved: SavedState, weights: SavedState) -> SavedState:
    """The same with a full-precision copy of each of ``weights`` that was saved without one: in fp32, without ZeRO."""
    tensors = {name: {**weight, **saved.tensors.get(name, {})} for name, weight in weights.tensors.items()}
    return replace(saved, tensors={**saved.tensors, **tensors})


def own_parts(optimizer: Any, names: Mapping[Any, str]) -> dict[str, range]:
    """Of each parameter that an engine's optimizer trains, the numbers that this rank steps; none where others do."""
    in_buffers = _buffers(optimizer) is not None
    found = {}
    for group in parameter_groups(optimizer):
        if in_buffers:
            found.update({names[parameter]: range(0) for parameter in group})
            found.update({names[parameter]: range(low, low + n) for parameter, low, _, n in _fragments(group)})
        else:
            found.update({names[parameter]: range(parameter.numel()) for parameter in group})
    return {name: part for name, part in found.items() if not is_placeholder(name)}


def read_state(
    record: CheckpointRecord, wanted: Mapping[str, range], load: Load, where: str, sizes: Mapping[str, int]
) -> SavedState:
    """State of the numbers ``wanted`` of parameters; each file that has some is read once and dropped.

    Of a flat buffer that was cut over replicas, no file is opened that has none of them, but one for its options.

    Args:
        sizes: numbers in each parameter of the model, the addresses in buffers that have none.

    Raises:
        PlanError: no rank of the checkpoint trained one of the parameters.
    """
    saved, missing = SavedState(), set(wanted)
    for rank, groups in enumerate(record.parameters):
        here = missing & {name for group in groups for name in group}
        if here:
            if record.partitioned:
                parts = {name: wanted[name] for name in here if wanted[name]}
                _read_partitioned(saved, groups, parts, partial(load, rank), record.data_parallel, sizes)
            else:
                _read_whole(saved, groups, here, load(rank, None)["optimizer"], sizes)
            missing -= here
    if missing:
        raise PlanError(
            f"{where}: no optimizer state of {len(missing)} trainable parameters, the first is {min(missing)}; freeze "
            "the same parameters as then, or load no optimizer state (load_optimizer_states=False)"
        )
    return saved


def _read_whole(
    saved: SavedState, groups: Groups, names: set[str], state: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
    base = state.get(OPTIMIZER_STATE_DICT, state)
    if "fp32_groups_flat" in state:
        for index, group in enumerate(groups):
            flat = {**base["state"].get(index, {}), MASTER: state["fp32_groups_flat"][index]}
            start = 0
            for name in group:
                if name in names:
                    piece = _cut_out(flat, start, sizes[name])
                    _sort_in(saved, name, piece, _counters([piece]))
                    if names <= saved.tensors.keys():
                        break
                if name not in sizes and not is_placeholder(name):
                    raise PlanError(
                        f"optimizer state in one buffer, behind that of {name}, whose size is not known in this run; "
                        "load no optimizer state (load_optimizer_states=False)"
                    )
                start += 1 if is_placeholder(name) else sizes[name]
    else:
        copies = [copy for group in state.get("fp32_groups", ()) for copy in group]
        counters = _counters(base["state"].values())
        for index, name in enumerate(name for group in groups for name in group):
            if name in names:
                full = {MASTER: copies[index]} if copies else {}
                _sort_in(saved, name, {**base["state"].get(index, {}), **full}, counters)
    keep_options(saved, groups, base["param_groups"])
    saved.scale.update(keep_scale(state))


def _read_partitioned(
    saved: SavedState,
    groups: Groups,
    parts: Mapping[str, range],
    load: Callable[[int], Any],
    replicas: int,
    sizes: Mapping[str, int],
) -> None:
    """Read ``parts`` of parameters, none of them empty, out of the files of replicas (``load``)."""
    cuts = [Cut.of(group, replicas, sizes) for group in groups]
    places = {name: (index, cut) for index, cut in enumerate(cuts) if cut is not None for name in cut.spans}
    pieces = _pieces(saved, groups, parts, load, replicas, places) if places.keys() >= parts.keys() else None
    if pieces is not None:
        saved.parts.update(parts)
    else:  # buffers that were laid out in another way: whole parameters, out of all files
        pieces = {name: [] for name in parts}
        for replica in range(replicas):
            for addresses, flat in _flat_state(saved, groups, load(replica)):
                for name in addresses.keys() & parts.keys():
                    # replicas hold the fragments of a parameter in order
                    pieces[name].append(_cut_out(flat, addresses[name].start, addresses[name].numel))
    for name in parts:
        found = pieces.pop(name)
        state = {k: torch.cat([piece[k] for piece in found]) if _is_flat(v) else v for k, v in found[0].items()}
        _sort_in(saved, name, state, _counters([state]))


def _pieces(
    saved: SavedState,
    groups: Groups,
    parts: Mapping[str, range],
    load: Callable[[int], Any],
    replicas: int,
    places: Mapping[str, tuple[int, Cut]],
) -> dict[str, list[dict[str, Any]]] | None:
    """What makes up ``parts``, in order, by parameter; None where a file has them elsewhere than at ``places``."""
    last = replicas - 1
    needed = {replica for name, part in parts.items() for replica in places[name][1].replicas(name, part)} or {last}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in parts}
    for replica in sorted(needed):
        file = load(replica)
        buffers = _flat_state(saved, groups, file)
        if any(map(any, file[OPTIMIZER_STATE_DICT].get(_GAPS, ()))):
            return None
        for name, part in parts.items():
            index, cut = places[name]
            held, start = cut.held(name, replica)
            mine = common(held, part)
            if mine:
                addresses, flat = buffers[index]
                address = addresses.get(name)
                if address is None or (address.start, address.numel) != (start, len(held)):
                    return None
                found[name].append(_cut_out(flat, start + mine.start - held.start, len(mine)))
    if last not in needed and any(map(estimate_of, saved.options.values())):
        _flat_state(saved, groups, load(last))  # replicas have adapted rates of their own, of which the last counts
    return found


def _flat_state(saved: SavedState, groups: Groups, file: Any) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Per parameter group, addresses in a replica's part of its flat buffer, and that; notes options and the scale."""
    state = file[OPTIMIZER_STATE_DICT]
    base = state[BASE_OPTIMIZER_STATE]
    if not isinstance(base, Mapping):
        raise PlanError(
            "optimizer state written with zero_optimization.elastic_checkpoint, which leaves learning rates and "
            "other options out: it goes on under the plan, number of ranks and ZeRO stage that wrote it only; "
            "resume so, and save without that option, or load no optimizer state (load_optimizer_states=False)"
        )
    keep_options(saved, groups, base["param_groups"])
    saved.scale.update(keep_scale(vars(state[LOSS_SCALER]) if LOSS_SCALER in state else {}))
    return [
        (addresses, {**base["state"].get(index, {}), MASTER: state[SINGLE_PARTITION_OF_FP32_GROUPS][index]})
        for index, addresses in enumerate(state[PARAM_SLICE_MAPPINGS])
    ]


def _cut_out(flat: Mapping[str, Any], start: int, count: int) -> dict[str, Any]:
    """A parameter's part of a flat buffer's state; a PlanError where that has fewer numbers than the buffer."""
    total = flat[MASTER].numel()
    for key, value in flat.items():
        if _is_flat(value) and value.numel() < total:
            raise PlanError(
                f"optimizer state {key}: expected a number for each of the {total} of its flat buffer, found "
                f"{value.numel()}, which cannot be parted by parameter; resume under the plan, number of ranks and "
                "ZeRO stage that it was saved with, or load no optimizer state (load_optimizer_states=False)"
            )
    return {k: v.reshape(-1)[start : start + count].clone() if _is_flat(v) else v for k, v in flat.items()}


def _counters(states: Iterable[Mapping[str, Any]]) -> set[str]:
    """Keys of what counts for a whole parameter, whose others have dimensions.

    Everything that belongs to a parameter without dimensions looks like that; so those that have some tell.
    """
    telling = [state for state in states if any(map(_is_flat, state.values()))]
    return {"step"} | {key for state in telling for key, value in state.items() if not _is_flat(value)}


def _sort_in(saved: SavedState, name: str, state: Mapping[str, Any], counters: Collection[str]) -> None:
    """Note a parameter's state; ``counters``: keys whose tensors without dimensions are no numbers of its own."""
    tensors = {
        key: value
        for key, value in state.items()
        if _is_flat(value) or (isinstance(value, torch.Tensor) and key not in counters)
    }
    saved.tensors[name] = tensors
    saved.scalars[name] = {key: value for key, value in state.items() if key not in tensors}


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def keep_options(saved: SavedState, groups: Groups, options: list[dict[str, Any]]) -> None:
    """Note the options of each parameter's group."""
    for names, group in zip(groups, options, strict=True):
        mine = {key: value for key, value in group.items() if key != "params"}
        saved.options.update(dict.fromkeys(names, mine))


def check_state(optimizer: Any, names: Mapping[Any, str], saved: SavedState) -> None:
    """Raise a :class:`PlanError` for state of another size, and for one group trained with different options.

    An optimizer that steps each parameter by itself may keep less than a number for each (rows and columns of it).
    """
    for members in parameter_names(optimizer, names):
        _options_of(members, saved)
    in_buffers = _buffers(optimizer) is not None
    for parameter, name in names.items():
        for key, value in saved.tensors.get(name, {}).items():
            count = len(saved.parts.get(name, range(parameter.numel())))
            if value.numel() != count and (in_buffers or key == MASTER):
                raise PlanError(
                    f"optimizer state {key} of {name}: expected {count} numbers, one for each of the "
                    f"weight's, as flat buffers (ZeRO-1, bf16) have them, found {value.numel()}; use the ZeRO stage "
                    "that it was saved with, and the same model, or load no optimizer state "
                    "(load_optimizer_states=False)"
                )


def _buffers(optimizer: Any) -> list[torch.Tensor] | None:
    """What an optimizer of upstream's steps in place of each group; None of one that steps parameters."""
    if hasattr(optimizer, "bit16_groups"):
        found = optimizer.single_partition_of_fp32_groups
    elif hasattr(optimizer, "bf16_groups"):
        found = optimizer.fp32_groups_flat_partition
    elif hasattr(optimizer, "fp32_groups_flat"):
        found = optimizer.fp32_groups_flat
    else:
        return None
    return list(found)


def write_state(optimizer: Any, names: Mapping[Any, str], saved: SavedState, *, keeps: bool = False) -> None:
    """Put saved state, checked, into an engine's optimizer, whose parameters have their weights already.

    ``keeps``: the state of other parameters than those stays.
    """
    buffers = _buffers(optimizer)
    if buffers is None:
        _write_plain(optimizer, names, saved, keeps)
    else:
        _write_flat(optimizer, buffers, names, saved, keeps)
    for group, members in zip(optimizer.param_groups, parameter_names(optimizer, names), strict=True):
        group.update(_options_of(members, saved))
    set_scale(optimizer, saved.scale)


def _options_of(members: Sequence[str], saved: SavedState) -> dict[str, Any]:
    """What a group goes on with; of learning rates that ranks have adapted the smallest, which can only grow."""
    known = [name for name in members if name in saved.options]
    given = {name: as_given(saved.options[name]) for name in known}
    for name in known:
        if given[name] != given[known[0]]:
            raise PlanError(
                f"parameters {known[0]} and {name} are in one group of this job's optimizer and were trained in groups "
                f"with different options: {given[known[0]]} and {given[name]}; build the same groups"
            )
    return min((saved.options[name] for name in known), key=estimate_of, default={})


def _write_plain(optimizer: Any, names: Mapping[Any, str], saved: SavedState, keeps: bool) -> None:
    copies = full_precision_copies(optimizer)
    base = optimizer.optimizer if copies else optimizer
    before = base.state_dict()
    state: dict[int, dict[str, Any]] = dict(before["state"]) if keeps else {}
    for index, parameter in enumerate(p for group in parameter_groups(optimizer) for p in group):
        name = names[parameter]
        tensors = _shaped(saved.tensors.get(name, {}), parameter)
        full = tensors.pop(MASTER, None)
        if full is not None and parameter in copies:
            copies[parameter].copy_(full)
        # counters that a file shares between parameters must not stay shared: optimizers count in place
        scalars = {key: _copy(value) for key, value in saved.scalars.get(name, {}).items()}
        if tensors or scalars:
            state[index] = {**scalars, **tensors}
        elif name in saved.scalars:
            state.pop(index, None)
    # torch's own loading casts the state to each parameter's dtype and device
    base.load_state_dict({"state": state, "param_groups": before["param_groups"]})


def _shaped(tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter's state out of a flat buffer, in the parameter's shape; any other as it was, flat in part as well."""
    if any(value.shape == parameter.shape for value in tensors.values()):
        return dict(tensors)
    whole = parameter.numel()
    return {k: value.reshape(parameter.shape) if value.numel() == whole else value for k, value in tensors.items()}


def _write_flat(
    optimizer: Any, partitions: list[torch.Tensor], names: Mapping[Any, str], saved: SavedState, keeps: bool
) -> None:
    for group, partition in zip(parameter_groups(optimizer), partitions, strict=True):
        fragments = list(_fragments(group))
        state: dict[str, Any] = dict(optimizer.optimizer.state.pop(partition, {}))
        if not keeps or all(names[parameter] in saved.scalars for parameter, *_ in fragments):
            state = {}
        for parameter, low, high, count in fragments:
            name = names[parameter]
            for old in filter(_is_flat, state.values() if name in saved.scalars else ()):
                old[high : high + count] = 0  # saved before its first step, it had none
            state.update({key: _copy(value) for key, value in saved.scalars.get(name, {}).items()})
            low -= saved.parts[name].start if name in saved.parts else 0
            for key, value in saved.tensors.get(name, {}).items():
                target = partition.data if key == MASTER else state.setdefault(key, torch.zeros_like(partition.data))
                target[high : high + count].copy_(value.reshape(-1)[low : low + count])
        if state:
            optimizer.optimizer.state[partition] = state
    if hasattr(optimizer, "_link_all_hp_params"):
        # upstream's views into the state point to the old buffers: linked anew now and at the next step
        optimizer._link_all_hp_params()
        optimizer._hp_optimizer_states_linked = False


def _fragments(group: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """(parameter, start in it, start in the flat buffer, count) of what lies in this rank's buffer."""
    start = 0
    for parameter in group:
        if not hasattr(parameter, "_hp_mapping"):  # whole buffers have no addresses
            yield parameter, 0, start, parameter.numel()
        elif parameter._hp_mapping is not None:
            low, high = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            yield parameter, low.start, high.start, high.numel
        start += parameter.numel()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
