"""Ranks that are threads: enough of an engine for what saves and loads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from deepspeed_pulse.errors import ConfigError, PulseError


class FakeModule:
    """The part of PipelineModule that the export uses; ranks are threads that meet at a barrier."""

    def __init__(self, layers: list[Any], owners: list[int], rank: int, shared: SimpleNamespace) -> None:
        self.layer_list, self.owners, self.stage_id, self.shared = layers, owners, rank, shared
        self.ranks = self
        self.received_bytes: list[int] = []

    def local_layers(self) -> list[tuple[int, Any]]:
        return [(i, x.layer) for i, x in enumerate(self.layer_list) if self.owners[i] == self.stage_id]

    def backbone_layers(self, name: str | None, what: str = "") -> range:
        return range(len(self.layer_list))

    def got_on(self) -> None:
        """Nobody watches."""

    def meet(self, item: Any) -> list[Any]:
        self.shared.slots[self.stage_id] = item
        self.shared.barrier.wait()
        found = list(self.shared.slots)
        self.shared.barrier.wait()
        return found

    def gather_to_first(self, item: Any) -> list[Any] | None:
        found = self.meet(item)
        return found if self.stage_id == 0 else None

    def decide_on_first(self, make: Any, what: str) -> Any:
        outcome = None
        if self.stage_id == 0:
            try:
                outcome = make()
            except PulseError as problem:
                outcome = problem
            self.received_bytes.append(0)
        outcome = self.meet(outcome)[0]
        if isinstance(outcome, PulseError):
            raise outcome
        return outcome

    def together(self, act: Any, what: str) -> Any:
        result = problem = None
        try:
            result = act()
        except PulseError as found:
            problem = found
        for found in self.meet(problem):
            if found is not None:
                raise found
        return result

    def check_alike(self, given: str, what: str) -> None:
        found = self.meet(given)
        if len(set(found)) > 1:
            raise ConfigError(f"{what}: {found}")

    def bring_to_first(self, tensor: Any, *, owner: int, shape: Any, dtype: Any) -> Any:
        found = self.meet(tensor)[owner]
        if self.stage_id != 0:
            return None
        assert (tuple(found.shape), found.dtype) == (shape, dtype)
        self.received_bytes[-1] += found.nbytes if owner else 0
        return found

    def full_precision(self, parameter: Any) -> Any:
        return parameter.detach().float()


def fake_engine(module: FakeModule, *, replica: int = 0) -> Any:
    """What saving asks an engine for."""
    grid = SimpleNamespace(data_parallel_id=replica)
    return SimpleNamespace(module=module, grid=grid, global_rank=module.stage_id, finish_backbones=lambda: None)


def on_ranks(layers: list[Any], act: Callable[[Any], Any], *, ranks: int = 1) -> list[FakeModule]:
    """Run ``act(engine)`` on ranks that each hold a wave: layer i of n and layer n - i together."""
    owners = [min(i, len(layers) - 1 - i) * 2 * ranks // (len(layers) + 1) for i in range(len(layers))]
    shared = SimpleNamespace(slots=[None] * ranks, barrier=threading.Barrier(ranks, timeout=60))
    modules = [FakeModule(layers, owners, rank, shared) for rank in range(ranks)]
    engines = [fake_engine(module) for module in modules]
    with ThreadPoolExecutor(ranks) as pool:
        done = [pool.submit(act, engine) for engine in engines]
        problems = [one.exception() for one in done]
    assert len({(type(problem), str(problem)) for problem in problems}) == 1  # every rank raises the same
    if problems[0] is not None:
        raise problems[0]
    return modules
