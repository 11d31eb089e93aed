"""What the stand-in device promises, each promise tried in a process of its own (two, where ranks talk).

    python -m support.standin_proofs NAME ...

prints a line "NAME STATUS" each: 0 where it is kept, minus the signal that ended it, else what went wrong before.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

PROOFS: dict[str, tuple[Callable[..., None], int]] = {}
"""By name: a function, and how many ranks run it."""


def proof(ranks: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(function: Callable[..., None]) -> Callable[..., None]:
        PROOFS[function.__name__] = function, ranks
        return function

    return keep


def on_side_stream() -> Any:
    return torch.npu.stream(torch.npu.Stream())


# -- it bites ------------------------------------------------------------------------------


@proof()
def a_missing_stream_wait_reads_poison() -> None:
    from torch_npu.streams import gate

    with on_side_stream():
        held = gate()
        made = torch.ones(8, device="npu") * 2
        ready = torch.npu.Event()
        ready.record()
    assert (made + 1).cpu().isnan().all()
    torch.npu.current_stream().wait_event(ready)
    waited = made + 1
    held.open()
    assert waited.cpu().eq(3).all()


@proof()
def memory_freed_under_another_stream_reads_nan() -> None:
    from torch_npu.streams import gate

    for recorded in (False, True):
        made, side = torch.ones(8, device="npu"), torch.npu.Stream()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            held = gate()
            late = made + 1
        if recorded:
            made.record_stream(side)
        del made
        torch.npu.current_stream().synchronize()
        held.open()
        with torch.npu.stream(side):
            assert late.cpu().isnan().all() == (not recorded)


@proof()
def new_memory_reads_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        del_me = torch.ones(64, device="npu", dtype=dtype)
        address = del_me.data_ptr()
        del del_me
        again = torch.empty(64, device="npu", dtype=dtype)
        assert again.data_ptr() == address
        assert again.cpu().isnan().all()
        assert torch.empty(100, device="npu", dtype=dtype).cpu().isnan().all()


@proof()
def the_host_dies_that_reads_device_memory() -> None:
    ctypes.string_at(torch.ones(8, device="npu").data_ptr(), 4)


@proof()
def the_host_dies_that_writes_device_memory() -> None:
    ctypes.memset(torch.ones(8, device="npu").data_ptr(), 0, 4)


@proof()
def pinned_memory_is_read_when_the_device_comes_to_it() -> None:
    from torch_npu.streams import gate

    pinned, pageable = torch.ones(8).pin_memory(), torch.ones(8)
    assert pinned.is_pinned() and not pageable.is_pinned()
    held = gate()
    late, copied = pinned.to("npu", non_blocking=True), pageable.to("npu", non_blocking=True)
    pinned.fill_(7), pageable.fill_(7)
    held.open()
    assert late.cpu().eq(7).all() and copied.cpu().eq(1).all()


@proof()
def an_error_of_a_kernel_comes_at_the_next_wait() -> None:
    table = torch.ones(3, device="npu")
    found = table.gather(0, torch.tensor([5], device="npu"))
    try:
        found.cpu()
    except RuntimeError as error:
        assert "out of bounds" in str(error), error
    else:
        raise AssertionError("no error")


# -- it computes ---------------------------------------------------------------------------


@proof()
def it_computes_as_the_cpu() -> None:
    def results(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x, target = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device)
        F.mse_loss(F.dropout(torch.tanh(x), 0.3), target).backward()
        empty = torch.cat([torch.zeros(0, 3, device=device), torch.zeros(0, 3, device=device) + 1])
        return [x.grad, torch.rand(5, device=device), torch.randperm(7, device=device), empty]

    for found, expected in zip(results("npu"), results("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@proof()
def autocast_and_types() -> None:
    x = torch.npu.FloatTensor([[1.0, 2.0]])
    assert isinstance(x, torch.npu.FloatTensor) and x.type() == "torch.npu.FloatTensor"
    weight = torch.npu.FloatTensor(3, 2)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert F.linear(x, weight).dtype is torch.bfloat16
        assert F.mse_loss(F.linear(x, weight), torch.zeros(1, 3, device="npu")).dtype is torch.float32


@proof()
def a_module_moves_with_its_parameters() -> None:
    """So that an optimizer may be made before, as on CUDA and with torch-npu."""
    layer = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    layer.to("npu")
    assert layer.weight.device.type == "npu" and layer.weight is optimizer.param_groups[0]["params"][0]
    layer(torch.ones(1, 2, device="npu")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    layer.cpu()
    torch.testing.assert_close(layer.weight.detach(), before - 1)


@proof()
def generators_do_not_wait() -> None:
    from torch_npu import counters
    from torch_npu.streams import gate

    torch.manual_seed(1)
    counters.start()
    held = gate()
    before = torch.npu.get_rng_state()
    first = torch.randn(5, device="npu")
    torch.npu.set_rng_state(before)
    again = torch.randn(5, device="npu")
    torch.manual_seed(1)
    seeded = torch.randn(5, device="npu")
    assert not counters.stop()
    held.open()
    assert torch.equal(first.cpu(), again.cpu()) and torch.equal(first.cpu(), seeded.cpu())


# -- it counts -----------------------------------------------------------------------------


@proof()
def waits_and_copies_are_counted_with_their_line() -> None:
    from torch_npu import counters

    x = torch.ones(8, device="npu", requires_grad=True)
    pinned = torch.ones(8).pin_memory()
    counters.start()
    x.detach().sum().item()
    pinned.to("npu", non_blocking=True)
    torch.ones(4).to("npu")
    torch.npu.synchronize()
    x.register_hook(lambda gradient: gradient * gradient.sum().item())
    x.sum().backward()
    found = counters.stop()
    first = waits_and_copies_are_counted_with_their_line.__code__.co_firstlineno + 7
    place = "tests/support/standin_proofs.py"
    assert counters.waits(found) == {
        ("item", f"{place}:{first}"): 1,
        ("copy to device", f"{place}:{first + 2}"): 1,
        ("device", f"{place}:{first + 3}"): 1,
        ("item", f"{place}:{first + 4}"): 1,
    }, counters.waits(found)
    assert counters.copies(found) == {
        ("pinned to device", f"{place}:{first + 1}"): 1,
        ("pageable to device", f"{place}:{first + 2}"): 1,
    }, counters.copies(found)
    assert sum(h.num_bytes for h in found) == 48


@proof()
def operations_that_wait_are_warned_of() -> None:
    x, pinned = torch.ones(8, device="npu"), torch.ones(8).pin_memory()
    torch.npu.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        x.sum().item()
        x.nonzero()
        pinned.to("npu", non_blocking=True)
        torch.npu.synchronize()
        torch.npu.set_sync_debug_mode("default")
        x.sum().item()
    first = operations_that_wait_are_warned_of.__code__.co_firstlineno + 6
    assert {str(warning.message) for warning in found} == {"called a synchronizing NPU operation"}
    lines = {(warning.filename, warning.lineno) for warning in found}
    assert lines == {("tests/support/standin_proofs.py", line) for line in (first, first + 1)}, lines


@proof()
def memory_has_a_limit_and_a_peak() -> None:
    from torch_npu import memory

    kept = torch.ones(256, device="npu")
    before = memory.allocated()
    memory.reset_peak()
    for _ in range(3):
        torch.empty(1 << 20, device="npu", dtype=torch.uint8)
    assert memory.allocated() == before == 1024 and memory.peak() == before + (1 << 20)
    for plain in (False, True):
        memory.limit(1 << 20, plain_error=plain)
        try:
            torch.empty(1 << 20, device="npu", dtype=torch.uint8)
        except RuntimeError as error:
            assert isinstance(error, torch.OutOfMemoryError) != plain
            assert "NPU out of memory. Tried to allocate 1 MiB (NPU 0; 1 MiB total capacity" in str(error), error
        else:
            raise AssertionError("no error")
    assert kept.cpu().eq(1).all()


# -- it talks ------------------------------------------------------------------------------


@proof(ranks=2)
def collectives_and_messages(rank: int) -> None:
    import torch.distributed as dist
    from torch_npu import counters

    mine = torch.full((4,), rank + 1.0, device="npu")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        total, parts = mine.to(dtype).clone(), torch.empty(8, device="npu", dtype=dtype)
        dist.all_reduce(total)
        dist.all_gather_single(parts, mine.to(dtype))
        half = torch.empty(2, device="npu", dtype=dtype)
        dist.reduce_scatter_single(half, torch.arange(4, device="npu").to(dtype))
        assert total.tolist() == [3] * 4 and parts.tolist() == [1] * 4 + [2] * 4, (total, parts)
        assert half.tolist() == ([0, 2], [4, 6])[rank]
    copy = mine.clone()
    dist.broadcast(copy, src=1)
    listed = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(listed, mine)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert copy.tolist() == [2] * 4 and listed[1].tolist() == [2] * 4 and objects[1] == {"rank": 1}
    for shape, dtype in (((4,), torch.bfloat16), ((0, 3), torch.float32)):
        sent = torch.full(shape, rank + 1.0, device="npu", dtype=dtype)
        found = torch.empty_like(sent)
        both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, found, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert found.shape == shape and found.cpu().eq(2 - rank).all()
    assert [made.name for made in counters.COMMUNICATORS] == ["all 2"]


@proof(ranks=2)
def collectives_of_several_tensors(rank: int) -> None:
    """And those with a root, which change nothing elsewhere but ``reduce``."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    mine, other = torch.arange(4.0, device="npu") + 10 * rank, torch.arange(4.0, device="npu") + 10 * (1 - rank)
    total = mine + other
    summed, found = [mine.clone(), mine.clone()], [torch.empty(8, device="npu") for _ in range(2)]
    with _coalescing_manager():
        for tensor in summed:
            dist.all_reduce(tensor)
    with _coalescing_manager(async_ops=True) as both:
        for tensor in found:
            dist.all_gather_single(tensor, mine)
    both.wait()
    assert all(torch.equal(tensor.cpu(), total.cpu()) for tensor in summed)
    assert all(torch.equal(tensor[4 * (1 - rank) :][:4].cpu(), other.cpu()) for tensor in found)
    halves = [torch.empty(2, device="npu") for _ in range(3)]
    with _coalescing_manager():
        for half in halves[:2]:
            dist.reduce_scatter_single(half, mine)
    dist.reduce_scatter(halves[2], list(mine.split(2)))
    assert all(half.tolist() == total[2 * rank :][:2].tolist() for half in halves)
    swapped, listed = torch.empty(4, device="npu"), [torch.empty(2, device="npu") for _ in range(2)]
    dist.all_to_all_single(swapped, mine)
    dist.all_to_all(listed, list(mine.split(2)))
    parts = [tensor[2 * rank :][:2].tolist() for tensor in ((mine, other) if rank == 0 else (other, mine))]
    assert swapped.tolist() == parts[0] + parts[1] and [part.tolist() for part in listed] == parts
    uneven = torch.empty((2, 6)[rank], device="npu")
    dist.all_to_all_single(uneven, mine, output_split_sizes=[(1, 3)[rank]] * 2, input_split_sizes=[1, 3])
    assert uneven.tolist() == ([0, 10], [1, 2, 3, 11, 12, 13])[rank]
    dist.scatter(listed[0], list(mine.split(2)) if rank == 1 else None, src=1)
    assert listed[0].tolist() == ([10, 11], [12, 13])[rank]
    gathered = [torch.empty(4, device="npu") for _ in range(2)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    assert gathered is None or gathered[1].tolist() == other.tolist()
    last, words = mine.clone(), ["of rank 1" if rank == 1 else None]
    dist.reduce(last, dst=0)
    dist.broadcast_object_list(words, src=1)
    assert words == ["of rank 1"] and (rank == 1 or last.tolist() == total.tolist())


@proof(ranks=2)
def a_send_waits_for_its_receive_and_the_host_for_nobody(rank: int) -> None:
    import torch.distributed as dist
    from torch_npu import counters

    group = dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()
    exchange = (dist.isend, dist.irecv)[rank]
    exchange(torch.zeros(1, device="npu"), 1 - rank, group=group).wait()  # makes the communicator
    counters.start()
    if rank == 0:
        work = dist.isend(torch.ones(4, device="npu"), 1, group=group)
        work.wait()
        later = torch.zeros(1, device="npu") + 1
        assert not counters.waits(counters.stop())
        assert not work.is_completed()
        store.set("looked", "yes")
        assert later.item() == 1 and work.is_completed()
    else:
        store.wait(["looked"])
        found = torch.empty(4, device="npu")
        dist.irecv(found, 0, group=group).wait()
        assert found.cpu().eq(1).all()


@proof(ranks=2)
def buffers_of_communicators(rank: int) -> None:
    """Of collectives as the group's options say, else as the environment does; of messages as it says of these."""
    import torch.distributed as dist
    import torch_npu
    from torch_npu import counters

    def options(size: object) -> object:
        found = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        found.hccl_config = {"hccl_buffer_size": size}
        return found

    def made(message: bool, size: object = None) -> list[tuple[bool, int]]:
        before = len(counters.COMMUNICATORS)
        group = dist.new_group([0, 1], pg_options=None if size is None else options(size))
        tensor = torch.zeros(1, device="npu")
        if message:
            (dist.isend, dist.irecv)[rank](tensor, 1 - rank, group=group).wait()
        else:
            dist.all_reduce(tensor, group=group)
        return [(one.for_messages, one.buffer_mb) for one in counters.COMMUNICATORS[before:]]

    assert made(False) == [(False, 200)] and made(False, 16) == [(False, 16)] and made(True, 16) == [(True, 20)]
    os.environ.update(HCCL_BUFFSIZE="50", P2P_HCCL_BUFFSIZE="0")
    assert made(False) == [(False, 50)] and made(True) == [(False, 50)] and made(True, 16) == [(False, 16)]
    with pytest.raises(RuntimeError, match="hccl_buffer_size should be int"):
        made(False, "16")


@proof(ranks=2)
def refused_by_hccl(rank: int) -> None:
    check_dtypes(sent=[torch.int16], refused=[torch.complex64], never_summed=[torch.float64])


@proof(ranks=2)
def refused_by_nccl(rank: int) -> None:
    check_dtypes(sent=[torch.uint8], refused=[torch.int16, torch.complex64], never_summed=[])


def check_dtypes(sent: list[Any], refused: list[Any], never_summed: list[Any]) -> None:
    import torch.distributed as dist

    def fails(start: Callable[..., Any], dtype: torch.dtype) -> bool:
        try:
            start(torch.zeros(2, device="npu", dtype=dtype))
        except RuntimeError as error:
            assert str(dtype) in str(error), error
            return True
        return False

    def send(tensor: torch.Tensor) -> None:
        """To the other rank, which need not take it. Not by dist.isend, which sends complex numbers as pairs."""
        dist.group.WORLD.send([tensor], 1 - dist.get_rank(), 0)

    assert not any(fails(send, dtype) for dtype in sent)
    assert all(fails(send, dtype) for dtype in refused)
    assert all(fails(dist.all_reduce, dtype) for dtype in never_summed)


# ------------------------------------------------------------------------------------------


def run(name: str, rank: int, folder: str) -> None:
    """In a process of its own."""
    function, ranks = PROOFS[name]
    os.environ["STANDIN_WAITS"] = "nccl" if name.endswith("nccl") else "hccl"
    import torch_npu  # noqa: F401

    if ranks == 1:
        function()
        return
    torch.npu.set_device(rank)
    torch.distributed.init_process_group("hccl", init_method=f"file://{folder}/{name}", rank=rank, world_size=ranks)
    function(rank)
    torch.distributed.barrier()


def forked(name: str, rank: int, folder: str) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        run(name, rank, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            processes = [forked(name, rank, folder) for rank in range(PROOFS[name][1])]
            statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
            print(name, next((status for status in statuses if status), 0), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
