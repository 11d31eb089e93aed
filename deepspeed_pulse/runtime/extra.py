"""Extra forwards of one rank: without gradient, with hidden states and named values of their own.

What the last stage's gives is made into an estimate, which the microbatch's own forward reads as an entry of its batch.
Where there is none that entry is zeros in the form of the backbone's input: in extra forwards themselves, and in the
forwards of microbatches that have no estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.effects import INPUT
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import HIDDEN, Message, Step
from deepspeed_pulse.ir.schedule import Op
from deepspeed_pulse.runtime.owning import copied, without_gradient
from deepspeed_pulse.runtime.payload import Payload, as_payload, num_bytes, tensors_in, tensors_of
from deepspeed_pulse.runtime.protocols import Batches
from deepspeed_pulse.runtime.stage import Stage
from deepspeed_pulse.runtime.usage import Usage
from deepspeed_pulse.runtime.values import ValueBuffer

Estimate = Callable[[Any, int, int], Any]
"""``estimate(output of a backbone's last layer, microbatch, backbone)`` returns what its entry is in the forward."""


class OrderedBatches:
    """The data of a step as a plan's microbatches find it: in the order that was drawn, zeros where entries are theirs.

    Args:
        batches: the data.
        order: per microbatch of the plan, which of the data it is.
        entries: by name of an entry that extra forwards make, its backbone.
    """

    def __init__(self, batches: Batches, order: Sequence[int], entries: Mapping[str, int]) -> None:
        self._batches, self._order, self._entries = batches, order, entries
        self._zeros: dict[Any, torch.Tensor] = {}
        self._zeros_of: dict[tuple[str, int], torch.Tensor] = {}

    def inputs(self, microbatch: int, backbone: int) -> Any:
        return self._batches.inputs(self._order[microbatch], backbone)

    def entry(self, name: str, microbatch: int) -> Any:
        if name in self._entries:
            place = name, microbatch
            if place not in self._zeros_of:  # inputs go to the device for it
                self._zeros_of[place] = self._zeros_like(self.inputs(microbatch, self._entries[name]))
            return self._zeros_of[place]
        return self._batches.entry(name, self._order[microbatch])

    def _zeros_like(self, inputs: Any) -> torch.Tensor:
        """One for all microbatches: data of a batch is not for layers to change."""
        key = (getattr(inputs, "shape", None), getattr(inputs, "dtype", None))
        if key not in self._zeros:
            self._zeros[key] = zeros_like(inputs)
        return self._zeros[key]

    def has_entry(self, name: str) -> bool:
        return name in self._entries or self._batches.has_entry(name)

    def release(self, microbatch: int) -> None:
        for name in self._entries:
            self._zeros_of.pop((name, microbatch), None)
        self._batches.release(self._order[microbatch])


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Casts of weights that autocast would keep from here have no gradient, and the forward that trains read them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class ExtraForwards:
    """Runs the extra forwards of one rank's stages in one step, and keeps estimates until they have been read."""

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        usage: Usage,
        batches: Batches,
        estimate: Estimate | None,
        number: Callable[[int], int],
    ) -> None:
        self._plan, self._stages, self._usage, self._batches = plan, stages, usage, batches
        self._estimate, self._number = estimate, number
        self._entries = {plan.placement.backbone_of(plan.stage_of(c.layers[0])): c.entry for c in plan.conditioning}
        """By backbone."""
        self._hidden: dict[tuple[int, int], Payload] = {}
        self._values = ValueBuffer()
        self._estimates: dict[tuple[str, int], torch.Tensor] = {}
        mine = {stage for stage in stages for one in plan.conditioning if stage in map(plan.stage_of, one.layers)}
        self._last_reader = {self._entry_of(stage): stage for stage in sorted(mine)}

    def _entry_of(self, stage: int) -> str:
        return self._entries[self._plan.placement.backbone_of(stage)]

    def run(self, stage: int, m: int) -> None:
        """One stage's extra forward."""
        placement = self._plan.placement
        before, backbone = placement.before(stage), placement.backbone_of(stage)
        hidden = self._batches.inputs(m, backbone) if before is None else self._hidden.pop((stage, m))
        if INPUT in self._stages[stage].changes:
            hidden = copied(hidden)

        def lookup(name: str) -> Any:
            return self._batches.entry(name, m) if self._batches.has_entry(name) else self._values.get(name, m)

        with torch.no_grad(), _without_cached_casts():
            # numbers below zero: random numbers of their own, where layers are seeded
            output, exported = self._stages[stage].run(hidden, lookup, number=-3 - self._number(m))
            for name, value in exported.items():
                self._values.put(name, m, value)
            following = placement.after(stage)
            if following is not None:
                self._hidden[following, m] = as_payload(output, f"layer {self._stages[stage].last} returned")
            else:
                self._estimates[self._entries[backbone], m] = self._made(output, m, backbone)

    def _made(self, output: Any, m: int, backbone: int) -> torch.Tensor:
        assert self._estimate is not None
        return checked(self._estimate(output, m, backbone), self._batches.entry(self._entries[backbone], m))

    def estimate(self, name: str, microbatch: int) -> torch.Tensor | None:
        """What an entry is in a microbatch's forward; None: what the batch has."""
        return self._estimates.get((name, microbatch))

    def take(self, message: Message, content: Payload) -> None:
        """A message of an extra forward has come."""
        m = message.microbatch
        if message.name == HIDDEN:
            self._hidden[message.target_stage, m] = content
        elif message.name in self._entries.values():
            (self._estimates[message.name, m],) = tensors_of(content)
        else:
            self._values.put(message.name, m, content)

    def give(self, message: Message) -> Payload:
        """What a message of an extra forward carries."""
        m = message.microbatch
        if message.name == HIDDEN:
            return self._hidden.pop((message.target_stage, m))
        if message.name in self._entries.values():
            return self._estimates[message.name, m]
        if self._batches.has_entry(message.name):
            return without_gradient(as_payload(self._batches.entry(message.name, m), message.label))
        return self._values.get(message.name, m)  # type: ignore[no-any-return]

    def drop(self, step: Step) -> None:
        """Let go of what no later action reads."""
        action = step.action
        stage, m = action.stage, action.microbatch
        if action.op is Op.EXTRA_FORWARD:
            for name in self._usage.dropped(action, training=False):
                self._values.drop(name, m)
            if self._plan.placement.after(stage) is None and self._entry_of(stage) not in self._last_reader:
                del self._estimates[self._entry_of(stage), m]  # it was sent
        elif action.op is Op.FORWARD and self._entries.get(self._plan.placement.backbone_of(stage)) is not None:
            name = self._entry_of(stage)
            if self._last_reader.get(name) == stage:
                self._estimates.pop((name, m), None)

    @property
    def num_bytes(self) -> int:
        """Of all that is held now."""
        hidden = [t for payload in self._hidden.values() for t in tensors_in(payload)]
        values = sum(self._values.bytes_of(name, m) for name, m in self._values.live)
        return num_bytes([*hidden, *self._estimates.values()]) + values

    @property
    def live(self) -> list[Any]:
        """What is held now; empty after a step."""
        return [*self._hidden, *self._values.live, *self._estimates]


def zeros_like(inputs: Any) -> torch.Tensor:
    """What stands for an estimate where there is none.

    Raises:
        BatchError: a first layer does not read one tensor.
    """
    if not isinstance(inputs, torch.Tensor):
        found = f"a tuple of {len(inputs)}" if isinstance(inputs, (tuple, list)) else type(inputs).__name__
        raise BatchError(
            "self_conditioning: expected one tensor as the first layer's input, whose form an estimate has, found "
            f"{found}"
        )
    return torch.zeros_like(inputs)


def checked(estimate: Any, zeros: torch.Tensor) -> torch.Tensor:
    """An estimate in the form of what stands for it where there is none.

    Raises:
        BatchError: it is no tensor, or has another shape.
    """
    if not isinstance(estimate, torch.Tensor):
        raise BatchError(
            f"self_conditioning: expected a tensor from estimate(output, entries), found {type(estimate).__name__}"
        )
    if estimate.shape != zeros.shape:
        raise BatchError(
            "self_conditioning: expected estimate(output, entries) to return the shape of the first layer's input "
            f"{list(zeros.shape)}, found {list(estimate.shape)}"
        )
    return estimate.detach().to(device=zeros.device, dtype=zeros.dtype)
