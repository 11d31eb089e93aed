"""Optimizers as other packages have them, whose step is about all weights of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Exchanging(torch.optim.Optimizer):
    """As Keller Jordan's Muon: each rank steps some weights, and gathers the others'."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gathered = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
                dist.all_gather(gathered, parameter - group["lr"])


class ExchangingElsewhere(Exchanging):
    """In a method that its step calls, and in one that has a collective's name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.broadcast()

    def broadcast(self) -> None:
        [dist.all_reduce(p) for group in self.param_groups for p in group["params"]]


class NamedAlike(Exchanging):
    """Its step speaks to nobody."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.broadcast()

    def broadcast(self) -> None:
        pass


class Adapting(torch.optim.Optimizer):
    """As Prodigy: the learning rate grows with what all gradients say."""

    def __init__(self, params: Any, *, fsdp_in_use: bool = False) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-3, "d0": 1e-3, "fsdp_in_use": fsdp_in_use})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = sum((p.grad.norm() for group in self.param_groups for p in group["params"]), torch.tensor(0.0))
        if self.param_groups[0]["fsdp_in_use"]:
            dist.all_reduce(found)
        for group in self.param_groups:
            group["d"] = max(group["d"], 1e-3 * float(found))
            for parameter in group["params"]:
                parameter -= group["d"] * parameter.grad
