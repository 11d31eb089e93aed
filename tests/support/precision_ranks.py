"""What ranks run in the tests of precision: five steps in one process, or on many ranks under pulse."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from support.parity import models, share_groups
from support.precision_cases import Row
from support.reference import Unpartitioned, error, train

STEPS = 5
OVERFLOWS = 1
"""The step that overflows in fp16: its labels are huge, so it does in every run, however gradients are summed."""

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
REORDERED = 1e-2
"""Of bf16 where replicas add their microbatches apart: one rank of DeepSpeed differs from itself by 4e-3 when it takes
the same microbatches in another order. Rows that hold the pairs go without it."""


def allow_fp16() -> None:
    """Half precision computes on every CPU; DeepSpeed asks whether it is fast."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def mse(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output.float(), labels.float())


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(cast(item, dtype) for item in value)
    return value.to(dtype) if value.is_floating_point() else value


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def engine_of(row: Row, *, ranks: int, microbatches: int, **pulse: Any) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    precision = {} if row["precision"] == "fp32" else {row["precision"]: {"enabled": True}}
    if row["precision"] == "fp16":
        dynamic = {"initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}
        precision["fp16"] |= {"loss_scale": row["static"]} if "static" in row else dynamic
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": row["clip"],
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": row["zero"], **OFFLOAD} if row.get("offload") else {"stage": row["zero"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "pulse": {"solver_seconds": 0, "placement": "wave", **pulse},
        **precision,
    }
    layers, _, first = models(model_of(row))
    module = PipelineModule(
        layers=layers(),
        num_stages=ranks,
        loss_fn=mse,
        seed_layers=True,
        config=config,
        input=first,
        activation_checkpoint_interval=0 if row["recompute"] == "off" or not pulse.get("enabled", True) else 2,
    )
    return deepspeed.initialize(model=module, optimizer=sgd(module.parameters()), config=config)[0]


def model_of(row: Row) -> str:
    return "noisy" if row["recompute"] == "dropout" else "toy"


def result_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    weights = {}
    for index, function in engine.module.local_layers():
        owner = getattr(function, "module", function)
        for name, p in owner.named_parameters() if isinstance(owner, torch.nn.Module) else ():
            weights[index, name] = engine.module.full_precision(p).detach().float().clone()
    scale = getattr(engine.optimizer, "loss_scale", None)
    return {"losses": losses, "weights": weights, "skipped": engine.skipped_steps, "scale": scale}


# -- one process -----------------------------------------------------------------------------


def reference_name(row: Row) -> str:
    keys = ("precision", "clip", "M", "dp", *(() if row["precision"] == "fp32" else ("zero", "static")))
    return "-".join([model_of(row), *(str(row.get(key)) for key in keys)]) + ".pt"


def references(argument: dict[str, Any]) -> None:
    """All microbatches of all replicas one after another: fp32 in torch alone, else in one-rank DeepSpeed."""
    share_groups()
    allow_fp16()
    for row in argument["rows"]:
        path = Path(argument["folder"], reference_name(row))
        if not path.exists():
            torch.save(alone_in_torch(row) if row["precision"] == "fp32" else alone_in_deepspeed(row), path)


def batch_of(row: Row, step: int, microbatch: int, replica: int) -> Any:
    inputs, labels = models(model_of(row))[1](step, microbatch, replica)
    if row["precision"] == "fp16" and step == OVERFLOWS and "static" not in row:
        labels = labels * 1e4
    return cast((inputs, labels), DTYPES[row["precision"]])


def batches_of(row: Row, step: int) -> list[Any]:
    return [batch_of(row, step, m, d) for d in range(row["dp"]) for m in range(row["M"])]


def alone_in_torch(row: Row) -> dict[str, Any]:
    layers, _, first = models(model_of(row))
    model = Unpartitioned(layers())
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        numbers = [step * row["M"] + m for m in range(row["M"])] * row["dp"] if model_of(row) == "noisy" else None
        losses.append(train(model, optimizer, batches_of(row, step), mse, row["clip"], first, numbers)[0])
    weights = {(i, name): p.detach() for i, layer in model.by_layer.items() for name, p in layer.named_parameters()}
    return {"losses": losses, "weights": weights, "skipped": 0, "scale": None}


def alone_in_deepspeed(row: Row) -> dict[str, Any]:
    engine = engine_of(row, ranks=1, microbatches=row["dp"] * row["M"], enabled=False)
    if model_of(row) == "noisy":
        number_by_microbatch(engine.module, row["M"], row["dp"])
    before = result_of(engine, [])["weights"]
    losses = [float(engine.train_batch(iter(batches_of(row, step))).detach()) for step in range(STEPS)]
    result = result_of(engine, losses)
    engine.destroy()
    # A loss scale that is divided by and never multiplied with would leave weights nearly where they were.
    moved = sum(float((result["weights"][key] - old).norm()) for key, old in before.items())
    assert moved > 0.02, (row, moved)
    return result


def number_by_microbatch(module: Any, microbatches: int, data_parallel: int) -> None:
    """Upstream numbers its forwards; replicas of a real run would each start at the same number."""
    forward, count = module.forward, itertools.count()

    def numbered(inputs: Any) -> Any:
        step, position = divmod(next(count), microbatches * data_parallel)
        module.micro_offset = step * microbatches + position % microbatches
        return forward(inputs)

    module.forward = numbered


# -- many ranks ------------------------------------------------------------------------------


def compare(argument: dict[str, Any]) -> None:
    """Under pulse, on all ranks of this world: every rank compares its own layers."""
    share_groups()
    allow_fp16()
    for row in argument["rows"]:
        expected = torch.load(Path(argument["folder"], reference_name(row)))
        engine = engine_of(row, ranks=row["P"], microbatches=row["M"])
        losses = [float(engine.train_batch(data_of(engine, row, step)).detach()) for step in range(STEPS)]
        check(row, result_of(engine, losses), expected)
        engine.destroy()


def data_of(engine: Any, row: Row, step: int) -> Any:
    return (batch_of(row, step, m, engine.grid.data_parallel_id) for m in itertools.count())


def check(row: Row, found: dict[str, Any], expected: dict[str, Any]) -> None:
    reordered = "whole" in row and row["precision"] == "bf16" and row["dp"] > 1 and row["M"] > 1
    tolerance = REORDERED if reordered else TOLERANCES[row["precision"]]
    assert found["skipped"] == expected["skipped"], (row, found["skipped"], expected["skipped"])
    if row["precision"] == "fp16":
        assert found["skipped"] == ("static" not in row), (row, found["skipped"])
        assert found["scale"] == expected["scale"], (row, found["scale"], expected["scale"])
    losses = [abs(a - b) / abs(b) for a, b in zip(found["losses"], expected["losses"], strict=True)]
    weights = {key: error(weight, expected["weights"][key]) for key, weight in found["weights"].items()}
    assert max(losses) <= tolerance, (row, found["losses"], expected["losses"])
    assert max(weights.values()) <= tolerance, (row, max((found, key) for key, found in weights.items()))
    line = f"ERRORS {row['precision']} {max(losses):.1e} {max(weights.values()):.1e}\n"
    os.write(1, line.encode())  # ranks share the log


def destroyed_once(_: Any) -> None:
    """Not again when the garbage collector comes: ZeRO-1 would wait for the device in another engine's step."""
    share_groups()
    row = {"precision": "bf16", "M": 1, "recompute": "off", "zero": 1, "clip": 0.0, "P": 1, "dp": 1}
    engine = engine_of(row, ranks=1, microbatches=1)
    seen, destroy = list[int](), engine.optimizer.destroy
    engine.optimizer.destroy = lambda: (seen.append(1), destroy())
    engine.destroy()
    engine.__del__()
    assert seen == [1]


def skips_together(_: Any) -> None:
    """A gradient overflows on one rank of one replica: no rank steps, scales agree, and training goes on."""
    share_groups()
    allow_fp16()
    base = {"precision": "fp16", "M": 3, "recompute": "off", "clip": 0.1, "P": 2, "dp": 2}
    for more in ({"zero": 0}, {"zero": 1}, {"zero": 1, "offload": True}):
        row = {**base, **more}
        engine = engine_of(row, ranks=2, microbatches=3)
        overflowing = engine.stage_id == 1 and engine.grid.data_parallel_id == 0
        seen = []
        for step in range(3):
            before = result_of(engine, [])["weights"]
            hook = next(engine.module.parameters()).register_hook(lambda g: g * float("inf")) if overflowing else None
            if step != 1 and hook is not None:
                hook.remove()
            engine.train_batch(data_of(engine, {**row, "static": 0}, step))
            if hook is not None:
                hook.remove()
            after = result_of(engine, [])
            moved = any(not torch.equal(after["weights"][key], value) for key, value in before.items())
            seen.append((moved, after["skipped"], after["scale"]))
        assert seen == [(True, 0, 1024.0), (False, 1, 512.0), (True, 1, 512.0)], (row, seen)
        engine.destroy()


def changed_between_steps(_: Any) -> None:
    """A weight that a script changes alone is as before after the next step; with its fp32 copy it stays changed."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    share_groups()
    allow_fp16()
    base = {"M": 3, "recompute": "off", "clip": 0.0, "static": 128}
    for more in (
        {"precision": "bf16", "zero": 0, "P": 2, "dp": 1},
        {"precision": "bf16", "zero": 1, "P": 1, "dp": 2},
        {"precision": "fp16", "zero": 1, "P": 2, "dp": 1},
        {"precision": "fp32", "zero": 1, "P": 1, "dp": 2},
    ):
        row = {**base, **more}
        engine = engine_of(row, ranks=row["P"], microbatches=3)
        engine.train_batch(data_of(engine, row, 0))
        weight = next(engine.module.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.basic_optimizer, factor=0.0, patience=0)
        plateau.step(1.0)
        plateau.step(2.0)
        assert set(engine.get_lr()) == {0.0}, row
        full = safe_get_full_fp32_param(weight)
        for with_copy in (False, True):
            if with_copy:
                safe_set_full_fp32_param(weight, full + 1)
            weight.data.copy_(full + 1)
            engine.train_batch(data_of(engine, row, 1))
            assert torch.equal(weight, (full + with_copy).to(weight.dtype)), (row, with_copy)
        for group in engine.basic_optimizer.param_groups:  # as eval() of a schedule-free optimizer
            [p.data.mul_(2) for p in group["params"]]
        assert torch.equal(engine.module.full_precision(weight), 2 * (full + 1)), row
        assert torch.equal(weight, (full + 1).to(weight.dtype)), row
        engine.destroy()


def other_precision(_: Any) -> None:
    """Prints ``TOLD`` and what bf16 layers say of data in fp32."""
    from support.engine_ranks import data_of, make_engine

    engine = make_engine(2, 2, bf16={"enabled": True})
    try:
        engine.train_batch(data_of(engine, 0))
    except Exception as problem:
        told = "\n".join([str(problem), *getattr(problem, "__notes__", ())])
        print("TOLD", type(problem).__name__, told.replace("\n", " | "), flush=True)


def many_losses(_: Any) -> None:
    """The mean of 300 losses of 1, in bf16, is 1: a sum in bf16 would stop at 256."""
    from support.engine_ranks import as_bf16, data_of, make_engine

    engine = make_engine(2, 300, bf16={"enabled": True})
    fixed = engine.module.loss_fn
    engine.module.loss_fn = lambda output, labels: fixed(output, labels) * 0 + 1
    for batch in (engine.train_batch, engine.eval_batch):
        assert float(batch(map(as_bf16, data_of(engine, 0)))) == 1.0
    print("PASSED", flush=True)
