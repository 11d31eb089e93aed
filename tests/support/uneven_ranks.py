"""Replicas whose data use other weights, copies of a weight whose sums lie apart, and runs that begin anew or go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.backbone_ranks import joint_data, joint_engine, weights
from support.cases import run_each
from support.engine_ranks import as_bf16, data_of, make_engine
from support.parity import mse
from support.precision_ranks import allow_fp16, cast
from support.toy import toy_batch

BF16 = {"bf16": {"enabled": True}}
ZERO_1 = {"zero_optimization": {"stage": 1}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, ZeRO-1": ZERO_1,
    "bf16": BF16,
    "bf16, ZeRO-1": {**BF16, **ZERO_1},
    "bf16, ZeRO-1, sums in fp32": {**BF16, **ZERO_1, **FP32_SUMS},
}
CLIP = 0.1


class Choice(torch.nn.Module):
    """One of two weights, as the sign of its input says; a third one, of another size, only where that is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.null = torch.nn.Parameter(torch.randn(64, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.null.sum(0) if x[0, 0] > 0 else self.right(x)


def choosing_layers() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    return [LayerSpec(Choice), *(LayerSpec(torch.nn.Linear, 4, 4) for _ in range(3))]


def choosing_data(engine: Any, step: int) -> Iterator[Any]:
    """Positive on one replica, negative on the other."""
    replica, dtype = engine.grid.data_parallel_id, next(engine.module.parameters()).dtype
    generator = torch.Generator().manual_seed(7 + replica + 10 * step)
    while True:
        x, y = torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)
        x[:, 0] = x[:, 0].abs() * (1 if replica == 0 else -1)
        yield x.to(dtype), (5 * y).to(dtype)


def engine_of(ranks: int, microbatches: int, **given: Any) -> Any:
    more = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    pulse = {"solver_seconds": 0, "placement": "linear"}
    return make_engine(ranks, microbatches, **{"pulse": pulse, "optimizer": sgd, **more, **given})


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=1.0)


def toy_data(engine: Any, step: int) -> Iterator[Any]:
    batches = data_of(engine, step)
    return map(as_bf16, batches) if engine.bfloat16_enabled() else batches


def moved(precision: str, clip: float) -> dict[str, torch.Tensor]:
    """By how much two steps move each weight; alike on both replicas."""
    engine = engine_of(1, 2, listed=choosing_layers(), gradient_clipping=clip, **PRECISIONS[precision])
    before = weights(engine)
    for step in range(2):
        engine.train_batch(choosing_data(engine, step))
    found = weights(engine)
    for name, weight in found.items():
        others = weight.clone()
        torch.distributed.broadcast(others, 0)
        assert torch.equal(others, weight), name
    engine.destroy()
    return {name: found[name] - before[name] for name in found}


@cache
def moved_in_fp32(clip: float) -> dict[str, torch.Tensor]:
    return moved("fp32", clip)


def used_by_one(precision: str) -> None:
    """Weights that one replica's data use get its gradient, and are clipped with all others."""
    for clip in (0.0, CLIP):
        expected, found = moved_in_fp32(clip), moved(precision, clip)
        for name, way in expected.items():
            assert way.norm() > 0
            far = float((found[name] - way).norm() / way.norm())
            assert far < (0.05 if "bf16" in precision else 1e-5), (clip, name, far)


def copies_agree(_: str) -> None:
    """Of a tied weight, where ZeRO keeps the sum of microbatches in another dtype than the gradients have."""
    allow_fp16()
    precision = {"fp16": {"enabled": True, "loss_scale": 128.0}, **ZERO_1, **FP32_SUMS}
    engine = engine_of(2, 3, cuts=[4], loss=lambda output, y: mse(output.float(), y.float()), **precision)
    for step in range(3):
        engine.train_batch(cast(batch, torch.float16) for batch in toy_data(engine, step))
    tied = dict(engine.module.named_parameters())["tied_modules.square.weight"].detach().float()
    first = tied.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, tied)
    engine.destroy()


def clips_as_the_config_says(precision: str, folder: Path) -> None:
    """Not as the run that saved the checkpoint did."""
    place = folder / precision
    engine = engine_of(1, 2, gradient_clipping=1.0, **PRECISIONS[precision])
    engine.train_batch(toy_data(engine, 0))
    engine.save_checkpoint(str(place), tag="one")
    engine.destroy()
    engine = engine_of(1, 2, gradient_clipping=0.01, **PRECISIONS[precision])
    engine.load_checkpoint(str(place), tag="one")
    before = weights(engine)
    engine.train_batch(toy_data(engine, 1))
    square = sum(float((weight - before[name]).square().sum()) for name, weight in weights(engine).items())
    assert square**0.5 < 0.011, square**0.5
    engine.destroy()


def begins_anew(precision: str, folder: Path) -> None:
    """A run that goes back to a checkpoint from before the first step has no moments of its own steps left."""

    def adam(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-2)

    place = folder / f"new {precision}"
    engine = engine_of(2, 3, cuts=[4], optimizer=adam, **PRECISIONS[precision])
    engine.save_checkpoint(str(place), tag="none")
    engine.destroy()
    for cuts in ([4], [6]):
        losses = []
        for steps in (0, 3):
            engine = engine_of(2, 3, cuts=cuts, optimizer=adam, **PRECISIONS[precision])
            for step in range(steps):
                engine.train_batch(toy_data(engine, 50 + step))
            engine.load_checkpoint(str(place), tag="none")
            losses.append([float(engine.train_batch(toy_data(engine, step))) for step in range(3)])
            engine.destroy()
        assert losses[0] == losses[1], cuts


class Stream:
    """A loader that knows where it is, and is set back; it may fail once."""

    def __init__(self) -> None:
        self.position, self.fails = 0, False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self.fails:
            self.fails = False
            raise OSError("the storage is away for a moment")
        self.position += 1
        return toy_batch(0, self.position - 1, 0)


def reads_where_it_is(_: str, folder: Path) -> None:
    """After a load, a step has data that is read then, not what a step before began with and was refused."""
    engine, stream = engine_of(1, 2), Stream()
    engine.train_batch(stream)
    engine.save_checkpoint(str(folder / "stream"), tag="one")
    at = stream.position
    stream.fails = engine.global_rank == 1
    try:
        engine.train_batch(stream)
    except Exception as refused:
        assert "storage is away" in str(refused)
    else:
        raise AssertionError("one rank's data failed")
    engine.load_checkpoint(str(folder / "stream"), tag="one")
    stream.position = at
    engine.train_batch(stream)
    assert stream.position == at + 2
    engine.destroy()


def ended(engine: Any) -> dict[str, torch.Tensor]:
    """The weights of several backbones, when each has made its last step."""
    engine.finish_backbones()
    found = weights(engine)
    engine.destroy()
    return found


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


def a_refused_batch_leaves_nothing(mode: str) -> None:
    """Of several backbones: a script that catches the error and goes on trains as if the step had not been tried."""
    from deepspeed_pulse.errors import BatchError

    case = {"set": "two toys", "P": 1, "M": 3, "pulse": {"backbone_steps": mode}}

    def bad(batches: Iterator[Any]) -> Iterator[Any]:
        for number, (inputs, labels) in enumerate(batches):
            first, *others = inputs
            short = {name: value[:1] for name, value in inputs[first].items()}
            yield ({**{name: inputs[name] for name in others}, first: short} if number == 2 else inputs), labels

    found = []
    for refuses in (False, True):
        engine = joint_engine(case)
        engine.train_batch(joint_data(case, 0, 0))
        if refuses:
            try:
                engine.train_batch(bad(joint_data(case, 1, 0)))
            except BatchError:
                pass
            else:
                raise AssertionError("the batch is to be refused")
        for step in (2, 3):
            engine.train_batch(joint_data(case, step, 0))
        found.append(ended(engine))
    assert_alike(*found)


def one_rank_trains_one_backbone(precision: str) -> None:
    """Each backbone makes its own steps, and a rank has nothing of one of them that trains."""
    found = []
    for mode in ("together", "each"):
        case = {"set": "two toys", "P": 2, "M": 4, "placement": "linear", "adam": True, "precision": precision}
        engine = joint_engine({**case, "untrained": "toy1", "pulse": {"backbone_steps": mode}})
        for step in range(3):
            engine.train_batch(joint_data(case, step, 0))
        found.append(ended(engine))
    assert_alike(*found)


def ends_as_it_began(_: str, folder: Path) -> None:
    """A step that began inside ``torch.autocast`` ends under it, whoever ends it."""
    found = []
    for saves in (False, True):
        case = {"set": "two toys", "P": 2, "M": 4, "pulse": {"backbone_steps": "each"}}
        engine = joint_engine(case)
        for step in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                engine.train_batch(joint_data(case, step, 0))
        if saves:
            engine.save_checkpoint(str(folder / "autocast"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(ended(engine))
    assert_alike(*found)


def frozen_for_a_while(precision: str) -> None:
    """Layers of a backbone, between steps that have ended."""
    found = []
    for mode in ("together", "each"):
        case = {"set": "two toys", "P": 2, "M": 4, "placement": "linear", "precision": precision}
        engine = joint_engine({**case, "pulse": {"backbone_steps": mode}})
        for step in range(6):
            if step % 2 == 0:
                engine.finish_backbones()
                for name, parameter in engine.module.named_parameters():
                    parameter.requires_grad_(step != 2 or not name.startswith(("0.", "2.", "3.")))
            engine.train_batch(joint_data(case, step, 0))
        found.append(ended(engine))
    assert_alike(*found)


CHECKS: dict[str, Callable[..., None]] = {
    "weights that one replica uses": used_by_one,
    "copies of a tied weight": copies_agree,
    "clipping after a load": clips_as_the_config_says,
    "back to the start": begins_anew,
    "data after a load": reads_where_it_is,
    "a refused batch": a_refused_batch_leaves_nothing,
    "a rank without a backbone": one_rank_trains_one_backbone,
    "frozen for a while": frozen_for_a_while,
    "an end outside of autocast": ends_as_it_began,
}
SAVING = ("clipping after a load", "back to the start", "data after a load", "an end outside of autocast")


def run(arguments: dict[str, Any]) -> None:
    """Each of ``cases``, a check and of what, in a folder."""

    def one(case: list[str]) -> None:
        check, of = case
        more = [Path(arguments["folder"])] if check in SAVING else []
        CHECKS[check](of, *more)

    run_each(arguments["cases"], one)
