"""What ranks on the stand-in measure and sum: times of messages, and buckets of gradients in copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from support.engine_ranks import torch_world
from support.parity import mse, share_groups

SIZES = (2**12, 2**14, 2**16)


def measures(_: Any) -> None:
    """Prints, for links and for sums, a line MEASURED with what was found and where the host waited."""
    from deepspeed.accelerator import get_accelerator
    from torch_npu import counters

    from deepspeed_pulse.engine.measure import links, sums

    torch.set_num_threads(1)
    assert torch_world() == 2
    device = torch.device(get_accelerator().current_device_name())
    links.SIZES = sums._SIZES = SIZES
    group = torch.distributed.new_group([0, 1])
    kinds: dict[str, Callable[[], Any]] = {
        "links": lambda: links._exchange((0, 1), device),
        "sums": lambda: sums._points(group, 2, device, 2**14),
    }
    for kind, act in kinds.items():
        counters.start()
        points = act()
        waits = [[kind, place, count] for (kind, place), count in counters.waits(counters.stop()).items()]
        print("MEASURED", json.dumps({"kind": kind, "points": points, "waits": waits}), flush=True)


LAYERS, WIDTH = 12, 256
WEIGHT_BYTES = 2 * WIDTH * WIDTH


def sums_copies(case: dict[str, Any]) -> None:
    """Two replicas, gradients in bf16: as upstream sums them at the end, and what copies take.

    Prints a line COPIES: bytes by the device's allocator and as counted.
    """
    from torch_npu import counters, memory

    torch.set_num_threads(1)
    share_groups()
    assert torch_world() == 2
    found = []
    for early in (True, False):
        engine = _engine(case)
        sums = engine._reduction.sums
        sums.bucket_bytes = WEIGHT_BYTES  # a weight a bucket
        if not early:
            engine._reduction.sums = None
        losses = [engine.train_batch(data_iter=_batches(engine, step)) for step in range(3)]
        found.append([*losses, *(p.detach().clone() for p in engine.module.parameters())])
        if early:
            figures = _watched(engine, sums, counters, memory)
        engine.destroy()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True)), case
    print("COPIES", json.dumps(figures), flush=True)


def _watched(engine: Any, sums: Any, counters: Any, memory: Any) -> dict[str, Any]:
    """One more step: what starting to sum takes, as counted and as the allocator says, and the host's waits in it.

    Everything leaves behind the backward, as in a first step, and gradients that the bf16 optimizer has stay: so the
    allocator counts nothing else.
    """
    sums._once.clear()
    kept, remember = [], sums._gradients.remember

    def remembered(parameter: Any) -> None:
        kept.append(parameter.grad)
        remember(parameter)

    sums._gradients.remember = remembered
    figures: dict[str, Any] = {"counted": 0, "left": 0}
    start, count = sums.start, sums._count

    def counted(change: int, beside_bytes: int) -> None:
        count(change, beside_bytes)
        figures["left"] += change
        figures["counted"] = max(figures["counted"], figures["left"])

    def watched(stage: int) -> None:
        before = memory.allocated()
        memory.reset_peak()
        counters.start()
        start(stage)
        figures["waits"] = [list(key) for key in counters.waits(counters.stop())]
        figures["allocated"] = memory.peak() - before
        figures["kept"] = memory.allocated() - before

    sums.start, sums._count = watched, counted
    engine.train_batch(data_iter=_batches(engine, 3))
    return figures


def _engine(case: dict[str, Any]) -> Any:
    import deepspeed

    from deepspeed_pulse import LayerSpec, PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
        **case,
    }
    layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    module = PipelineModule(layers=layers, num_stages=1, loss_fn=mse, config=config, seed_layers=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def _batches(engine: Any, step: int) -> Any:
    """Of one step, others on the other replica."""
    generator = torch.Generator().manual_seed(10 * step + engine.grid.data_parallel_id)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    return iter([tuple(torch.randn(2, WIDTH, generator=generator).to(dtype) for _ in "xy") for _ in range(2)])


def refused(cases: list[dict[str, Any]]) -> None:
    """Prints, for each case, a line REFUSED with the error that a job over gloo gets on this rank."""
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        try:
            _tied_engine(**case)
        except Exception as problem:
            print("REFUSED", json.dumps([type(problem).__name__, str(problem)]), flush=True)


def _tied_engine(*, ranks: int, tied: bool, measured: bool) -> Any:
    """First and last layer may be one."""
    import deepspeed

    from deepspeed_pulse import LayerSpec, PipelineModule, TiedLayerSpec

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "pulse": {"solver_seconds": 0},
    }
    ends = [TiedLayerSpec("ends", torch.nn.Linear, 4, 4) for _ in range(2)] if tied else []
    layers = [*ends[:1], *(LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)), *ends[1:]]
    example = {"example_batch": (torch.ones(2, 4), torch.ones(2, 4))} if measured else {}
    module = PipelineModule(layers=layers, num_stages=ranks, loss_fn=mse, config=config, **example)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def numbers_stay(_: Any) -> None:
    """Building a frozen part, tracing a model and measuring leave the device's random numbers where they were."""
    from deepspeed.accelerator import get_accelerator

    from deepspeed_pulse import LayerSpec
    from deepspeed_pulse.engine.frozen import _frozen
    from deepspeed_pulse.models.traced.trying import tried

    assert torch_world() == 1
    device = torch.device(get_accelerator().current_device_name())
    get_accelerator().manual_seed_all(5)
    before = get_accelerator().get_rng_state().clone()
    _frozen(LayerSpec(torch.nn.Linear, 4, 4), 7, device, None)
    tried(torch.nn.Linear(4, 4).to("meta").forward, (torch.ones(2, 4, device="meta"),), {})
    assert torch.equal(get_accelerator().get_rng_state(), before)
    print("STAYED", flush=True)


def runs_where_it_was_not_listed(_: Any) -> None:
    """A model that was listed on the CPU, and sets autocast for the kind of its device, computes on it as it does."""
    from deepspeed.accelerator import get_accelerator
    from support.families import interpret
    from support.plain_nets import Odd

    from deepspeed_pulse.models import to_layers

    assert torch_world() == 1
    device = torch.device(get_accelerator().current_device_name())
    model, x = Odd("device_kind"), torch.randn(2, 8)
    for example in (x, x.to("meta")):
        layers = to_layers(model.cpu(), example_batch={"x": example})
        for where in (device, torch.device("cpu")):
            for module in (model, *(layer.layer for layer in layers)):
                module.to(where)
            batch = {"x": x.to(where)}
            for found, expected in zip(interpret(layers, batch), model(**batch), strict=True):
                assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected.cpu()), where
    print("AGREES", flush=True)
