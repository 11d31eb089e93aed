"""What ranks run in the tests of backbones that make optimizer steps of their own, and of each alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from support.backbone_ranks import (
    ROUNDING,
    TOLERANCES,
    alone_data,
    alone_engine,
    joint_data,
    joint_engine,
    parts_of,
    spoil,
    weights,
)
from support.parity import run_sharing
from support.reference import error

from deepspeed_pulse.ir.carried import carried_actions

STEPS = 4


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """The case with steps of their own."""
    return {**case, "pulse": {**case.get("pulse", {}), "backbone_steps": "each"}}


def trains_alike(case: dict[str, Any]) -> None:
    """Losses, weights and norms of each backbone equal those of its own run alone; evaluated in the midst."""
    engine = joint_engine(apart(case))
    assert carried_actions(engine.module.plan)
    if "schedule" in case:
        scheduled(engine)
    replica, names = engine.grid.data_parallel_id, list(parts_of(case))
    starts = [head.layers.start for head in engine.module.job.heads]
    if "spoilt" in case:
        spoil(engine, starts[case["spoilt"]], case["M"])
    losses: dict[str, list[float]] = {name: [] for name in names}
    results: list[int] = []
    data = joint_data(case, 0, replica)
    for step in range(STEPS):
        total = engine.train_batch(data)
        note(losses, engine)
        results.append(engine._runtime.holdings.live.get("frozen", 0))
        assert abs(float(total) - sum(map(float, engine.losses.values()))) <= 1e-6 * abs(float(total))
        assert engine.global_steps == step + 1
        assert {len(found) for found in losses.values()} == ({step, step + 1} if step != 1 else {1, 2})
        if step == 1:
            if "then M" in case:
                engine.set_train_batch_size(2 * case["then M"] * engine.dp_world_size)
            engine.finish_backbones()
            note(losses, engine, step + 1)
            evaluated = engine.eval_batch(joint_data(case, 9, replica))
            assert set(engine.losses) == set(names) and float(evaluated) > 0
    assert results[-1] == results[-2], "bytes of frozen results are counted down as they were counted up"
    left = [part.name for part in engine.module.plan.backbones if part.carried]
    assert engine._unfinished.text.startswith(f"backbone {left[0]}: step {STEPS}" if len(left) == 1 else "backbones ")
    engine.finish_backbones()
    assert not engine._unfinished.text
    note(losses, engine, STEPS)
    engine.finish_backbones()
    found, norm = weights(engine), engine.get_global_grad_norm()
    assert (norm is not None) == ("clip" in case or hasattr(engine.optimizer, "bf16_groups"))
    engine.destroy()
    norms = [
        alike_alone(case, name, start, found, losses[name], is_spoilt=k == case.get("spoilt"))
        for k, (name, start) in enumerate(zip(names, starts, strict=True))
    ]
    if norm is not None:
        expected = math.hypot(*map(float, norms))
        assert abs(float(norm) - expected) <= ROUNDING[case.get("precision", "fp32")] * expected, (norm, norms)


def note(losses: dict[str, list[float]], engine: Any, limit: int = STEPS) -> None:
    """Each backbone's loss, if it has ended another step."""
    for name, loss in engine.losses.items():
        if len(losses[name]) < min(limit, engine.global_steps):
            losses[name].append(float(loss))


def alike_alone(
    case: dict[str, Any],
    name: str,
    start: int,
    found: dict[str, torch.Tensor],
    losses: list[float],
    *,
    is_spoilt: bool,
) -> Any:
    """Returns the norm of the last step's gradients."""
    precision = case.get("precision", "fp32")
    tolerance, rounding = TOLERANCES[precision], ROUNDING[precision]
    alone = alone_engine(case, name, start)
    if "schedule" in case:
        scheduled(alone)
    if is_spoilt:
        spoil(alone, 0, case["M"])
    data = alone_data(case, name, 0, alone.grid.data_parallel_id)
    for step, expected in enumerate(losses):
        loss = float(alone.train_batch(data))
        assert abs(loss - expected) <= rounding * loss, (name, step, loss, expected)
        if step == 1 and "then M" in case:
            alone.set_train_batch_size(2 * case["then M"] * alone.dp_world_size)
    for weight, value in weights(alone).items():
        index, _, rest = weight.partition(".")
        mine = found[f"{int(index) + start}.{rest}" if index.isdigit() else f"{index}.{name}/{rest}"]
        assert error(mine, value) < tolerance, (name, weight, error(mine, value))
    alone.destroy()
    return alone.get_global_grad_norm()


def scheduled(engine: Any) -> None:
    """Another learning rate in every step."""
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(inner(engine.optimizer), 0.5)


def inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def run_cases(cases: list[dict[str, Any]]) -> None:
    run_sharing(cases, trains_alike)


def resumes(arguments: dict[str, Any]) -> None:
    run_sharing(arguments["cases"], lambda case: _resumes(case, Path(arguments["folder"])))


def _resumes(case: dict[str, Any], folder: Path) -> None:
    """Saved in the midst, both go on as one that never stopped: this run, and another one, together."""
    straight = joint_engine(case)
    names = [str(folder / str(abs(hash(str(case))) % 10**6))]
    torch.distributed.broadcast_object_list(names)
    replica = straight.grid.data_parallel_id
    for step in range(4):
        straight.train_batch(joint_data(case, step, replica))
    expected = weights(straight)
    straight.destroy()
    first = joint_engine(apart(case))
    for step in range(2):
        first.train_batch(joint_data(case, step, replica))
    first.save_checkpoint(names[0])
    goes_on(case, first, expected)
    first.destroy()
    for other in (apart(case), case):
        engine = joint_engine(other)
        engine.load_checkpoint(names[0])
        goes_on(case, engine, expected)
        engine.destroy()


def goes_on(case: dict[str, Any], engine: Any, expected: dict[str, torch.Tensor]) -> None:
    for step in (2, 3):
        engine.train_batch(joint_data(case, step, engine.grid.data_parallel_id))
    engine.finish_backbones()
    for name, value in weights(engine).items():
        assert error(value, expected[name]) < 1e-5, name
