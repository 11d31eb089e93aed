"""Plans made ready to run on this rank: with routes for the data, versions of changed values, channels and stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_pulse.engine.binding import bound_layers, bound_stages
from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.data.reading import Reading, entry_routes
from deepspeed_pulse.engine.discovery import Discovery
from deepspeed_pulse.engine.orders import Orders
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.ir.channels import make_traffic
from deepspeed_pulse.ir.effects import Effects, with_versions
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.runtime.rank import RankPart
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

    def clear(self) -> None:
        """Forget what was made: the plans have changed."""
        self._made.clear()

    def part(self, micro_batches: int, mode: str, readers: tuple[bool, ...]) -> RankPart:
        """The part of a step of a kind; collective in the world where it is made, and its order planned."""
        key = (micro_batches, mode, readers, self.reading.reads_labels)
        if key not in self._made:
            training = mode == "train"
            plan = self.orders.of(micro_batches) if training else self.orders.forwards(micro_batches)
            self._made[key] = self._lowered(plan, self._effects.get(training, ()), readers)
        return self._made[key]

    def _lowered(self, plan: Plan, effects: Sequence[Effects], readers: tuple[bool, ...]) -> RankPart:
        module = self.module
        graph = with_versions(module.graph, effects)
        entries = self.reading.entries(graph)
        same = graph is module.graph
        routes = plan.routes if same else make_routes(plan.boundaries, plan.placement, graph.values)
        plan = replace(plan, routes=(*routes, *entry_routes(plan, entries, readers)))
        traffic = make_traffic(plan)
        self.communicator.open(traffic.channels)
        usage = Usage(plan, [*graph.values, *entries], self.seat.rank)
        return RankPart(
            plan=plan,
            traffic=traffic,
            usage=usage,
            stages=bound_stages(module, usage, graph, effects),
            recomputed_bytes=planning.recomputed_bytes(module.planned, module.job.recomputing.interval),
            workspace_bytes=planning.workspace_bytes(module.planned),
        )

    def knows_effects(self, *, training: bool) -> bool:
        """True when it is known what layers change in place in such steps."""
        return training in self._effects

    def discover(self, part: RankPart, *, training: bool, number: int) -> None:
        """Try the layers on the microbatch of that number; parts made before are void. Collective in the world."""
        module = self.module
        self._effects[training] = Discovery(
            plan=part.plan,
            graph=module.graph,
            layers=bound_layers(module),
            encoded=() if module.frozen is None else module.frozen.names,
            seat=self.seat,
            number=number,
        ).run(self.reading.batches)
        self.clear()
