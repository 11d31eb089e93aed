"""Weights that layers change in forward, the upstream way: the first forward shows them, as no layer is tried before.

Later forwards find such a weight as the last one left it, as under a plan (:mod:`deepspeed_pulse.runtime.settling`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.device import same_random_numbers
from deepspeed_pulse.engine.sharing.unseen import AGREED_STEPS, check_changed_weights
from deepspeed_pulse.ir.effects import Effects
from deepspeed_pulse.runtime.discovery import changed_weights
from deepspeed_pulse.runtime.settling import begin_forward, changes_while_others_wait, check_run_once, end_forward
from deepspeed_pulse.runtime.stage import module_of


class ChangedWeights:
    """What the layers of this rank change of their own weights."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._found: dict[int, Effects] = {}
        """By layer index; until a layer is tried, all that it may have changed counts as normalised."""
        self._has_looked = False
        self._checks = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward of all layers of this rank; the first one of training is looked at."""
        module = self._engine.module
        if self._has_looked or not module.training:
            yield
            return
        before = {parameter: parameter._version for parameter in module.parameters()}
        yield
        self._has_looked = True
        places: dict[torch.nn.Module, list[int]] = {}
        for index, function in module.local_layers():
            owner = module_of(function)
            if owner is not None:
                places.setdefault(owner, []).append(index)
        for owner, indices in places.items():
            named = {name: p for name, p in owner.named_parameters() if p._version != before.get(p, p._version)}
            if named:
                end_forward(list(named.values()), [before[p] for p in named.values()])
                self._watch(owner, indices, tuple(named))

    def _watch(self, owner: torch.nn.Module, indices: list[int], names: tuple[str, ...]) -> None:
        engine = self._engine
        self._found.update(dict.fromkeys(indices, Effects(weights=names)))
        layer = _Layer(
            name=engine.module.graph.layers[indices[0]].name,
            indices=tuple(indices),
            found=self._found,
            others_wait=min(engine.micro_batches, engine.num_stages - engine.stage_id) > 1,
            device=torch.device(engine.device),
        )
        owner.register_forward_pre_hook(layer.begin)
        owner.register_forward_hook(layer.end)

    def check(self) -> None:
        """Raise a GraphError for a weight that cannot change so; in the first steps collective in the world."""
        if self._checks == AGREED_STEPS:
            return
        self._checks += 1
        module = self._engine.module
        whole = {index: effect for part in told_by_all(self._found) for index, effect in part.items()}
        effects = [whole.get(index, Effects()) for index in range(len(module.graph.layers))]
        check_changed_weights(module, effects)
        again = module.job.recomputed_every(module.activation_checkpoint_interval)
        check_run_once(module.graph, effects, again)


@dataclass(kw_only=True)
class _Layer:
    """Hooks around the forward of a layer that has changed weights. They are copied with it, so they hold little.

    ``others_wait``: forwards of other microbatches run between one and its backward. ``found``: what it changes is put
    there, under its ``indices``.
    """

    name: str
    indices: tuple[int, ...]
    found: dict[int, Effects]
    others_wait: bool
    device: torch.device
    weights: tuple[torch.Tensor, ...] | None = None
    """Those that further forwards leave as they are; None until the layer was tried."""
    begun: list[int] = field(default_factory=list)

    def begin(self, owner: torch.nn.Module, arguments: Any) -> None:
        if not owner.training:
            return
        if self.weights is None:
            self._try(owner, arguments)
            assert self.weights is not None
        self.begun = begin_forward(self.weights)

    def end(self, owner: torch.nn.Module, arguments: Any, output: Any) -> None:
        if owner.training and self.weights is not None:
            end_forward(self.weights, self.begun)

    def _try(self, owner: torch.nn.Module, arguments: Any) -> None:
        self.weights = ()  # a copy has these hooks too
        with same_random_numbers(self.device):
            effects = changed_weights(owner, arguments)
        self.found.update(dict.fromkeys(self.indices, effects))
        if effects.unsettled and self.others_wait:
            raise changes_while_others_wait(self.name, effects.unsettled[0])
        self.weights = tuple(owner.get_parameter(name) for name in effects.weights)
