"""What ranks run in the tests of universal checkpoints: DeepSpeed's converter and engine beside ours."""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.parity import share_groups
from support.plain_ranks import batch, layers_of
from support.toy import WIDTH, toy_batch, toy_layers
from support.versions import mend_upstream
from torch import nn

from deepspeed_pulse.errors import FileError, PlanError

BEFORE, AFTER = 2, 2
"""Optimizer steps before and after the checkpoint."""
GLOBAL_MICROBATCHES = 4
PAIR = ("base", "upper")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to run the same training; ``plan``: "stock" (upstream's classes), "off", or a placement."""

    ranks: int
    plan: str = "wave"
    zero: int = 1
    model: str = "plain"
    backbones: tuple[str, ...] = ()
    """Each of the model's layers."""
    dtype: str = "float32"


def shared_and_frozen() -> list[nn.Module]:
    """Eight layers: one module lies twice in the middle, the last three are frozen."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(7)]
    for layer in layers[5:]:
        layer.requires_grad_(False)
    return [*layers[:4], layers[2], *layers[4:], nn.Linear(WIDTH, 3).requires_grad_(False)]


def linear() -> list[nn.Module]:
    return [nn.Linear(WIDTH, width) for width in (WIDTH, WIDTH, WIDTH, 3)]


MODELS = {"toy": toy_layers, "shared": shared_and_frozen, "linear": linear}


def engine_of(job: Job, **blocks: Any) -> Any:
    import deepspeed
    from deepspeed import pipe as upstream

    import deepspeed_pulse as ours

    share = GLOBAL_MICROBATCHES // (torch.distributed.get_world_size() // job.ranks)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": share,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        **blocks,
    }
    pipe: Any = upstream if job.plan == "stock" else ours
    arguments: dict[str, Any] = {"partition_method": "uniform"} if job.plan in ("stock", "off") else {}
    if job.plan != "stock":
        config["pulse"] = False if job.plan == "off" else {"solver_seconds": 0, "placement": job.plan}
        arguments["config"] = config
    layers = MODELS.get(job.model, lambda: layers_of(pipe))
    if job.backbones:
        arguments["backbones"] = {n: ours.Backbone(layers(), loss_fn=nn.functional.mse_loss) for n in job.backbones}
    else:
        arguments |= {"layers": layers(), "loss_fn": nn.functional.mse_loss}
    module = pipe.PipelineModule(num_stages=job.ranks, seed_layers=True, **arguments)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def train(engine: Any, job: Job, steps: range) -> list[float]:
    """The same global batch for any number of replicas."""
    share = engine.gradient_accumulation_steps()
    first = engine.grid.data_parallel_id * share
    dtype = next(engine.module.parameters()).dtype

    def one(step: int, microbatch: int) -> Any:
        if job.model == "toy":
            return toy_batch(step, microbatch, 0)
        inputs, labels = (tensor.to(dtype) for tensor in batch(step, microbatch))
        if job.backbones:
            return dict.fromkeys(job.backbones, inputs), dict.fromkeys(job.backbones, labels)
        return inputs, labels

    return [float(engine.train_batch(one(step, first + m) for m in itertools.count()).detach()) for step in steps]


def convert(folder: Path) -> None:
    """As ``python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`` on rank 0."""
    from deepspeed.checkpoint.ds_to_universal import main

    if torch.distributed.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        main(
            SimpleNamespace(
                input_folder=str(folder / "step"),
                output_folder=str(folder / "universal"),
                inject_missing_state=True,
                **options,
            )
        )
    torch.distributed.barrier()


def resumes(folder: str) -> None:
    """Each base is saved and converted; each target goes on from there. Failures are told by the cases' names."""
    import deepspeed

    share_groups()
    deepspeed.init_distributed()
    mend_upstream()
    stock, off, linear4 = Job(ranks=2, plan="stock"), Job(ranks=2, plan="off"), Job(ranks=4, plan="linear")
    wave2, wave4_without_zero = Job(ranks=2), Job(ranks=4, zero=0)
    shared2, shared4 = Job(ranks=2, model="shared"), Job(ranks=4, plan="linear", model="shared")
    bf16, bf16_linear = Job(ranks=2, dtype="bfloat16"), Job(ranks=4, plan="linear", dtype="bfloat16")
    cases = [
        (stock, [wave2, linear4, off, wave4_without_zero]),
        (wave2, [stock, off, linear4]),
        (linear4, [wave2]),
        (off, [stock]),
        (shared2, [shared4]),
        (shared4, [shared2]),
        (Job(ranks=4, model="toy"), [Job(ranks=2, model="toy")]),
        (bf16, [bf16_linear]),
        (Job(ranks=2, model="linear", backbones=PAIR), [Job(ranks=4, plan="linear", model="linear", backbones=PAIR)]),
    ]
    wrong = []
    for number, (base, targets) in enumerate(cases):
        place = Path(folder, str(number))
        expected = saved_and_converted(base, place)
        for target in targets:
            try:
                goes_on(target, place, expected, 1e-2 if target.dtype == "bfloat16" else 1e-5)
            except Exception:
                wrong.append(f"{base} -> {target}: {traceback.format_exc()}")
    assert not wrong, "\n".join(wrong)
    refuses(Path(folder, "0"), off)
    refuses_one_of_two(Path(folder, str(len(cases) - 1)))
    print("PASSED", flush=True)


def saved_and_converted(base: Job, place: Path) -> list[float]:
    """The losses of the steps after."""
    from deepspeed.checkpoint.constants import PIPELINE_REPLICATED_PARAMETER_PATTERNS, UNIVERSAL_CHECKPOINT_INFO

    engine = engine_of(base)
    train(engine, base, range(BEFORE))
    tied = [r"tied_modules\.square\.weight"] if base.plan == "stock" else []
    info = {UNIVERSAL_CHECKPOINT_INFO: {PIPELINE_REPLICATED_PARAMETER_PATTERNS: tied}}
    engine.save_checkpoint(str(place), tag="step", client_state={"note": 7, **info})
    expected = train(engine, base, range(BEFORE, BEFORE + AFTER))
    engine.destroy()
    torch.distributed.barrier()
    convert(place)
    return expected


def goes_on(target: Job, place: Path, expected: list[float], tolerance: float) -> None:
    engine = engine_of(target, checkpoint={"load_universal": True})
    _, state = engine.load_checkpoint(str(place))
    assert state["note"] == 7 and engine.global_steps == BEFORE, (state, engine.global_steps)
    found = train(engine, target, range(BEFORE, BEFORE + AFTER))
    engine.destroy()
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= tolerance, f"{found} instead of {expected}"


def refuses(place: Path, job: Job) -> None:
    """The wrong kind of checkpoint, or one with a file missing: the same error on every rank, nothing changed."""
    rank = torch.distributed.get_rank()
    engine = engine_of(job)
    before = [p.clone() for p in engine.module.parameters()]
    says(lambda: engine.load_checkpoint(str(place), tag="universal"), "a universal checkpoint; to load it, write")
    engine.destroy()
    engine = engine_of(job, checkpoint={"load_universal": True})
    says(lambda: engine.load_checkpoint(str(place), tag="step"), "expected a universal checkpoint, found another")
    says(lambda: engine.load_checkpoint(str(place.parent)), "found no file latest_universal")
    if rank == 0:
        (place / "universal" / "zero" / "0.weight" / "fp32.pt").unlink()
    torch.distributed.barrier()
    says(lambda: engine.load_checkpoint(str(place)), "0.weight/fp32.pt: expected a file of the checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.destroy()


def refuses_one_of_two(place: Path) -> None:
    """A run of one alone, whose weights have the names of the other's; a folder that is older is not known to be so."""
    engine = engine_of(Job(ranks=2, model="linear"), checkpoint={"load_universal": True})
    says(lambda: engine.load_checkpoint(str(place)), "written by a run of base, upper, this one has one; load one")
    if torch.distributed.get_rank() == 0:
        for file in (place / "universal").glob("mp_rank_*.pt"):
            state = torch.load(file, weights_only=False)
            del state["pulse_checkpoint"]
            torch.save(state, file)
    torch.distributed.barrier()
    engine.load_checkpoint(str(place))
    assert engine.global_steps == BEFORE
    engine.destroy()


def says(act: Any, text: str) -> None:
    try:
        act()
    except (FileError, PlanError) as problem:
        assert text in str(problem), problem
    else:
        raise AssertionError(f"no error with {text!r}")
