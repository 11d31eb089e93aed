"""What ranks run in the tests of the engine's features."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import signal
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.parity import TOLERANCE, measure_links_once, models, mse, share_groups
from support.precision_ranks import DTYPES, allow_fp16, cast
from support.reference import Unpartitioned, error
from support.toy import loss_fn, toy_batch, toy_layers


def make_engine(
    ranks: int,
    microbatches: int,
    *,
    model: str = "toy",
    pulse: Any = None,
    optimizer: Any = None,
    dynamic: bool = False,
    interval: int = 0,
    listed: Any = None,
    loss: Any = None,
    cuts: Any = None,
    **config: Any,
) -> Any:
    """``listed``: layers instead of the model's, the first of which reads the batch's only input."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    layers, batch, first = models(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": "wave"} if pulse is None else pulse,
        **config,
    }
    module = PipelineModule(
        layers=layers() if listed is None else listed,
        num_stages=ranks,
        loss_fn=loss or mse,
        seed_layers=True,
        config=config,
        **({"input": first} if listed is None else {}),
        **({} if cuts is None else {"partition_method": cuts}),
        example_batch=batch(0, 0, 0) if model == "unet" else None,
        dynamic_shape=dynamic,
        activation_checkpoint_interval=interval,
    )
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)))(list(module.parameters()))
    engine, *_ = deepspeed.initialize(model=module, optimizer=made, config=config)
    return engine


def data_of(engine: Any, step: int, model: str = "toy") -> Any:
    batch = models(model)[1]
    return (batch(step, m, engine.grid.data_parallel_id) for m in itertools.count())


def boundary_bytes(model: str) -> list[int]:
    """Bytes of the hidden state behind each layer, seen in the unpartitioned model."""
    layers, batch, first = models(model)
    unpartitioned = Unpartitioned(layers())
    found: list[int] = []
    for index, function in enumerate(unpartitioned.functions):

        def wrapped(*args: Any, function: Any = function) -> Any:
            result = function(*args)
            hidden = result[0] if isinstance(result, tuple) else result
            found.append(hidden.numel() * hidden.element_size())
            return result

        unpartitioned.functions[index] = wrapped
    with torch.no_grad():
        unpartitioned(batch(0, 0, 0)[0], first)
    return found


def bytes_on_the_wire(model: str) -> None:
    """Skips stay; hidden crosses 2(P-1) times each way; a travelling value visits each rank once each way."""
    share_groups()
    microbatches, ranks = 3, torch_world()
    engine = make_engine(ranks, microbatches, model=model)
    engine.train_batch(data_of(engine, 0, model))
    wave = total(engine)
    plan, sizes = engine.module.plan, boundary_bytes(model)
    crossings = [s for s in range(1, plan.num_stages) if plan.placement[s - 1] != plan.placement[s]]
    assert len(crossings) == 2 * (ranks - 1)
    hidden = microbatches * sum(sizes[plan.boundaries[s] - 1] for s in crossings)
    temb = 2 * 4 * (8 if model == "toy" else 128)
    value = next(v for v in engine.module.graph.values if v.name == "temb")
    readers = {plan.rank_of_layer(layer) for layer in value.targets} - {plan.rank_of_layer(value.source)}
    travels = microbatches * len(readers) * temb
    if engine.global_rank == 0:
        assert wave == {"hidden": hidden, "hidden_grad": hidden, "value:temb": travels, "value_grad:temb": travels}, (
            wave,
            hidden,
            travels,
        )
    engine.destroy()
    engine = make_engine(ranks, microbatches, model=model, pulse=False)
    engine.train_batch(data_of(engine, 0, model))
    relayed = total(engine)
    if engine.global_rank == 0:
        skips = sum(b for name, b in relayed.items() if name.startswith("value") and not name.endswith("temb"))
        assert skips > 0, relayed
        print(f"RATIO relayed / wave = {sum(relayed.values()) / sum(wave.values()):.2f}", flush=True)


def torch_world() -> int:
    import deepspeed

    deepspeed.init_distributed()
    return torch.distributed.get_world_size()


def total(engine: Any) -> dict[str, int]:
    found = engine.module.ranks.gather_to_first(engine.pulse_stats()["p2p_bytes"]) or []
    names = sorted({name for row in found for name in row})
    return {name: sum(row.get(name, 0) for row in found) for name in names}


def evaluates(_: Any) -> None:
    """Loss and logits between training steps, any number of microbatches, pulse on and off; training goes on alike."""
    share_groups()
    ranks = torch_world()
    for pulse in (None, {"solver_seconds": 0, "waves": 2} if ranks == 2 else {"placement": "linear"}, False):
        engine = make_engine(ranks, 3, pulse=pulse)
        twin = Unpartitioned(toy_layers())
        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            for microbatches in (1, 3, 5):
                loss = engine.eval_batch(data_of(engine, 100 + step), num_micro_batches=microbatches)
                batches = [toy_batch(100 + step, m, 0) for m in range(microbatches)]
                with torch.no_grad():
                    expected = sum(loss_fn(twin(x), y) for x, y in batches) / microbatches
                assert abs(float(loss) - float(expected)) < TOLERANCE * float(expected), (
                    pulse,
                    step,
                    microbatches,
                    loss,
                    expected,
                )
            _, logits = engine.eval_batch(data_of(engine, 100 + step), return_logits=True)
            if engine.is_last_stage():
                with torch.no_grad():
                    assert error(logits, twin(toy_batch(100 + step, 2, 0)[0])) < TOLERANCE
            engine.train_batch(data_of(engine, step))
            twin_optimizer.zero_grad()
            for m in range(3):
                x, y = toy_batch(step, m, 0)
                (loss_fn(twin(x), y) / 3).backward()
            twin_optimizer.step()
        engine.destroy()
    print("PASSED", flush=True)


def changes_microbatches(_: Any) -> None:
    """``set_train_batch_size`` plans the order anew; the cuts stay."""
    share_groups()
    engine = make_engine(torch_world(), 2)
    before = engine.module.plan.boundaries
    for size, microbatches in ((10, 5), (2, 1), (4, 2)):
        engine.set_train_batch_size(size)
        twin = Unpartitioned(toy_layers())
        for index, function in engine.module.local_layers():
            owner = getattr(function, "module", function)
            twin.by_layer[index].load_state_dict(owner.state_dict())
        engine.train_batch(data_of(engine, size))
        assert engine._orders.made(microbatches).microbatches == microbatches
        assert engine._orders.made(microbatches).boundaries == before
    print("PASSED", flush=True)


def resumes(folder: str) -> None:
    """Five steps straight equal three, a checkpoint, a new engine, and two more: bit for bit."""
    share_groups()
    ranks = torch_world()
    straight = make_engine(ranks, 3)
    losses = [float(straight.train_batch(data_of(straight, step)).detach()) for step in range(5)]
    first = make_engine(ranks, 3)
    for step in range(3):
        assert float(first.train_batch(data_of(first, step)).detach()) == losses[step]
    first.save_checkpoint(folder, client_state={"note": 7})
    second = make_engine(ranks, 3)
    _, state = second.load_checkpoint(folder)
    assert state["note"] == 7 and second.global_steps == 3
    for step in (3, 4):
        assert float(second.train_batch(data_of(second, step)).detach()) == losses[step]
    check_layer_files(second, folder)
    print("PASSED", flush=True)


def check_layer_files(engine: Any, folder: str) -> None:
    """One file a layer, named as upstream names them; tied layers have theirs."""
    if engine.global_rank == 0:
        files = sorted(path.name for path in Path(folder, "global_step3").glob("layer_*"))
        assert files == [f"layer_{index:02d}-model_states.pt" for index in range(10)], files


def trains_without_parameters(_: Any) -> None:
    """A rank whose layers are all frozen or functions takes part, in every precision; frozen weights stay."""
    share_groups()
    allow_fp16()
    for precision, stage, grouped in itertools.product(DTYPES, (0, 1), (False, True)):
        half_frozen(precision, stage, sgd_by_group if grouped else sgd)
    print("PASSED", flush=True)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def sgd_by_group(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Weights and biases apart: both groups are empty where all is frozen."""
    groups = [
        {"params": [p for name, p in module.named_parameters() if p.requires_grad and name.endswith(kind)], "lr": lr}
        for kind, lr in (("weight", 0.1), ("bias", 0.02))
    ]
    return torch.optim.SGD(groups, lr=0.1)


def half_frozen(precision: str, stage: int, make: Any) -> None:
    import deepspeed

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.engine.specs import spec

    torch.manual_seed(0)
    frozen = [torch.nn.Linear(8, 8).requires_grad_(False) for _ in range(3)]
    trained = [torch.nn.Linear(8, 8) for _ in range(2)]
    layers: list[Any] = [trained[0], *frozen, torch.tanh, trained[1]]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "pulse": {"solver_seconds": 0},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    batches = [(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(2)]
    twin = torch.nn.Sequential(
        *(copy.deepcopy(x) if isinstance(x, torch.nn.Module) else torch.nn.Tanh() for x in layers)
    )
    twin.to(DTYPES[precision]).float()
    module = PipelineModule(
        layers=[spec(layer, name=f"l{i}") for i, layer in enumerate(layers)],
        num_stages=2,
        loss_fn=mse,
        config=config,
        partition_method=["l1", 3, "l4"],
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=make(module), config=config)
    assert engine.module.plan.boundaries == (0, 1, 3, 4, 6)
    engine.train_batch(iter(cast(batches, DTYPES[precision])))
    twin_optimizer = make(twin)
    for x, y in batches:
        (mse(twin(x), y) / 2).backward()
    torch.nn.utils.clip_grad_norm_([p for p in twin.parameters() if p.requires_grad], 0.1)
    twin_optimizer.step()
    tolerance = TOLERANCE if precision == "fp32" else 2e-3
    for index, function in module.local_layers():
        if isinstance(function, torch.nn.Module):
            for mine, theirs in zip(function.parameters(), twin[index].parameters(), strict=True):
                assert error(module.full_precision(mine), theirs) < tolerance, (precision, stage, index)
    engine.destroy()


def as_bf16(batch: Any) -> Any:
    inputs, labels = batch
    cast = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    return cast, labels.bfloat16()


def traces(folder: str) -> None:
    """The trace is written, the same profile is found again, planned and measured timelines have the plan's actions."""
    share_groups()
    ranks = torch_world()
    plans = []
    for _ in range(2):
        pulse = {"placement": "wave", "solver_seconds": 0}
        pulse |= {"trace": f"{folder}/trace.json", "plan_cache": f"{folder}/plans"}
        engine = make_engine(ranks, 3, model="unet", pulse=pulse)
        for step in range(3):
            engine.train_batch(data_of(engine, step, "unet"))
        measured = engine.pulse_timeline()
        plans.append(engine.module.plan)
        stats = engine.pulse_stats()
        assert stats["peak_live_bytes"] > 0 and stats["idle_ms"] >= 0
        if measured is not None:
            planned = engine.pulse_planned_timeline()
            assert planned is not None
            for rank, row in enumerate(engine.module.plan.schedule):
                assert tuple(span.work for span in measured.spans_of(rank)) == row
                assert tuple(span.work for span in planned.spans_of(rank)) == row
    assert plans[0] == plans[1]
    print("PASSED", flush=True)


def changes_shapes(steps: int) -> None:
    """A rank holds no more after the last step than after the tenth; shapes met before send no more metadata."""
    share_groups()
    engine = make_engine(torch_world(), 3, model="tokens", dynamic=True)
    seen: list[tuple[int, int]] = []
    first = (10**9, 10**18)
    for step in range(steps):
        engine.train_batch(data_of(engine, step, "tokens"))
        if step >= 10:
            assert engine.pulse_stats()["metadata_bytes"] == 0, step
        if step % 10 == 9:
            seen.append(live_tensors(at_most=first))
            first = seen[0]
    assert all(count <= first[0] and size <= first[1] for count, size in seen), seen
    pictures = make_engine(torch_world(), 3, model="unet buckets", dynamic=True)
    outputs = pictures.eval_batch(data_of(pictures, 1, "unet buckets"), compute_loss=False, reduce_output=None)
    assert outputs is None or len({tuple(output.shape) for output in outputs}) > 1, "shapes of one evaluation"
    print("PASSED", seen, flush=True)


def live_tensors(at_most: tuple[int, int]) -> tuple[int, int]:
    """Tensors that are alive in this process, and the bytes below them, once there are no more than expected.

    A thread of gloo lets go of what it sent some time after the message counts as sent. What is held for ever is
    still there when this gives up.
    """
    end = time.monotonic() + 60
    while True:
        gc.collect()
        found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
        count, size = len(found), sum(storages.values())
        if (count <= at_most[0] and size <= at_most[1]) or time.monotonic() > end:
            return count, size
        del found
        time.sleep(0.05)


def recomputes(folder: str) -> None:
    """Peaks fall with an interval, and again by as much as ``memory_gb`` asks for; losses stay."""
    from deepspeed_pulse.planner import Job, SearchOptions, make_plan

    share_groups()
    measure_links_once()
    planned = make_engine(torch_world(), 4, model="unet").module.planned
    # measured bytes, but times that are the same on every machine, so that the plans are
    layers = tuple(
        replace(layer, forward_ms=1.0, backward_ms=2.0, weight_grad_ms=1.0, input_grad_ms=1.0)
        for layer in planned.profile.layers
    )
    profile = replace(planned.profile, layers=layers)
    path = Path(folder, "profile.json")
    if torch.distributed.get_rank() == 0:
        path.write_text(profile.to_json())
    torch.distributed.barrier()
    job = Job(profile=profile, cluster=planned.cluster, pipeline_ranks=torch_world(), microbatches=4, recompute="all")
    plan = make_plan(job, SearchOptions(placement="wave", split_backward=False, solver_seconds=0))
    cap = max(plan.estimate.peak_bytes) * 1.02 / 1e9
    pulse = {"solver_seconds": 0, "placement": "wave", "profile": str(path)}
    whole = {"split_backward": False}  # halves may hold little, or what is recomputed for longer, as time alone decides
    found = []
    for more, interval in ((whole, 0), (whole, 1), ({"memory_gb": cap}, 0), ({}, 1)):
        engine = make_engine(torch_world(), 4, model="unet", pulse={**pulse, **more}, interval=interval)
        if "memory_gb" in more:
            assert 0 < len(engine.module.plan.recompute) < engine.module.plan.num_layers
        found.append(trained(engine))
    (most, losses), (all_whole, _), (capped, _), _ = found
    assert max(all_whole, capped) < most
    assert capped <= 1.05 * cap * 1e9, (capped, cap)
    assert all(abs(a - b) <= TOLERANCE * b for _, others in found for a, b in zip(others, losses, strict=True))
    print("PASSED", [(peak, losses[-1]) for peak, losses in found], flush=True)


def trained(engine: Any) -> tuple[int, list[float]]:
    """Peak of the fullest rank, and losses."""
    losses = [float(engine.train_batch(data_of(engine, step, "unet")).detach()) for step in range(2)]
    peak = torch.tensor(engine.pulse_stats()["peak_live_bytes"])
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    return int(peak), losses


def makes_another(_: Any) -> None:
    """An engine that was destroyed is freed; the one after it hears SIGTERM."""
    share_groups()
    adam = partial(torch.optim.AdamW, lr=1e-3)
    for config in ({}, {"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}):
        first = make_engine(2, 2, optimizer=adam, **config)
        if "bf16" not in config:
            first.train_batch(data_iter=data_of(first, 0))
        gone = weakref.ref(first), weakref.ref(first.module)
        first.destroy()
        del first
        gc.collect()
        assert [ref() for ref in gone] == [None, None], f"an engine that was destroyed is still there: {config}"
    first = make_engine(2, 2)
    second = make_engine(2, 2)
    first.destroy()
    second.train_batch(data_iter=data_of(second, 0))
    os.kill(os.getpid(), signal.SIGTERM)
    ended = ""
    try:
        second.train_batch(data_iter=data_of(second, 1))
        second.train_batch(data_iter=data_of(second, 2))
    except SystemExit as end:
        ended = str(end.code)
    assert ended == "143", f"SIGTERM ended a step with {ended!r}"
    second.destroy()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
