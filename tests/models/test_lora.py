"""LoRA and freezing over ranks: what trains, trains as in one process; what is frozen stays and is not sent for."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file
from support.cases import launch_each
from support.families import assert_transparent, interpret
from support.patched import Blocks, Patch, flagged_batch, patched_blocks, register_patches
from support.reference import error
from support.small_models import (
    kandinsky_entries,
    pixel_entries,
    sd_entries,
    sdxl_entries,
    small_kandinsky3,
    small_sd_unet,
    small_sdxl_unet,
    small_svd_unet,
    small_unet,
    small_unet_3d,
    svd_entries,
    video_entries,
)
from support.small_transformers import (
    hunyuan_dit_batch,
    small_hunyuan_dit,
    small_unidiffuser,
    small_uvit,
    unidiffuser_batch,
    uvit_batch,
)
from support.thread_ranks import on_ranks
from transformers import CLIPTextConfig, CLIPTextModel

from deepspeed_pulse import spec
from deepspeed_pulse.errors import ConfigError, GraphError
from deepspeed_pulse.models import EMA, from_pretrained, gather_model, save_lora, save_pretrained, to_layers
from deepspeed_pulse.models.units import Adapted
from deepspeed_pulse.models.weights.folder import PLAIN_WEIGHTS, WEIGHTS
from deepspeed_pulse.models.weights.lora import DIFFUSERS_WEIGHTS, PEFT_WEIGHTS
from deepspeed_pulse.models.weights.lora import _of_diffusers as of_diffusers

MIDDLE_ON = ("conv_in.*", "time_embedding.*", "down_blocks.*")
"""Patterns that freeze everything before the middle of a U-Net."""

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"P": 2, "lora": "everywhere", "clip": 0.0},
        {"P": 2, "lora": "last", "clip": 0.01, "ema": {"decay": 0.5, "foreach": True}},
        {"P": 2, "freeze": MIDDLE_ON, "clip": 0.0},
        {"P": 2, "lora": "everywhere", "bf16": True},
        {"P": 2, "lora": "everywhere", "mixed": True, "clip": 0.01},
        {"P": 1, "lora": "last", "clip": 0.01, "zero": 1},
    ],
    4: [
        {"P": 4, "lora": "everywhere", "clip": 0.01, "ema": {"use_ema_warmup": True, "power": 0.75}},
        {"P": 4, "lora": "middle", "clip": 0.0},
        {"P": 4, "lora": "middle", "clip": 0.01, "zero": 1},
        {"P": 2, "lora": "last", "clip": 0.01, "zero": 1},
        {"P": 2, "lora": "everywhere", "mixed": True, "clip": 0.01, "zero": 1},
        {"P": 4, "freeze": MIDDLE_ON, "clip": 0.01},
    ],
}
"""World size to cases; with LoRA on one block all ranks but one have nothing to train."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_what_trains_trains_as_in_one_process(subtests: pytest.Subtests, world: int, tmp_path: Path) -> None:
    cases = [{**case, "out": str(tmp_path)} for case in CASES[world]]
    launch_each(subtests, "support.lora_ranks:run_cases", world, cases, timeout=500)


# ---------------------------------------------------------------------------------------- families

FAMILIES = {
    "sdxl": (small_sdxl_unet, sdxl_entries),
    "svd": (small_svd_unet, svd_entries),
    "unet_3d": (small_unet_3d, video_entries),
    "kandinsky3": (small_kandinsky3, kandinsky_entries),
    "hunyuan_dit": (small_hunyuan_dit, hunyuan_dit_batch),
    "unidiffuser": (small_unidiffuser, unidiffuser_batch),
    "uvit": (small_uvit, uvit_batch),
}


LONG = {("sdxl", "block"), ("svd", "fine"), ("unet_3d", "fine"), ("kandinsky3", "fine")}
"""Each family's other granularity is in the suite."""


@pytest.mark.parametrize(
    ("family", "granularity"),
    [
        pytest.param(*row, marks=pytest.mark.soak) if row in LONG else row
        for row in itertools.product(FAMILIES, ("block", "fine"))
    ],
)
def test_layers_of_every_family_carry_adapters(family: str, granularity: str) -> None:
    """On whatever is linear or a convolution, so no layer reads a weight past its adapter.

    In double precision: random adapters on every layer make gradients that nearly cancel.
    """
    make, batch = FAMILIES[family]
    model = make().double()
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    options = {"r": 2, "init_lora_weights": False, "lora_bias": False}
    inject_adapter_in_model(LoraConfig(target_modules=names, **options), model)
    # Parts that the models themselves do not call: one is unused, of the other they read the weights.
    uncalled = ("transformer.pos_embed.proj.", ".pooler.")
    unused = [name for name, _ in model.named_parameters() if any(part in name for part in uncalled)]

    def forward(model: Any, batch: dict[str, Any]) -> Any:
        output = model(**batch, return_dict=False) if family != "unidiffuser" else model(**batch)
        return output[0] if len(output) == 1 else output

    assert_transparent(
        model, in_double(batch()), forward, ranks=(1, 2), without_gradient=unused, granularity=granularity
    )


def in_double(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: in_double(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(in_double(item) for item in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


# ------------------------------------------------------------------------------------------ saving


def lora_model(make: Any = small_sd_unet, name: str = "default", **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["to_q", "proj_in", "conv1"], **options}
    model = make()
    inject_adapter_in_model(LoraConfig(init_lora_weights=False, **options), model, name)
    return model


def save(model: Any, folder: Path, *, ranks: int = 3, **options: Any) -> Path:
    layers = to_layers(model)
    on_ranks(layers, lambda engine: save_lora(engine, folder, **options), ranks=ranks)
    return folder


@torch.no_grad()
def output_of(model: Any) -> torch.Tensor:
    return model.eval()(**sd_entries()).sample


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["conv_out"]}])
def test_the_file_is_the_one_diffusers_writes(tmp_path, options):
    model = lora_model(**options)
    StableDiffusionPipeline.save_lora_weights(
        tmp_path / "theirs",
        unet_lora_layers=get_peft_model_state_dict(model),
        unet_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    save(model, tmp_path / "ours")
    (theirs,), (ours,) = ((tmp_path / name).iterdir() for name in ("theirs", "ours"))
    assert theirs.name == ours.name
    assert_same_tensors(theirs, ours)
    found, expected = metadata_of(ours), metadata_of(theirs)
    assert found.keys() == expected.keys()
    assert sorted(found.pop("unet.target_modules")) == sorted(expected.pop("unet.target_modules"))
    assert found == expected


def assert_same_tensors(theirs: Path, ours: Path) -> None:
    expected, found = load_file(theirs), load_file(ours)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) and expected[key].dtype == found[key].dtype for key in expected)


def metadata_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["lora_adapter_metadata"])


def test_a_pipeline_loads_it(tmp_path):
    model = lora_model()
    save(model, tmp_path)
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    pipeline = StableDiffusionPipeline(
        unet=small_sd_unet(),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        requires_safety_checker=False,
        **parts,
    )
    pipeline.load_lora_weights(tmp_path)
    assert error(output_of(pipeline.unet), output_of(model)) < 1e-6
    alone = small_sd_unet()
    alone.load_lora_adapter(tmp_path, prefix="unet", use_safetensors=True)
    assert error(output_of(alone), output_of(model)) < 1e-6


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_one_adapter_of_two_and_a_prefix_of_ones_own(tmp_path):
    model = lora_model(name="style")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_k"]), model, "other")
    keys = load_file(save(model, tmp_path, adapter_name="style", prefix="mine") / DIFFUSERS_WEIGHTS).keys()
    assert all(key.startswith("mine.") and ".to_k." not in key for key in keys)
    assert any(".to_q.lora_A.weight" in key for key in keys)
    with pytest.raises(
        ConfigError, match=r'no adapter \'stile\' \(did you mean "style"\?\); its adapters: style, other'
    ):
        save(model, tmp_path, adapter_name="stile")


@pytest.mark.parametrize("make_config", [LoraConfig, LoHaConfig])
def test_pefts_own_format_for_models_that_diffusers_loads_no_adapters_into(tmp_path, make_config):
    torch.manual_seed(3)
    config = make_config(r=2, target_modules=["to_q"])
    wrapped = get_peft_model(small_unet(), config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(0.01 * parameter.requires_grad)
    wrapped.save_pretrained(tmp_path / "theirs")
    save(wrapped, tmp_path / "ours", format="peft")
    assert_same_tensors(tmp_path / "theirs" / PEFT_WEIGHTS, tmp_path / "ours" / PEFT_WEIGHTS)
    read = PeftModel.from_pretrained(small_unet(), tmp_path / "ours").eval()
    entries = pixel_entries()
    with torch.no_grad():
        # The same weights; where they lie in memory changes the last bit.
        assert error(read(**entries).sample, wrapped.eval()(**entries).sample) < 1e-6
    with pytest.raises(ConfigError, match='no adapters into a UNet2DModel; use format="peft"'):
        save(wrapped, tmp_path / "none")


def test_the_folder_of_averages_stands_beside_one_with_a_slash_behind(tmp_path):
    layers = to_layers(lora_model())
    on_ranks(layers, lambda engine: save_lora(engine, f"{tmp_path}/lora/", ema=EMA(engine)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "lora_ema"]


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="this UNet2DConditionModel has no adapters; put one on before to_layers"):
        save(small_sd_unet(), tmp_path)
    with pytest.raises(ConfigError, match='expected "diffusers" or "peft", found \'kohya\''):
        save(lora_model(), tmp_path, format="kohya")
    model = small_sd_unet()
    inject_adapter_in_model(LoHaConfig(target_modules=["to_q"]), model)
    with pytest.raises(ConfigError, match='LORA adapters, found LOHA; use format="peft"'):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["conv_in"]}])
def test_the_base_model_is_saved_under_its_own_names_and_the_user_is_told(tmp_path, caplog, options):
    model = lora_model(**options)
    on_ranks(to_layers(model), lambda engine: save_pretrained(engine, tmp_path / "ours"), ranks=3)
    small_sd_unet().save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "theirs").iterdir():
        assert path.read_bytes() == (tmp_path / "ours" / path.name).read_bytes()
    (told,) = (record.getMessage() for record in caplog.records)
    assert "without its adapters (default); save_lora() writes those" in told


def test_adapters_on_layers_that_read_their_own_weights(tmp_path):
    small_sd_unet().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "conv_in"], init_lora_weights=False)
    lazy = from_pretrained(tmp_path / "base", prepare=lambda model: model.add_adapter(config))
    layers = [spec(layer.build(), stash=layer.stash, pop=layer.pop, name=layer.layer_name) for layer in lazy]
    trains = {name for layer in layers for name, p in layer.layer.named_parameters() if p.requires_grad}
    assert trains and all(".lora_" in name for name in trains)
    on_ranks(layers, lambda engine: save_lora(engine, tmp_path / "lora"), ranks=3)
    on_ranks(layers, lambda engine: save_pretrained(engine, tmp_path / "again"), ranks=3)
    assert_same_tensors(tmp_path / "base" / WEIGHTS, tmp_path / "again" / WEIGHTS)
    read = small_sd_unet()
    read.load_lora_adapter(tmp_path / "lora", prefix="unet", use_safetensors=True)
    with torch.no_grad():
        assert error(interpret(layers, sd_entries()), output_of(read)) < 1e-6


# -------------------------------------------------------------------------- parts with adapters of their own


def one_level_unet() -> Any:
    return small_sd_unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        layers_per_block=1,
    )


class Both(torch.nn.Module):
    """A text encoder that trains beside its U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = one_level_unet()
        torch.manual_seed(5)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = CLIPTextConfig(vocab_size=64, max_position_embeddings=7, **sizes)
        self.text_encoder = CLIPTextModel(config)

    def forward(self, input_ids: torch.Tensor, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        states = self.text_encoder(input_ids).last_hidden_state
        return self.unet(sample, timestep, encoder_hidden_states=states).sample  # type: ignore[no-any-return]


UNET = LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "conv1"], init_lora_weights=False)
TEXT = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def adapted_both() -> Both:
    model = Both()
    torch.manual_seed(3)
    model.unet.add_adapter(copy.deepcopy(UNET))
    model.text_encoder.add_adapter(copy.deepcopy(TEXT))
    return model.eval()


def both_entries() -> dict[str, torch.Tensor]:
    entries = sd_entries()
    ids = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "sample": entries["sample"], "timestep": entries["timestep"]}


@pytest.fixture(scope="module")
def both() -> tuple[Both, list[Any]]:
    model = adapted_both()
    return model, to_layers(model, example_batch=both_entries())


def test_adapters_of_parts_are_in_one_file_that_a_pipeline_loads(tmp_path, both):
    model, layers = both
    on_ranks(layers, lambda engine: save_lora(engine, tmp_path / "ours"), ranks=3)
    StableDiffusionPipeline.save_lora_weights(
        tmp_path / "theirs",
        unet_lora_layers=get_peft_model_state_dict(model.unet),
        text_encoder_lora_layers=get_peft_model_state_dict(model.text_encoder),
        unet_lora_adapter_metadata=model.unet.peft_config["default"].to_dict(),
        text_encoder_lora_adapter_metadata=model.text_encoder.peft_config["default"].to_dict(),
    )
    theirs, ours = (tmp_path / name / DIFFUSERS_WEIGHTS for name in ("theirs", "ours"))
    assert_same_tensors(theirs, ours)
    found, expected = metadata_of(ours), metadata_of(theirs)
    for part in ("unet", "text_encoder"):
        name = f"{part}.target_modules"
        assert sorted(found.pop(name)) == sorted(expected.pop(name))
    assert found == expected
    fresh = Both().eval()
    absent = dict.fromkeys(("vae", "tokenizer", "safety_checker", "feature_extractor"))
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = {"unet": fresh.unet, "text_encoder": fresh.text_encoder, "scheduler": scheduler}
    StableDiffusionPipeline(requires_safety_checker=False, **parts, **absent).load_lora_weights(tmp_path / "ours")
    with torch.no_grad():
        expected_output = model(**both_entries())
        assert error(fresh(**both_entries()), expected_output) < 1e-6
        assert error(interpret(layers, both_entries()), expected_output) < 1e-6
    with pytest.raises(ConfigError, match=r"prefix=: expected none, as several parts.*\(unet, text_encoder\)"):
        on_ranks(layers, lambda engine: save_lora(engine, tmp_path, prefix="unet"))


def test_adapters_of_parts_are_folders_in_pefts_format(tmp_path, both):
    model, layers = both
    on_ranks(layers, lambda engine: save_lora(engine, tmp_path, format="peft"), ranks=3)
    fresh = Both().eval()
    fresh.unet = PeftModel.from_pretrained(fresh.unet, tmp_path / "unet").eval()
    fresh.text_encoder.load_adapter(str(tmp_path / "text_encoder"))
    with torch.no_grad():
        assert error(fresh(**both_entries()), model(**both_entries())) < 1e-6


def test_a_model_of_parts_is_saved_without_adapters_and_gathered_with_them(tmp_path, both):
    model, layers = both
    on_ranks(layers, lambda engine: save_pretrained(engine, tmp_path), ranks=3)
    saved, bare = load_file(tmp_path / PLAIN_WEIGHTS), Both().state_dict()
    assert saved.keys() == bare.keys() and all(torch.equal(saved[key], bare[key]) for key in saved)
    found: list[Any] = []
    on_ranks(layers, lambda engine: found.append(gather_model(engine, build=Both)))
    with torch.no_grad():
        assert error(found[0](**both_entries()), model(**both_entries())) < 1e-6
    with pytest.raises(ConfigError, match=r"a part unet, which has adapters, found none in the Linear that build="):
        on_ranks(layers, lambda engine: gather_model(engine, build=lambda: torch.nn.Linear(1, 1)))


def test_one_part_goes_by_the_name_that_pipelines_look_for():
    for kind, name, expected in ((UNet2DConditionModel, "net", "unet."), (CLIPTextModel, "text_encoder_2", "text_")):
        part = Adapted(path=name, name=name, model_class=kind, configs={"default": UNET})
        (found,) = of_diffusers([part], "default", None).parts
        assert found.startswith(expected), found


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def test_a_part_that_peft_has_wrapped(tmp_path):
    model, config = Holder(), LoraConfig(r=2, target_modules=["inner.0"], init_lora_weights=False)
    model.net = get_peft_model(model.net, config)
    layers = to_layers(model, example_batch=flagged_batch())
    on_ranks(layers, lambda engine: save_pretrained(engine, tmp_path / "whole"), ranks=3)
    assert load_file(tmp_path / "whole" / PLAIN_WEIGHTS).keys() == Holder().state_dict().keys()
    on_ranks(layers, lambda engine: save_lora(engine, tmp_path / "lora", format="peft"), ranks=3)
    read = PeftModel.from_pretrained(Blocks(), tmp_path / "lora")
    assert torch.equal(read(**flagged_batch()), model(**flagged_batch()))
    with pytest.raises(ConfigError, match=r"other parts than the one that trains, the first is net\..*pass build="):
        on_ranks(layers, lambda engine: gather_model(engine, build=Holder))


# ------------------------------------------------------------------------------- adapters that no model knows


def patched_unet() -> Any:
    model = small_sd_unet()
    model.requires_grad_(False)
    torch.manual_seed(3)
    for module in [module for name, module in model.named_modules() if name.endswith((".to_q", ".to_v"))]:
        Patch(module)
    return model


def test_an_adapter_that_replaces_a_forward_is_refused_and_trains_when_registered(tmp_path):
    model = patched_unet()
    for how in ({}, {"example_batch": sd_entries(), "trace": True}):
        with pytest.raises(
            GraphError, match=r"to_q has a forward set on the instance \(a method of a Patch\).*add_module"
        ):
            to_layers(model, **how)
    register_patches(model)
    expected = model(**sd_entries()).sample
    expected.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients and all(".lora." in name for name in gradients)
    model.zero_grad()
    layers = to_layers(model)
    found = interpret(layers, sd_entries())
    assert torch.equal(found, expected)
    found.square().mean().backward()
    for name, gradient in gradients.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name
    on_ranks(layers, lambda engine: save_pretrained(engine, tmp_path), ranks=3)
    assert load_file(tmp_path / WEIGHTS).keys() == model.state_dict().keys()


def test_a_model_is_cut_alike_with_such_adapters_and_without():
    with_adapters, without = (to_layers(make(), example_batch=flagged_batch()) for make in (patched_blocks, Blocks))
    assert [layer.name for layer in with_adapters] == [layer.name for layer in without]


def test_hooks_that_read_weights_of_their_own_are_refused():
    model = small_sd_unet()
    adapter = torch.nn.Linear(1, 1)
    model.conv_in.register_forward_hook(lambda module, given, output: output * adapter.weight)
    with pytest.raises(GraphError, match="conv_in has a forward hook, which reads a trainable weight"):
        to_layers(model)
    adapter.requires_grad_(False)
    assert to_layers(model)
