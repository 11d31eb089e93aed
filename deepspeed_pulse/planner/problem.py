"""What planning and simulating share: a plan's stages with times, sizes, messages and dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from deepspeed_pulse.errors import PlanError, did_you_mean
from deepspeed_pulse.ir.backbones import BackboneLayers
from deepspeed_pulse.ir.carried import carried_actions, rolling
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.communicators import communicator_bytes
from deepspeed_pulse.ir.keys import Key, key_of, local_dependents
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.ir.profile import Held, Profile, Value
from deepspeed_pulse.ir.program import HIDDEN, Lowering, Message, Program, Step
from deepspeed_pulse.ir.schedule import Action, Direction, Op, Schedule
from deepspeed_pulse.planner.buckets import Bucket, in_buckets
from deepspeed_pulse.planner.cost import StageCosts
from deepspeed_pulse.planner.links import Links, Way
from deepspeed_pulse.planner.recompute import held_in_actions, with_recompute


class Given(NamedTuple):
    """What an action hands to one that reads it.

    Attributes:
        reader: by its own key; ``reader_needs``: what it needs in all.
        rank: of the reader.
        way: of a message; None: it stays.
        completes: nothing more for this reader follows.
    """

    reader: Key
    reader_needs: int
    rank: int
    way: Way | None
    completes: bool


class Problem:
    """A plan's cuts, placement, routes and rules with the costs of a profile on a cluster; not its schedule."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster) -> None:
        _check_fit(plan, profile)
        self.plan, self.profile, self.cluster, self.rules = plan, profile, cluster, plan.rules
        if plan.carries:  # its backbones' sums wait for their own steps
            self.rules = replace(plan.rules, reduce_early=False)
        self.placement, self.num_ranks, self.num_stages = plan.placement, plan.pipeline_ranks, plan.num_stages
        self.links = Links(cluster, plan.grid)
        # DeepSpeed's optimizer for bf16 has sums of its own, and a backward makes what is added to them
        fresh = profile.dtype == "bfloat16" and not plan.rules.shards_optimizer
        self._held = {split: held_in_actions(profile, plan, split=split, fresh=fresh) for split in (False, True)}
        self._values = {value.name: value for value in profile.values}
        self._lowering = Lowering(plan, {name for name, value in self._values.items() if not value.gradient})
        self._ways: dict[tuple[str, Direction, int, int], Way] = {}
        self._steps: dict[Action, Step] = {}
        self._gives: dict[tuple[Action, bool], tuple[Given, ...]] = {}
        self._readers: dict[tuple[str, int], tuple[int, ...]] = {}
        self._reading: dict[str, list[int]] = {}
        self._passed_on: dict[tuple[str, int], bool] = {}
        self._communicator_bytes: dict[int, int] = {}
        self.bounds_ms: dict[tuple[int, bool], float] = {}
        """Lower bounds found so far, by number of microbatches and whether backward is split."""
        layers = with_recompute(profile, plan.recompute)
        overheads = [
            [self.overhead_ms(Action(stage, op, 0)) for stage in range(plan.num_stages)]
            for op in (Op.FORWARD, Op.BACKWARD)
        ]
        self.costs = StageCosts.of(layers, plan.boundaries).with_overheads(*overheads)
        """Of layers, and of their messages what these cost the rank."""
        self._durations_ms = {
            Op.FORWARD: self.costs.forward_ms,
            Op.BACKWARD: self.costs.backward_ms,
            Op.INPUT_GRAD: self.costs.input_grad_ms,
            Op.WEIGHT_GRAD: self.costs.weight_grad_ms,
            Op.EXTRA_FORWARD: self.costs.forward_ms,
        }

    def with_plan(self, plan: Plan) -> Problem:
        """Another plan with the same costs."""
        return Problem(plan, self.profile, self.cluster)

    def overhead_ms(self, action: Action) -> float:
        """What the messages of an action keep its rank from other work, both that it sends and that it takes."""
        step = self.step(action)
        return sum(self.links.between(*self._ranks(message)).overhead_ms for message in (*step.receives, *step.sends))

    def duration_ms(self, action: Action) -> float:
        """Time that an action keeps its rank."""
        return self._durations_ms[action.op][action.stage]

    def least_ms(self, action: Action) -> float:
        """Part of an action's time, so that ``I`` and ``W`` together take no longer than ``B``."""
        if action.op is not Op.INPUT_GRAD:
            return self.duration_ms(action)
        return self.costs.backward_ms[action.stage] - self.costs.weight_grad_ms[action.stage]

    def num_bytes(self, message: Message) -> int:
        """Size of a message: a gradient has the size of its value."""
        name, source, _ = message.forward_edge
        if name == HIDDEN or self.is_estimate(message):
            return self.costs.output_bytes[source]
        return self._values[name].bytes

    def is_estimate(self, message: Message) -> bool:
        """What an extra forward of a last stage sends, about as large as its output."""
        return message.direction is Direction.EXTRA and self.placement.after(message.source_stage) is None

    def reader_of(self, message: Message, op: Op) -> Action:
        """The action that reads what an action of that op sends."""
        return Action(message.target_stage, Op.FORWARD if self.is_estimate(message) else op, message.microbatch)

    def _ranks(self, message: Message) -> tuple[int, int]:
        return self.placement[message.source_stage], self.placement[message.target_stage]

    def way(self, message: Message) -> Way:
        """How a message goes; those of all microbatches go alike."""
        edge = message[:4]
        found = self._ways.get(edge)
        if found is None:
            found = self._ways[edge] = self.links.way(*self._ranks(message), self.num_bytes(message))
        return found

    def step(self, action: Action) -> Step:
        """The action with its messages; values without gradient send nothing back."""
        found = self._steps.get(action)
        if found is None:
            found = self._steps[action] = self._lowering.step(action)
        return found

    def lower(self, schedule: Schedule) -> Program:
        """Steps of every rank."""
        program = tuple(tuple(self.step(action) for action in row) for row in schedule)
        late = self.carried(schedule)
        return rolling(program, late, self.placement) if late else program

    def carried(self, schedule: Schedule) -> frozenset[Action]:
        """The actions of an order that are the previous step's, as the plan says."""
        if not self.plan.carries:
            return frozenset()
        return carried_actions(replace(self.plan, schedule=schedule))

    @cached_property
    def buckets(self) -> tuple[tuple[Bucket, ...], ...]:
        """Of each stage's gradients."""
        return in_buckets(self.costs, self.links, self.placement, self.plan.bucket_bytes)

    @cached_property
    def extra_actions(self) -> list[Action]:
        """All extra forwards, stage by stage."""
        return [Action(s, Op.EXTRA_FORWARD, m) for s in range(self.num_stages) for m in self.plan.extra_forwards(s)]

    def gives(self, action: Action, *, split: bool) -> tuple[Given, ...]:
        """What an action hands over when it ends, messages in the order in which they leave."""
        found = self._gives.get((action, split))
        if found is None:
            found = self._gives[action, split] = tuple(self._handed_over(action, split))
        return found

    def _handed_over(self, action: Action, split: bool) -> Iterator[Given]:
        step = self.step(action)
        local = dict.fromkeys([*local_dependents(action, self.placement, split=split), *step.feeds])
        readers = [*local, *(self.reader_of(message, action.op) for message in step.sends)]
        for at, (reader, message) in enumerate(zip(readers, [*(None for _ in local), *step.sends], strict=True)):
            yield Given(
                reader=key_of(reader),
                reader_needs=len(self.step(reader).needs),
                rank=self.placement[reader.stage],
                way=None if message is None else self.way(message),
                completes=reader not in readers[at + 1 :],
            )

    def held_in_actions(self, stage: int, *, split: bool = False) -> Held:
        """What a stage's actions hold while they run."""
        return self._held[split][stage]

    def communicator_bytes(self, rank: int) -> int:
        """What a rank's communicators hold; 0 where the cluster does not say."""
        if rank not in self._communicator_bytes:
            self._communicator_bytes[rank] = communicator_bytes(self.plan, rank, self.cluster)
        return self._communicator_bytes[rank]

    def encoded_bytes(self, rank: int) -> int:
        """Of the last results of frozen parts that a rank reads, of all microbatches of a step."""
        plan, parts = self.plan, () if self.plan.fill is None else self.plan.fill.parts
        return plan.microbatches * sum(part.output_bytes for part in parts if rank in plan.readers_of(part))

    def received_bytes(self, stage: int) -> int:
        """Named values of one microbatch that a route brings to this stage's rank at this stage."""
        return sum(self._values[r.name].bytes for r in self.plan.routes for _, to in r.hops if to == stage)

    def consumer_stages(self, name: str, rank: int) -> tuple[int, ...]:
        """Stages of a rank that read a named value, ascending."""
        found = self._readers.get((name, rank))
        if found is None:
            if name not in self._reading:
                self._reading[name] = sorted(set(map(self.plan.stage_of, self._values[name].targets)))
            found = tuple(stage for stage in self._reading[name] if self.placement[stage] == rank)
            self._readers[name, rank] = found
        return found

    def made_in(self, stage: int) -> list[str]:
        """Named values that a stage stashes."""
        return [value.name for value in self._values.values() if self.plan.stage_of(value.source) == stage]

    def value_bytes(self, name: str) -> int:
        return self._values[name].bytes

    def estimate_readers(self, source: int, rank: int) -> tuple[int, ...]:
        """Stages of a rank that read what a backbone's last stage gives in an extra forward."""
        found = (c.layers for c in self.plan.conditioning if self.plan.estimate_stages(c)[0] == source)
        stages = {self.plan.stage_of(layer) for layers in found for layer in layers}
        return tuple(sorted(stage for stage in stages if self.placement[stage] == rank))

    def values_with_gradient(self) -> list[Value]:
        """Named values that have one."""
        return [value for value in self._values.values() if value.gradient]

    def last_sender(self, name: str, rank: int) -> int:
        """The last stage of a rank that sends on a named value that came to it."""
        return max(source for source, _ in self._route(name).hops if self.placement[source] == rank)

    def passed_on(self, name: str, stage: int) -> bool:
        """True where a stage sends a named value on, the last time, that its rank neither makes nor reads."""
        found = self._passed_on.get((name, stage))
        if found is None:
            rank, route = self.placement[stage], self._route(name)
            used = self.placement[route.source_stage] == rank or self.consumer_stages(name, rank)
            found = self._passed_on[name, stage] = not used and self.last_sender(name, rank) == stage
        return found

    def _route(self, name: str) -> Route:
        (route,) = (route for route in self.plan.routes if route.name == name)
        return route


def other_backbones(plan: Plan, known: Sequence[BackboneLayers], whose: str) -> str | None:
    """What is wrong where a plan's backbones are not the ``known`` ones; None where they are. ``whose``: in words."""
    cut = [(part.name, tuple(plan.boundaries[stage] for stage in part.stages)) for part in plan.backbones]
    wanted = [(part.name, part.layers) for part in known]
    if cut == wanted:
        return None
    expected, found = (", ".join(f"{n} {a}..{b - 1}" for n, (a, b) in one) or "one" for one in (wanted, cut))
    return f"the plan's backbones are not those of {whose}: expected (by layers) {expected}, found {found}"


def _check_fit(plan: Plan, profile: Profile) -> None:
    if plan.num_layers != profile.num_layers:
        raise PlanError(
            f"the plan cuts {plan.num_layers} layers, the profile {profile.name!r} has {profile.num_layers}: "
            "the plan was made for another model; plan it anew from this profile"
        )
    other = other_backbones(plan, profile.backbones, f"the profile {profile.name!r}")
    if other is not None:
        raise PlanError(f"{other}; plan it anew from this profile")
    known = {value.name for value in profile.values}
    for route in plan.routes:
        if route.name not in known:
            raise PlanError(
                f"the plan routes a value {route.name!r} that the profile {profile.name!r} does not have"
                f"{did_you_mean(route.name, known)}; plan it anew from this profile"
            )
        if any(not 0 <= stage < plan.num_stages for hop in route.hops for stage in hop):
            raise PlanError(f"the route of {route.name!r} names a stage outside 0..{plan.num_stages - 1}")
    stages = [action.stage for row in plan.schedule for action in row]
    if stages and max(stages) >= plan.num_stages:
        raise PlanError(f"the schedule names stage {max(stages)}; the plan has stages 0..{plan.num_stages - 1}")
