"""What ranks on the stand-in count in a steady step."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from support.parity import models, mse, share_groups

STEADY = 4
"""Steps before the one that is counted: shapes are known, data is compared no more, nothing is measured."""


def engine_of(case: dict[str, Any]) -> Any:
    """An engine as in the parity cases."""
    layers, _, first = models(case["model"])
    return begun(case, layers(), partial(torch.optim.SGD, lr=0.05, momentum=0.9), {}, input=first)


def begun(case: dict[str, Any], layers: list[Any], optimizer: Any, config: dict[str, Any], **arguments: Any) -> Any:
    """An engine for a case; ``config``: what DeepSpeed's has besides, ``arguments``: of ``PipelineModule``."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["M"],
        "gradient_clipping": case["clip"],
        "steps_per_print": 10**9,
        "pulse": {
            "enabled": case["enabled"],
            "solver_seconds": 0,
            "placement": case.get("placement", "wave"),
            "waves": case.get("W", 1),
            "split_backward": case.get("split", "auto"),
            **({"hccl_buffer_size": case["buffer_mb"]} if "buffer_mb" in case else {}),
        },
        **config,
    }
    module = PipelineModule(
        layers=layers, num_stages=case["P"], loss_fn=mse, seed_layers=True, config=settings, **arguments
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(model=module, optimizer=optimizer(trained), config=settings)[0]


def counted(cases: list[dict[str, Any]]) -> None:
    """Prints, for each case, a line COUNTED with a JSON object of what this rank did in one step."""
    from torch_npu import counters, memory

    torch.set_num_threads(1)
    share_groups()
    for case in cases:
        engine = engine_of(case)
        data = batches(case["model"], engine.grid.data_parallel_id)
        for _ in range(STEADY):
            engine.train_batch(data_iter=data)
        torch.npu.synchronize()
        made = len(counters.COMMUNICATORS)
        memory.reset_peak()
        counters.start()
        engine.train_batch(data_iter=data)
        found = counters.stop()
        print("COUNTED", json.dumps(summary(case, engine, found, made, memory.peak())), flush=True)
        engine.destroy()


def runs_behind(case: dict[str, Any]) -> None:
    """On the first rank the device stands still while the host hands it a whole step, and another one."""
    from torch_npu.streams import gate

    torch.set_num_threads(1)
    share_groups()
    engine = engine_of(case)
    data = batches(case["model"], engine.grid.data_parallel_id)
    expected = engine_of(case)
    same = batches(case["model"], engine.grid.data_parallel_id)
    wanted = [expected.train_batch(data_iter=same) for _ in range(STEADY + 2)][-2:]
    for _ in range(STEADY):
        engine.train_batch(data_iter=data)
    torch.npu.synchronize()
    held = gate() if engine.global_rank == 0 else None
    losses = [engine.train_batch(data_iter=data)]
    if held is not None:
        under_way = engine._watchdog.device.under_way()
        assert under_way is not None, "the device has done a step that it has not begun"
        held.open()
    losses.append(engine.train_batch(data_iter=data))
    assert torch.equal(torch.stack(losses).cpu(), torch.stack(wanted).cpu()), (losses, wanted)
    assert engine.pulse_stats()["idle_ms"] >= 0 and engine._watchdog.device.under_way() is None


def batches(model: str, replica: int) -> Any:
    batch = models(model)[1]
    return (batch(number, 0, replica) for number in itertools.count())


def summary(case: dict[str, Any], engine: Any, found: list[Any], made: int, peak: int) -> dict[str, Any]:
    from torch_npu import counters

    def table(counts: Any) -> list[list[Any]]:
        return [[kind, place, count] for (kind, place), count in sorted(counts.items())]

    return {
        "case": case,
        "rank": engine.stage_id,
        "waits": table(counters.waits(found)),
        "copies": table(counters.copies(found)),
        "entries_read": case["M"] * len(entries_read(engine)) if case["enabled"] else None,
        "copied_bytes": sum(h.num_bytes for h in found),
        "shapes_from_zeros": sorted({h.name for h in found if h.kind == counters.SHAPE}),
        "communicators_before": made,
        "peak_bytes": peak,
        "peak_live_bytes": engine.pulse_stats()["peak_live_bytes"] if case["enabled"] else None,
    }


def entries_read(engine: Any) -> set[str]:
    """Batch entries, the first layer's input and the labels, as far as a stage of this rank reads them."""
    plan, rank = engine.module.plan, engine.stage_id
    readers = {entry.name: entry.targets for entry in engine.module.graph.batch_entries}
    found = {name for name, layers in readers.items() if rank in {plan.placement[plan.stage_of(i)] for i in layers}}
    ends = {"the input": plan.placement[0], "the labels": plan.placement[-1]}
    return found | {name for name, reader in ends.items() if reader == rank}


def communicators(cases: list[dict[str, Any]]) -> None:
    """Prints, for each case, a line MADE: this rank's communicators, and what is said of its plan.

    The world's own group stays from case to case, and what it has made.
    """
    from support import memory_ranks
    from torch_npu import counters

    from deepspeed_pulse.engine.sharing.shared import ties_of
    from deepspeed_pulse.ir.communicators import communicators as planned_for

    torch.set_num_threads(1)
    there: set[Any] = set()
    for case in cases:
        before = len(counters.COMMUNICATORS)
        if case["model"] == "uvit":
            engine, data = memory_ranks.engine_of(case)
        else:
            engine = engine_of(case)
            data = batches(case["model"], engine.grid.data_parallel_id)
        for _ in range(2):  # all are there with the first messages
            engine.train_batch(data_iter=data)
        torch.npu.synchronize()
        module, made = engine.module, counters.COMMUNICATORS[before:]
        cluster, index = module.planned.cluster, engine.grid.data_parallel_id
        told = planned_for(module.plan, engine.stage_id, cluster=cluster, data_index=index, ties=ties_of(module))
        new = replace(
            told,
            world=tuple(one for one in told.world if one not in there),
            pairs=tuple(one for one in told.pairs if one not in there),
        )
        there |= {*told.world, *told.pairs}
        found = {
            "case": case,
            "rank": engine.global_rank,
            "collectives": sorted(one.name for one in made if not one.for_messages),
            "messages": sum(one.for_messages for one in made),
            "bytes": sum(2 * one.buffer_mb * 2**20 for one in made),
            "told_collectives": sorted(f"all {len(ranks)}" for ranks in (*new.world, *new.groups)),
            "told_messages": len(new.pairs) + len(new.channels),
            "told_bytes": new.num_bytes(cluster.communicators),
            "whole": [told.count, told.num_bytes(cluster.communicators)],
            "counted": engine.pulse_stats()["peak_parts"]["communicators"],
        }
        print("MADE", json.dumps(found), flush=True)
        engine.destroy()
