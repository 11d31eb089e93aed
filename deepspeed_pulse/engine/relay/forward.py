"""Running and cutting a module's layers the upstream way, named values in the tuple."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed_pulse.engine.relay.tuples import RelayLayer
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.graph import Graph


@contextmanager
def relaying(module: Any, layers: list[RelayLayer]) -> Iterator[None]:
    """Upstream's ``forward`` of a module runs ``layers`` meanwhile, also where a checkpoint runs them again."""
    before = module.forward_funcs, module.activation_checkpoint_func
    checkpoint = module.activation_checkpoint_func

    def relayed_checkpoint(function: Any, *args: Any) -> Any:
        def relayed(*inputs: Any) -> Any:
            with relaying(module, layers):
                return function(*inputs)

        return checkpoint(relayed, *args)

    module.forward_funcs, module.activation_checkpoint_func = layers, relayed_checkpoint
    try:
        yield
    finally:
        module.forward_funcs, module.activation_checkpoint_func = before


def explicit_parts(graph: Graph, cuts: Sequence[int | str], num_ranks: int) -> list[int]:
    """Upstream's boundaries from inner cuts: the first layer of each rank but the first, by index or by name.

    Raises:
        ConfigError: another number of cuts than ranks need, or not in order.
    """
    indices = [cut if isinstance(cut, int) else graph.index_of(cut) for cut in cuts]
    parts = [0, *indices, len(graph.layers)]
    if len(parts) != num_ranks + 1 or any(a >= b for a, b in itertools.pairwise(parts)):
        raise ConfigError(
            f"partition_method: expected {num_ranks - 1} increasing cuts inside the {len(graph.layers)} layers, found "
            f"{list(cuts)}"
        )
    return parts
