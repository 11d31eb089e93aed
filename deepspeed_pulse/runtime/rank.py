"""Everything one pipeline rank does in a step: its stages, its values, its messages.

A step is driven from outside, action by action (:meth:`RankRuntime.run`). The engine does it through DeepSpeed's
instructions, tests for all ranks in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from deepspeed_pulse.errors import PulseError, add_note
from deepspeed_pulse.ir.channels import Traffic
from deepspeed_pulse.ir.effects import INPUT
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Held
from deepspeed_pulse.ir.program import HIDDEN, Message, Step
from deepspeed_pulse.ir.schedule import FORWARDS, Action, Direction, Op
from deepspeed_pulse.runtime.extra import Estimate, ExtraForwards, OrderedBatches
from deepspeed_pulse.runtime.holdings import Holdings, Stats
from deepspeed_pulse.runtime.owning import copied, cut_off, released, without_gradient
from deepspeed_pulse.runtime.payload import Payload, as_payload, num_bytes, tensors_in, tensors_of
from deepspeed_pulse.runtime.protocols import Batches, Communicator, Device, Timers
from deepspeed_pulse.runtime.roots import Root, roots_of
from deepspeed_pulse.runtime.shapes import ShapeBook, Shapes
from deepspeed_pulse.runtime.stage import SavedBytes, Stage
from deepspeed_pulse.runtime.stopwatch import Stopwatch
from deepspeed_pulse.runtime.tape import Tape
from deepspeed_pulse.runtime.transport import Transport
from deepspeed_pulse.runtime.usage import Usage
from deepspeed_pulse.runtime.values import ValueBuffer, gradient_of

Finish = Callable[[Any, int, int], Any]
"""``finish(output of a backbone's last layer, microbatch, backbone)`` returns the loss to run backward from."""


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """A plan as one rank runs it.

    Attributes:
        traffic: the plan's messages.
        usage: named values on this rank.
        stages: of this rank, by index.
        held: per stage of the plan, what it holds while it runs, by whether its backward is in halves, and whether
            that makes gradients of weights where none are; empty: not known.
        due: per step of this rank, the receives to post (:func:`~deepspeed_pulse.ir.channels.arrivals`); None: as early
            as can be.
        due_at_first: ``due`` counts where the device may meet a kernel for the first time, and only there.
        communicator_bytes: what the rank's communicators hold.
        carried: actions of any rank that are the previous step's (:mod:`deepspeed_pulse.ir.carried`). ``plan`` is then
            that of one step by itself, and ``traffic`` that of the part of the rows that runs.
        runs_on: the next step runs what this one leaves.
    """

    plan: Plan
    traffic: Traffic
    usage: Usage
    stages: Mapping[int, Stage]
    held: Mapping[tuple[bool, bool], Sequence[Held]] = field(default_factory=dict)
    due: Sequence[Sequence[Message]] | None = None
    due_at_first: bool = False
    communicator_bytes: int = 0
    carried: frozenset[Action] = frozenset()
    runs_on: bool = False

    @property
    def cold_steps(self) -> int:
        """Steps with batches of one shape in which kernels may run for the first time; what is carried runs later.

        Loading a kernel may wait until the device stands still, which a receive that is posted keeps it from.
        """
        return 2 if self.carried else 1

    @cached_property
    def earlier(self) -> frozenset[Message]:
        """Messages of the previous step's data, apart from those that have landed."""
        steps = (step for row in self.traffic.program for step in row if step.action in self.carried)
        return frozenset(message for step in steps for message in step.sends)

    def data(self, batches: Batches, order: Sequence[int] = ()) -> Batches:
        """The data as the plan's microbatches find it; see :meth:`RankRuntime.begin`."""
        plan = self.plan
        if not plan.conditioning:
            return batches
        owners = {c.entry: plan.placement.backbone_of(plan.stage_of(c.layers[0])) for c in plan.conditioning}
        return OrderedBatches(batches, order or range(plan.microbatches), owners)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The data of a step; ``order``: for each microbatch of the plan, which of the data it is."""

    batches: Batches
    shapes: Sequence[Shapes]
    order: Sequence[int]
    first_number: int
    number: int
    extra: ExtraForwards | None


@dataclass
class _Forward:
    """One stage's forward of one microbatch, kept until its backward."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[Root | None, ...]
    exported: dict[str, tuple[Root | None, ...]]
    loss: torch.Tensor | None
    tape: Tape | None
    """Where backward runs in halves."""


class RankRuntime:
    """Runs one rank's part of a plan.

    Args:
        rank: pipeline rank.
        communicator, device: see :mod:`deepspeed_pulse.runtime.protocols`.
        finish: turns a last layer's output into the loss.
        estimates: gives for a step that begins what turns what a last layer gave in an extra forward into what the
            microbatch's forward reads.
        parameters, state_bytes, fresh_gradients, bucket_bytes: of what :class:`Holdings` counts.
        timeout_seconds: silence of a peer after which a wait raises.
    """

    def __init__(
        self,
        *,
        rank: int,
        communicator: Communicator,
        device: Device,
        finish: Finish,
        estimates: Callable[[], Estimate] | None = None,
        parameters: tuple[torch.Tensor, ...] = (),
        state_bytes: int = 0,
        fresh_gradients: bool = False,
        bucket_bytes: int = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.rank = rank
        self._device = device
        self._finish, self._estimates = finish, estimates
        self._parameters = parameters
        self._transport = Transport(rank, communicator, device, timeout_seconds)
        self.holdings = Holdings(
            parameters,
            state_bytes=state_bytes,
            fresh_gradients=fresh_gradients,
            bucket_bytes=bucket_bytes,
            transport=self._transport,
        )
        self._values = ValueBuffer()
        self._hidden: dict[tuple[int, int], Payload] = {}
        self._hidden_grads: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._book = ShapeBook()
        self._begun: Counter[tuple[bool, int]] = Counter()
        """Steps, by whether they train and what stands for their shapes."""
        self._is_cold = True
        self._trains: list[bool] | None = None
        """Of each parameter, whether it did when boundaries agreed on which gradients they want."""
        self._kept: dict[tuple[int, int], int] = {}
        """Bytes of activations, by stage and microbatch."""
        self._waiting: dict[tuple[int, int], int] = {}
        """Bytes of hidden states that nothing else keeps, by the stage that reads them here and microbatch."""
        self._runs = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_GRAD: self._input_half,
            Op.WEIGHT_GRAD: self._weight_half,
            Op.EXTRA_FORWARD: self._extra_forward,
        }
        self._late: dict[tuple[int, int], Tape] = {}
        self.runs_on = False
        """The last step has left something, which the next one runs or :meth:`end_last` begins."""
        self._data: _Data
        self._earlier: _Data | None = None
        """Of the step before, where that has left something."""
        self._now: _Data
        """Of the action that runs."""
        self.stopwatch: Stopwatch[Action] = Stopwatch(rank, device)
        """Of the last step's actions."""
        self.stats = Stats()

    # -- one step ----------------------------------------------------------------------------

    def begin(
        self,
        part: RankPart,
        batches: Batches,
        *,
        training: bool,
        shape_keys: Sequence[int] | None = None,
        first_number: int = 0,
        number: int = 1,
        order: Sequence[int] = (),
    ) -> None:
        """Get ready for one step.

        Args:
            shape_keys: per microbatch, what stands for its batch's shapes on every rank of the pipeline; None when
                shapes never change.
            first_number: by which layers that are seeded know the first microbatch.
            number: of the step, for errors.
            order: for each microbatch of the plan, which of the data it is; empty: the data's own.
        """
        plan = part.plan
        order = order or range(plan.microbatches)
        batches = part.data(batches, order)
        keys = [0] * plan.microbatches if shape_keys is None else [shape_keys[data] for data in order]
        shapes = self._book.of("train" if training else "eval", keys)
        self._is_cold = self.is_cold(part, training=training, keys=keys)
        self._begun.update((training, key) for key in set(keys))
        self._earlier = self._data if self.runs_on else None
        extra = None
        if plan.conditioning:
            estimate = None if self._estimates is None else self._estimates()
            extra = ExtraForwards(plan, part.stages, part.usage, batches, estimate, self._layer_number)
        self._data = self._now = _Data(
            batches=batches, shapes=shapes, order=order, first_number=first_number, number=number, extra=extra
        )
        self._training = training
        self._set_out(part)

    def is_cold(self, part: RankPart, *, training: bool, keys: Iterable[int]) -> bool:
        """True where a step may meet kernels for the first time; ``keys``: what stands for its batches' shapes."""
        return any(self._begun[training, key] < part.cold_steps for key in keys)

    @property
    def trains_anew(self) -> bool:
        """True before the first step, and where weights have been frozen or train again since :meth:`agree_anew`."""
        return self._trains != _which_train(self._parameters)

    @property
    def has_agreed(self) -> bool:
        """Some step was before."""
        return self._trains is not None

    def agree_anew(self) -> None:
        """Between steps, on all ranks of a pipeline: boundaries agree anew on which gradients they want."""
        self._book, self._trains = ShapeBook(), _which_train(self._parameters)
        self._begun.clear()

    def end_last(self, part: RankPart) -> None:
        """Get ready for what the last step has left, where no step follows."""
        self._earlier = self._now = self._data
        self._set_out(part)

    def _set_out(self, part: RankPart) -> None:
        """Be at the beginning of a part; what the step before has left stays."""
        plan, traffic = part.plan, part.traffic
        self._plan, self._usage, self._stages, self._carried = plan, part.usage, part.stages, part.carried
        self._held = part.held
        self._releases = traffic.releases[self.rank]
        self._in_halves = {(a.stage, a.microbatch) for a in plan.schedule[self.rank] if a.op is Op.INPUT_GRAD}
        self._last_forwards = set({a.microbatch: a for a in plan.schedule[self.rank] if a.op in FORWARDS}.values())
        self._position = 0
        self.stats = Stats()
        self.stopwatch.begin()
        self.holdings.begin(
            self.stats, training=self._training, communicators=part.communicator_bytes, goes_on=self.runs_on
        )
        mine = {c: m for c, m in traffic.channels.items() if self.rank in (c.source_rank, c.target_rank)}
        self.runs_on = part.runs_on
        earlier = self._earlier.shapes if self._earlier is not None else ()
        due = part.due if self._is_cold or not part.due_at_first else None
        self._transport.begin(mine, traffic.slots, self._data.shapes, due, (part.earlier, earlier))

    @property
    def number(self) -> int:
        """Of the step whose data the action works on that runs, or ran last."""
        return self._now.number

    def run(self, step: Step, timers: Timers | None = None) -> None:
        """Wait for the messages that a step needs, run its action, and start the messages that leave then."""
        if step.action in self._carried:
            assert self._earlier is not None
            self._now = self._earlier
        else:
            self._now = self._data
        try:
            if step.action.op is Op.LANDING:
                self._receive(step)
                self._position += 1
            elif timers is None:
                self._receive(step)
                self._compute(step)
                self._send(step)
            else:
                with timers.receiving(step):
                    self._receive(step)
                with timers.computing(step):
                    self._compute(step)
                with timers.sending(step):
                    self._send(step)
        except PulseError as problem:
            raise type(problem)(f"{self._where(step)}: {problem}") from problem.__cause__
        except Exception as problem:
            add_note(problem, self._where(step))
            raise

    def _where(self, step: Step) -> str:
        action = step.action
        place = f"pipeline rank {self.rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}"
        return f"step {self._now.number}, {place}" if self._training else f"evaluation, {place}"

    def _receive(self, step: Step) -> None:
        self._transport.reach(self._position)
        if step.receives:
            with self.stopwatch.waiting():
                for message in step.receives:
                    self._take(message)
        self._transport.release(self._releases[self._position])

    def _compute(self, step: Step) -> None:
        with self.stopwatch.running(step.action):
            self._runs[step.action.op](step.action.stage, step.action.microbatch)

    def _send(self, step: Step) -> None:
        """Start messages, and drop what is needed no more."""
        for message in step.sends:
            self._give(message)
        self._drop_values(step)
        if self._training:
            self._count_gradients(step.action.microbatch)
            self._count_waiting(step.action)
        if step.action in self._last_forwards:
            self._now.batches.release(step.action.microbatch)
        self._position += 1

    def finish(self) -> Stats:
        """End the step: all sends are over and every buffer is empty."""
        self._transport.drain()
        live = [] if self._data.extra is None else self._data.extra.live
        assert self.runs_on or not live, live
        assert self.runs_on or not (
            self._forwards or self._late or self._hidden or self._hidden_grads or self._values.live
        ), (
            self._forwards.keys(),
            self._late.keys(),
            self._hidden.keys(),
            self._hidden_grads.keys(),
            self._values.live,
        )
        self.stats.p2p_bytes = dict(self._transport.sent_bytes)
        self.stats.metadata_bytes = self._transport.metadata_bytes
        return self.stats

    def named(self, name: str, microbatch: int) -> Any:
        """A named value or batch entry that this rank reads."""
        estimate = None if self._extra is None else self._extra.estimate(name, microbatch)
        if estimate is not None:
            return estimate
        if self._now.batches.has_entry(name):
            return self._now.batches.entry(name, microbatch)
        return self._values.get(name, microbatch)

    # -- forward -----------------------------------------------------------------------------

    @property
    def _extra(self) -> ExtraForwards | None:
        """Of the step whose data the action works on."""
        return self._now.extra

    def _layer_number(self, m: int) -> int:
        """By which layers that are seeded know a microbatch: its place in the data, not in the plan."""
        return self._now.first_number + self._now.order[m]

    def _extra_forward(self, stage: int, m: int) -> None:
        assert self._extra is not None
        self._extra.run(stage, m)
        self.holdings.count_extra_forward(self._held_extra(), self._held_in(stage).forward)

    def _forward(self, stage: int, m: int) -> None:
        placement = self._plan.placement
        if placement.before(stage) is None:
            hidden = self._now.batches.inputs(m, placement.backbone_of(stage))
        else:
            hidden = self._hidden.pop((stage, m))
            self.holdings.drop("received", self._waiting.pop((stage, m), 0))
        leaves = self._leaves(hidden)
        entry = leaves if isinstance(hidden, tuple) else leaves[0] if leaves else hidden
        if INPUT in self._stages[stage].changes:
            entry = released(entry) if self._arrived(stage) else copied(entry)

        def lookup(name: str) -> Any:
            return self.named(name, m)

        tape = Tape(leaves) if self._training and (stage, m) in self._in_halves else None
        run = partial(self._stages[stage].run, entry, lookup, number=self._layer_number(m), tape=tape)
        shapes = self._now.shapes[m]
        if self._training and (stage, tape is not None) not in shapes.activation_bytes:
            with SavedBytes((*self._parameters, *self._values.tensors(m))) as saved:
                output, exported = run(saved=saved)
            saved.add(t for value in exported.values() for t in tensors_in(value))
            saved.add(() if tape is None else tape.leaves())
            shapes.activation_bytes[stage, tape is not None] = kept = saved.bytes
            saved.add(tensors_in(output))
            shapes.unkept_bytes[stage] = saved.bytes - kept
        else:
            output, exported = run()
        self._keep(stage, m, leaves, output, exported, tape)

    def _arrived(self, stage: int) -> bool:
        """True where a stage's input comes in a message, so that nobody else reads that memory."""
        before = self._plan.placement.before(stage)
        return before is not None and self._plan.placement[before] != self.rank

    def _leaves(self, hidden: Any) -> tuple[torch.Tensor, ...]:
        """The input cut off from the graph that made it; backward leaves its gradient here."""
        tensors = tensors_of(hidden) if isinstance(hidden, (torch.Tensor, tuple)) else ()
        if not self._training:
            return tensors
        return tuple(map(cut_off, tensors))

    def _keep(
        self,
        stage: int,
        m: int,
        leaves: tuple[torch.Tensor, ...],
        output: Any,
        exported: dict[str, Any],
        tape: Tape | None,
    ) -> None:
        following = self._plan.placement.after(stage)
        for name, value in exported.items():
            self._values.put(name, m, value)
            if self._usage.stays(name):
                self.stats.local_value_bytes += self._values.bytes_of(name, m)
        loss: torch.Tensor | None = None
        outputs: tuple[torch.Tensor, ...] = ()
        if following is None:
            loss = self._finish(output, m, self._plan.placement.backbone_of(stage))
        else:
            payload = as_payload(output, f"layer {self._stages[stage].last} returned")
            self._hidden[following, m] = payload
            outputs = tensors_of(payload)
        if self._training:
            self._forwards[stage, m] = _Forward(
                inputs=leaves,
                outputs=roots_of(outputs),
                exported={name: roots_of(tensors_of(value)) for name, value in exported.items()},
                loss=loss,
                tape=tape,
            )
            self._kept[stage, m] = self._now.shapes[m].activation_bytes[stage, tape is not None]
            self.holdings.count("activations", self._kept[stage, m], self._held_in(stage).forward)

    # -- backward ----------------------------------------------------------------------------

    def _backward(self, stage: int, m: int) -> None:
        forward = self._forwards.pop((stage, m))
        roots, gradients = self._given_back(forward, stage, m)
        for name, exported in forward.exported.items():
            _pair(exported, self._values.gradients(name, m), roots, gradients)
        held = self._held_in(stage)
        self.holdings.count_bucket()
        self.holdings.count("recomputed", held.recomputed, held.workspace)
        if roots:
            with self._device.accumulating():
                torch.autograd.backward(roots, gradients)
        self.holdings.count("recomputed", -held.recomputed)
        self._hand_back(forward, stage, m)
        self._end_backward(stage, m)

    def _input_half(self, stage: int, m: int) -> None:
        forward = self._forwards.pop((stage, m))
        assert forward.tape is not None
        roots, gradients = self._given_back(forward, stage, m)
        for name in forward.exported:
            forward.tape.add_gradients(name, self._values.gradients(name, m))
        forward.tape.input_half(roots, gradients, self._device.accumulating)
        held, late = self._held_in(stage, split=True), self._now.shapes[m].late_bytes
        if stage not in late:
            late[stage] = forward.tape.late_bytes()
        self.holdings.count("recomputed", held.recomputed)
        self.holdings.count("gradients", late[stage], held.workspace)
        self._hand_back(forward, stage, m)
        self._count_gradients(m)
        self._late[stage, m] = forward.tape

    def _weight_half(self, stage: int, m: int) -> None:
        held = self._held_in(stage, split=True)
        self.holdings.count_bucket()
        self.holdings.count("recomputed", 0, held.weights)
        self._late.pop((stage, m)).weight_half(self._device.accumulating)
        self.holdings.count("recomputed", -held.recomputed)
        self.holdings.count("gradients", -self._now.shapes[m].late_bytes[stage])
        self._end_backward(stage, m)

    def _held_in(self, stage: int, *, split: bool = False) -> Held:
        fresh = self.holdings.lacks_gradients(self._stages[stage].parameters)
        return self._held[split, fresh][stage] if self._held else Held()

    def _given_back(self, forward: _Forward, stage: int, m: int) -> tuple[list[Root], list[torch.Tensor | None]]:
        """Where backward begins of what the stage handed on, and with which gradients."""
        roots: list[Root] = []
        gradients: list[torch.Tensor | None] = []
        if forward.loss is not None:
            scaled = self._device.scale_loss(forward.loss)
            _pair(roots_of([scaled]), [torch.ones_like(scaled)], roots, gradients)
        else:
            received = self._hidden_grads.pop((stage + 1, m), None) or [None] * len(forward.outputs)
            _pair(forward.outputs, received, roots, gradients)
        return roots, gradients

    def _hand_back(self, forward: _Forward, stage: int, m: int) -> None:
        if self._plan.placement.before(stage) is not None:
            self._hidden_grads[stage, m] = [gradient_of(leaf) for leaf in forward.inputs]
            for leaf in forward.inputs:
                leaf.grad = None  # the leaf stays in a graph that waits for the weights' half

    def _end_backward(self, stage: int, m: int) -> None:
        self.holdings.count("activations", -self._kept.pop((stage, m)))
        self.holdings.count_fresh(self._stages[stage].parameters)
        self._count_gradients(m)

    # -- messages ----------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        content = self._transport.receive(message)
        stage, m = message.target_stage, message.microbatch
        if message.direction is Direction.EXTRA:
            assert self._extra is not None
            self._extra.take(message, content)  # type: ignore[arg-type]
        elif message.direction is Direction.FORWARD:
            if message.name == HIDDEN:
                self._hidden[stage, m] = content  # type: ignore[assignment]
            else:
                self._values.put(message.name, m, content)  # type: ignore[arg-type]
                self.holdings.count("received", self._values.bytes_of(message.name, m))
        elif content is not None and message.name == HIDDEN:
            self._hidden_grads[message.source_stage, m] = content  # type: ignore[assignment]
        elif content is not None:
            self._values.add_gradients(message.name, m, content)  # type: ignore[arg-type]

    def _give(self, message: Message) -> None:
        m = message.microbatch
        if message.direction is Direction.EXTRA:
            assert self._extra is not None
            payload = self._extra.give(message)
            self._transport.send(message, payload, num_bytes(tensors_of(payload)))
        elif message.direction is Direction.FORWARD:
            if message.name == HIDDEN:
                unkept = self._now.shapes[m].unkept_bytes.get(message.source_stage, 0)
                self._transport.send(message, self._hidden.pop((message.target_stage, m)), unkept)
            elif self._now.batches.has_entry(message.name):
                entry = as_payload(self._now.batches.entry(message.name, m), message.label)
                self._transport.send(message, without_gradient(entry))  # nothing on this rank would take one
            else:
                passed_on = self._usage.passed_on(message.name, message.source_stage)
                unkept = self._values.bytes_of(message.name, m) if passed_on else 0
                self._transport.send(message, self._values.get(message.name, m), unkept)
        elif message.name == HIDDEN:
            self._transport.send_gradient(message, self._hidden_grads.pop((message.source_stage, m)))
        else:
            self._transport.send_gradient(message, self._values.whole_gradients(message.name, m))

    def _drop_values(self, step: Step) -> None:
        m = step.action.microbatch
        if self._extra is not None:
            self._extra.drop(step)
            self.holdings.count_extra(self._held_extra())
        if step.action.op is Op.EXTRA_FORWARD:
            return
        for name in self._usage.sent_away(step.action) if self._training else ():
            released = self._values.release_data(name, m)
            if self._usage.arrived(name):
                self.holdings.drop("received", released)
        for name in self._usage.dropped(step.action, training=self._training):
            if self._usage.arrived(name) and self._values.has_data(name, m):
                self.holdings.drop("received", self._values.bytes_of(name, m))
            self._values.drop(name, m)

    # -- bookkeeping -------------------------------------------------------------------------

    def _count_gradients(self, m: int) -> None:
        """Of a microbatch: those of named values, and of hidden states that were made on this rank."""
        hidden = [g for (_, own), gradients in self._hidden_grads.items() if own == m for g in gradients]
        waiting = self._values.gradient_bytes(m) + num_bytes([g for g in hidden if g is not None])
        self.holdings.count_waiting(m, waiting)

    def _count_waiting(self, action: Action) -> None:
        """What a forward gave to the next stage of this rank, where its activations do not keep it."""
        after, m = self._plan.placement.after(action.stage), action.microbatch
        if action.op is Op.FORWARD and after is not None and (after, m) in self._hidden:
            self._waiting[after, m] = self._now.shapes[m].unkept_bytes.get(action.stage, 0)
            self.holdings.hold("received", self._waiting[after, m])

    def _held_extra(self) -> int:
        steps = (self._data,) if self._earlier is None or self._earlier is self._data else (self._data, self._earlier)
        return sum(step.extra.num_bytes for step in steps if step.extra is not None)


def _which_train(parameters: Sequence[torch.Tensor]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _pair(
    made: tuple[Root | None, ...],
    found: list[torch.Tensor | None],
    roots: list[Root],
    gradients: list[torch.Tensor | None],
) -> None:
    for root, gradient in zip(made, found, strict=True):
        if root is not None and gradient is not None:
            roots.append(root)
            gradients.append(gradient)
