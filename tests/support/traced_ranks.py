"""What ranks run in the tests of traced models: training equals one process, and what is saved loads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support import small_models as unets
from support.cases import run_each
from support.parity import by_rank_0, share_groups
from support.patched import flagged_batch, patched_blocks
from support.plain_nets import NamedAsLayers, PlainUNet, plain_unet_batch
from support.reference import error
from support.zoo import ZOO, output_of
from torch.utils._pytree import tree_leaves

STEPS, MICROBATCHES = 2, 2
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def zoo(name: str, **changes: Any) -> tuple[Any, Any]:
    animal = ZOO[name]
    return lambda: type(animal)(config={**animal.config, **changes}, batch=animal.batch).model(name), animal.example


def lora_sana(num_layers: int = 6) -> Any:
    from peft import LoraConfig

    model = zoo("SanaTransformer2DModel", num_layers=num_layers)[0]()
    torch.manual_seed(3)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return model.train()


def odd_unet_batch(size: int = 0) -> dict[str, Any]:
    """The second is of a size that does not divide by the U-Net's levels."""
    side = 16 if size == 0 else 18
    return {**unets.sd_entries(), "sample": torch.randn(2, 4, side, side, generator=torch.Generator().manual_seed(1))}


CASES: dict[str, dict[str, Any]] = {
    "a plain U-Net": {
        "model": PlainUNet,
        "batch": lambda size=0: plain_unet_batch(2, 16 + 8 * size),
        "pulse": {"placement": "wave"},
        "dynamic_shape": True,
    },
    "names that layers have": {
        "model": NamedAsLayers,
        "batch": lambda size=0: {"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(size))},
        "pulse": {"placement": "wave"},
    },
    "a plain U-Net, linear, recomputed": {
        "model": PlainUNet,
        "batch": lambda size=0: plain_unet_batch(2, 16),
        "pulse": {"placement": "linear"},
        "config": {"pipeline": {"activation_checkpoint_interval": 1}},
    },
    "sizes that break a guard": {
        "model": unets.small_sd_unet,
        "batch": odd_unet_batch,
        "pulse": {"placement": "wave"},
        "dynamic_shape": True,
    },
    "lists in the batch": {
        "model": zoo("QwenImageTransformer2DModel")[0],
        "batch": zoo("QwenImageTransformer2DModel")[1],
        "pulse": {"placement": "linear"},
        "dynamic_shape": True,
    },
    "a list of pictures": {
        "model": zoo("ZImageTransformer2DModel")[0],
        "batch": lambda size=0: zoo("ZImageTransformer2DModel")[1](0),
        "pulse": {"placement": "linear"},
    },
    "adapters": {
        "model": lora_sana,
        "batch": zoo("SanaTransformer2DModel")[1],
        "pulse": {"placement": "wave"},
        "dynamic_shape": True,
    },
    "adapters in reentrant checkpoints": {
        "model": patched_blocks,
        "batch": flagged_batch,
        "pulse": {"placement": "wave"},
    },
    "relayed": {
        "model": zoo("Flux2Transformer2DModel")[0],
        "batch": lambda size=0: zoo("Flux2Transformer2DModel")[1](0),
        "pulse": {"enabled": False},
    },
    "measured": {
        "model": zoo("LTXVideoTransformer3DModel")[0],
        "batch": lambda size=0: zoo("LTXVideoTransformer3DModel")[1](0),
        "pulse": {"placement": "wave", "cluster": "a100:1x2"},
        "measured": True,
    },
}


def trains(arguments: dict[str, Any]) -> None:
    """Losses, and all weights after the steps, equal one process's."""
    share_groups()
    run_each(arguments["cases"], lambda name: train_case(CASES[name], arguments["ranks"]))


def train_case(case: dict[str, Any], ranks: int) -> None:
    from deepspeed_pulse.models import to_layers

    model = case["model"]()
    reference = copy.deepcopy(model)
    layers = to_layers(model, example_batch=case["batch"](0), trace=True)
    engine = engine_of(layers, case, ranks)
    losses, weights = by_rank_0(lambda: train_alone(reference, case["batch"]))
    for step, wanted in enumerate(losses):
        found = float(engine.train_batch(batches(case["batch"], step)).detach())
        assert abs(found - wanted) <= 1e-5 * abs(wanted), (step, found, wanted)
    for _, layer in engine.module.local_layers():
        for name, parameter in layer.named_parameters():
            assert error(parameter.detach(), weights[name]) <= 1e-5, (layer, name)
    engine.destroy()


def engine_of(layers: Any, case: dict[str, Any], ranks: int) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    pulse = case["pulse"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": pulse if "enabled" in pulse else {"solver_seconds": 0, **pulse},
        **case.get("config", {}),
    }
    options = {"dynamic_shape": True} if case.get("dynamic_shape") else {}
    module = PipelineModule(
        layers=layers,
        num_stages=ranks,
        loss_fn=loss_of,
        config=config,
        input=next(iter(case["batch"](0))),
        example_batch=next(batches(case["batch"], 0)) if case.get("measured") else None,
        **options,
    )
    return deepspeed.initialize(model=module, optimizer=sgd(module), config=config)[0]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def train_alone(model: Any, make_batch: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [
            loss_of(output_of(model, inputs), labels)
            for inputs, labels in itertools.islice(batches(make_batch, step), MICROBATCHES)
        ]
        loss = sum(found) / MICROBATCHES
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def batches(make_batch: Any, step: int) -> Iterator[Any]:
    """A step of one size; other samples in every microbatch."""
    for microbatch in itertools.count():
        batch = dict(make_batch(step % 2))
        first = next(iter(batch))
        numbers = [x for x in tree_leaves(batch[first]) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        for x in map(torch.Tensor.detach, numbers):
            x.mul_(1 + 0.1 * step).sub_(0.2 * microbatch)
        yield batch, torch.zeros(1)


def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return sum(one.float().square().mean() + one.float().mean() for one in tree_leaves(output))  # type: ignore[no-any-return]


def folder_model(**changes: Any) -> tuple[str, Any, Any]:
    """A class without a family, enough layers for a wave on four ranks: its name, a model, and what makes a batch."""
    make, make_batch = zoo("SanaTransformer2DModel", num_layers=8, **changes)
    return "SanaTransformer2DModel", make(), make_batch


def large_model() -> Any:
    """12 blocks of 16 MB: a quarter of the layers is about a quarter of the model; modules take 2 MB a block."""
    inner = {"num_attention_heads": 16, "attention_head_dim": 32, "cross_attention_dim": 512}
    cross = {"num_cross_attention_heads": 16, "cross_attention_head_dim": 32}
    return zoo("SanaTransformer2DModel", num_layers=12, **inner, **cross)[0]()


def holds_its_share(arguments: dict[str, Any]) -> None:
    """Loading a traced model never takes more than 45 % of the model's bytes on a rank.

    What tracing imports, some 30 MB, is there before anything is counted.
    """
    from support.model_ranks import holds_its_share

    from deepspeed_pulse.models import to_layers

    to_layers(folder_model()[1], example_batch=folder_model()[2](0))
    inputs = ZOO["SanaTransformer2DModel"].batch(1, 8, 5)
    holds_its_share(arguments["large"], "SanaTransformer2DModel", inputs, 0.45)
    print("PASSED", flush=True)


def saves(arguments: dict[str, Any]) -> None:
    """A folder of a class without a family: each rank reads its own layers, trains, and all write it back."""
    from deepspeed_pulse.models import from_pretrained, save_lora, save_pretrained

    share_groups()
    name, fresh, make_batch = folder_model()
    folder, out = Path(arguments["folder"]), Path(arguments["out"])
    import diffusers

    kind = getattr(diffusers, name)
    reference = kind.from_pretrained(folder).train()
    case = {"batch": lambda size=0: make_batch(0), "pulse": {"placement": "wave"}}
    layers = from_pretrained(folder, example_batch=make_batch(0))
    engine = engine_of(layers, case, arguments["ranks"])
    whole = sum(p.numel() for p in reference.parameters())
    mine = sum(p.numel() for p in engine.module.parameters())
    assert 0 < mine < 0.45 * whole, (mine, whole)
    losses, weights = by_rank_0(lambda: train_alone(reference, case["batch"]))
    for step, wanted in enumerate(losses):
        found = float(engine.train_batch(batches(case["batch"], step)).detach())
        assert abs(found - wanted) <= 1e-5 * abs(wanted), (step, found, wanted)
    save_pretrained(engine, out / "whole")
    loaded = kind.from_pretrained(out / "whole").state_dict()
    assert loaded.keys() == reference.state_dict().keys()
    for key, weight in weights.items():
        assert error(loaded[key], weight) <= 1e-5, key
    engine.destroy()
    adapted = {**CASES["adapters"], "batch": case["batch"]}
    from deepspeed_pulse.models import to_layers

    model = lora_sana(8)
    engine = engine_of(to_layers(model, example_batch=case["batch"]()), adapted, arguments["ranks"])
    engine.train_batch(batches(case["batch"], 0))
    save_lora(engine, out / "lora")
    fresh.load_lora_adapter(str(out / "lora"), adapter_name="default", prefix="transformer", use_safetensors=True)
    loaded = {key: weight for key, weight in fresh.named_parameters() if "lora" in key}
    assert loaded.keys() == {key for key, _ in model.named_parameters() if "lora" in key}
    for _, layer in engine.module.local_layers():
        for name, weight in layer.named_parameters():
            assert "lora" not in name or torch.equal(loaded[name], weight), name
    engine.destroy()
    print("PASSED", flush=True)
