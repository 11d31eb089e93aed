"""What ranks run in the tests of shared weights: many cases in a launch, each told by its name.

Ranks are seeded differently, so that copies agree only where the package makes them agree.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import torch
from support.parity import share_groups
from support.precision_ranks import allow_fp16, cast, mse
from support.reference import Unpartitioned, error
from support.shared_models import MODELS, REFUSED, REFUSED_APART, batch, blocks, kept_module

from deepspeed_pulse.errors import GraphError

STEPS = 3
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
Weights = dict[tuple[int, str], torch.Tensor]


def case_name(case: dict[str, Any]) -> str:
    return " ".join(str(value) if key == "model" else f"{key}={value}" for key, value in case.items())


def run_cases(cases: list[dict[str, Any]]) -> None:
    """Each case prints ``CASE [name, problem or null]``."""
    torch.set_num_threads(1)
    share_groups()
    allow_fp16()
    for case in cases:
        problem = None
        try:
            run_case(case)
        except AssertionError as found:
            problem = str(found) or "assertion failed"
        print("CASE", json.dumps([case_name(case), problem]), flush=True)


def refuses(plans: list[dict[str, Any]]) -> None:
    """Each list under each of the plans; prints ``CASE [name, problem or null]``: the error must be known by name."""
    torch.set_num_threads(1)
    share_groups()
    for plan in plans:
        for name in refused_under(plan):
            case = {"model": name, **plan}
            print("CASE", json.dumps([case_name(case), refusal_problem(case)]), flush=True)


def refused_under(plan: dict[str, Any]) -> list[str]:
    return [*REFUSED, *LOSSES, *(REFUSED_APART if plan["P"] > 1 else ())]


LOSSES = {
    "a loss of a listed module": "loss_fn reads inner.weight of layer 0.Block",
    "a loss that learns": "loss_fn has trainable weights, the first is a parameter of shape [8, 8]",
    "a loss module that learns": "loss_fn has trainable weights, the first is a parameter of shape [8, 8]",
}
"""Names of losses that are refused, and what the error says."""


class LearningLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mse(output, labels) + self.weight.square().sum()


def loss_of(name: str, layers: list[Any]) -> Any:
    """The loss of :data:`LOSSES`."""
    learning = LearningLoss()
    if name == "a loss module that learns":
        return learning
    weight = layers[0].inner.weight if name == "a loss of a listed module" else learning.weight
    return lambda output, labels: mse(output, labels) + weight.square().sum()


def refusal_problem(case: dict[str, Any]) -> str | None:
    """What is wrong with the error that a case raises before any weight has moved; None: nothing."""
    kept_module.cache_clear()
    lists = REFUSED | REFUSED_APART
    if case["model"] in lists:
        make, text = lists[case["model"]]
        layers, loss_fn = make(), mse
    else:
        layers, text = blocks(), LOSSES[case["model"]]
        loss_fn = loss_of(case["model"], layers)
    try:
        engine = engine_of(case, layers, loss_fn)
        engine.train_batch(batch(0, m, engine.grid.data_parallel_id) for m in itertools.count())
    except GraphError as problem:
        return None if text in str(problem) else f"another error: {problem}"
    return "no error"


def engine_of(case: dict[str, Any], layers: list[Any], loss_fn: Any = mse) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    pulse: Any = {"solver_seconds": 0, "placement": case.get("placement", "wave"), "timeout_seconds": 60}
    pulse |= {"waves": case.get("W", 1)} if pulse["placement"] == "wave" else {}
    pulse = {"on": pulse, "off": {"enabled": False}, "none": None}[case.get("pulse", "on")]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.get("M", 3),
        "gradient_clipping": case.get("clip", 0.0),
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": case.get("zero", 0)},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.get("precision") == "bf16"},
        "fp16": {"enabled": case.get("precision") == "fp16", "initial_scale_power": 8},
        **({} if pulse is None else {"pulse": pulse}),
    }
    module = PipelineModule(
        layers=layers,
        num_stages=case["P"],
        loss_fn=loss_fn,
        config=config,
        activation_checkpoint_interval=case.get("interval", 0),
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    adam = case.get("optimizer") == "adam"
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if adam else torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def weights_of(engine: Any) -> list[Weights]:
    """Of every rank of the world, in full precision, under every name they have on it."""
    found: Weights = {}
    for index, function in engine.module.local_layers():
        owner = getattr(function, "module", function)
        if isinstance(owner, torch.nn.Module):
            for name, p in owner.named_parameters(remove_duplicate=False):
                found[index, name] = engine.module.full_precision(p).detach().float().clone()
            found |= {(index, name): buffer.float() for name, buffer in owner.named_buffers()}
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, found)
    return rows


def joined(rows: list[Weights]) -> Weights:
    """Of the first pipeline; replicas must hold the same."""
    found: Weights = {}
    for row in rows:
        for key, value in row.items():
            assert torch.equal(found.setdefault(key, value), value), f"replicas differ in {key}"
    return found


def places_of(layers: list[Any]) -> list[list[tuple[int, str]]]:
    """Names of one tensor, for all that have several; by the unpartitioned model, whose layers share as they should."""
    places: dict[int, list[tuple[int, str]]] = {}
    twin = Unpartitioned(layers)
    for index, module in twin.by_layer.items():
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            places.setdefault(id(tensor), []).append((index, name))
    return [found for found in places.values() if len(found) > 1]


def check_copies(weights: Weights, places: list[list[tuple[int, str]]]) -> None:
    for first, *others in places:
        for other in others:
            assert torch.equal(weights[first], weights[other]), (
                f"copies differ: {first} and {other} by {error(weights[other], weights[first]):.1e}"
            )


def run_case(case: dict[str, Any]) -> None:
    """Losses, gradient norms and weights are the unpartitioned model's, and copies are equal bit for bit."""
    # replicas alike: DeepSpeed makes their weights the same at the start, but not their buffers
    torch.manual_seed(100 + int(os.environ["RANK"]) * case["P"] // int(os.environ["WORLD_SIZE"]))
    make = MODELS[case["model"]]
    precision = case.get("precision", "fp32")
    engine = engine_of(case, make())
    twin, places = Unpartitioned(make()), places_of(make())
    start = joined(weights_of(engine))
    losses, norms = [], []
    for step in range(STEPS):
        data = (cast(batch(step, m, engine.grid.data_parallel_id), dtype_of(engine)) for m in itertools.count())
        losses.append(float(engine.train_batch(data_iter=data).detach()))
        norms.append(engine.get_global_grad_norm())
    rows = weights_of(engine)
    replicas = engine.grid.data_parallel_size
    engine.destroy()
    check_copies(start, places)
    found = joined(rows)
    check_copies(found, places)
    expected = reference(twin, start, case, replicas)
    tolerance = TOLERANCES[precision]
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        assert abs(loss - expected[0][step]) <= tolerance * expected[0][step], f"loss of step {step}: {loss}"
        if case.get("clip") and precision != "fp16":  # whose norm upstream gives before it is unscaled
            assert abs(float(norm) - expected[1][step]) <= tolerance * expected[1][step], f"norm of step {step}: {norm}"
    for (index, name), value in found.items():
        reached = error(value, dict(all_tensors(twin.by_layer[index]))[name].detach().float())
        assert reached <= tolerance, f"layer {index} {name}: {reached:.1e}"


def dtype_of(engine: Any) -> torch.dtype:
    return next(p for p in engine.module.parameters() if p.is_floating_point()).dtype


def all_tensors(module: torch.nn.Module) -> Any:
    return (*module.named_parameters(remove_duplicate=False), *module.named_buffers())


def reference(twin: Unpartitioned, start: Weights, case: dict[str, Any], replicas: int) -> tuple[list[float], ...]:
    """Losses and norms of the unpartitioned model from these weights; it holds the last ones then."""
    with torch.no_grad():
        for index, module in twin.by_layer.items():
            for name, tensor in all_tensors(module):
                tensor.copy_(start[index, name])
    trained = [p for p in twin.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = [batch(step, m, d) for d in range(replicas) for m in range(case.get("M", 3))]
        total = torch.zeros(())
        for x, y in data:
            loss = mse(twin(x), y) / len(data)
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, case.get("clip") or float("inf"))))
        optimizer.step()
    return losses, norms
