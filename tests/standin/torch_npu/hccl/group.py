"""A process group: a communicator for each pair of its ranks that talks, one for what all of them do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import counters
from torch_npu.hccl.communicator import Communicator
from torch_npu.hccl.dtypes import check_summed
from torch_npu.hccl.work import Work

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.AVG: "avg",
}


def reduction_of(options: Any) -> str:
    """Of a call's options, or of an operation."""
    wanted = getattr(options, "reduceOp", options)
    return next((name for op, name in _NAMES.items() if wanted == op), "sum") if wanted is not None else "sum"


class Options:
    """Of torch-npu's process groups; ``hccl_config`` goes before the environment."""

    def __init__(self) -> None:
        self.hccl_config: dict[str, Any] = {}
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=30)

    def buffer_mb(self) -> int:
        """Of what is no message between two ranks."""
        size = self.hccl_config.get("hccl_buffer_size", int(os.environ.get("HCCL_BUFFSIZE", "200")))
        if not isinstance(size, int):
            raise RuntimeError("Value type of hccl_buffer_size should be int.")
        return size


def message_buffer_mb() -> int:
    """Of messages between two ranks; with 0 they run in the communicator of all ranks of the group."""
    return int(os.environ.get("P2P_HCCL_BUFFSIZE", "20"))


class Group(dist.ProcessGroup):
    """What torch.distributed calls. Tensors are lists of one, as in all backends."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self.options = store, rank, size, options
        self._timeout = options._timeout
        self._pairs: dict[tuple[int, int], Communicator] = {}
        self._whole: Communicator | None = None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("npu")]

    def getBackendName(self) -> str:
        return "hccl"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def whole(self) -> Communicator:
        if self._whole is None:
            store = dist.PrefixStore("whole", self._store)
            made = counters.Made(name=f"all {self._size}", for_messages=False, buffer_mb=self.options.buffer_mb())
            self._whole = Communicator(store, self._rank, self._size, self._timeout, made)
        return self._whole

    def towards(self, peer: int) -> tuple[Communicator, int]:
        """What carries messages, and the peer's number in it."""
        if not message_buffer_mb():
            return self.whole(), peer
        return self.pair(peer), int(peer > self._rank)

    def pair(self, peer: int) -> Communicator:
        low, high = sorted((self._rank, peer))
        if (low, high) not in self._pairs:
            store = dist.PrefixStore(f"pair {low} {high}", self._store)
            name = f"ranks {low} and {high} of {self._size}"
            made = counters.Made(name=name, for_messages=True, buffer_mb=message_buffer_mb())
            self._pairs[low, high] = Communicator(store, int(self._rank == high), 2, self._timeout, made)
        return self._pairs[low, high]

    # -- between two ranks

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        communicator, number = self.towards(peer)
        return communicator.run(lambda c: c.send(tensors[0], number), tensors, "send")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        communicator, number = self.towards(peer)
        return communicator.run(lambda c: c.receive(tensors[0], number), tensors, "recv")

    def batch(self, operations: list[Any]) -> Work:
        """Messages that are started together, in the communicator of all."""
        tensors = [operation.tensor for operation in operations]
        peers = [o.group_peer if o.op is dist.irecv else -1 - o.group_peer for o in operations]
        return self.whole().run(lambda c: c.batch(tensors, peers), tensors, "batch")

    # -- of all ranks

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        reduction = reduction_of(opts)
        check_summed(tensors[0], reduction)
        return self.whole().run(lambda c: c.all_reduce(tensors[0], reduction), tensors, "all_reduce")

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """As a sum for all: what other ranks find in their tensors is not said."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        root = opts.rootRank if opts is not None else 0
        return self.whole().run(lambda c: c.broadcast(tensors[0], root), tensors, "broadcast")

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self.whole().run(lambda c: c.all_gather(outputs[0], inputs[0]), [*outputs[0], *inputs], "all_gather")

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        parts = list(output.view(self._size, -1).unbind(0))
        flat = source.view(-1)
        return self.whole().run(lambda c: c.all_gather(parts, flat), [output, source], "all_gather")

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        parts = outputs[0] if outputs else []
        root = opts.rootRank if opts is not None else 0
        return self.whole().run(lambda c: c.gather(parts, inputs[0], root), [*parts, *inputs], "gather")

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        reduction = reduction_of(opts)
        check_summed(source, reduction)
        return self.whole().run(
            lambda c: c.reduce_scatter(output, source, reduction), [output, source], "reduce_scatter"
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self._reduce_scatter_base(outputs[0], torch.cat([part.view(-1) for part in inputs[0]]), opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        root = opts.rootRank if opts is not None else 0
        nobody: list[torch.Tensor | None] = [None] * self._size
        sent = inputs[0] if self._rank == root else nobody
        found = [outputs[0] if rank == root else None for rank in range(self._size)]
        return self._exchange(sent, found, "scatter")

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._exchange(inputs, outputs, "all_to_all")

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, found: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        """``found``, ``sent``: rows from and to each rank; empty: as many for each."""
        parts, outputs = (
            list(tensor.split(rows or tensor.shape[0] // self._size))
            for tensor, rows in ((source, sent), (output, found))
        )
        return self._exchange(parts, outputs, "all_to_all")

    def _exchange(self, sent: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None], name: str) -> Work:
        """A tensor to each rank and one from each, where there is one."""
        mine, own = sent[self._rank], found[self._rank]
        if mine is not None and own is not None:
            own.copy_(mine)
        others = [rank for rank in range(self._size) if rank != self._rank]
        given = [(sent[rank], -1 - rank) for rank in others] + [(found[rank], rank) for rank in others]
        tensors, peers = [t for t, _ in given if t is not None], [peer for t, peer in given if t is not None]
        return self.whole().run(lambda c: c.batch(tensors, peers), tensors, name)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return [self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    def barrier(self, opts: Any = None) -> Work:
        """The host waits too, as those of NCCL and HCCL do."""
        work = self.whole().run(lambda c: c.barrier(), [], "barrier")
        work.end.synchronize()
        return work

    alltoall_base = all_to_all_single
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    getRank, getSize = rank, size
