"""One rank: ``python rank.py FOLDER`` runs the folder's task on the accelerator at hand and writes figures there."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
from accelerator.cases import Case, loss_of, on
from accelerator.plans import Machine
from accelerator.waits import host_waits
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from measured import measured_profiles

from deepspeed_pulse import PipelineModule
from deepspeed_pulse.engine.measure.hardware import device_name, hardware_of
from deepspeed_pulse.engine.plans.machines import machines
from deepspeed_pulse.planner.cost import default_cluster

WARM_UP = 3
"""Steps after the first one before any is looked at: shapes are known, figures are gathered, memory is there."""


def main() -> int:
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    case = Case(**task.pop("case"))
    jobs = {"prepare": prepare, "pipeline": pipeline, "data_parallel": data_parallel}
    found = jobs[task.pop("job")](case, **task)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    return 0


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


# -- before the sides -------------------------------------------------------------------------


def prepare(case: Case, reference: str) -> dict[str, Any]:
    """What layers and links cost here, measured by all ranks together; the first then runs the whole model, if it fits.

    Args:
        reference: file to write the whole model's gradients to.
    """
    deepspeed.init_distributed(verbose=False)
    inputs, _ = next(case.batches())
    entries = dict(_dotted(inputs))
    (profile,) = measured_profiles(
        case.name, case.layers(), entries, [case.samples], microbatch_size=case.samples, device=device(), adam=True
    )
    ranks = torch.distributed.get_world_size()
    cluster = default_cluster(1, hardware_of(device()).memory_bytes) if ranks == 1 else machines(device())
    machine = Machine(profile=profile, cluster=cluster, ranks=ranks, microbatches=case.microbatches)
    unfit, found = machine.alone(), None
    if not unfit and torch.distributed.get_rank() == 0:
        get_accelerator().empty_cache()
        try:
            found = alone(case, ranks * case.microbatches, reference)
        except torch.OutOfMemoryError as problem:
            unfit = f"planned to fit, but {problem}".splitlines()[0]
    return {
        "device": device_name(device()),
        "profile": profile.to_dict(),
        "cluster": cluster.to_dict(),
        "unfit": unfit,
        "unpartitioned": found,
    }


def _dotted(inputs: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def alone(case: Case, microbatches: int, reference: str) -> dict[str, Any]:
    """The unpartitioned model: its mean loss. Its gradients by layer and name go to a file.

    They are summed in bf16, as DeepSpeed sums them over microbatches where a config names no other type.
    """
    model, named = case.model(device())
    total = 0.0
    for inputs, wanted in itertools.islice(case.batches(), microbatches):
        loss = loss_of(model(**on(device(), inputs)).sample, on(device(), wanted)) / microbatches
        loss.backward()
        total += float(loss.detach())
    gradients = {key: _gradient(p).cpu() for key, p in named.items()}
    torch.save(gradients, reference)
    return {"loss": total, "gradient_norm": _norm(gradients.values())}


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _norm(tensors: Any) -> float:
    return sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5


# -- the sides --------------------------------------------------------------------------------


def pipeline(
    case: Case,
    microbatches: int,
    steps: int,
    pulse: dict[str, Any],
    cuts: list[int] | None = None,
    reference: str | None = None,
    looks: bool = False,
) -> dict[str, Any]:
    """All ranks are one pipeline.

    Args:
        pulse: the block of the config.
        cuts: the first layer of each stage but the first; None: as planned.
        reference: file of the unpartitioned model's gradients, which those of the first step are compared with.
        looks: host waits of a step are counted too.
    """
    config = {**_config(case, microbatches), "pulse": pulse}
    before = _allocated()
    module = PipelineModule(
        layers=case.layers(),
        num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=loss_of,
        config=config,
        input="sample",
        **({} if cuts is None else {"partition_method": cuts}),
    )
    optimizer = _optimizer(module)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data = itertools.cycle(list(itertools.islice(case.batches(), microbatches)))
    found: dict[str, Any] = {}
    if reference is not None:
        compare = optimizer.register_step_pre_hook(lambda *_: found.update(gradients=_gradients(module, reference)))
        found["loss"] = float(engine.train_batch(data).detach())
        compare.remove()
    step = partial(engine.train_batch, data)
    found |= _watched(step, before, steps, looks=looks)
    if module.plan is not None:
        planned, buffers = module.plan.estimate, engine.pulse_stats()["peak_parts"].get("communicators", 0)
        found |= {  # what communicators hold is not the allocator's
            "counted_bytes": engine.pulse_stats()["peak_live_bytes"] - buffers,
            "planned_bytes": planned.peak_bytes[engine.stage_id] - buffers,
            "communicator_bytes": buffers,
            "planned_ms": planned.step_ms,
            "schedule": module.plan.solver.name,
            "recomputed_layers": len(module.plan.recompute),
        }
    return found


def data_parallel(case: Case, microbatches: int, steps: int) -> dict[str, Any]:
    """Every rank trains the unpartitioned model with DeepSpeed alone, on ``microbatches`` of its own."""
    config, before = _config(case, microbatches), _allocated()
    model, _ = case.model(device())
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    own = int(os.environ["RANK"]) * microbatches
    batches = list(itertools.islice(case.batches(), own, own + microbatches))

    def step() -> None:
        for inputs, wanted in batches:
            loss = loss_of(engine(**on(device(), inputs)).sample, on(device(), wanted))
            engine.backward(loss)
            engine.step()

    return _watched(step, before, steps, looks=False)


def _config(case: Case, microbatches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": case.samples,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)


def _watched(step: Callable[[], Any], before: int | None, steps: int, *, looks: bool) -> dict[str, Any]:
    """Memory and host waits of a steady step, and times of further ones.

    Args:
        before: bytes that were allocated before there was an engine.
    """
    for _ in range(WARM_UP):
        step()
    found: dict[str, Any] = {"allocated_bytes": None, "waits": None}
    if before is not None:
        get_accelerator().synchronize()
        get_accelerator().reset_peak_memory_stats()
    step()
    if before is not None:
        get_accelerator().synchronize()
        found["allocated_bytes"] = get_accelerator().max_memory_allocated() - before
    if looks:
        with host_waits() as waits:
            step()
        found["waits"] = waits
    found["step_ms"] = [_timed(step) for _ in range(steps)]
    return found


def _timed(step: Callable[[], Any]) -> float:
    """ms from a moment that all ranks have until this rank's device has done the step."""
    deepspeed.comm.barrier()
    get_accelerator().synchronize()
    start = time.perf_counter()
    step()
    get_accelerator().synchronize()
    return (time.perf_counter() - start) * 1e3


def _allocated() -> int | None:
    """Bytes, as the device's allocator says; None where there is none."""
    gc.collect()
    return None if device().type == "cpu" else int(get_accelerator().memory_allocated())


def _gradients(module: PipelineModule, reference: str) -> dict[str, Any]:
    """Of this rank's layers, just before the optimizer's step.

    By layer: norm of the difference and norm of the unpartitioned model's gradient.
    """
    expected = torch.load(reference, mmap=True)
    found = {}
    for index, layer in module.local_layers():
        named = dict(layer.named_parameters()) if isinstance(layer, torch.nn.Module) else {}
        pairs = [(safe_get_full_grad(p), expected[index, name]) for name, p in named.items()]
        differences = [wanted if seen is None else seen.cpu().float() - wanted for seen, wanted in pairs]
        if pairs:
            name = module.graph.layers[index].name
            found[name] = {"difference": _norm(differences), "norm": _norm(wanted for _, wanted in pairs)}
    return found


def _end_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent()
    status = 1
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
    if status == 0:
        get_accelerator().synchronize()  # what others are sent may still be on its way
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of the process group
