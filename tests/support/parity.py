"""Same loss, same gradients, same weights as the unpartitioned model: many cases in one launch of ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from support.cases import run_each
from support.reference import Unpartitioned, error, train
from support.versions import reentrant_checkpoint

import deepspeed_pulse.engine.engine  # noqa: F401  once, before ranks are forked
from deepspeed_pulse.ir.schedule import Op
from deepspeed_pulse.runtime.payload import is_dense

STEPS = 3
TOLERANCE = 1e-5


def share_groups() -> None:
    """Reuse process groups of equal ranks over the cases of one launch: each costs sockets and threads.

    Not those of two ranks where channels are kept apart by their groups.
    """
    from deepspeed_pulse.engine import communicator

    made: dict[Any, Any] = {}
    make = torch.distributed.new_group

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if len(ranks or ()) == 2 and torch.distributed.get_backend() not in communicator.HOST_BACKENDS:
            return make(ranks, *args, **kwargs)
        of = tuple(ranks) if ranks is not None else tuple(range(torch.distributed.get_world_size()))
        key = (of, kwargs.get("backend"))
        if key not in made:
            made[key] = make(ranks, *args, **kwargs)
        return made[key]

    torch.distributed.new_group = new_group


def measure_links_once() -> None:
    """Links between the same ranks are measured by the first engine of a launch alone: 3.5 s for each other one."""
    from deepspeed_pulse.engine.plans import machines

    found: dict[Any, Any] = {}
    measure = machines.measure_cluster

    def measure_cluster(ranks: Any, device: torch.device, bucket_bytes: int) -> Any:
        key = (repr(ranks), str(device), bucket_bytes, torch.distributed.get_backend())
        if key not in found:
            found[key] = measure(ranks, device, bucket_bytes)
        return found[key]

    machines.measure_cluster = measure_cluster


def plan_once() -> None:
    """The same job is planned once in a launch: up to a second for each other time, with several backbones.

    Not where cases change the planner itself.
    """
    from deepspeed_pulse import planner

    found: dict[str, Any] = {}
    plan = planner.make_plan

    def make_plan(job: Any, options: Any, plan_cache: Any = None) -> Any:
        if plan_cache is not None:
            return plan(job, options, plan_cache=plan_cache)
        key = repr((job, options))
        if key not in found:
            found[key] = plan(job, options)
        return found[key]

    planner.make_plan = make_plan  # type: ignore[assignment]


class RecordingSGD(torch.optim.SGD):
    """SGD with momentum that remembers the gradients it was given."""

    def step(self, closure: Any = None) -> Any:
        self.seen = {
            id(p): p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        return super().step(closure)


def run_sharing(cases: Iterable[Any], run: Callable[[Any], Any]) -> None:
    """:func:`run_each`, of cases that share process groups and links."""
    share_groups()
    measure_links_once()
    run_each(cases, run)


def models(name: str) -> tuple[Any, Any, str]:
    """(layer list factory, batch factory, name of the first input)."""
    if name == "toy":
        from support.toy import toy_batch, toy_layers

        return toy_layers, toy_batch, "hidden"
    if name in ("waiting", "loading"):
        from support.toy import toy_batch
        from support.waiting import waiting_layers

        return partial(waiting_layers, at_first=name == "loading"), toy_batch, "hidden"
    if name in ("nested", "scalars"):
        from support.nested import nested_batch, nested_layers, scalar_layers

        return nested_layers if name == "nested" else scalar_layers, nested_batch, "latents.noisy"
    if name == "noisy":
        from support.noisy import noisy_batch, noisy_layers

        return noisy_layers, noisy_batch, "hidden"
    if name.startswith("irregular"):
        from support.irregular import numbered_sketch, sketch_batch, sketch_layers

        return partial(sketch_layers, numbered_sketch(int(name.split()[1]))), sketch_batch, "hidden"
    if name == "assorted":
        from support.assorted import assorted_batch, assorted_layers

        return assorted_layers, assorted_batch, "hidden"
    if name == "tokens":
        from support.buckets import token_batch, token_layers

        return token_layers, token_batch, "hidden"
    if name == "ordered":
        from support.ordered import ordered_batch, ordered_layers

        return ordered_layers, ordered_batch, "hidden"
    if name == "tables apart":
        from support.shared_models import batch, same_tables_apart

        return same_tables_apart, batch, "hidden"
    if name.startswith("in place"):
        from support.in_place import MODELS

        return MODELS[name]
    if name == "unet buckets":
        from support.buckets import unet_bucket
        from support.small_unet import unet_layers

        return unet_layers, unet_bucket, "sample"
    if name == "uvit":
        from support.small_unet import uvit_batch, uvit_layers

        return uvit_layers, uvit_batch, "sample"
    from support.small_unet import unet_batch, unet_layers

    return unet_layers, unet_batch, "sample"


def mse(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, labels)


def reference_run(model: str, microbatches: int, data_parallel: int, clip: float, autocast: bool = False) -> Any:
    """Losses, gradients of the last step and weights after it; rank 0 runs it for all, and each rank keeps it."""
    key = (model, microbatches, data_parallel, clip, autocast)
    if key not in _REFERENCES:
        _REFERENCES[key] = by_rank_0(lambda: _reference(*key))
    return _REFERENCES[key]


def by_rank_0(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks."""
    found = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def in_bf16(autocast: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=autocast)


def _reference(model: str, microbatches: int, data_parallel: int, clip: float, autocast: bool) -> Any:
    layers, batch, first = models(model)
    unpartitioned = Unpartitioned(layers())
    optimizer = torch.optim.SGD(unpartitioned.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for step in range(STEPS):
        data = [batch(step, m, d) for d in range(data_parallel) for m in range(microbatches)]
        numbers = [step * microbatches + m for _ in range(data_parallel) for m in range(microbatches)]
        with in_bf16(autocast):
            drawn = numbers if model == "noisy" else None
            loss, gradients = train(unpartitioned, optimizer, data, mse, clip, first, drawn)
        losses.append(loss)
    of_weight = {p: gradients[name] for name, p in unpartitioned.named_parameters()}
    by_layer = {
        index: {name: (p.detach().clone(), of_weight[p]) for name, p in m.named_parameters()}
        for index, m in unpartitioned.by_layer.items()
    }
    buffers = {index: dict(module.named_buffers()) for index, module in unpartitioned.by_layer.items()}
    return losses, by_layer, buffers


_REFERENCES: dict[Any, Any] = {}


def run_case(case: dict[str, Any]) -> None:
    """One case: every rank asserts on its own layers."""
    import deepspeed

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.engine import communicator

    # As on backends that ignore tags: every channel has a group of its own.
    communicator.HOST_BACKENDS = () if case.get("untagged") else ("gloo", "mpi")
    layers, batch, first = models(case["model"])
    microbatches, clip = case["M"], case["clip"]
    pulse = {"enabled": case["enabled"]}
    if case["enabled"]:
        pulse |= {"waves": case.get("W", 1), "solver_seconds": 0, "placement": case.get("placement", "wave")}
    if "plan" in case:
        pulse["plan"] = case["plan"]
    pulse |= case.get("pulse", {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
        "pulse": pulse,
    }
    listed = layers()
    if case.get("moved"):
        move_to_device(listed)
    module = PipelineModule(
        layers=listed,
        num_stages=case["P"],
        topology=topology(**case["topology"]) if "topology" in case else None,
        loss_fn=mse,
        seed_layers=True,
        config=config,
        input=first,
        dynamic_shape=case.get("dynamic", False),
        activation_checkpoint_interval=case.get("interval", 0),
        activation_checkpoint_func=reentrant_checkpoint() if case.get("reentrant") else None,
        checkpointable_layers=case.get("checkpointable"),
    )
    if case.get("moved"):
        check_places(module, listed)
    optimizer = RecordingSGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if pulse.get("split_backward") and case["P"] > 1 and not case.get("whole_may_be_faster"):
        assert any(action.op is Op.INPUT_GRAD for row in module.plan.schedule for action in row), case
    if "pipelines" in case:
        assert engine.grid.topology().get_axis_comm_lists("pipe") == case["pipelines"]
    data_parallel, data_index = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    losses, expected, buffers = reference_run(
        case["model"], microbatches, data_parallel, clip, case.get("autocast", False)
    )
    feeds = not case.get("first_rank_only") or engine.is_first_stage() or engine.is_last_stage()
    with in_bf16(case.get("autocast", False)):  # around all steps: what it keeps of weights is of one step
        for step in range(STEPS):
            data = (batch(step, m, data_index) for m in itertools.count())
            loss = float(engine.train_batch(data_iter=data if feeds else None).detach())
            assert abs(loss - losses[step]) <= TOLERANCE * abs(losses[step]), (case, step, loss, losses[step])
    scale = max(float(g.norm()) for layer in expected.values() for _, g in layer.values())
    for index, function in module.local_layers():
        owner = getattr(function, "module", function)
        if not isinstance(owner, torch.nn.Module):
            continue
        for name, parameter in owner.named_parameters():
            weight, gradient = expected[index][name]
            seen = optimizer.seen.get(id(parameter), torch.zeros_like(parameter))
            assert error(parameter, weight) <= TOLERANCE, (case, "weight", index, name, error(parameter, weight))
            assert not is_dense(parameter) or parameter.stride() == weight.stride(), (case, "lies", index, name)
            if float(gradient.norm()) > 1e-6 * scale:
                assert error(seen, gradient) <= TOLERANCE, (case, "gradient", index, name, error(seen, gradient))
        for name, buffer in owner.named_buffers() if data_parallel == 1 else ():
            assert error(buffer, buffers[index][name]) <= TOLERANCE, (case, "buffer", index, name)
    if case["model"].startswith("irregular"):
        check_routes(engine, case)
    elif case["enabled"] and case.get("placement", "wave") == "wave" and not case["model"].startswith("in place"):
        check_bytes(engine, case)
    engine.destroy()


def move_to_device(layers: list[Any]) -> None:
    """As a script moves its whole model to its card before it is cut."""
    from deepspeed.accelerator import get_accelerator

    from deepspeed_pulse.engine.specs import unwrap

    for layer in map(unwrap, layers):
        if isinstance(layer, torch.nn.Module):
            layer.to(get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))


def check_places(module: Any, layers: list[Any]) -> None:
    """This rank's weights are on the device, those of other ranks' layers on the CPU."""
    from deepspeed_pulse.engine.specs import unwrap

    here, held = dict(module.local_layers()), {id(p) for p in module.parameters()}
    others = [layer for index, layer in enumerate(map(unwrap, layers)) if index not in here]
    weights = [p for layer in others if isinstance(layer, torch.nn.Module) for p in layer.parameters()]
    assert any(id(p) not in held for p in weights)
    assert all((p.device.type == "cpu") == (id(p) not in held) for p in weights)
    assert all(p.device.type != "cpu" for p in module.parameters())


def topology(**dims: int) -> Any:
    """Upstream's, of axes in this order and their sizes."""
    from deepspeed.runtime.pipe.topology import ProcessTopology

    return ProcessTopology(axes=list(dims), dims=list(dims.values()))


def check_bytes(engine: Any, case: dict[str, Any]) -> None:
    """No skip on the wire; travelling values once per rank and way; hidden once per crossing."""
    sent = engine.pulse_stats()["p2p_bytes"]
    if case.get("first_rank_only") or "plan" in case or case["model"] == "assorted":  # all layers read its values
        return
    skips = [name for name in sent if name.startswith("value") and not name.endswith(":temb")]
    assert not skips, (case, sent)


def check_routes(engine: Any, case: dict[str, Any]) -> None:
    """This rank sent each value along the hops that leave from it, and no other."""
    from support.irregular import numbered_sketch

    plan, expected = engine.module.plan, {}
    for index, value in enumerate(numbered_sketch(int(case["model"].split()[1])).values):
        hops = next(route.hops for route in plan.routes if route.name == f"v{index}")
        leaving = sum(plan.placement[source] == engine.module.stage_id for source, _ in hops)
        if leaving:
            expected[f"value:v{index}"] = leaving * case["M"] * value.num_bytes
    sent = engine.pulse_stats()["p2p_bytes"]
    assert {name: sent[name] for name in sent if name.startswith("value:")} == expected, (case, sent)


def run_cases(cases: list[dict[str, Any]]) -> None:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    share_groups()
    run_each(cases, run_case)
