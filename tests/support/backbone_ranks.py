"""What ranks run in the tests of several backbones: all in one pipeline, then each alone with the same weights."""

from __future__ import annotations

import io
import itertools
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support import frozen_ranks
from support.optimizers import Adapting
from support.parity import models, mse, run_sharing
from support.precision_ranks import DTYPES, cast
from support.reference import BASE_SEED, error
from support.small_unet import unet_batch

from deepspeed_pulse import planner
from deepspeed_pulse.ir.placement import Placement

STEPS = 3
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-3}
ROUNDING = {"fp32": 1e-5, "bf16": 2.0**-7}
"""Of losses: upstream's mean over replicas is of the dtype that is trained in."""
SETS = {
    "two toys": ("toy", "toy"),
    "three toys": ("toy", "toy", "toy"),
    "two unets": ("unet", "unet"),
    "unet and uvit": ("unet", "uvit"),
    "toy and unet": ("toy", "unet"),
    "toy and lora": ("toy", "lora"),
    "two of tokens": ("tokens", "tokens"),
    "encoded and toy": ("encoded", "toy"),
    "two encoded": ("encoded", "encoded"),
}


def parts_of(case: dict[str, Any]) -> dict[str, tuple[Any, Any, str]]:
    """By name of the backbone: layers, batch, name of the input."""
    return {f"{kind}{k}": model_of(kind) for k, kind in enumerate(SETS[case["set"]])}


def model_of(kind: str) -> tuple[Any, Any, str]:
    """As :func:`models`; with adapters, or reading encoders, one of which makes its input."""
    if kind == "encoded":
        return frozen_ranks.layers, frozen_ranks.raw_batch, "sample"
    if kind == "lora":
        return lora_layers, unet_batch, "sample"
    return models(kind)


def lora_layers() -> list[Any]:
    from support.lora_ranks import lora_unet

    from deepspeed_pulse.models import to_layers

    return to_layers(lora_unet("everywhere"))


def frozen_of(case: dict[str, Any], name: str | None) -> dict[str, Any] | None:
    """Encoders of the backbone called ``name``, trained alone; None: of all, each under its backbone's name."""
    readers = [each for each in parts_of(case) if each.startswith("encoded")]
    if name is not None:
        return frozen_ranks.frozen_parts() if name in readers else None
    return {key: part for each in readers for key, part in frozen_parts_under(each).items()} or None


def frozen_parts_under(backbone: str) -> dict[str, Any]:
    """The parts with the backbone's name before all names."""
    from deepspeed_pulse import spec

    def named(layer: Any) -> Any:
        if not getattr(layer, "pop", ()):
            return layer
        return spec(layer.layer, pop=[f"{backbone}.{name}" for name in layer.pop])

    parts = frozen_ranks.frozen_parts()
    return {
        f"{backbone}.{name}": replace(part, layers=list(map(named, part.layers)), input=f"{backbone}.{part.input}")
        for name, part in parts.items()
    }


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    precision = {} if case.get("precision", "fp32") == "fp32" else {case["precision"]: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["M"],
        "gradient_clipping": case.get("clip", 0.0),
        "zero_optimization": {"stage": case.get("zero", 0)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": case.get("placement", "wave"), **case.get("pulse", {})},
        **({"data_types": {"grad_accum_dtype": case["accumulate"]}} if "accumulate" in case else {}),
        **precision,
    }


def engine_of(case: dict[str, Any], **layers: Any) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = config_of(case)
    module = PipelineModule(
        num_stages=case["P"],
        seed_layers=True,
        config=config,
        dynamic_shape=case.get("dynamic", False),
        activation_checkpoint_interval=case.get("interval", 0),
        **layers,
    )
    if "untrained" in case and module.stage_id == 0:
        for parameter in module.backbone_parameters(case["untrained"]):
            parameter.requires_grad_(False)
    if case.get("adapting"):
        optimizer: Any = Adapting(module.parameters())
    elif case.get("adam"):
        optimizer = torch.optim.AdamW(grouped(module, case), lr=0.01)
    else:
        trained = grouped(module, case) if "rates" in case else [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def grouped(module: Any, case: dict[str, Any]) -> Any:
    """Of several backbones a group each, with a learning rate of its own, if the case asks for that."""
    if "rates" not in case:
        return [p for p in module.parameters() if p.requires_grad]
    if not module.has_several:
        return [{"params": list(module.parameters()), "lr": case["rate"]}]
    names = [str(head.name) for head in module.job.heads]
    rates = zip(names, case["rates"], strict=False)
    return [{"params": module.backbone_parameters(name), "lr": rate} for name, rate in rates]


def joint_engine(case: dict[str, Any]) -> Any:
    from deepspeed_pulse import Backbone

    mirrored = case.get("directions", "same") == "opposite"
    choose = planner.make._placements_of_several

    def directed(job: Any, options: Any) -> list[Placement]:
        """Every second one the other way round, or none."""
        first = choose(job, options)[0].parts[0]
        ways = [first.mirrored if mirrored and k % 2 else first for k in range(len(job.profile.backbones))]
        return [Placement.of_backbones(ways)]

    planner.make._placements_of_several = directed
    try:
        backbones = {
            name: Backbone(layers(), loss_fn=mse, input=first) for name, (layers, _, first) in parts_of(case).items()
        }
        engine = engine_of(case, backbones=backbones, **with_encoders(case, None))
    finally:
        planner.make._placements_of_several = choose
    ways = engine.module.plan.placement.parts
    if case["P"] > 1:
        assert (ways[1] == ways[0]) != mirrored, engine.module.plan.placement
    return engine


def alone_engine(case: dict[str, Any], name: str, start: int) -> Any:
    layers, _, first = parts_of(case)[name]
    k = list(parts_of(case)).index(name)
    rate = case.get("rates", [0.05] * 9)[k]
    more = {"loss_fn": mse, "input": first, "base_seed": BASE_SEED + start, **with_encoders(case, name)}
    return engine_of({**case, "rate": rate}, layers=layers(), **more)


def with_encoders(case: dict[str, Any], name: str | None) -> dict[str, Any]:
    """What a module is given more where there are encoders."""
    parts = frozen_of(case, name)
    data = joint_data(case, 0, 0) if name is None else alone_data(case, name, 0, 0)
    return {} if parts is None else {"frozen": parts, "example_batch": next(data)}


def joint_data(case: dict[str, Any], step: int, replica: int) -> Any:
    parts = parts_of(case)

    def batch(drawn: int) -> Any:
        ahead, m = divmod(drawn, case["M"])  # encoders read the next step's data in this one
        found = {name: own(step + ahead, m, replica) for name, (_, own, _) in parts.items()}
        inputs, labels = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
        return cast((inputs, labels), DTYPES["bf16"]) if case.get("precision") == "bf16" else (inputs, labels)

    return (batch(m) for m in itertools.count())


def alone_data(case: dict[str, Any], name: str, step: int, replica: int) -> Any:
    def of(batch: Any) -> Any:
        return batch[0][name], batch[1][name]

    return map(of, joint_data(case, step, replica))


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Of all ranks of the pipeline by name, on its first rank; full precision."""
    named = [(name, engine.module.full_precision(p).cpu()) for name, p in engine.module.named_parameters()]
    mine = {name: value.clone() for name, value in named if "placeholder" not in name}
    rows = engine.module.ranks.gather_to_first(mine) or []
    return {name: value for row in rows for name, value in row.items()}


def trains_alike(case: dict[str, Any]) -> None:
    """Losses and weights of each backbone equal those of its own run alone."""
    precision = case.get("precision", "fp32")
    tolerance, rounding = TOLERANCES[precision], ROUNDING[precision]
    engine = joint_engine(case)
    replica, names = engine.grid.data_parallel_id, list(parts_of(case))
    starts = [head.layers.start for head in engine.module.job.heads]
    losses: list[dict[str, float]] = []
    data = joint_data(case, 0, replica)
    for step in range(STEPS):
        total = engine.train_batch(data)
        losses.append({name: float(value) for name, value in engine.losses.items()})
        assert abs(float(total) - sum(losses[-1].values())) <= 1e-6 * float(total)
        if step == 0:
            if "then M" in case:
                engine.set_train_batch_size(2 * case["then M"] * engine.dp_world_size)
            # the run alone is evaluated on data without results
            evaluated = float(engine.eval_batch(map(with_results, joint_data(case, 9, replica))))
            each = {name: float(value) for name, value in engine.losses.items()}
            assert abs(evaluated - sum(each.values())) <= 1e-6 * evaluated
    found = weights(engine)
    adapters = [saved_adapter(engine, name, name) for name in names if "lora" in name]
    engine.destroy()
    for name, start in zip(names, starts, strict=True):
        alone = alone_engine(case, name, start)
        data = alone_data(case, name, 0, replica)
        for step in range(STEPS):
            loss = float(alone.train_batch(data))
            assert abs(loss - losses[step][name]) <= rounding * loss, (name, step, loss, losses[step][name])
            if step == 0:
                if "then M" in case:
                    alone.set_train_batch_size(2 * case["then M"] * alone.dp_world_size)
                assert abs(float(alone.eval_batch(alone_data(case, name, 9, replica))) - each[name]) <= rounding
        expected = weights(alone)
        for weight, value in expected.items():
            index, _, rest = weight.partition(".")
            mine = found[f"{int(index) + start}.{rest}" if index.isdigit() else f"{index}.{name}/{rest}"]
            assert error(mine, value) < tolerance, (name, weight, error(mine, value))
        if "lora" in name:
            same_adapters(adapters[0], saved_adapter(alone, "alone", None))
        alone.destroy()


def saved_adapter(engine: Any, folder: str, backbone: str | None) -> dict[str, torch.Tensor]:
    """What ``save_lora`` writes, on the first rank; nothing on the others."""
    from deepspeed_pulse.models import save_lora
    from deepspeed_pulse.models.weights.lora import DIFFUSERS_WEIGHTS

    with tempfile.TemporaryDirectory() as name:
        save_lora(engine, Path(name) / folder, backbone=backbone)
        return load_file(Path(name) / folder / DIFFUSERS_WEIGHTS) if engine.global_rank == 0 else {}


def same_adapters(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(error(found[key], value) <= 1e-5 for key, value in expected.items())


def with_results(batch: Any) -> Any:
    """A batch that has what encoders would give, for those backbones that have some."""
    inputs, labels = batch
    found = {n: {**x, **frozen_ranks.encoded(x)} if n.startswith("encoded") else x for n, x in inputs.items()}
    return found, labels


def spoil(engine: Any, start: int, microbatches: int) -> None:
    """A gradient of the backbone whose layers begin at ``start`` is not finite in its second step."""
    parameter = dict(engine.module.named_parameters()).get(f"{start + 3}.inner.weight")
    if parameter is not None:
        count = itertools.count()
        parameter.register_hook(lambda grad: torch.full_like(grad, torch.inf) if next(count) == microbatches else grad)


def misses(case: dict[str, Any]) -> None:
    """All miss a step for gradients of one, and that is said."""
    engine, said = joint_engine(case), io.StringIO()
    data = joint_data(case, 0, engine.grid.data_parallel_id)
    spoil(engine, engine.module.job.heads[case["spoilt"]].layers.start, case["M"])
    engine.train_batch(data)
    before = weights(engine)
    with redirect_stdout(said):
        engine.train_batch(data)
    found = weights(engine)
    assert engine.skipped_steps == 1 and all(torch.equal(found[name], value) for name, value in before.items())
    whose = f" of {list(parts_of(case))[case['spoilt']]}" if "clip" in case else ""
    told = f"pulse: warning: step 2: gradients{whose} are not finite, so DeepSpeed's optimizer dropped the step of all"
    assert said.getvalue().count(told) == (engine.global_rank == 0), said.getvalue()
    engine.train_batch(data)
    assert any(not torch.equal(value, before[name]) for name, value in weights(engine).items()) == bool(before)
    engine.destroy()


def run_cases(cases: list[dict[str, Any]]) -> None:
    run_sharing(cases, lambda case: (misses if "spoilt" in case else trains_alike)(case))


def resumes(arguments: dict[str, Any]) -> None:
    """Training goes on from a checkpoint under another plan or direction as if it had not stopped."""
    run_sharing(arguments["cases"], lambda case: _resumes(case, Path(arguments["folder"])))


def _resumes(case: dict[str, Any], folder: Path) -> None:
    straight = joint_engine(case)
    replica = straight.grid.data_parallel_id
    for step in range(2):
        straight.train_batch(joint_data(case, step, replica))
    where = folder / str(abs(hash(str(case))) % 10**6)
    names = [str(where)]
    torch.distributed.broadcast_object_list(names)
    straight.save_checkpoint(names[0])
    expected = [float(straight.train_batch(joint_data(case, step, replica))) for step in (2, 3)]
    straight.destroy()
    other = joint_engine({**case, **case["then"]})
    replica = other.grid.data_parallel_id
    other.load_checkpoint(names[0])
    found = [float(other.train_batch(joint_data(case, step, replica))) for step in (2, 3)]
    other.destroy()
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-5 * b, (found, expected)
