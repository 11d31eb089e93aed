"""Any skip graph trains exactly under any placement: nothing is lost, nothing waits, and only what must is sent."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.irregular import Kind, Reference, Sketch, data, draw_sketch, gradient, graph_of, reference, sketch_layers
from support.local_world import LocalWorld, Mailboxes
from support.random_plans import random_plan
from support.reference import Unpartitioned, error
from torch.nn.functional import mse_loss

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.program import Channel
from deepspeed_pulse.planner import Job, SearchOptions, estimate, make_plan, violations
from deepspeed_pulse.runtime.payload import METADATA_INTS

LINK = Link(bandwidth_gb_per_s=1e-3, latency_us=100.0)
CLUSTER = Cluster(name="toy", nodes=1, ranks_per_node=8, memory_bytes=10**15, intra_node=LINK, inter_node=LINK)
MOST_LAYERS = 20


def profile_of(sketch: Sketch) -> Profile:
    """Sizes as they are, and random times."""
    seen, rng = reference(sketch, 1), random.Random(sketch.num_layers)
    layers = [
        LayerCost(
            name=str(index),
            forward_ms=rng.uniform(0.5, 2.0),
            backward_ms=rng.uniform(1.0, 4.0),
            param_bytes=100,
            activation_bytes=1000,
            output_bytes=size,
        )
        for index, (size, _) in enumerate(seen.hidden)
    ]
    skips = [
        Skip(name=name, source=sketch.values[i].source, target=target, bytes=size, gradient=back > 0)
        for i, (name, (size, back)) in enumerate(sorted(seen.values.items()))
        for target in sketch.values[i].targets
    ]
    return Profile(
        name="toy", device="none", dtype="float64", microbatch_size=2, layers=tuple(layers), skips=tuple(skips)
    )


def planned_bytes(plan: Plan, seen: Reference) -> Counter[Channel]:
    """Edge by edge, as the plan says: hidden state where neighbours part, values along their routes, once each way."""
    found: Counter[Channel] = Counter()
    edges = [(s - 1, s, seen.hidden[plan.boundaries[s] - 1]) for s in range(1, plan.num_stages)]
    edges += [(*hop, seen.values[route.name]) for route in plan.routes for hop in route.hops]
    for source, target, (there, back) in edges:
        a, b = plan.placement[source], plan.placement[target]
        if a != b:
            found[Channel(a, b)] += there * plan.microbatches
            found[Channel(b, a)] += back * plan.microbatches
    return +found


class Watched(Mailboxes):
    """Counts bytes by channel, and notes sends that are waited for before the other end took the message."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[Channel] = Counter()
        self.sent: Counter[Channel] = Counter()
        self.posted: Counter[Channel] = Counter()
        self.taken: set[tuple[Channel, int]] = set()
        self.early: list[tuple[Channel, int]] = []

    def isend(self, tensor: torch.Tensor, channel: Channel) -> Any:
        handle = super().isend(tensor, channel)
        if tuple(tensor.shape) != (METADATA_INTS,):
            self.bytes[channel] += tensor.numel() * tensor.element_size()
        place = (channel, self.sent[channel])
        self.sent[channel] += 1

        def wait(timeout_seconds: float) -> None:
            if place not in self.taken:
                self.early.append(place)

        handle.wait = wait
        return handle

    def irecv(self, tensor: torch.Tensor, channel: Channel) -> Any:
        handle = super().irecv(tensor, channel)
        place, wait = (channel, self.posted[channel]), handle.wait
        self.posted[channel] += 1

        def counted(timeout_seconds: float) -> None:
            wait(timeout_seconds)
            self.taken.add(place)

        handle.wait = counted
        return handle


@dataclass(frozen=True)
class Case:
    """``planned``: by the planner; else random cuts and a random order, ``greedy``: all forwards first.

    ``halves``: share of the backwards that run in two halves.
    """

    sketch: Sketch
    placement: tuple[int, ...]
    microbatches: int
    planned: bool
    greedy: bool
    halves: float
    seed: int

    def plan(self) -> Plan:
        ranks, microbatches = max(self.placement) + 1, self.microbatches
        if not self.planned:
            options = {"greedy_forward": self.greedy, "placement": self.placement, "halves": self.halves}
            return random_plan(graph_of(self.sketch), self.seed, ranks=ranks, microbatches=microbatches, **options)
        return make_plan(
            Job(profile=profile_of(self.sketch), cluster=CLUSTER, pipeline_ranks=ranks, microbatches=microbatches),
            SearchOptions(
                placement="linear" if self.placement == Placement.linear(ranks) else "wave",
                split_backward=self.halves > 0,
                solver_seconds=0,
            ),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng, ranks = random.Random(draw(st.integers(0, 10**9))), draw(st.integers(1, 4))
    places = {
        "linear": Placement.linear(ranks),
        "wave": Placement.wave(ranks),
        "two waves": Placement.wave(ranks, 2),
        "loop": Placement.loop(ranks, 2),
        "any": tuple(rng.sample([*range(ranks), *(rng.randrange(ranks) for _ in range(ranks))], 2 * ranks)),
    }
    kind = draw(st.sampled_from(sorted(places)))
    return Case(
        sketch=draw_sketch(rng, draw(st.integers(len(places[kind]), MOST_LAYERS))),
        placement=places[kind],
        microbatches=draw(st.integers(1, 3)),
        planned=kind in ("linear", "wave") and draw(st.booleans()),
        greedy=draw(st.booleans()),
        halves=draw(st.sampled_from([0.0, 0.5, 1.0])),
        seed=rng.randrange(10**6),
    )


def trains_exactly(case: Case) -> None:
    """Gradients bit for bit with one stage; in float64 to 1e-12 where sums have another order."""
    sketch, plan = case.sketch, case.plan()
    graph = graph_of(sketch)
    assert violations(plan, num_layers=sketch.num_layers, values=graph.values) == [], "may deadlock"
    seen, batches, mail = reference(sketch, plan.microbatches), data(plan.microbatches), Watched()
    model = Unpartitioned(sketch_layers(sketch)).double()
    world = LocalWorld(plan, graph, model.functions, lambda output, m: mse_loss(output, batches[m][1]), mailboxes=mail)
    for _ in range(2):  # the second step finds every boundary agreed on
        model.zero_grad()
        mail.bytes.clear()
        stats = world.step([(inputs["hidden"], inputs) for inputs, _ in batches])
    for name, parameter in model.named_parameters():
        found, expected = gradient(parameter), seen.gradients[name]
        same = plan.num_stages == 1 and not case.halves
        assert torch.equal(found, expected) if same else error(found, expected) < 1e-12, name
    assert +mail.bytes == planned_bytes(plan, seen)
    assert sum(sum(stat.p2p_bytes.values()) for stat in stats) == mail.bytes.total()
    assert not mail.early, "a send was waited for before the other end took it"


@settings(max_examples=80, deadline=None)
@given(cases())
def test_any_skip_graph_trains_exactly(case: Case) -> None:
    trains_exactly(case)


def simulator_counts(case: Case) -> None:
    """A profile has one size for both ways, so there are no pairs and no frozen beginnings, which send less back."""
    values = [replace(v, kind=Kind.OWN if v.kind is Kind.PAIR else v.kind) for v in case.sketch.values]
    sketch = replace(case.sketch, values=tuple(values), frozen=frozenset())
    plan = replace(case, sketch=sketch).plan()
    found = planned_bytes(plan, reference(sketch, plan.microbatches)).total()
    assert estimate(plan, profile_of(sketch), CLUSTER).p2p_bytes_per_microbatch * plan.microbatches == found


@settings(max_examples=20, deadline=None)
@given(cases())
def test_the_simulator_counts_what_is_sent(case: Case) -> None:
    simulator_counts(case)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@settings(max_examples=1000, deadline=None)
@given(cases())
def test_a_thousand_skip_graphs(case: Case) -> None:
    trains_exactly(case)
    simulator_counts(case)
