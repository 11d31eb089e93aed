"""The whole model on rank 0: the same outputs as the one that trains, whatever trains it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from peft import LoraConfig, get_peft_model
from support.quantized import quantize
from support.small_models import pixel_entries, sd_entries, small_sd_unet, small_unet
from support.small_transformers import hunyuan_dit_batch, small_hunyuan_dit
from support.thread_ranks import on_ranks

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models import EMA, from_config, gather_model, to_layers

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def gathered(layers: list[Any], *, ranks: int = 2, act: Callable[[Any], None] | None = None, **options: Any) -> Any:
    """What rank 0 gets; the others must get nothing."""
    found: list[Any] = []

    def run(engine: Any) -> None:
        if act is not None:
            act(engine)
        model = gather_model(engine, **options)
        assert (model is None) == (engine.global_rank != 0)
        found.extend([model] if model is not None else [])

    on_ranks(layers, run, ranks=ranks)
    return found[0]


def lora_unet(**options: Any) -> Any:
    model = small_sd_unet()
    torch.manual_seed(7)
    model.add_adapter(LoraConfig(r=3, target_modules=ATTENTION, **{"init_lora_weights": False, **options}))
    return model


def wrapped_unet() -> Any:
    torch.manual_seed(7)
    wrapped = get_peft_model(small_sd_unet(), LoraConfig(r=3, target_modules=ATTENTION, init_lora_weights=False))
    return wrapped.get_base_model()


MODELS = {
    "conditional": (small_sd_unet, sd_entries),
    "pixel": (small_unet, pixel_entries),
    "hunyuan_dit": (small_hunyuan_dit, hunyuan_dit_batch),
    "lora": (lora_unet, sd_entries),
    "lora of peft": (wrapped_unet, sd_entries),
    "lora from singular values": (lambda: lora_unet(init_lora_weights="pissa"), sd_entries),
}


@torch.no_grad()
def output(model: Any, entries: Any) -> torch.Tensor:
    return model.eval()(**entries()).sample if "return_dict" not in entries() else model.eval()(**entries())[0]


@pytest.mark.parametrize("name", MODELS)
def test_gives_what_the_trained_model_gives(name):
    make, entries = MODELS[name]
    model = make()
    found = gathered(to_layers(model), ranks=3)
    assert type(found) is type(model)
    assert not found.training and not any(p.requires_grad for p in found.parameters())
    assert json.loads(found.to_json_string()) == json.loads(model.to_json_string())
    assert found.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(output(found, entries), output(model, entries))


def test_the_copy_stays_when_training_goes_on():
    model = small_sd_unet()
    found = gathered(to_layers(model), ranks=1)
    before = output(found, sd_entries)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(output(found, sd_entries), before)


def test_adapters_keep_their_config_and_can_be_switched():
    model = lora_unet(init_lora_weights="gaussian", lora_alpha=6)
    found = gathered(to_layers(model))
    assert found.peft_config["default"].to_dict() == model.peft_config["default"].to_dict()
    found.disable_adapters(), model.disable_adapters()
    assert torch.equal(output(found, sd_entries), output(model, sd_entries))


def test_adapters_keep_the_scale_that_they_train_with():
    model = lora_unet(lora_alpha=6)
    model.set_adapters("default", 0.3)
    found = gathered(to_layers(model))
    assert torch.equal(output(found, sd_entries), output(model, sd_entries))


class Halved(AttnProcessor):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) / 2


def halved_unet() -> Any:
    model = small_sd_unet()
    model.set_attn_processor(Halved())
    return model


def test_a_processor_of_the_users_is_there_or_missed():
    model = halved_unet()
    with pytest.raises(ConfigError, match=r"the processor Halved at down_\S+, as .*found Attn.*; pass build="):
        gathered(to_layers(model))
    found = gathered(to_layers(model), build=halved_unet)
    assert torch.equal(output(found, sd_entries), output(model, sd_entries))
    model.set_attn_processor(AttnProcessor())
    assert torch.allclose(output(gathered(to_layers(model)), sd_entries), output(model, sd_entries), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"build": lora_unet}])
def test_a_quantized_model_is_refused_before_a_weight_travels(options):
    def run(engine: Any) -> None:
        with pytest.raises(ConfigError, match=r"this UNet2DConditionModel is quantized.*save_lora\(\)"):
            gather_model(engine, **options)

    first, _ = on_ranks(to_layers(quantize(lora_unet())), run, ranks=2)
    assert not any(first.received_bytes)


def test_dtypes():
    model = lora_unet().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if "lora" in name else parameter.data
    same = gathered(to_layers(model)).state_dict()
    assert {key: t.dtype for key, t in same.items()} == {key: t.dtype for key, t in model.state_dict().items()}
    full = gathered(to_layers(model), dtype=torch.float32).state_dict()
    assert {t.dtype for t in full.values()} == {torch.float32}


def test_averages_in_place_of_weights_in_their_dtype():
    model = small_unet().to(torch.bfloat16)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    def run(engine: Any) -> None:
        ema = EMA(engine)
        for _, layer in engine.module.local_layers():
            for parameter in layer.parameters():
                parameter.data.add_(1.0)
        averaged, last = gather_model(engine, ema=ema), gather_model(engine)
        if engine.global_rank == 0:
            assert all(torch.equal(tensor, before[key]) for key, tensor in averaged.state_dict().items())
            assert all(torch.equal(tensor, before[key] + 1.0) for key, tensor in last.state_dict().items())

    on_ranks(to_layers(model), run, ranks=2)


def test_of_a_model_that_no_process_had_whole():
    model = small_unet()
    layers = from_config(dict(model.config), model_class=type(model), seed=3)
    built = [layer.build() for layer in layers]
    for layer, unit in zip(layers, built, strict=True):
        layer.layer = unit
    found = gathered(layers)
    weights = {key: tensor for unit in built for key, tensor in unit.state_dict().items()}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in found.state_dict().items())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # peft about a second adapter
def test_what_cannot_be_gathered_is_told_by_all_ranks():
    several = lora_unet()
    several.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "second")
    with pytest.raises(ConfigError, match=r"gather_model\(\): expected one adapter at most, found default, second"):
        gathered(to_layers(several))
    longer = small_unet()
    longer.conv_out.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ConfigError, match=r"the config has other parts .*, the first is conv_out\.extra"):
        gathered(to_layers(longer))
    with pytest.raises(ConfigError, match=r"no layer of the list holds \d+ of the \d+ entries"):
        gathered(to_layers(small_unet())[:-1])
    with pytest.raises(ConfigError, match=r"gather_model\(\) gives a model back; no layer"):
        gathered([])
