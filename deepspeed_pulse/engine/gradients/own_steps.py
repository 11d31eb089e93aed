"""Optimizer steps of one of several backbones, while gradients of the others are not whole yet.

DeepSpeed has one optimizer over all parameter groups. Where each group is of one backbone, a step of some groups is a
step of one backbone: for its time the optimizer sees no others. That holds for optimizers over gradients where autograd
leaves them, for DeepSpeed's over bf16 weights with fp32 gradients, and for ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceGrads, ReduceTiedGrads
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_pulse.engine.gradients.clipping import OwnNorms
from deepspeed_pulse.engine.gradients.completion import complete, sum_tied
from deepspeed_pulse.engine.gradients.memory import held_in_step
from deepspeed_pulse.engine.replaced import replaced_instructions
from deepspeed_pulse.engine.sharing.unseen import check_buffers
from deepspeed_pulse.errors import ConfigError

_SCHEDULED = ("lr", "betas", "momentum", "weight_decay")
"""Options of a group that schedules of a script or of DeepSpeed change from step to step."""


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """An optimizer of DeepSpeed's that keeps the parameters of a group in one flat tensor.

    ``held``: its name for parameters by group; ``partitions``: for what the optimizer inside steps; ``by_group``: for
    the lists with one item a group, and dicts by the number of the group. ``newer``: those that DeepSpeed 0.18 lacks.
    ``changes``: what else has another value while it sees one backbone.
    """

    held: str
    partitions: str
    by_group: tuple[str, ...]
    newer: tuple[str, ...] = ()
    changes: Mapping[str, Any]


_BF16 = _Flat(
    held="bf16_groups",
    partitions="fp32_groups_flat_partition",
    by_group=(
        "bf16_groups",
        "bf16_groups_flat",
        "bf16_partitioned_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_gradients",
        "fp32_groups_gradients_flat",
        "fp32_groups_gradient_flat_partition",
        "fp32_groups_has_gradients",
        "group_paddings",
        "real_dp_process_group",
    ),
    changes={"clip_grad": 0.0},
)

_ZERO_1 = _Flat(
    held="bit16_groups",
    partitions="single_partition_of_fp32_groups",
    by_group=(
        "all_grad_tensors",
        "averaged_gradients",
        "bit16_groups",
        "bit16_groups_flat",
        "first_offset",
        "first_param_index_in_partition",
        "grad_partition_insertion_offset",
        "grad_start_offset",
        "is_grad_computed",
        "is_partition_reduced",
        "parallel_partitioned_bit16_groups",
        "param_to_partition_ids",
        "params_in_partition",
        "params_not_in_partition",
        "partition_count",
        "partition_size",
        "real_dp_process_group",
        "remaining_grads_in_partition",
        "round_robin_bit16_groups",
        "round_robin_bit16_indices",
        "round_robin_bit16_meta",
        "single_partition_of_fp32_groups",
        "total_grads_in_partition",
    ),
    newer=("round_robin_bit16_offsets", "round_robin_bit16_padding"),
    # A norm of its own would be read by nothing: backbones are clipped before.
    changes={"clip_grad": 0.0, "compute_grad_norm": False},
)

_OWN = 'use "backbone_steps": "together" in the "pulse" block'

Values = Sequence[Mapping[str, Any]]
"""Of each group, the options that schedules change."""


def refusal(config: Mapping[str, Any] | None) -> str | None:
    """Why backbones cannot make steps of their own under a DeepSpeed config; None where they can."""
    given = config or {}
    if _section(given, "fp16").get("enabled"):
        return "expected no fp16, whose loss scale is one for all backbones"
    if _section(given, "torch_autocast").get("enabled"):
        return "expected no torch_autocast, which may scale the losses of all backbones"
    zero = _section(given, "zero_optimization")
    for key in ("overlap_comm", "offload_optimizer"):
        if zero.get("stage", 0) and zero.get(key):
            return f'expected no "{key}" under ZeRO-1, which takes gradients of all backbones as they come'
    return None


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def split_groups(module: Any, given: Sequence[Any]) -> list[Any]:
    """Parameters, or groups of them, as groups of one backbone each; what stands in for one comes with the first."""
    groups = list(given)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [part for group in groups for part in _parted(module, group)]


def _parted(module: Any, group: dict[str, Any]) -> list[dict[str, Any]]:
    """In the order of backbones; all ranks have as many, where a rank has nothing of one an empty one."""
    held = group["params"]
    parameters = [held] if isinstance(held, torch.Tensor) else list(held)
    owners = [module.backbone_of(p) for p in parameters]
    known = sorted({owner for owner in owners if owner is not None})
    if len(known) < 2:
        return [group]
    return [
        {
            **group,
            "params": [p for p, o in zip(parameters, owners, strict=True) if (known[0] if o is None else o) == owner],
        }
        for owner in known
    ]


def split_optimizer(module: Any, optimizer: Any, scheduler: Any) -> None:
    """The same of a script's optimizer; refused where a schedule of the script has counted its groups already."""
    parted = [_parted(module, group) for group in optimizer.param_groups]
    if all(len(parts) == 1 for parts in parted):
        return
    if hasattr(scheduler, "step"):
        raise ConfigError(
            "backbones that make steps of their own: expected parameter groups of one backbone each, found one of "
            "several beside a learning rate schedule that has counted the groups; make groups from "
            f"module.backbone_parameters(name), or {_OWN}"
        )
    optimizer.param_groups[:] = [part for parts in parted for part in parts]


class OwnSteps:
    """Ends the steps of backbones, each by itself.

    Args:
        engine: its optimizer is made, of groups of one backbone each.
        norms: clips one backbone's gradients.
        count: is told what a step makes and drops, bytes.

    Raises:
        ConfigError: the optimizer, or something that a program has put in its place, steps all at once.
    """

    def __init__(self, engine: Any, norms: OwnNorms, count: Callable[[int], None]) -> None:
        self._engine, self._norms, self._count = engine, norms, count
        self._before: Values = ()
        self._now: Values = ()
        self._squares: dict[int, torch.Tensor | None] = {}
        """By backbone, of the norm of its gradients in the last step that it has ended; None where it is not known."""
        optimizer = engine.optimizer
        kinds = ((BF16_Optimizer, _BF16), (DeepSpeedZeroOptimizer, _ZERO_1))
        self._flat = next((flat for kind, flat in kinds if isinstance(optimizer, kind)), None)
        self._changes = {} if self._flat is None else {**self._flat.changes, "_hp_optimizer_states_linked": True}
        if self._flat is _ZERO_1:
            self._changes["check_grad_overflow"] = _skips(optimizer)
        unknown = isinstance(optimizer, ZeROOptimizer) and self._flat is None
        if unknown or not hasattr(optimizer, "param_groups") or engine.fp16_enabled():
            raise self._refused(f"the optimizer {type(optimizer).__name__}")
        if isinstance(optimizer, BF16_Optimizer) and (optimizer.immediate_grad_update or engine.has_moe_layers):
            raise self._refused("bf16 with immediate_grad_update or experts")
        if not engine.pipeline_enable_backward_allreduce:
            raise self._refused("an optimizer that sums gradients itself")
        if any(getattr(part, "sparse", False) is True for part in engine.module.modules()):
            raise self._refused("sparse gradients")
        self._groups = [self._owner_of(number, group) for number, group in enumerate(self._held())]

    def _refused(self, found: str) -> ConfigError:
        return ConfigError(
            "backbones that make steps of their own: expected gradients that DeepSpeed sums and an optimizer for "
            f"fp32 or bf16, ZeRO-1 or without, found {found}; {_OWN}"
        )

    def _held(self) -> Sequence[Sequence[torch.Tensor]]:
        """Parameters by group."""
        optimizer = self._engine.optimizer
        if self._flat is not None:
            return list(getattr(optimizer, self._flat.held))
        return [group["params"] for group in optimizer.param_groups]

    def _owner_of(self, number: int, parameters: Iterable[torch.Tensor]) -> int:
        """The backbone of a group; the first where it has a placeholder only."""
        owners = {self._engine.module.backbone_of(p) for p in parameters} - {None}
        if len(owners) > 1:
            raise ConfigError(
                f"backbones that make steps of their own: expected parameter groups of one backbone each, found number "
                f"{number} of several; make groups from module.backbone_parameters(name), or {_OWN}"
            )
        return owners.pop() if owners else 0

    def begin(self, *, anew: bool) -> None:
        """A step begins: remember what learning rates are its own. ``anew``: no backbone is in the midst of one."""
        if not {OptimizerStep, ReduceGrads, ReduceTiedGrads}.isdisjoint(replaced_instructions()):
            raise self._refused("an instruction of DeepSpeed's schedule that the program has replaced")
        if anew:
            self._squares.clear()
        self._before, self._now = self._now, self._values()

    def _values(self) -> Values:
        groups = self._engine.optimizer.param_groups
        return [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]

    @torch.no_grad()
    def end(self, backbone: int, *, earlier: bool) -> None:
        """Sum a backbone's gradients, clip them, and step; collective. ``earlier``: it is the step before that ends."""
        self._reduce(backbone)
        squares = self._norms.clip(backbone)
        present = self._values()
        self._set(self._before if earlier else self._now)
        with self._only(backbone):
            self._count(held_in_step(self._engine))
            self._engine.optimizer.step()
            torch.clear_autocast_cache()  # the backbone's next forward may come in this call of train_batch
            self._clear(backbone)
        self._squares[backbone] = self._found_by_optimizer() if squares is None else squares[backbone]
        self._set(present)

    def _found_by_optimizer(self) -> torch.Tensor | None:
        """The square of the norm that an optimizer has looked for by itself, as DeepSpeed's for bf16 does."""
        norm = getattr(self._engine.optimizer, "_global_grad_norm", None)
        if norm is None:
            return None
        return torch.as_tensor(norm, dtype=torch.float32, device=self._engine.device).square()

    def norm(self) -> torch.Tensor | None:
        """Of all gradients before clipping, of the last step that each has ended since it began anew.

        None where no backbone has ended one, or a norm is not known: without clipping in fp32 and under ZeRO-1.
        """
        found = [square for square in self._squares.values() if square is not None]
        return torch.stack(found).sum().sqrt() if found and len(found) == len(self._squares) else None

    def _set(self, values: Values) -> None:
        for group, own in zip(self._engine.optimizer.param_groups, values, strict=True):
            group.update(own)

    def _reduce(self, backbone: int) -> None:
        engine, module = self._engine, self._engine.module
        check_buffers(module.shared)
        tied = [(w, g) for w, g in module.get_tied_weights_and_groups() if module.backbone_of(w) == backbone]
        sum_tied(tied, engine.optimizer)
        with self._only(backbone):
            complete(engine.optimizer)
            if self._flat is _ZERO_1:
                with _changed(engine, "_force_grad_boundary", True):
                    engine.allreduce_gradients()
                return
        engine.buffered_allreduce_fallback(grads=list(self._gradients(backbone)))

    def _gradients(self, backbone: int) -> Iterator[torch.Tensor]:
        """Of all its parameters that train, zeros where this rank's data has not used one; others' may have."""
        optimizer = self._engine.optimizer
        if self._flat is _BF16:
            for number, gradients in enumerate(optimizer.fp32_groups_gradients):
                yield from (gradients if self._groups[number] == backbone else ())
            return
        for parameter in self._parameters(backbone):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad

    def _parameters(self, backbone: int) -> list[torch.Tensor]:
        module = self._engine.module
        return [p for p in module.parameters() if p.requires_grad and module.backbone_of(p) == backbone]

    def _clear(self, backbone: int) -> None:
        if self._flat is not None:
            self._engine.optimizer.zero_grad()
            return
        for parameter in self._parameters(backbone):
            parameter.grad = None

    @contextmanager
    def _only(self, backbone: int) -> Iterator[None]:
        """The optimizer has a backbone's groups only."""
        optimizer = self._engine.optimizer
        mine = [number for number, owner in enumerate(self._groups) if owner == backbone]
        if self._flat is None:
            with _items_of(optimizer, "param_groups", mine):
                yield
            return
        linked, newer = optimizer._hp_optimizer_states_linked, [n for n in self._flat.newer if hasattr(optimizer, n)]
        with ExitStack() as stack:
            for name, value in self._changes.items():
                stack.enter_context(_changed(optimizer, name, value))
            for name in (*self._flat.by_group, *newer):
                stack.enter_context(_items_of(optimizer, name, mine))
            stack.enter_context(_items_of(optimizer.optimizer, "param_groups", mine))
            yield
        if not linked and all(part in optimizer.optimizer.state for part in getattr(optimizer, self._flat.partitions)):
            optimizer._lazy_init_hp_params_optimizer_state()


def _skips(zero: Any) -> bool:
    """Whether ZeRO-1's optimizer alone skips a step whose gradients are not finite.

    It looks at them, or from some version on at their norm. A step of one backbone has no norm, and looks at them.
    """
    by_norm = getattr(zero, "compute_grad_norm", False) and zero.dtype != torch.bfloat16
    return bool(by_norm or getattr(zero, "check_grad_overflow", False))


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An object's field has another value; one that an older version does not read has it for that time only."""
    had, before = hasattr(owner, name), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def _items_of(owner: Any, name: str, numbers: Sequence[int]) -> Iterator[None]:
    """A list of an object, or a dict by number, has some items only; what is put in their places stays."""
    every = getattr(owner, name)
    keyed = isinstance(every, dict)
    some: Any = {at: every[n] for at, n in enumerate(numbers) if n in every} if keyed else [every[n] for n in numbers]
    setattr(owner, name, some)
    try:
        yield
    finally:
        for at, number in enumerate(numbers):
            if not keyed or at in some:
                every[number] = some[at]
        setattr(owner, name, every)


@contextmanager
def counting_only(engine: Any) -> Iterator[None]:
    """What upstream does in an optimizer step changes its books and schedules only."""
    optimizer = engine.optimizer
    engine.optimizer, engine.zero_grad = _Counting(optimizer), _nothing
    try:
        yield
    finally:
        engine.optimizer = optimizer
        del engine.zero_grad


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Counting:
    """An optimizer, but for steps."""

    overflow = False
    step = zero_grad = staticmethod(_nothing)

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
