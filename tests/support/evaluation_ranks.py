"""What ranks run in the tests of evaluation and sampling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.engine_ranks import make_engine, torch_world
from support.parity import TOLERANCE, models, mse, reference_run, share_groups
from support.reference import Unpartitioned, error, train
from support.toy import toy_batch, toy_layers

from deepspeed_pulse.errors import ConfigError

MICROBATCHES = 3
PULSE = {
    "wave": {"solver_seconds": 0, "placement": "wave"},
    "linear": {"solver_seconds": 0, "placement": "linear"},
    "off": False,
}


def evaluated(engine: Any, *, labels: bool = True) -> Iterator[Any]:
    for m in itertools.count():
        inputs, found = toy_batch(100, m, engine.grid.data_parallel_id)
        yield inputs, found if labels else None


def endless(engine: Any) -> Iterator[Any]:
    """The batches of all training steps, one after the other."""
    for number in itertools.count():
        yield toy_batch(number // MICROBATCHES, number % MICROBATCHES, engine.grid.data_parallel_id)


def on_four_ranks(folder: str) -> None:
    share_groups()
    options(folder)
    several_losses()
    print("PASSED", flush=True)


def options(folder: str) -> None:
    """Every option on 2 x 2 ranks gives what upstream documents; training goes on with its own data and losses."""
    replicas = torch_world() // 2
    for name, pulse in PULSE.items():
        monitor = {"enabled": True, "output_path": folder, "job_name": name}
        engine = make_engine(2, MICROBATCHES, pulse=pulse, csv_monitor=monitor)
        engine.set_dataiterator(endless(engine))
        losses, *_ = reference_run("toy", MICROBATCHES, replicas, 0.0)
        with torch.no_grad():
            twin = Unpartitioned(toy_layers())
            check_options(engine, twin, replicas)
        for expected in losses:
            assert close(engine.train_batch(), expected), name
            engine.eval_batch(evaluated(engine, labels=False), compute_loss=False)
            try:
                engine.eval_batch(evaluated(engine), reduce_output="sum")
            except ConfigError as problem:
                assert "expected \"avg\" or None, found 'sum'" in str(problem)
        engine.destroy()
        if engine.global_rank == 0:
            rows = Path(folder, name, "Train_Samples_eval_loss.csv").read_text().splitlines()
            assert len(rows) == 1 + 4, rows


def check_options(engine: Any, twin: Unpartitioned, replicas: int) -> None:
    """What each rank gets; a mean is over microbatches and replicas, a list is this replica's."""
    last, mine = engine.is_last_stage(), engine.grid.data_parallel_id
    outputs = [[twin(toy_batch(100, m, d)[0]) for m in range(5)] for d in range(replicas)]
    found = [[mse(outputs[d][m], toy_batch(100, m, d)[1]) for m in range(5)] for d in range(replicas)]
    for count in (1, MICROBATCHES, 5):
        mean = sum(sum(row[:count]) for row in found) / replicas / count
        assert close(engine.eval_batch(evaluated(engine), num_micro_batches=count), mean)
    loss, logits = engine.eval_batch(evaluated(engine), return_logits=True, bcast_loss=False)
    assert close(loss, sum(sum(row[:MICROBATCHES]) for row in found) / replicas / MICROBATCHES)
    assert (logits is not None) == last
    if last:
        assert error(logits, outputs[mine][MICROBATCHES - 1]) < TOLERANCE
    rows = engine.eval_batch(evaluated(engine), reduce_output=None, bcast_loss=False)
    parts = engine.eval_batch(
        evaluated(engine, labels=False), compute_loss=False, reduce_output=None, num_micro_batches=5
    )
    average = engine.eval_batch(evaluated(engine, labels=False), compute_loss=False, num_micro_batches=2)
    if not last:
        assert rows is None and parts is None and average is None
        return
    assert len(rows) == MICROBATCHES and all(map(close, rows, found[mine]))
    assert len(parts) == 5 and all(error(a, b) < TOLERANCE for a, b in zip(parts, outputs[mine], strict=True))
    assert error(average, sum(sum(row[:2]) for row in outputs) / replicas / 2) < TOLERANCE


def close(found: Any, expected: Any) -> bool:
    return abs(float(found) - float(expected)) <= TOLERANCE * abs(float(expected))


def two_losses(output: torch.Tensor, labels: torch.Tensor) -> Any:
    return mse(output, labels), output.mean()


def several_losses() -> None:
    """A loss function may return several for an evaluation; each is averaged."""
    replicas = torch_world() // 2
    for name, pulse in PULSE.items():
        engine = make_engine(2, MICROBATCHES, pulse=pulse)
        engine.module.loss_fn = two_losses
        found = engine.eval_batch(evaluated(engine), bcast_loss=False)
        assert (found is not None) == engine.is_last_stage(), name
        if found is not None:
            with torch.no_grad():
                twin = Unpartitioned(toy_layers())
                batches = [toy_batch(100, m, d) for m in range(MICROBATCHES) for d in range(replicas)]
                rows = [two_losses(twin(inputs), labels) for inputs, labels in batches]
            means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
            assert len(found) == 2 and all(map(close, found, means)), (name, found, means)
        engine.destroy()


# -- sampling --------------------------------------------------------------------------------

IMAGES, TIMES = 3, (900, 600, 300)


def sample(predict: Any) -> torch.Tensor:
    """A short deterministic denoising of three images, two latents each; ``predict(latents, time)`` is the model."""
    latents = torch.randn(2 * IMAGES, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    for time in TIMES:
        latents = 0.9 * latents - 0.3 * predict(latents, time)
    return latents


def conditions(latents: torch.Tensor, time: int) -> list[Any]:
    """A microbatch an image."""
    texts = torch.randn(IMAGES, 2, 5, 32, generator=torch.Generator().manual_seed(6))
    return [
        {"sample": part, "timestep": torch.full((2,), time), "encoder_hidden_states": text}
        for part, text in zip(latents.split(2), texts, strict=True)
    ]


def samples(_: Any) -> None:
    """Between training steps the ranks denoise together; under a wave the first rank alone does the arithmetic."""
    share_groups()
    ranks = torch_world()
    layers, batch, first = models("unet")
    twin = Unpartitioned(layers())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    engine = make_engine(ranks, 2, model="unet")
    alone = engine.is_first_stage()
    assert alone == engine.is_last_stage()

    def predict(latents: torch.Tensor, time: int) -> torch.Tensor:
        data = iter([(inputs, None) for inputs in conditions(latents, time)]) if alone else None
        parts = engine.eval_batch(data, compute_loss=False, reduce_output=None, num_micro_batches=IMAGES)
        return torch.cat(parts) if alone else torch.zeros_like(latents)

    def predict_alone(latents: torch.Tensor, time: int) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([twin(inputs, first) for inputs in conditions(latents, time)])

    for step in range(2):
        found = sample(predict)
        if alone:
            assert error(found, sample(predict_alone)) < TOLERANCE, step
        loss = engine.train_batch(batch(step, m, 0) for m in itertools.count())
        expected, _ = train(twin, optimizer, [batch(step, m, 0) for m in range(2)], mse, 0.0, first)
        assert close(loss, expected), (step, loss, expected)
        mean = engine.eval_batch(batch(9, m, 0) for m in itertools.count())
        with torch.no_grad():
            rows = [mse(twin(inputs, first), labels) for inputs, labels in (batch(9, m, 0) for m in range(2))]
        assert close(mean, sum(rows) / 2)
    print("PASSED", flush=True)
