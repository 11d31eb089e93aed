"""The batches of frozen parts: this step's results at hand, the next step's under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.data.batches import StepBatches
from deepspeed_pulse.engine.device import EngineDevice
from deepspeed_pulse.engine.frozen import check_same_weights
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.carried import Part, fill_of, program_of
from deepspeed_pulse.ir.channels import known_hand_overs
from deepspeed_pulse.ir.fill import Fill, FrozenRun, FrozenWork, HandOver, up_front
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.timeline import Span
from deepspeed_pulse.runtime.frozen import FrozenRuntime, channels_of
from deepspeed_pulse.runtime.holdings import Stats
from deepspeed_pulse.runtime.payload import num_bytes, tensors_in

ANOTHER_ITERATOR = (
    "frozen parts had read this step's data from the last step's iterator when another one was given: the step trains "
    "what was read, and the new iterator's first batches come later; pass one iterator to all steps"
)


class FrozenAhead:
    """Encodes what a step reads: in the idle time of the one before, or before the step where there was none.

    Args:
        module: the ``PipelineModule``; its plan has a fill.
        communicator, device, timeout_seconds: as for the pipeline.
        count: of the rank's holdings, told of bytes that results add and of those that are there for a moment.
    """

    def __init__(
        self,
        module: Any,
        seat: Seat,
        communicator: PipelineCommunicator,
        device: EngineDevice,
        timeout_seconds: float,
        count: Callable[[int, int], None],
    ) -> None:
        self._module, self._communicator = module, communicator
        plan: Plan = module.plan
        fill = plan.fill
        assert fill is not None
        self._microbatches, self._count = plan.microbatches, count
        self._rank = seat.rank
        readers = {part.name: tuple(plan.readers_of(part)) for part in fill.parts}
        held = fill.held_on(seat.rank)
        parts = module.frozen.build(held, seat.device)
        check_same_weights(parts, held)
        functions = [function for part in parts.values() for _, function in part.layers]
        self._parameters = [p for f in functions if isinstance(f, torch.nn.Module) for p in f.parameters()]
        self._runtime = FrozenRuntime(
            rank=seat.rank,
            parts=parts,
            reads=[name for name, ranks in readers.items() if seat.rank in ranks],
            communicator=communicator,
            device=device,
            timeout_seconds=timeout_seconds,
        )
        self._up_front = cache(lambda micro_batches: up_front(fill, micro_batches, readers))
        self._in_steps = cache(lambda rows: _in_step(plan, rows, seat.rank))
        self._opened: set[int] = set()
        self._ahead: StepBatches | None = None
        self._iterator: Any = None
        """Where that is from."""
        self._told_of_another = False
        self._running = self._ran_in_step = False

    @property
    def microbatches_ahead(self) -> int:
        """Microbatches drawn for a step that has not begun."""
        return 0 if self._ahead is None else self._microbatches

    @property
    def spans(self) -> list[Span[FrozenRun]]:
        """What ran in the last step."""
        return self._runtime.stopwatch.spans if self._ran_in_step else []

    @property
    def idle_ms(self) -> float:
        """How long the device waited for results in the last step."""
        return self._runtime.stopwatch.idle_ms if self._ran_in_step else 0.0

    def data(self, iterator: Any) -> StepBatches | None:
        """What :meth:`take` would give, to a step that is given this iterator."""
        if self._ahead is not None and iterator is not self._iterator and not self._told_of_another:
            self._told_of_another = True
            if self._module.global_rank == 0:
                print(f"pulse: warning: {ANOTHER_ITERATOR}", flush=True)
        return self._ahead

    def problem(self) -> GraphError | None:
        """A part on this rank that a script lets train, which it would not."""
        try:
            if any(parameter.requires_grad for parameter in self._parameters):
                self._module.frozen.check_frozen()
        except GraphError as found:
            return found
        return None

    def take(self) -> StepBatches | None:
        """The data of this training step where it was read ahead; without it the step reads and encodes its own."""
        found, self._ahead = self._ahead, None
        return found

    def encode(self, batches: StepBatches, micro_batches: int, mode: str) -> None:
        """All frozen work for a step before it, unless it is done."""
        batches.input_parts = self._module.frozen.makes_inputs
        self._ran_in_step = False
        if batches.is_encoded:
            return
        fill = self._up_front(micro_batches)
        self._open(fill)
        self._runtime.begin(fill, batches.data_entry, microbatches=micro_batches, mode=mode)
        self._runtime.run(0)
        batches.values, batches.is_encoded = self._runtime.finish(), True

    def start(self, rows: Part, current: StepBatches, following: StepBatches, iterator: Any) -> frozenset[int]:
        """Begin encoding the next step's data while this one runs; nothing where there is not enough of it.

        ``rows``: what of the plan's rows runs; ``iterator``: where the data is from. Returns the positions among the
        rank's actions of them before which there is work on it, or something of it to drop.
        """
        current.hold_all()
        if not following.are_whole():
            return frozenset()
        self._ahead, self._iterator = following, iterator
        fill, known = self._in_steps(rows)
        self._open(fill)
        self._runtime.begin(
            fill,
            following.data_entry,
            microbatches=self._microbatches,
            mode="train",
            known=known,
            count=self._count,
        )
        self._running = True
        places = [filling.position for filling in fill.rows[self._rank]]
        return frozenset([*places, *(place for place in known if isinstance(place, int))])

    def count_read(self, batches: StepBatches, *, counted: bool) -> None:
        """A step begins that holds these results, of each microbatch until the rank has read it.

        ``counted``: they were while they were made, and the count goes on.
        """
        held: dict[int, int] = {}
        for (_, m), value in batches.values.items():
            held[m] = held.get(m, 0) + num_bytes(tensors_in(value))
        if not counted:
            self._count(sum(held.values()), 0)
        batches.on_release = lambda m: self._count(-held.pop(m, 0), 0)
        if self._running:
            self._runtime.count_posted()

    def _open(self, fill: Fill) -> None:
        if id(fill) not in self._opened:
            self._opened.add(id(fill))
            self._communicator.open(channels_of(fill))

    def run(self, position: int) -> None:
        """Frozen work that the plan puts before the action at this position."""
        self._runtime.run(position)

    def finish(self, stats: Stats) -> None:
        """The end of a step, during which the next one's data may have been encoded: ``stats`` count that too."""
        if not self._running:
            return
        assert self._ahead is not None
        self._ahead.values, self._ahead.is_encoded = self._runtime.finish(), True
        self._running, self._ran_in_step = False, True
        stats.p2p_bytes.update(self._runtime.sent_bytes)


def _in_step(plan: Plan, rows: Part, rank: int) -> tuple[Fill, dict[int | FrozenWork, tuple[HandOver, ...]]]:
    """A plan's frozen work beside a part of its rows, and which of a rank's hand-overs are over when."""
    fill = fill_of(plan, rows)
    assert fill is not None
    return fill, known_hand_overs(program_of(plan, rows), fill)[rank]
