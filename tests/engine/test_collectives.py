"""What ranks find out together by messages: on numbers of ranks that are powers of two, and on others."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch

from deepspeed_pulse.engine import collectives


class Sent:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize(("ranks", "most_messages"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_every_rank_knows_the_largest(ranks: int, most_messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and messages lie in queues: by sender, receiver and tag."""
    mine = threading.local()
    lines: dict[tuple[int, int, int], Queue[torch.Tensor]] = defaultdict(Queue)
    received: dict[int, int] = defaultdict(int)

    def isend(tensor: torch.Tensor, dst: int, *, group: Any, tag: int) -> Sent:
        lines[mine.rank, dst, tag].put(tensor.clone())
        return Sent()

    def recv(tensor: torch.Tensor, src: int, *, group: Any, tag: int) -> None:
        received[mine.rank] += 1
        tensor.copy_(lines[src, mine.rank, tag].get(timeout=20))

    def largest(rank: int) -> list[int]:
        mine.rank = rank
        return collectives.largest_of_all(torch.tensor([rank, -rank, 7])).tolist()  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.distributed, "isend", isend)
    monkeypatch.setattr(torch.distributed, "recv", recv)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: mine.rank)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: ranks)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(largest, range(ranks)))
    assert found == [[ranks - 1, 0, 7]] * ranks
    assert max(received.values(), default=0) == most_messages
