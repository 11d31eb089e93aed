"""What ranks run in the tests of LoRA, freezing and EMA: equal to the same model in one process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.training_utils import EMAModel, cast_training_params
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from support.cases import run_each
from support.engine_ranks import as_bf16, total
from support.parity import TOLERANCE, RecordingSGD, mse, share_groups
from support.reference import error
from support.small_models import small_sd_unet
from support.small_unet import unet_batch

from deepspeed_pulse.engine.checkpoints import removal
from deepspeed_pulse.models import EMA, freeze, gather_model, save_lora, save_pretrained, to_layers
from deepspeed_pulse.models.weights.folder import WEIGHTS
from deepspeed_pulse.models.weights.lora import DIFFUSERS_WEIGHTS

STEPS, MICROBATCHES = 3, 2
HALF_TOLERANCE = 1e-3
"""Where gradients pass through bf16, in which the order of a sum shows; the same with an fp32 base is within 1e-5."""

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TARGETS: dict[str, Any] = {
    "everywhere": [*ATTENTION, "proj_in", "conv_shortcut", "conv_in"],
    "middle": r"mid_block\..*to_[qv]",
    "last": r"up_blocks\.1\.attentions\.1\..*to_[qv]",
}


def unet() -> Any:
    """Two levels: 22 layers, enough for a wave over four ranks."""
    return small_sd_unet(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
    )


def lora_unet(targets: str) -> Any:
    """The same weights every time; neither half of an adapter is zero, so both have a gradient."""
    model = unet()
    torch.manual_seed(7)
    model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[targets], init_lora_weights=False))
    return model


def frozen_unet(*patterns: str) -> Any:
    model = unet()
    freeze(model, *patterns)
    return model


def model_of(case: dict[str, Any]) -> Any:
    if case.get("mixed"):
        return mixed_unet(case["lora"])
    return lora_unet(case["lora"]) if "lora" in case else frozen_unet(*case["freeze"])


def reference(case: dict[str, Any], data_parallel: int) -> tuple[list[float], dict[str, torch.Tensor], Any, Any]:
    """Losses, gradients of the last step by name, the model, and its averages, all by the model's own forward."""
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    average = EMAModel(
        model.parameters(), model_cls=type(model), model_config=model.config, **case.get("ema") or {"decay": 0.9}
    )
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for m, d in itertools.product(range(MICROBATCHES), range(data_parallel)):
            inputs, labels = unet_batch(step, m, d)
            loss = mse(model(**inputs).sample, labels) / (MICROBATCHES * data_parallel)
            loss.backward()
            losses[-1] += float(loss.detach())
        if case["clip"]:
            assert float(torch.nn.utils.clip_grad_norm_(trained, case["clip"])) > case["clip"], "clips nothing"
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        average.step(model.parameters())
    return losses, gradients, model, average


def make(case: dict[str, Any], **options: Any) -> tuple[Any, RecordingSGD]:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": case.get("clip", 0.0),
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
        "zero_optimization": {"stage": case.get("zero", 0)},
        "zero_allow_untested_optimizer": True,
        **options,
    }
    module = PipelineModule(
        layers=to_layers(model_of(case)), num_stages=case["P"], loss_fn=mixed_mse, config=config, input="sample"
    )
    optimizer = RecordingSGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, optimizer


def data_of(engine: Any, step: int) -> Any:
    """Yields inside ``no_grad``, as loops do that encode images; the layers of a rank that reads must not see it."""
    with torch.no_grad():
        for m in itertools.count():
            yield unet_batch(step, m, engine.grid.data_parallel_id)


def run_case(case: dict[str, Any]) -> None:
    engine, optimizer = make(case)
    losses, gradients, trained, average = reference(case, engine.grid.data_parallel_size)
    ema = EMA(engine, **case["ema"]) if "ema" in case else None
    for step in range(STEPS):
        loss = float(engine.train_batch(data_of(engine, step)).detach())
        assert abs(loss - losses[step]) <= TOLERANCE * losses[step], (case, step, loss, losses[step])
        if ema is not None:
            ema.step()
    expected, before = dict(trained.named_parameters()), dict(model_of(case).named_parameters())
    for _, layer in engine.module.local_layers():
        for name, parameter in layer.named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(parameter, before[name]), (case, "a frozen weight changed", name)
                continue
            assert error(parameter, expected[name]) <= TOLERANCE, (case, "weight", name)
            if not case.get("zero"):
                seen = error(optimizer.seen[id(parameter)], gradients[name])
                assert seen <= TOLERANCE, (case, "gradient", name, seen)
    check_silence(engine, case)
    if ema is not None:
        averages = dict(zip(expected, average.shadow_params, strict=True))
        check_averages(ema, averages)
        swap_weights(engine, ema)
        save_everything(engine, ema, case, trained, average)
        resume_elsewhere(case, ema, averages)
    engine.destroy()


def check_silence(engine: Any, case: dict[str, Any]) -> None:
    """A boundary with nothing to train before it sends no gradient back."""
    plan, sent, layers = engine.module.plan, total(engine), engine.module.layer_list
    sizes, first = hidden_bytes(layers), next(i for i, layer in enumerate(layers) if trains(layer))
    wanted = 0
    for stage in range(1, plan.num_stages):
        crosses = plan.placement[stage - 1] != plan.placement[stage]
        if crosses and first < plan.boundaries[stage]:
            wanted += MICROBATCHES * sizes[plan.boundaries[stage] - 1]
    if engine.grid.get_stage_id() == 0:
        assert sent.get("hidden_grad", 0) == wanted, (case, sent, wanted)
        assert trains(layers[0]) or not any(name.startswith("value_grad") for name in sent), (case, sent)
        print("SILENT", case, sent.get("hidden_grad", 0), flush=True)


def check_averages(ema: EMA, expected: dict[str, torch.Tensor]) -> None:
    for name, average in ema.averages().items():
        assert error(average, expected[name.partition(".")[2]]) <= 1e-6, name


def swap_weights(engine: Any, ema: EMA) -> None:
    """Averages in the engine give the loss of averaged weights; afterwards training goes on as before."""
    before = float(engine.eval_batch(data_of(engine, 9)).detach())
    ema.store()
    ema.copy_to()
    swapped = float(engine.eval_batch(data_of(engine, 9)).detach())
    ema.restore()
    assert float(engine.eval_batch(data_of(engine, 9)).detach()) == before != swapped


def save_everything(engine: Any, ema: EMA, case: dict[str, Any], trained: Any, average: Any) -> None:
    """What ranks write together is what one process writes; the placeholder is in no file."""
    out = Path(case["out"])
    save_lora(engine, out / "lora", ema=ema)
    save_pretrained(engine, out / "unet", ema=ema)
    for step in range(3):
        engine.save_checkpoint(str(out / "checkpoint"), tag=f"step{step}", ema=ema, checkpoints_total_limit=2)
    removal.wait()
    torch.distributed.barrier()
    assert sorted(path.name for path in (out / "checkpoint").iterdir() if path.is_dir()) == ["step1", "step2"]
    check_gathered(engine, ema, trained, average)
    for path in [*out.rglob("*.safetensors"), *out.rglob("config.json"), *out.rglob("layer_*")]:
        assert b"pulse_placeholder" not in path.read_bytes(), path
    if engine.global_rank == 0:
        same_files(out / "lora" / DIFFUSERS_WEIGHTS, lora_file(out / "theirs", trained))
        average.copy_to(trained.parameters())
        same_files(out / "lora_ema" / DIFFUSERS_WEIGHTS, lora_file(out / "theirs", trained))
        unet().save_pretrained(out / "base")
        config, added = (json.loads((out / name / "config.json").read_text()) for name in ("base", "unet_ema"))
        assert added == {**config, **{k: v for k, v in average.state_dict().items() if k != "shadow_params"}}
        for name in ("unet", "unet_ema"):
            same_files(out / name / WEIGHTS, out / "base" / WEIGHTS)


def check_gathered(engine: Any, ema: EMA, trained: Any, average: Any) -> None:
    """Rank 0 gets the whole model, adapters included, with its weights and with their averages."""
    for averages in (None, ema):
        model = gather_model(engine, ema=averages)
        assert (model is None) == (engine.global_rank != 0)
        if model is not None:
            expected = average.shadow_params if averages else trained.parameters()
            for (name, found), weight in zip(model.named_parameters(), expected, strict=True):
                assert error(found, weight) <= TOLERANCE, name


def lora_file(folder: Path, model: Any) -> Path:
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(model))
    return folder / DIFFUSERS_WEIGHTS


def same_files(ours: Path, theirs: Path) -> None:
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys(), (ours, found.keys() ^ expected.keys())
    for key in found:
        assert found[key].dtype == expected[key].dtype and error(found[key], expected[key]) <= TOLERANCE, (ours, key)


def resume_elsewhere(case: dict[str, Any], ema: EMA, expected: dict[str, torch.Tensor]) -> None:
    """Averages go on under another plan."""
    engine, _ = make(case, pulse={"solver_seconds": 0, "placement": "linear"})
    other = EMA(engine)
    engine.load_checkpoint(str(Path(case["out"]) / "checkpoint"), ema=other)
    assert other.schedule() == ema.schedule()
    check_averages(other, expected)
    engine.destroy()


def half_base(value: Any) -> Any:
    """A batch of bf16 whose labels stay as they are."""
    inputs, labels = value
    return as_bf16((inputs, labels))[0], labels


def mixed_unet(targets: str) -> Any:
    """As diffusers' scripts make it: the base cast, what trains in fp32."""
    model = lora_unet(targets).to(torch.bfloat16)
    cast_training_params(model, dtype=torch.float32)
    return model


def mixed_mse(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mse(output.float(), labels)


def run_mixed_case(case: dict[str, Any]) -> None:
    """fp32 adapters over a bf16 base train as in one process, and are fp32 wherever they are written."""
    engine, _ = make(case)
    model = mixed_unet(case["lora"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    ema = EMA(engine, decay=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        expected = 0.0
        for m, d in itertools.product(range(MICROBATCHES), range(engine.grid.data_parallel_size)):
            inputs, labels = half_base(unet_batch(step, m, d))
            loss = mixed_mse(model(**inputs).sample, labels) / (MICROBATCHES * engine.grid.data_parallel_size)
            loss.backward()
            expected += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, case["clip"] or float("inf"))
        optimizer.step()
        loss = float(engine.train_batch(map(half_base, data_of(engine, step))).detach())
        ema.step()
        assert abs(loss - expected) <= HALF_TOLERANCE * expected, (case, step, loss, expected)
    weights, rounded = dict(model.named_parameters()), 0
    for _, layer in engine.module.local_layers():
        for name, parameter in layer.named_parameters():
            assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
            assert error(parameter, weights[name]) <= HALF_TOLERANCE, (case, name, error(parameter, weights[name]))
            rounded += int(parameter.requires_grad and torch.equal(parameter, parameter.bfloat16().float()))
    assert not rounded, "weights are only rounded ones"
    worst = max(error(p, weights[n]) for _, x in engine.module.local_layers() for n, p in x.named_parameters())
    print(f"ERROR of fp32 adapters over bf16: {worst:.1e}", flush=True)
    found = gather_model(engine)
    assert found is None or {n: p.dtype for n, p in found.named_parameters()} == {
        n: p.dtype for n, p in weights.items()
    }
    save_lora(engine, Path(case["out"]) / "mixed")
    torch.distributed.barrier()
    assert {t.dtype for t in load_file(Path(case["out"]) / "mixed" / DIFFUSERS_WEIGHTS).values()} == {torch.float32}
    engine.destroy()


def run_bf16_case(case: dict[str, Any]) -> None:
    """Averages follow the fp32 master weights, which 2-byte weights only round."""
    engine, _ = make(case, bf16={"enabled": True})
    ema, full = EMA(engine, decay=0.9), engine.module.full_precision
    weights = {f"{i}.{n}": p for i, x in engine.module.local_layers() for n, p in x.named_parameters()}
    expected = {name: full(weights[name]).clone() for name in ema.averages()}
    for step in range(STEPS):
        engine.train_batch(map(as_bf16, data_of(engine, step)))
        ema.step()
        kept = 1 - (0.0, 2 / 11, 3 / 12)[step]  # EMAModel.get_decay without warm-up
        for name, average in expected.items():
            average -= kept * (average - full(weights[name]))
    for name, average in ema.averages().items():
        assert average.dtype == torch.float32 and torch.equal(average, expected[name]), name
        assert not torch.equal(average, average.bfloat16().float()), name
    engine.destroy()


def trains(layer: Any) -> bool:
    return any(p.requires_grad for p in layer.layer.parameters())


@torch.no_grad()
def hidden_bytes(layers: list[Any]) -> list[int]:
    """Bytes of the hidden state behind each layer."""
    values, _ = unet_batch(0, 0, 0)
    hidden, found = values["sample"], []
    for declared in layers:
        output = declared.layer(hidden, *(values[name] for name in declared.pop))
        hidden, *stashed = output if declared.stash else (output,)
        values.update(zip(declared.stash, stashed, strict=True))
        found.append(hidden.numel() * hidden.element_size())
    return found


def run_any(case: dict[str, Any]) -> None:
    (run_mixed_case if case.get("mixed") else run_bf16_case if case.get("bf16") else run_case)(case)


def run_cases(cases: list[dict[str, Any]]) -> None:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    share_groups()
    run_each(cases, run_any)
