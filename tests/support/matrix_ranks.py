"""Jobs that stop and go on as others: weights, optimizer state by parameter name, averages and data position compared.

Three ranks: a pipeline of three, or three replicas. The toy network has a tied layer; the U-Net has adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.damage_ranks import report, told
from support.ordered import ordered_batch, ordered_layers
from support.parity import mse, share_groups
from support.precision_ranks import cast
from support.reference import error
from support.resume_ranks import full_weights
from support.shared_models import batch as shared_batch
from support.shared_models import with_names
from support.small_unet import unet_batch
from support.toy import toy_batch, toy_layers

from deepspeed_pulse.models import EMA
from deepspeed_pulse.runtime.payload import is_dense

MICROBATCHES = 3
"""Of a global batch: one for each of three replicas, or three of one pipeline."""
BEFORE, AFTER = 2, 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to run the same training."""

    model: str = "toy"
    ranks: int = 3
    zero: int = 0
    placement: str = "wave"
    off: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        plan = "off" if self.off else self.placement
        return f"{self.model} P={self.ranks} {plan} ZeRO-{self.zero} {self.dtype}"


def lora_layers() -> list[Any]:
    from support.lora_ranks import lora_unet

    from deepspeed_pulse.models import to_layers

    return to_layers(lora_unet("everywhere"))


def quantized_layers() -> list[Any]:
    from support.lora_ranks import lora_unet
    from support.quantized import quantize

    from deepspeed_pulse.models import to_layers

    return to_layers(quantize(lora_unet("everywhere")))


MODELS: dict[str, tuple[Any, Any, str]] = {
    "toy": (toy_layers, toy_batch, "hidden"),
    "lora": (lora_layers, unet_batch, "sample"),
    "shared": (with_names, shared_batch, "hidden"),
    "ordered": (ordered_layers, ordered_batch, "hidden"),
    "quantized": (quantized_layers, unet_batch, "sample"),
}
"""Layer list, batch of (step, microbatch, data index), name of the input."""


def engine_of(job: Job) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    replicas = torch.distributed.get_world_size() // job.ranks
    layers, _, first = MODELS[job.model]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES // replicas,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "pulse": {"enabled": not job.off, "solver_seconds": 0, "placement": job.placement},
    }
    module = PipelineModule(
        layers=layers(), num_stages=job.ranks, loss_fn=mse, seed_layers=job.model == "toy", config=config, input=first
    )
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


class Stream:
    """Endless data that knows its position, in microbatches of all replicas."""

    def __init__(self, engine: Any, model: str, position: int) -> None:
        self.engine, self.model, self.position = engine, model, position

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        grid = self.engine.grid
        share = MICROBATCHES // grid.data_parallel_size
        step, within = divmod(self.position, MICROBATCHES)
        number = grid.data_parallel_id * share + within // grid.data_parallel_size
        self.position += grid.data_parallel_size
        dtype = next(p.dtype for p in self.engine.module.parameters() if p.is_floating_point())  # not of packed weights
        return cast(MODELS[self.model][1](step, number, 0), dtype)


def train(engine: Any, data: Stream, ema: EMA, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        start = data.position
        losses.append(float(engine.train_batch(data).detach()))
        data.position = start + MICROBATCHES  # ranks that draw nothing are as far
        ema.step()
    return losses


# --------------------------------------------------------------------------------------------- state


def adam_state(engine: Any) -> dict[str, dict[str, Any]]:
    """Of all trained parameters, by name: ``exp_avg``, ``exp_avg_sq``, ``step``, and ``fp32`` where there is one."""
    pieces: dict[str, dict[str, dict[int, Any]]] = {}
    for mine in told(list(adam_pieces(engine))):
        for name, key, start, value in mine:
            pieces.setdefault(name, {}).setdefault(key, {})[start] = value.cpu()
    trained = {name for mine in told([n for p, n in engine.param_names.items() if p.requires_grad]) for name in mine}
    assert trained and all({"exp_avg", "exp_avg_sq", "step"} <= pieces[name].keys() for name in trained)
    return {
        name: {
            key: torch.cat([value.reshape(-1) for _, value in sorted(parts.items())]) for key, parts in state.items()
        }
        for name, state in pieces.items()
    }


def adam_pieces(engine: Any) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """(name, key, start in the parameter, numbers) on this rank."""
    optimizer, names = engine.optimizer, engine.param_names
    if not hasattr(optimizer, "bit16_groups") and not hasattr(optimizer, "bf16_groups"):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                yield names[parameter], key, 0, torch.as_tensor(value).detach().clone()
        return
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    for group, partition in zip(groups, flat, strict=True):
        state = optimizer.optimizer.state[partition]
        for parameter in group:
            if parameter._hp_mapping is None:
                continue
            low, high = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            place = slice(high.start, high.start + high.numel)
            yield names[parameter], "fp32", low.start, partition.detach()[place].clone()
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    yield names[parameter], key, low.start, value[place].clone()
                elif low.start == 0:
                    yield names[parameter], key, 0, torch.as_tensor(value).clone()


def averages(ema: EMA) -> dict[str, dict[str, torch.Tensor]]:
    """Averages of all ranks, and the number of steps."""
    found = {name: {"ema": t.clone().reshape(-1)} for mine in told(ema.averages()) for name, t in mine.items()}
    return found | {"schedule": {"ema": torch.tensor([float(ema.schedule()["optimization_step"])])}}


def weights_of(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    found = {name: p for mine in told(full_weights(engine)) for name, p in mine.items()}
    return {name: {"weight": p.detach().reshape(-1)} for name, p in found.items()}


def difference(found: Any, expected: Any, tolerance: float) -> str:
    """Empty, or the first that differs more than that, relative to its norm. 0: bit for bit."""
    if found.keys() != expected.keys():
        return f"other parameters: {sorted(found.keys() ^ expected.keys())[:3]}"
    for name, state in expected.items():
        # a master copy is there with some jobs only
        for key in (found[name].keys() & state.keys()) | ((found[name].keys() ^ state.keys()) - {"fp32"}):
            if key not in found[name] or key not in state:
                return f"{name}: {key} is there only before or only after"
            ours, theirs = (t.cpu().double() for t in (found[name][key], state[key]))
            if ours.shape != theirs.shape or (
                not torch.equal(ours, theirs) if tolerance == 0 else error(ours, theirs) > tolerance
            ):
                return f"{name}: {key} differs by {error(ours, theirs) if ours.shape == theirs.shape else 'shape'}"
    return ""


# ------------------------------------------------------------------------------------- what ranks run


def resumes(case: dict[str, Any]) -> None:
    share_groups()
    import deepspeed

    deepspeed.init_distributed()
    for number, (base, targets) in enumerate(case["cases"]):
        base, place = Job(**base), Path(case["folder"]) / str(number)
        engine = engine_of(base)
        data, ema = Stream(engine, base.model, 0), EMA(engine, decay=0.9)
        train(engine, data, ema, BEFORE)
        engine.save_checkpoint(place, "stop", client_state={"position": data.position})
        ema.save(place / "stop" / "ema")
        stopped = [weights_of(engine), adam_state(engine), averages(ema)]
        losses = train(engine, data, ema, AFTER)
        ended = [weights_of(engine), adam_state(engine), averages(ema)]
        engine.destroy()
        for target in (Job(**options) for options in targets):
            report(f"{base} -> {target}", resumed(place, target, stopped, losses, ended, exact=target == base))


def lies_as_weights(item: tuple[torch.Tensor, dict[str, Any]]) -> bool:
    weight, state = item
    alike = (value for value in state.values() if torch.is_tensor(value) and value.shape == weight.shape)
    return not is_dense(weight) or all(value.stride() == weight.stride() for value in alike)


def resumed(place: Path, target: Job, stopped: Any, losses: Any, ended: Any, *, exact: bool) -> str:
    engine = engine_of(target)
    ema = EMA(engine, decay=0.5)
    _, state = engine.load_checkpoint(place)
    ema.load(place / "stop" / "ema")
    problems = []
    for found, expected in zip((weights_of(engine), adam_state(engine), averages(ema)), stopped, strict=True):
        problems.append(difference(found, expected, 0.0))
    if not all(map(lies_as_weights, engine.basic_optimizer.state.items())):
        problems.append("optimizer state lies otherwise than its weight")
    data = Stream(engine, target.model, state["position"])
    if data.position != BEFORE * MICROBATCHES or engine.lr_scheduler.last_epoch != BEFORE:
        problems.append(f"position {data.position}, schedule {engine.lr_scheduler.last_epoch}")
    ours = train(engine, data, ema, AFTER)
    tolerance = 0.0 if exact else 3e-2 if target.dtype == "bfloat16" else 1e-4
    if any(abs(a - b) > tolerance * abs(b) for a, b in zip(ours, losses, strict=True)):
        problems.append(f"losses {ours} instead of {losses}")
    for found, expected in zip((weights_of(engine), adam_state(engine), averages(ema)), ended, strict=True):
        problems.append(difference(found, expected, tolerance * (10 if target.dtype == "bfloat16" else 1)))
    engine.destroy()
    return json.dumps(found_problems) if (found_problems := [one for one in problems if one]) else ""
