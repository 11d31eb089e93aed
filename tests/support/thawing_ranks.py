"""What ranks run where a script freezes weights between steps, and thaws them: equal to the model in one process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from support.engine_ranks import as_bf16, data_of, make_engine
from support.parity import TOLERANCE, by_rank_0, mse, run_sharing
from support.reference import Unpartitioned, error, train
from support.toy import toy_batch, toy_layers

MICROBATCHES = 4
TIED = (1, 5)
FROZEN: tuple[Collection[int], ...] = ((), range(4), range(7), (), range(4, 10), (0, 2, 9), (2, 3), ())
"""Layers that do not train, step by step: stages that send gradients, receive them, do both or neither any more."""


def frozen_in(step: int) -> set[int]:
    """With a tied layer, the others of its key."""
    found = set(FROZEN[step])
    return found | set(TIED) if found & set(TIED) else found


def sgd(parameters: Any, momentum: float = 0.9) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum)


def set_trainable(modules: dict[int, torch.nn.Module], step: int) -> None:
    for index, module in modules.items():
        module.requires_grad_(index not in frozen_in(step))


def expected(replicas: int, momentum: float) -> tuple[list[float], list[dict[int, dict[str, torch.Tensor]]]]:
    """Losses, and weights by layer after each step."""
    model = Unpartitioned(toy_layers())
    optimizer, losses, weights = sgd(model.parameters(), momentum), [], []
    for step in range(len(FROZEN)):
        set_trainable(model.by_layer, step)
        data = [toy_batch(step, m, replica) for replica in range(replicas) for m in range(MICROBATCHES)]
        losses.append(train(model, optimizer, data, mse, 0.0)[0])
        weights.append({i: {n: p.detach().clone() for n, p in m.named_parameters()} for i, m in model.by_layer.items()})
    return losses, weights


def trains_what_is_not_frozen(case: dict[str, Any]) -> None:
    """After every step, losses and weights are those of the unpartitioned model."""
    momentum = case.get("momentum", 0.9)
    pulse = {"solver_seconds": 0, "placement": case["placement"], **case.get("pulse", {})}
    engine = make_engine(
        case["P"],
        MICROBATCHES,
        pulse=pulse,
        optimizer=lambda parameters: sgd(parameters, momentum),
        interval=case.get("interval", 0),
        **case.get("config", {}),
    )
    losses, weights = by_rank_0(lambda: expected(engine.grid.data_parallel_size, momentum))
    modules = {index: getattr(function, "module", function) for index, function in engine.module.local_layers()}
    modules = {index: module for index, module in modules.items() if isinstance(module, torch.nn.Module)}
    for step in range(len(FROZEN)):
        set_trainable(modules, step)
        loss = float(engine.train_batch(data_of(engine, step)))
        assert abs(loss - losses[step]) <= TOLERANCE * abs(losses[step]), (step, loss, losses[step])
        for index, module in modules.items():
            for name, parameter in module.named_parameters():
                far = error(parameter, weights[step][index][name])
                assert far <= TOLERANCE, (step, index, name, far)
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


def run(cases: list[dict[str, Any]]) -> None:
    run_sharing(cases, lambda case: (stands_still if "lr" in case else trains_what_is_not_frozen)(case))
