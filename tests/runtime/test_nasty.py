"""The result never depends on the plan: nasty but legal networks train as they do in one process, or never."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint as deepspeed_reentrant
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from support.local_world import LocalWorld
from support.nasty import Network, draw_network, network_batch, network_layers
from support.random_plans import random_plan
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_pulse.errors import PulseError
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner import forward_schedule
from deepspeed_pulse.runtime.payload import tensors_in
from deepspeed_pulse.runtime.recomputing import non_reentrant

STEPS = 2


def torch_reentrant(function: Any, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=True)


WAYS = (non_reentrant, non_reentrant, torch_reentrant, deepspeed_reentrant)
REENTRANT = 2


@dataclass(frozen=True)
class Case:
    """A network, a plan for it and how it runs; ``rows``: of each microbatch."""

    network: Network
    seed: int
    placement: tuple[int, ...]
    rows: tuple[int, ...]
    recompute: tuple[int, ...]
    interval: int
    way: int
    training: bool

    @property
    def microbatches(self) -> int:
        return len(self.rows)

    def plan(self, placement: tuple[int, ...] | None = None) -> Plan:
        placement = self.placement if placement is None else placement
        plan = random_plan(
            graph_of(self.network),
            self.seed,
            ranks=max(placement) + 1,
            microbatches=self.microbatches,
            greedy_forward=self.seed % 2 == 0,
            placement=placement,
        )
        if self.training:
            return replace(plan, recompute=self.recompute)
        return replace(plan, schedule=forward_schedule(plan, self.microbatches))


def draw_case(number: int, num_layers: int) -> Case:
    rng, ranks = random.Random(number), random.Random(number + 1).randint(1, 4)
    places = [Placement.linear(ranks), Placement.wave(ranks), Placement.wave(ranks, 2), Placement.loop(ranks, 2)]
    places = [place for place in places if len(place) <= num_layers] or [(0,)]
    some = tuple(i for i in range(num_layers) if rng.random() < 0.4)
    changing = rng.random() < 0.3
    return Case(
        network=draw_network(number, num_layers),
        seed=number,
        placement=rng.choice(places),
        rows=tuple(rng.choice((2, 3, 5)) if changing else 3 for _ in range(rng.randint(1, 3))),
        recompute=rng.choice(((), some, tuple(range(num_layers)))),
        interval=rng.randint(1, 3),
        way=rng.randrange(len(WAYS)),
        training=rng.random() < 0.85,
    )


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).square().mean()


def graph_of(network: Network) -> Graph:
    return Graph(
        layers=tuple(
            Layer(name=f"{i}.{odd.body}", stash=tuple(n for n, _ in odd.stashes), pop=tuple(n for n, _ in odd.pops))
            for i, odd in enumerate(network.layers)
        )
    )


def seed_layer(layer: int, microbatch: int) -> None:
    torch.manual_seed(1000 * microbatch + layer)


@dataclass
class Outcome:
    """Losses of all steps, gradients of the last, weights and buffers after it; or what was raised."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    problem: Exception | None = None


class Whole(torch.nn.ModuleList):
    """All layers of a network, which one process runs one after another."""

    def run(self, graph: Graph, batch: dict[str, torch.Tensor], microbatch: int) -> torch.Tensor:
        """The output; to it is added nothing, in a way that backward goes through all that a layer has made.

        Torch raises for what was saved and changed since only where backward comes by. Such a network is not legal.
        """
        hidden, values, made = batch["hidden"], dict(batch), []
        for index, (declared, layer) in enumerate(zip(graph.layers, self, strict=True)):
            seed_layer(index, microbatch)
            result = layer(hidden, *(values[name] for name in declared.pop))
            hidden, *stashed = result if declared.stash else (result,)
            values.update(zip(declared.stash, stashed, strict=True))
            made += [t for value in (hidden, *stashed) for t in tensors_in(value) if t.requires_grad]
        return hidden + sum(0 * t.sum() for t in made) if hidden.requires_grad else hidden


def batches_of(case: Case, step: int) -> list[Any]:
    return [network_batch(100 * step + m, rows) for m, rows in enumerate(case.rows)]


def after(model: Whole, losses: list[torch.Tensor]) -> Outcome:
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Outcome(losses, gradients, model.state_dict())


def in_one_process(case: Case) -> Outcome:
    model = Whole(network_layers(case.network)).train(case.training)
    graph, losses = graph_of(case.network), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            for m, (inputs, labels) in enumerate(batches_of(case, step)):
                with torch.set_grad_enabled(case.training):
                    loss = loss_of(model.run(graph, inputs, m), labels)
                if case.training:
                    (loss / case.microbatches).backward()
                losses.append(loss.detach())
            if case.training and step + 1 < STEPS:
                optimizer.step()
    except RuntimeError as problem:
        return Outcome([], {}, {}, problem)
    return after(model, losses)


def by_plan(case: Case, plan: Plan) -> Outcome:
    model = Whole(network_layers(case.network)).train(case.training)
    labels: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    world = LocalWorld(
        plan,
        graph_of(case.network),
        list(model),
        lambda output, m: loss_of(output, labels[m]),
        checkpoint=WAYS[case.way],
        interval=case.interval,
        seed=seed_layer,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            batches = batches_of(case, step)
            before = [(dict(inputs), {n: t.clone() for n, t in inputs.items()}) for inputs, _ in batches]
            labels[:] = [label for _, label in batches]
            with torch.set_grad_enabled(case.training):
                world.step(
                    [(inputs["hidden"], inputs) for inputs, _ in batches],
                    training=case.training,
                    shape_keys=case.rows,
                )
            for given_data, copies in before:
                assert all(torch.equal(given_data[name], copies[name]) for name in copies), "data was changed"
            losses += [world.losses[m].detach() for m in range(case.microbatches)]
            if case.training and step + 1 < STEPS:
                optimizer.step()
    except PulseError as problem:
        return Outcome([], {}, {}, problem)
    return after(model, losses)


def assert_equal(found: Outcome, expected: Outcome) -> None:
    for name in ("losses", "gradients", "state"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        items = zip(ours, theirs, strict=True) if name == "losses" else ((ours[n], theirs[n]) for n in theirs)
        for a, b in items:
            a, b = a.double(), b.double()
            assert float((a - b).norm()) <= 1e-10 * float(b.norm()) + 1e-13, name


def check(case: Case) -> str:
    """One case; says whether its network was illegal, refused or trained."""
    expected = in_one_process(case)
    if expected.problem is not None:
        return "illegal"
    try:
        found = by_plan(case, case.plan())
    except RuntimeError as problem:
        # its outputs all want a gradient, so backward comes by where it does not in the model as it is
        if case.way >= REENTRANT and "modified by an inplace operation" in str(problem):
            return "refused by autograd"
        raise
    if found.problem is not None:
        alone = by_plan(case, case.plan((0,))).problem
        assert str(alone) == str(found.problem), f"refused by the cut: {found.problem} (in one stage: {alone})"
        return "refused"
    assert_equal(found, expected)
    return "trained"


# torch's reentrant checkpoint says so where no input wants a gradient
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 14))
@example(6130128, 7)  # dropout on a transposed tensor: random numbers come in the order of memory
@example(187508601, 14)  # a value without gradient gets one by being changed
@example(410522800, 10)  # the output of a reentrant checkpoint is changed in place
@example(454104366, 12)  # a path without gradient through a reentrant checkpoint
@example(351908900, 13)  # an input that is popped, changed and stashed again
def test_any_legal_network_trains_as_in_one_process(number: int, num_layers: int) -> None:
    assume(check(draw_case(number, num_layers)) != "illegal")  # so many legal ones


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_five_thousand_networks() -> None:
    rng, found = random.Random(0), Counter[str]()
    while found["trained"] < 5000:
        number, num_layers = rng.randrange(10**9), rng.randint(1, 16)
        try:
            found[check(draw_case(number, num_layers))] += 1
        except Exception as problem:
            raise AssertionError(f"draw_case({number}, {num_layers})") from problem
    print(dict(found))
    assert found["refused"] < 0.1 * found["trained"]
