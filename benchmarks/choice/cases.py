"""Models that sleep and networks of namespaces: where to cut, how wide and how deep is another answer in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ranks import sleepers

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks on nodes of ``ranks_per_node``; rates in Mbit/s of each directed pair of ranks,
    None for what this machine does.

    ``hidden_bytes``: of the hidden state and of each skip, per sample; ``uneven``: the later half of the layers takes
    twice as long, as a U-Net's does.
    """

    name: str
    world: int
    ranks_per_node: int
    inside_mbit: float | None
    between_mbit: float | None
    global_batch: int
    num_layers: int
    param_bytes: int
    hidden_bytes: int
    uneven: bool
    forward_ms: float

    def mbit(self, a: int, b: int) -> float | None:
        """Rate from one rank to another."""
        return self.inside_mbit if a // self.ranks_per_node == b // self.ranks_per_node else self.between_mbit

    def layers(self) -> list[Any]:
        """Nested skips between mirror layers."""
        half = self.num_layers // 2
        later = self.forward_ms * (2 if self.uneven else 1)
        return sleepers([self.forward_ms] * half + [later] * half, param_bytes=self.param_bytes)

    def batch(self, samples: int) -> Callable[[], Any]:
        """Makes a microbatch."""
        width = self.hidden_bytes // 4
        return lambda: (torch.zeros(samples, width), torch.zeros(samples, width))


FAST, MEDIUM, SLOW = None, 400.0, 100.0


def _cases() -> Iterator[Case]:
    rows: Sequence[tuple[str, int, int, float | None, float | None, int, int, int, int, bool, float]] = (
        # name, world, ranks a node, inside, between, global batch, layers, KiB of weights, of hidden, uneven, ms
        ("fast links, few samples", 4, 4, FAST, FAST, 4, 16, 16, 16, False, 6.0),
        ("fast links, many samples", 4, 4, FAST, FAST, 16, 8, 16, 16, False, 5.0),
        ("medium links", 4, 4, MEDIUM, MEDIUM, 8, 12, 512, 64, False, 6.0),
        ("slow links, large skips", 4, 4, SLOW, SLOW, 8, 12, 384, 96, False, 6.0),
        ("slow links, many weights", 4, 4, SLOW, SLOW, 8, 12, 1024, 16, True, 4.0),
        ("two nodes, slow between", 4, 2, FAST, SLOW, 8, 8, 256, 64, False, 8.0),
        ("two ranks, slow links", 2, 2, SLOW, SLOW, 8, 8, 512, 64, False, 6.0),
        # few bytes on slower links, and long layers: two cores have to carry what eight ranks send
        ("eight ranks, few bytes", 8, 8, 50.0, 50.0, 16, 16, 64, 8, False, 8.0),
    )
    for name, world, per_node, inside, between, batch, layers, weights, hidden, uneven, forward_ms in rows:
        yield Case(
            name=name,
            world=world,
            ranks_per_node=per_node,
            inside_mbit=inside,
            between_mbit=between,
            global_batch=batch,
            num_layers=layers,
            param_bytes=weights * KIB,
            hidden_bytes=hidden * KIB,
            uneven=uneven,
            forward_ms=forward_ms,
        )


CASES = tuple(_cases())
