"""Running and cutting a module's layers the upstream way, named values in the tuple."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_pulse.engine.binding import bound_layers
from deepspeed_pulse.engine.relay.tuples import Headers, live_after, pack, unpack, unpack_batch
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.recomputing import Checkpoint
from deepspeed_pulse.runtime.stage import BoundLayer, Stage


class RelayStage:
    """A rank's layers between the tuples that upstream sends.

    Only what crosses ranks is packed: inside, a checkpoint function gets the tensors that layers read, so it may be
    reentrant, which runs forward without gradients.

    Args:
        bound: the layers, by layer index.
        asked: the function that runs layers again in backward, and how many in a row keep one input; 0: none.
        headers: of the tuples that this rank receives and sends.
    """

    def __init__(
        self, graph: Graph, bound: Mapping[int, BoundLayer], asked: tuple[Checkpoint, int], headers: Headers
    ) -> None:
        self.asked, self._headers = asked, headers
        first, last = min(bound), max(bound)
        self._before, self._after = live_after(graph, first - 1), live_after(graph, last)
        self._is_first, self._is_last = first == 0, last == len(graph.layers) - 1
        stashed = {name for layer in bound.values() for name in layer.declared.stash}
        exports = [name for name in self._after if name in stashed]
        checkpoint, interval = asked
        self._stage = Stage(tuple(bound.values()), exports, checkpoint=checkpoint, interval=max(1, interval))

    def __call__(self, state: Any, number: int) -> Any:
        """Microbatch ``number`` of this rank: what it received, to what it sends; the last rank's is the output."""
        hidden, values = self._received(state)
        output, stashed = self._stage.run(hidden, values.__getitem__, number=number)
        if self._is_last:
            return output
        values.update(stashed)
        return pack(output, {name: values[name] for name in self._after}, self._headers)

    def _received(self, state: Any) -> tuple[Any, dict[str, Any]]:
        if not self._is_first:
            return unpack(state, self._before, self._headers)
        return unpack_batch(state, self._before) if self._before else (state, {})


def relay_stage(module: Any, made: RelayStage | None) -> RelayStage:
    """A module's layers, made anew where it asks for other activation checkpointing than ``made`` was made for."""
    asked = (module.activation_checkpoint_func, module.activation_checkpoint_interval)
    if made is not None and made.asked == asked:
        return made
    chosen = module.job.recomputed_every(module.activation_checkpoint_interval)
    return RelayStage(module.graph, bound_layers(module, recompute=chosen), asked, module.headers)


def explicit_parts(graph: Graph, cuts: Sequence[int | str], num_ranks: int) -> list[int]:
    """Upstream's boundaries from inner cuts: the first layer of each rank but the first, by index or by name.

    Raises a :class:`ConfigError` for another number of cuts than ranks need, and for another order.
    """
    indices = [cut if isinstance(cut, int) else graph.index_of(cut) for cut in cuts]
    parts = [0, *indices, len(graph.layers)]
    if len(parts) != num_ranks + 1 or any(a >= b for a, b in itertools.pairwise(parts)):
        raise ConfigError(
            f"partition_method: expected {num_ranks - 1} increasing cuts inside the {len(graph.layers)} layers, found "
            f"{list(cuts)}"
        )
    return parts
