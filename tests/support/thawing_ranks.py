"""What ranks run where a script freezes weights between steps, and thaws them: equal to the model in one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from support.engine_ranks import as_bf16, data_of, make_engine
from support.parity import TOLERANCE, by_rank_0, models, mse, run_sharing
from support.reference import Unpartitioned, error, train

MICROBATCHES = 4
Layers = Collection[int]
FROZEN: Mapping[str, tuple[Layers, ...]] = {
    "toy": ((), range(4), range(7), (), range(4, 10), (0, 2, 9), (2, 3), ()),
    "in place seen": ((0, 2), (), (0,), range(4), (), range(6), ()),
    "in place apart": ((0,), (), (0, 2), ()),
    "in place alexnet": ((0,), (), (0, 3, 5), (0,), ()),
}
"""Layers that do not train, step by step: stages that send gradients, receive them, do both or neither any more."""
TIED = (1, 5)
"""Of the toy."""


def set_trainable(modules: Mapping[int, torch.nn.Module], model: str, step: int) -> None:
    frozen = set(FROZEN[model][step])
    if model == "toy" and frozen & set(TIED):
        frozen |= set(TIED)
    for index, module in modules.items():
        module.requires_grad_(index not in frozen)


def sgd(parameters: Any, momentum: float) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum)


def expected(name: str, replicas: int, momentum: float) -> tuple[list[float], list[dict[int, dict[str, torch.Tensor]]]]:
    """Losses, and weights by layer after each step."""
    layers, batch, first = models(name)
    model = Unpartitioned(layers())
    optimizer, losses, weights = sgd(model.parameters(), momentum), [], []
    for step in range(len(FROZEN[name])):
        set_trainable(model.by_layer, name, step)
        data = [batch(step, m, replica) for replica in range(replicas) for m in range(MICROBATCHES)]
        losses.append(train(model, optimizer, data, mse, 0.0, first)[0])
        weights.append({i: {n: p.detach().clone() for n, p in m.named_parameters()} for i, m in model.by_layer.items()})
    return losses, weights


def trains_what_is_not_frozen(case: dict[str, Any]) -> None:
    """After every step, losses and weights are those of the unpartitioned model."""
    momentum, name = case.get("momentum", 0.9), case.get("model", "toy")
    pulse = {"solver_seconds": 0, "placement": case["placement"], **case.get("pulse", {})}
    engine = make_engine(
        case["P"],
        MICROBATCHES,
        model=name,
        pulse=pulse,
        optimizer=lambda parameters: sgd(parameters, momentum),
        interval=case.get("interval", 0),
        **case.get("config", {}),
    )
    losses, weights = by_rank_0(lambda: expected(name, engine.grid.data_parallel_size, momentum))
    modules = {index: getattr(function, "module", function) for index, function in engine.module.local_layers()}
    modules = {index: module for index, module in modules.items() if isinstance(module, torch.nn.Module)}
    for step in range(len(FROZEN[name])):
        set_trainable(modules, name, step)
        loss = float(engine.train_batch(data_of(engine, step, name)))
        assert abs(loss - losses[step]) <= TOLERANCE * abs(losses[step]), (step, loss, losses[step])
        for index, module in modules.items():
            for of, parameter in module.named_parameters():
                far = error(parameter, weights[step][index][of])
                assert far <= TOLERANCE, (step, index, of, far)
    engine.destroy()


def stands_still(case: dict[str, Any]) -> None:
    """Where all weights are stepped in one piece: what a warning says keeps frozen ones where they are."""
    made = []

    def adam(parameters: list[Any]) -> Any:
        made.append(torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01))
        return made[0]

    pulse = {"solver_seconds": 0, "placement": "linear"}
    engine = make_engine(case["P"], 2, pulse=pulse, optimizer=adam, **case["config"])
    first = list(engine.module.parameters())[:2]
    for step in range(6):
        frozen = step in (2, 3)
        for parameter in first:
            parameter.requires_grad_(not frozen)
        made[0].param_groups[0]["lr"] = 0.0 if frozen else 0.01
        before = [parameter.detach().clone() for parameter in first]
        engine.train_batch(map(as_bf16, data_of(engine, step)) if engine.bfloat16_enabled() else data_of(engine, step))
        assert [torch.equal(*pair) for pair in zip(before, first, strict=True)] == [frozen] * 2, step
    engine.destroy()


def copies_stay_together(case: dict[str, Any]) -> None:
    """A module in layers of two ranks, frozen when the engine was made: its copies train as one when it is thawed."""
    torch.manual_seed(0)
    one = torch.nn.Linear(3, 3).requires_grad_(False)
    layers = [one, torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), one]
    pulse, bf16 = {"solver_seconds": 0, "placement": "linear"}, "bf16" in case.get("config", {})
    engine = make_engine(2, 2, pulse=pulse, listed=layers, optimizer=lambda p: sgd(p, 0.0), **case.get("config", {}))
    generator = torch.Generator().manual_seed(engine.grid.data_parallel_id)
    for step in range(4):
        [parameter.requires_grad_(True) for parameter in engine.module.parameters() if step]
        x = torch.randn(2, 3, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
        before = one.weight.detach().clone()
        engine.train_batch(iter([(x, x.flip(1))] * 2))
        first = one.weight.detach().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, one.weight), step
        assert torch.equal(before, one.weight) == (bf16 or not step), step
    engine.destroy()


def is_told_of_what_no_group_has(case: dict[str, Any]) -> None:
    """Weights that train again, and were frozen when the optimizer was made."""
    layers = [torch.nn.Linear(3, 3).requires_grad_(False), *(torch.nn.Linear(3, 3) for _ in range(3))]
    made: list[Any] = []

    def optimizer(parameters: list[Any]) -> Any:
        made.append(sgd([p for p in parameters if p.requires_grad], 0.9))
        return made[0]

    pulse = {"solver_seconds": 0, "placement": "linear"}
    engine = make_engine(2, 2, pulse=pulse, listed=layers, optimizer=optimizer)
    data = iter([(torch.ones(2, 3), torch.zeros(2, 3))] * 20)
    engine.train_batch(data)
    layers[0].requires_grad_(True)
    engine.train_batch(data)
    if case["adds"] and engine.is_first_stage():
        made[0].add_param_group({"params": list(layers[0].parameters())})
    before = layers[0].weight.detach().clone()
    engine.train_batch(data)
    assert torch.equal(before, layers[0].weight) != (case["adds"] and engine.is_first_stage())
    engine.destroy()


CHECKS = {"a rate of 0": stands_still, "no group": is_told_of_what_no_group_has, "copies": copies_stay_together}


def run(cases: list[dict[str, Any]]) -> None:
    run_sharing(cases, lambda case: CHECKS.get(case.get("check"), trains_what_is_not_frozen)(case))
