"""The begin of a step, which ranks agree on, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_pulse.engine.data.agreement import check_same_step
from deepspeed_pulse.engine.data.frozen_ahead import FrozenAhead
from deepspeed_pulse.engine.data.reading import Reading
from deepspeed_pulse.engine.gradients.reduction import EarlyReduction
from deepspeed_pulse.engine.lowering import Lowering
from deepspeed_pulse.engine.observation.watchdog import Watchdog
from deepspeed_pulse.engine.orders import Orders
from deepspeed_pulse.engine.schedule import PulseSchedule
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.runtime.rank import RankRuntime


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Begins and ends the steps of an engine, of any kind and number of microbatches.

    ``host_group``: of all ranks, over the host's memory; None: the world's own. ``ahead``: frozen parts; None without.
    """

    engine: Any
    watchdog: Watchdog
    host_group: Any
    orders: Orders
    lowering: Lowering
    reading: Reading
    ahead: FrozenAhead | None
    runtime: RankRuntime
    reduction: EarlyReduction

    def begin(self, micro_batches: int, mode: str) -> PulseSchedule:
        """Get ready, together with all other ranks; what this rank is to do. ``mode``: one of ``reading.MODES``."""
        engine, training = self.engine, mode == "train"
        if self.orders.follow_program():
            self.lowering.clear()
        if training:
            engine.module.shared.watch_buffers()
        check_same_step(mode, micro_batches, engine.train_micro_batch_size_per_gpu(), self.host_group)
        self.watchdog.go_on("the start of a step")
        ahead = self.ahead.take() if self.ahead is not None and training else None
        self.reading.begin(micro_batches, mode, ahead)
        readers = self.reading.agreed_readers()
        part = self.lowering.part(micro_batches, mode, readers)
        frozen_at = self._begin_encoding(part.plan, mode)
        keys = self.reading.agreed_shapes(micro_batches)
        first_number = engine.global_steps * engine.micro_batches
        if not self.lowering.knows_effects(training=training):
            self.watchdog.enter("trying the layers before the first step")
            self.lowering.discover(part, training=training, number=first_number)
            part = self.lowering.part(micro_batches, mode, readers)
        self.runtime.begin(
            part,
            self.reading.batches,
            training=training,
            shape_keys=keys,
            first_number=first_number,
            number=engine.global_steps + 1,
        )
        return PulseSchedule(
            part.traffic.program[engine.stage_id],
            training=training,
            reduce_early=self.reduction.begin(training=training),
            micro_batches=micro_batches,
            stages=engine.num_stages,
            stage_id=engine.stage_id,
            frozen_at=frozen_at,
        )

    def _begin_encoding(self, plan: Plan, mode: str) -> frozenset[int]:
        """This step's data is encoded, the next one's begun; before which of the rank's actions there is work on it."""
        if self.ahead is None or self.reading.is_encoded:
            return frozenset()
        self.watchdog.enter("encoding before the step")
        self.ahead.encode(self.reading.batches, plan.microbatches, mode)
        if mode != "train" or plan.fill is None:
            return frozenset()
        return self.ahead.start(self.reading.batches, self.reading.following(plan.microbatches))

    def finish(self) -> None:
        """The end of a step's actions: messages have arrived, data is read to its end and was the same everywhere."""
        self.reading.batches.finish()
        stats = self.runtime.finish()
        if self.ahead is not None:
            self.ahead.finish(stats)
        self.reading.compare()
