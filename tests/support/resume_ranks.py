"""What ranks run in the tests of saving and resuming under other plans."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.fused import fused_adamw
from support.parity import share_groups
from support.precision_ranks import allow_fp16, cast, mse
from support.toy import toy_batch, toy_layers

from deepspeed_pulse.engine.checkpoints.digests import SUMS_FILE, digest_of, write_sums
from deepspeed_pulse.engine.checkpoints.files import SafeCheckpointEngine
from deepspeed_pulse.engine.checkpoints.optimizer_state import own_parts
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord
from deepspeed_pulse.errors import PulseError

GLOBAL_MICROBATCHES = 4
BEFORE, AFTER = 2, 2
"""Optimizer steps before and after the checkpoint."""


def adamw_by_group(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 1e-3, "weight_decay": 0.0}], lr=1e-2)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: fused_adamw(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "two groups": lambda parameters: adamw_by_group(list(parameters)),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


class Gain(torch.nn.Module):
    """A weight without dimensions, as gates have."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x


def gained_layers() -> list[Any]:
    return [*toy_layers()[:4], Gain(), *toy_layers()[4:]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to run the same training."""

    ranks: int
    zero: int = 0
    placement: str = "wave"
    waves: int = 1
    off: bool = False
    dtype: str = "float32"
    optimizer: str = "adamw"
    gain: bool = False
    in_turn: bool = False
    """Flat buffers take weights in turn for each replica."""

    def __str__(self) -> str:
        plan = "1F1B without pulse" if self.off else f"{self.placement} W={self.waves}"
        more = f"{', a gain' if self.gain else ''}{', in turn' if self.in_turn else ''}"
        return f"{plan}, P={self.ranks}, ZeRO-{self.zero}, {self.dtype}, {self.optimizer}{more}"


def engine_of(job: Job) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    replicas = torch.distributed.get_world_size() // job.ranks
    pulse: Any = {"solver_seconds": 0, "placement": job.placement, "waves": job.waves}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GLOBAL_MICROBATCHES // replicas,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": job.zero,
            "round_robin_gradients": job.in_turn,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        # the scale grows in every step, so that a new one is not where the saved one was
        "fp16": {"enabled": job.dtype == "float16", "initial_scale_power": 8, "loss_scale_window": 1, "hysteresis": 2},
        "pulse": False if job.off else pulse,
    }
    layers = gained_layers() if job.gain else toy_layers()
    module = PipelineModule(layers=layers, num_stages=job.ranks, loss_fn=mse, seed_layers=True, config=config)
    optimizer: Any = OPTIMIZERS[job.optimizer](module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def data_of(engine: Any, step: int) -> Iterator[Any]:
    """The same global batch for any number of replicas."""
    share = engine.gradient_accumulation_steps()
    first = engine.grid.data_parallel_id * share
    dtype = next(engine.module.parameters()).dtype
    return (cast(toy_batch(step, first + m, 0), dtype) for m in itertools.count())


def train(engine: Any, steps: range) -> list[float]:
    return [float(engine.train_batch(data_of(engine, step)).detach()) for step in steps]


def resumes(case: dict[str, Any]) -> None:
    """Each base job is saved after two steps; each target goes on from there and finds the same losses."""
    share_groups()
    allow_fp16()
    import deepspeed

    deepspeed.init_distributed()
    folder = Path(case["folder"])
    for number, (base, targets) in enumerate(case["cases"]):
        place = folder / str(number)
        base = Job(**base)
        engine = engine_of(base)
        train(engine, range(BEFORE))
        engine.save_checkpoint(place, client_state={"note": 7})
        scale = scale_of(engine)
        torch.save(full_weights(engine), place / f"full{torch.distributed.get_rank()}.pt")
        torch.distributed.barrier()
        weights = {name: p for file in place.glob("full*.pt") for name, p in torch.load(file).items()}
        expected = train(engine, range(BEFORE, BEFORE + AFTER))
        engine.destroy()
        for target in (Job(**options) for options in targets):
            engine = engine_of(target)
            with opened() as files:
                _, state = engine.load_checkpoint(place)
            check_opened(engine, place / f"global_step{BEFORE}", files)
            assert state["note"] == 7 and engine.global_steps == BEFORE
            assert scale_of(engine) == scale, (base, target, scale_of(engine), scale)
            assert all(torch.equal(p, weights[name]) for name, p in full_weights(engine).items()), (base, target)
            found = train(engine, range(BEFORE, BEFORE + AFTER))
            tolerance = 0.0 if target == base else case.get("tolerance", 1e-5)
            worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            assert worst <= tolerance, f"{base} -> {target}: {found} instead of {expected}"
            engine.load_checkpoint(place, load_optimizer_states=False, load_lr_scheduler_states=False)
            check_weights_alone(engine, weights)
            engine.destroy()
    if case.get("naive"):
        naive_load_diverges(folder / "naive")
    print("PASSED", flush=True)


@contextmanager
def opened() -> Iterator[set[str]]:
    """Names of the files with parts of flat buffers that this rank reads inside."""
    found: set[str] = set()
    genuine = SafeCheckpointEngine._read

    def read(self: Any, path: Path, map_location: Any) -> Any:
        found.update({path.name} if path.match("*_optim_states.pt") else ())
        return genuine(self, path, map_location)

    with patch.object(SafeCheckpointEngine, "_read", read):
        yield found


def check_opened(engine: Any, folder: Path, files: set[str]) -> None:
    """Its own under the same layout; else those that hold its numbers, and one of each rank that has others' only."""
    saved = CheckpointRecord.read(folder)
    assert saved is not None
    if saved.same_layout(CheckpointRecord.of(engine)):
        assert len(files) == bool(saved.zero_stage), files
        return
    mine, held, seen = own_parts(engine.optimizer, engine.param_names), set(), Counter[str]()
    for path in sorted(folder.glob("*_optim_states.pt")):
        for addresses in torch.load(path, weights_only=False)["optimizer_state_dict"]["param_slice_mappings"]:
            for name, address in addresses.items():
                if set(mine.get(name, ())) & set(range(seen[name], seen[name] + address.numel)):
                    held.add(path.name)
                seen[name] += address.numel
    ranks, more = ([name.partition("_mp_rank_")[2] for name in names] for names in (held, files - held))
    assert held <= files and len(set(more)) == len(more) and not set(ranks) & set(more), (held, files)


def check_weights_alone(engine: Any, saved: dict[str, torch.Tensor]) -> None:
    """They are the saved ones, as precise as a layer file; so are the copies that the next step goes on from."""
    full = full_weights(engine)
    for name, p in engine.module.named_parameters():
        assert torch.equal(p, saved[name].to(p.dtype)), name
        assert torch.equal(full[name], p.float()), name


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """In full precision, which layer files do not hold."""
    return {name: engine.module.full_precision(p).clone() for name, p in engine.module.named_parameters()}


def scale_of(engine: Any) -> list[Any]:
    """Where dynamic loss scaling stands."""
    if not engine.fp16_enabled():
        return []
    scaler = getattr(engine.optimizer, "loss_scale_config", getattr(engine.optimizer, "loss_scaler", None))
    return [engine.optimizer.loss_scale, scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter]


def naive_load_diverges(place: Path) -> None:
    """Upstream's own loading takes optimizer state of other layers without a word; ours does not."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    base, target = Job(ranks=4, zero=1), Job(ranks=4, zero=1, placement="linear")
    engine = engine_of(base)
    train(engine, range(BEFORE))
    engine.save_checkpoint(place)
    expected = train(engine, range(BEFORE, BEFORE + AFTER))
    engine.destroy()
    engine = engine_of(target)
    try:
        DeepSpeedEngine.load_checkpoint(engine, str(place))
        failed = False
    except (RuntimeError, ValueError):  # where sizes happen to differ, upstream fails instead
        failed = True
    votes: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(votes, failed)
    if not any(votes):
        found = train(engine, range(BEFORE, BEFORE + AFTER))
        assert max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) > 1e-4
    engine.destroy()


def refuses(case: dict[str, Any]) -> None:
    """Checkpoints that cannot be resumed: one clear error on every rank, and the weights still load."""
    share_groups()
    import deepspeed

    deepspeed.init_distributed()
    folder = Path(case["folder"])
    engine = engine_of(Job(ranks=2))
    train(engine, range(1))
    engine.save_checkpoint(folder)
    engine.destroy()
    place = folder / "global_step1"
    other = engine_of(Job(ranks=2, optimizer="sgd"))
    expect(other, folder, "optimizer: written with AdamW, this job runs SGD; use the same, or load no optimizer state")
    other.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    (folder / "global_step0.removed").mkdir(exist_ok=True)
    (folder / "global_step0.removed" / "mp_rank_00_model_states.pt").touch()
    expect(other, folder, "expected a checkpoint 'nothing', found global_step1; give", tag="nothing")
    other.destroy()
    grouped = engine_of(Job(ranks=2, optimizer="two groups"))
    train(grouped, range(1))
    grouped.save_checkpoint(folder / "grouped")
    grouped.destroy()
    plain = engine_of(Job(ranks=2))
    train(plain, range(1))
    schedule, plain.lr_scheduler = plain.lr_scheduler, None
    plain.save_checkpoint(folder / "constant")
    plain.lr_scheduler = schedule
    expect(
        plain, folder / "constant", "expected the state of a learning rate schedule, as this run has one, found none"
    )
    plain.load_checkpoint(folder / "constant", load_lr_scheduler_states=False)
    plain.destroy()
    engine = engine_of(Job(ranks=2, placement="linear"))
    expect(engine, folder / "grouped", "in one group of this job's optimizer and were trained in groups with different")
    engine.destroy()
    factored = engine_of(Job(ranks=2, optimizer="adafactor"))
    train(factored, range(1))
    factored.save_checkpoint(folder / "factored")
    factored.destroy()
    engine = engine_of(Job(ranks=2, optimizer="adafactor", zero=1))
    expect(engine, folder / "factored", "Adafactor: expected ZeRO stage 0, with which it was written, found 1")
    engine.destroy()
    partitioned = engine_of(Job(ranks=2, zero=1))
    train(partitioned, range(1))
    partitioned.save_checkpoint(folder / "elastic")
    partitioned.destroy()
    as_elastic(folder / "elastic" / "global_step1")
    engine = engine_of(Job(ranks=2, placement="linear"))
    expect(engine, folder / "elastic", "written with zero_optimization.elastic_checkpoint, which leaves learning rates")
    engine.destroy()
    engine = engine_of(Job(ranks=2, dtype="bfloat16"))
    expect(engine, folder, "dtype: written with float32, this job runs bfloat16")
    engine.destroy()
    engine = engine_of(Job(ranks=2, placement="linear"))
    record = place / "pulse_checkpoint.json"
    text = record.read_text()
    torch.distributed.barrier()
    change(record, text, "layers", ["x"])
    expect(engine, folder, "written by a model of 1 layers, this one has 10; the first that differs is layer 0")
    change(record, text, "parameters", [[["nothing"]], []])
    expect(engine, folder, "no optimizer state of")
    change(record, text, "surprise", 1)
    expect(engine, folder, "unknown field 'surprise'")
    change(record, text, None, None)
    expect(engine, folder, "nothing says which rank trained which parameter")
    change(record, text, "zero_stage", 0)
    engine.load_checkpoint(folder)
    damaged = place / "mp_rank_01_model_states.pt"
    if torch.distributed.get_rank() == 0:
        damaged.write_bytes(damaged.read_bytes()[:2000])
    torch.distributed.barrier()
    expect(engine, folder, "mp_rank_01_model_states.pt: is damaged: expected SHA-256")
    engine.destroy()
    engine = engine_of(Job(ranks=2))
    expect(engine, folder, "mp_rank_01_model_states.pt: is damaged: expected SHA-256")
    change(record, text, "format", "pulse-checkpoint/1")
    if torch.distributed.get_rank() == 0:
        (place / SUMS_FILE).unlink()
    torch.distributed.barrier()
    expect(engine, folder, "mp_rank_01_model_states.pt: expected a whole file, found a damaged one")
    print("PASSED", flush=True)


def as_elastic(place: Path) -> None:
    """What DeepSpeed keeps with ``zero_optimization.elastic_checkpoint``: state by group, without their options."""
    if torch.distributed.get_rank() == 0:
        for path in place.glob("*_optim_states.pt"):
            content = torch.load(path, weights_only=False)
            state = content["optimizer_state_dict"]
            state["base_optimizer_state"] = list(state["base_optimizer_state"]["state"].values())
            torch.save(content, path)
        sums = place / SUMS_FILE
        write_sums(place, {path.name: digest_of(path) for path in place.iterdir() if path != sums})
    torch.distributed.barrier()


def expect(engine: Any, folder: Path, message: str, **options: Any) -> None:
    try:
        engine.load_checkpoint(folder, **options)
    except PulseError as problem:
        assert message in str(problem), f"expected {message!r} in {problem}"
        return
    raise AssertionError(f"no error: {message}")


def change(record: Path, text: str, key: str | None, value: Any) -> None:
    """The record with one field changed, and its digest; without a key there is neither."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        sums = record.with_name(SUMS_FILE)
        if key is None:
            record.unlink()
            sums.unlink()
        else:
            record.write_text(json.dumps({**json.loads(text), key: value}))
            write_sums(record.parent, {path.name: digest_of(path) for path in record.parent.iterdir() if path != sums})
    torch.distributed.barrier()
