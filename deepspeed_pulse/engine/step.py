"""The steps of an engine: plans made ready to run on this rank, a step's begin, which ranks agree on, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_pulse.engine.binding import bound_layers, bound_stages
from deepspeed_pulse.engine.checkpoints.preemption import Preemption, Stopped
from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.conditioning import Estimates
from deepspeed_pulse.engine.data.agreement import agree_on_step, check_same_weights_train, check_something_trains
from deepspeed_pulse.engine.data.frozen_ahead import FrozenAhead
from deepspeed_pulse.engine.data.reading import Reading, entry_routes
from deepspeed_pulse.engine.device import runs_at_once
from deepspeed_pulse.engine.discovery import Discovery
from deepspeed_pulse.engine.gradients.placeholders import check_covers
from deepspeed_pulse.engine.gradients.reduction import EarlyReduction
from deepspeed_pulse.engine.gradients.stepped import MOVES_FROZEN, Stepped, moves_frozen, parameter_groups
from deepspeed_pulse.engine.observation.observer import Observer
from deepspeed_pulse.engine.observation.watchdog import Watchdog
from deepspeed_pulse.engine.orders import Orders
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.engine.schedule import BackboneEnds, PulseSchedule
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.engine.sharing.shared import ties_of
from deepspeed_pulse.engine.sharing.unseen import check_changed_weights
from deepspeed_pulse.errors import RunError
from deepspeed_pulse.ir.carried import Part, carried_actions, isolated, updates_at
from deepspeed_pulse.ir.channels import arrivals, make_traffic
from deepspeed_pulse.ir.communicators import communicator_bytes
from deepspeed_pulse.ir.conditioning import data_order, drawn
from deepspeed_pulse.ir.effects import Effects, with_versions
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.ir.program import Step
from deepspeed_pulse.runtime.rank import RankPart, RankRuntime
from deepspeed_pulse.runtime.settling import check_unsettled
from deepspeed_pulse.runtime.usage import Usage


@dataclass(frozen=True)
class Lowering:
    """This rank's parts of the plans that it runs, by number of microbatches, kind of step and who reads data."""

    module: Any
    seat: Seat
    orders: Orders
    reading: Reading
    communicator: PipelineCommunicator
    _effects: dict[bool, tuple[Effects, ...]] = field(default_factory=dict, init=False)
    """What layers change in place, in training and in evaluation; found before the first step of each kind."""
    _made: dict[Any, RankPart] = field(default_factory=dict, init=False)
    _updates: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict, init=False)

    def clear(self) -> None:
        """Forget what was made: the plans have changed."""
        self._made.clear()
        self._updates.clear()

    def updates(self, micro_batches: int) -> dict[int, tuple[int, ...]]:
        """Where backbones that carry actions make their own steps (:func:`~deepspeed_pulse.ir.carried.updates_at`)."""
        if micro_batches not in self._updates:
            self._updates[micro_batches] = updates_at(self.orders.of(micro_batches))
        return self._updates[micro_batches]

    def part(self, micro_batches: int, mode: str, readers: tuple[bool, ...], rows: Part = Part.WHOLE) -> RankPart:
        """The part of a step of a kind; collective in the world where it is made, and its order planned.

        ``rows``: what of them runs, where a step runs on into the next one.
        """
        key = (micro_batches, mode, readers, self.reading.reads_labels, rows)
        if key not in self._made:
            training = mode == "train"
            plan = self.orders.of(micro_batches) if training else self.orders.forwards(micro_batches)
            if training:
                check_unsettled(plan, self.module.graph, self._effects.get(training, ()))
            self._made[key] = self._lowered(plan, self._effects.get(training, ()), readers, rows)
        return self._made[key]

    def _lowered(self, plan: Plan, effects: Sequence[Effects], readers: tuple[bool, ...], rows: Part) -> RankPart:
        module = self.module
        graph = with_versions(module.graph, effects)
        entries = self.reading.entries(graph)
        same = graph is module.graph
        routes = plan.routes if same else make_routes(plan.boundaries, plan.placement, graph.values)
        carried = carried_actions(plan)
        plan = replace(plan, routes=(*routes, *entry_routes(plan, entries, readers)))
        traffic = make_traffic(plan, rows)
        plan = isolated(plan)
        self.communicator.open(traffic.channels)
        ahead = module.pulse.receive_ahead
        usage = Usage(plan, [*graph.values, *entries], self.seat.rank)
        return RankPart(
            plan=plan,
            traffic=traffic,
            usage=usage,
            stages=bound_stages(module, usage, graph, effects),
            held=planning.held(module.planned, module.job.recomputing.interval),
            due=None
            if ahead and runs_at_once(self.seat.device)
            else arrivals(traffic.program, plan.placement)[self.seat.rank],
            due_at_first=ahead,
            communicator_bytes=communicator_bytes(plan, self.seat.rank, module.planned.cluster, ties_of(module)),
            carried=carried,
            runs_on=bool(carried) and rows is not Part.LAST,
        )

    def try_anew(self) -> None:
        """Forget what layers change: it is told by gradients which of a memory's tensors a layer is to see."""
        self._effects.clear()
        self.clear()

    def knows_effects(self, *, training: bool) -> bool:
        """True when it is known what layers change in place in such steps."""
        return training in self._effects

    def discover(self, part: RankPart, *, training: bool, number: int, estimates: Estimates | None = None) -> None:
        """Try the layers on the microbatch of that number; parts made before are void. Collective in the world."""
        module = self.module
        effects = Discovery(
            plan=part.plan,
            graph=module.graph,
            layers=bound_layers(module),
            encoded=() if module.frozen is None else module.frozen.names,
            seat=self.seat,
            communicator=self.communicator,
            number=number,
            estimates=estimates,
        ).run(part.data(self.reading.batches))
        check_changed_weights(module, effects)
        self._effects[training] = effects
        self.clear()


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Begins and ends the steps of an engine, of any kind and number of microbatches.

    ``ahead``: frozen parts; None without.
    """

    engine: Any
    watchdog: Watchdog
    preemption: Preemption
    observer: Observer
    orders: Orders
    lowering: Lowering
    reading: Reading
    ahead: FrozenAhead | None
    runtime: RankRuntime
    reduction: EarlyReduction
    stepped: Stepped
    estimates: Estimates | None = None

    def meet(self, micro_batches: int, mode: str, problem: Exception | None = None) -> None:
        """All ranks begin the same step, before anything else of it. ``mode``: one of ``reading.MODES``.

        ``problem``: what this rank has met already, raised by all.

        Raises:
            BatchError: another rank begins another one, or cannot draw its first batch.
            ConfigError: the optimizer steps what is none of the module's.
            GraphError: a frozen part is to train.
            Stopped: a rank was asked to stop, before a step of training; evaluations are made.
            StopIteration: the data of any rank is over.
            RunError: ranks that hold one weight differ in whether it trains.
        """
        training = mode == "train"
        ahead = self.ahead.data(self.engine.data_iterator) if self.ahead is not None and training else None
        problem = problem or (self.stepped.problem(self.engine.optimizer) if training else None)
        if self.ahead is not None and training:
            problem = problem or self.ahead.problem()
        problem = problem or self.reading.problem_with_first(micro_batches, mode, ahead)
        self.watchdog.go_on("the start of a step: waiting for all ranks to have their first batch", meets=True)
        stops, trains_anew = agree_on_step(
            mode,
            micro_batches,
            self.engine.train_micro_batch_size_per_gpu(),
            self.preemption.group,
            asked_to_stop=self.preemption.heard,
            trains_anew=training and self.runtime.trains_anew,
            problem=problem,
        )
        if stops and training:
            raise Stopped
        self.watchdog.gave_outside()
        if trains_anew:
            self._agree_on_what_trains()
        if training:
            self.observer.begin_step()

    def _agree_on_what_trains(self) -> None:
        if self.runtime.runs_on:
            raise RunError(
                "weights were frozen, or train again, before the last step of every backbone had ended: what trains "
                "in it would be anyone's guess; call engine.finish_backbones() on every rank first"
            )
        check_same_weights_train(self.engine.module)
        check_something_trains(self.engine.module)
        if self.runtime.has_agreed and self.engine.optimizer is not None:
            check_covers(parameter_groups(self.engine.optimizer), self.engine.module)
        if any(told_by_all(moves_frozen(self.engine.optimizer))) and self.engine.global_rank == 0:
            print(f"pulse: warning: {MOVES_FROZEN}", flush=True)
        self.lowering.try_anew()
        self.runtime.agree_anew()

    def begin(self, micro_batches: int, mode: str) -> PulseSchedule:
        """Get ready, together with all other ranks, which have met; what this rank is to do."""
        engine, training = self.engine, mode == "train"
        if self.orders.follow_program():
            self.lowering.clear()
        if training:
            engine.module.shared.watch_buffers()
        self.watchdog.go_on("the start of a step")
        rows = self._rows(micro_batches, mode)
        ahead = self.ahead.take() if self.ahead is not None and training else None
        self.reading.begin(micro_batches, mode, ahead)
        readers = self.reading.agreed_readers()
        part = self.lowering.part(micro_batches, mode, readers, rows)
        if part.carried:
            self.reading.batches.hold()
        keys = self.reading.agreed_shapes(micro_batches)
        waits = part.due is not None and self.runtime.is_cold(part, training=training, keys=keys)
        frozen_at = self._begin_encoding(micro_batches, mode, rows, alone=waits)
        first_number = engine.global_steps * engine.micro_batches
        order = self._data_order(part.plan, mode)
        if not self.lowering.knows_effects(training=training):
            self.watchdog.enter("trying the layers before the first step")
            self.lowering.discover(part, training=training, number=first_number, estimates=self.estimates)
            part = self.lowering.part(micro_batches, mode, readers, rows)
        # before gradients are counted: some are there from the start
        reduces_early = not part.carried and self.reduction.begin(training=training)
        # results that the last step has made for this one
        counted = self.runtime.runs_on and ahead is not None
        self.runtime.begin(
            part,
            self.reading.batches,
            training=training,
            shape_keys=keys,
            first_number=first_number,
            number=engine.global_steps + 1,
            order=order,
        )
        if self.ahead is not None and training:
            self.ahead.count_read(self.reading.batches, counted=counted)
        return PulseSchedule(
            part.traffic.program[engine.stage_id],
            training=training,
            reduce_early=reduces_early,
            micro_batches=micro_batches,
            stages=engine.num_stages,
            stage_id=engine.stage_id,
            frozen_at=frozen_at,
            ends=self._ends(micro_batches, rows) if part.carried else None,
        )

    def _rows(self, micro_batches: int, mode: str) -> Part:
        """What of the rows runs; some of it only where a step was before."""
        if mode != "train" or self.runtime.runs_on or not carried_actions(self.orders.of(micro_batches)):
            return Part.WHOLE
        return Part.FIRST

    def _ends(self, micro_batches: int, rows: Part) -> BackboneEnds:
        plan, rank = self.orders.of(micro_batches), self.engine.stage_id
        later = self.lowering.updates(micro_batches)
        return BackboneEnds(
            within=tuple((counts[rank], index) for index, counts in later.items()) if rows is Part.WHOLE else (),
            after=tuple(index for index in range(len(plan.backbones)) if index not in later),
        )

    def begin_last(self, micro_batches: int) -> tuple[Step, ...]:
        """Get ready for what the last step has left; this rank's steps of it. Collective where they are made."""
        every = (True,) * self.engine.num_stages  # with several backbones all ranks read data
        part = self.lowering.part(micro_batches, "train", every, Part.LAST)
        self.runtime.end_last(part)
        return part.traffic.program[self.engine.stage_id]

    def _data_order(self, plan: Plan, mode: str) -> tuple[int, ...]:
        """Which of the data each microbatch of the plan is; empty for the data's own order, which evaluations keep."""
        if self.estimates is None:
            return ()
        engine, order = self.engine, tuple[int, ...]()
        if mode == "train":
            numbers = drawn(engine.module.base_seed, engine.global_steps, plan.microbatches)
            order = data_order(plan.conditioning, numbers)
        self.estimates.begin(self.reading.batches, order)
        return order

    def _begin_encoding(self, micro_batches: int, mode: str, rows: Part, *, alone: bool) -> frozenset[int]:
        """This step's data is encoded, the next one's begun; before which of the rank's actions there is work on it.

        ``alone``: nothing is begun. Layers may wait for the whole device, and so for results that come when they may.
        """
        if self.ahead is None or self.reading.is_encoded:
            return frozenset()
        self.watchdog.enter("encoding before the step")
        self.ahead.encode(self.reading.batches, micro_batches, mode)
        if mode != "train" or alone:
            return frozenset()
        iterator = self.engine.data_iterator
        return self.ahead.start(rows, self.reading.batches, self.reading.following(micro_batches), iterator)

    def finish(self) -> None:
        """The end of a step's actions: messages have arrived, data is read to its end and was the same everywhere."""
        self.reading.batches.finish()
        stats = self.runtime.finish()
        if self.ahead is not None:
            self.ahead.finish(stats)
        self.reading.compare()
