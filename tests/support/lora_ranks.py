"""What ranks run in the tests of LoRA and freezing: equal to the same model in one process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from peft import LoraConfig
from support.engine_ranks import total
from support.parity import TOLERANCE, RecordingSGD, mse, share_groups
from support.reference import error
from support.small_models import small_sd_unet
from support.small_unet import unet_batch

STEPS, MICROBATCHES = 2, 2
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
    from deepspeed_pulse.models import freeze

    model = unet()
    freeze(model, *patterns)
    return model


def model_of(case: dict[str, Any]) -> Any:
    return lora_unet(case["lora"]) if "lora" in case else frozen_unet(*case["freeze"])


def reference(case: dict[str, Any], data_parallel: int) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses, gradients of the last step by parameter name, and the model, trained by its own forward."""
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
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
    return losses, gradients, model


def make(case: dict[str, Any], **options: Any) -> tuple[Any, RecordingSGD]:
    import deepspeed

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.models import to_layers

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
        layers=to_layers(model_of(case)), num_stages=case["P"], loss_fn=mse, config=config, input="sample"
    )
    optimizer = RecordingSGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, optimizer


def data_of(engine: Any, step: int) -> Any:
    return (unet_batch(step, m, engine.grid.data_parallel_id) for m in itertools.count())


def run_case(case: dict[str, Any]) -> None:
    engine, optimizer = make(case)
    losses, gradients, trained = reference(case, engine.grid.data_parallel_size)
    for step in range(STEPS):
        loss = float(engine.train_batch(data_of(engine, step)).detach())
        assert abs(loss - losses[step]) <= TOLERANCE * losses[step], (case, step, loss, losses[step])
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


def run_cases(cases: list[dict[str, Any]]) -> None:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    share_groups()
    for case in cases:
        run_case(case)
        print("PASSED", case, flush=True)
