"""Layers that read or draw their own weights: the same model as diffusers', whichever rank builds what."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from support.families import interpret
from support.small_models import (
    pixel_entries,
    sd_entries,
    small_audioldm2,
    small_kandinsky3,
    small_motion_unet,
    small_sd_unet,
    small_sdxl_unet,
    small_svd_unet,
    small_unet,
    small_unet_3d,
)
from support.small_transformers import (
    small_cogvideox,
    small_flux,
    small_hunyuan_dit,
    small_hunyuan_video,
    small_pixart,
    small_sd3,
    small_unidiffuser,
    small_uvit,
    small_wan,
)
from torch import nn

from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.engine.plans.costs import parameter_counts
from deepspeed_pulse.engine.specs import describe, in_a_row, spec
from deepspeed_pulse.errors import ConfigError, FileError, GraphError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.models import freeze, from_config, from_pretrained, to_layers
from deepspeed_pulse.models.weights.folder import WEIGHTS
from deepspeed_pulse.models.weights.skeleton import Skeleton


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small class-conditional U-Net as a folder; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("saved") / "unet"
    small_unet().save_pretrained(folder)
    return folder


def small_fourier_unet() -> UNet2DModel:
    """Its time embedding has frequencies that are drawn and not trained."""
    return small_unet(time_embedding_type="fourier")


def built(layers: list[Any]) -> list[Any]:
    return [spec(layer.build(), stash=layer.stash, pop=layer.pop, name=layer.layer_name) for layer in layers]


def config_of(model: Any) -> dict[str, Any]:
    return json.loads(model.to_json_string())


def state_of(layers: list[Any]) -> dict[str, torch.Tensor]:
    return {key: value for layer in layers for key, value in layer.build().state_dict().items()}


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors that are plain attributes."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": v for name, v in vars(module).items() if isinstance(v, torch.Tensor)}
    return found


# ------------------------------------------------------------------------------- from_pretrained


@pytest.mark.parametrize(("max_shard_size", "variant"), [("10GB", None), ("10GB", "fp16"), ("1MB", "fp16")])
def test_the_weights_and_the_output_are_the_models(tmp_path, max_shard_size, variant):
    model = small_sd_unet()
    model.save_pretrained(tmp_path / "unet", max_shard_size=max_shard_size, variant=variant)
    layers = from_pretrained(tmp_path, subfolder="unet", variant=variant)
    assert_same_state(state_of(layers), model.state_dict())
    entries = sd_entries()
    with torch.no_grad():
        assert torch.equal(interpret(built(layers), entries), model(**entries).sample)


FAMILIES = (
    small_audioldm2,
    small_cogvideox,
    small_flux,
    small_fourier_unet,
    small_hunyuan_dit,
    small_hunyuan_video,
    small_kandinsky3,
    small_motion_unet,
    small_pixart,
    small_sd3,
    small_sdxl_unet,
    small_svd_unet,
    small_unet_3d,
    small_unidiffuser,
    small_uvit,
    small_wan,
)


CAST = (small_hunyuan_dit, small_svd_unet, small_wan)
"""Families with a position table, mix factors, and parts that stay in float32."""


@pytest.mark.parametrize(
    ("make", "dtype"), [(make, None) for make in FAMILIES] + [(make, torch.bfloat16) for make in CAST]
)
def test_every_layer_holds_what_diffusers_loads(tmp_path, make, dtype):
    """Parameters, buffers saved or computed (rotary and position tables, mix factors), and plain tensors."""
    make().save_pretrained(tmp_path)
    theirs = type(make()).from_pretrained(tmp_path, torch_dtype=dtype)
    layers = from_pretrained(tmp_path, dtype=dtype)
    made = [layer.build() for layer in layers]
    for mine, expected in zip(made, to_layers(theirs), strict=True):
        assert_same_state(tensors_of(mine), tensors_of(expected.layer))
    shared = [{id(module) for module in layer.modules()} for layer in made]
    eager = [{id(module) for module in layer.layer.modules()} for layer in to_layers(theirs)]
    assert len(set.union(*shared)) == len(set.union(*eager)), "a table is there more than once"


@pytest.mark.parametrize("make", [small_uvit, small_wan])
def test_initial_weights_do_not_depend_on_the_granularity(make):
    config = config_of(make())
    assert_same_state(*(state_of(from_config(config, granularity=cut)) for cut in ("fine", "block")))


def test_the_list_is_that_of_to_layers(saved):
    lazy, eager = from_pretrained(saved), to_layers(small_unet())
    assert [describe(i, x) for i, x in enumerate(lazy)] == [describe(i, x) for i, x in enumerate(eager)]
    assert [x.typename for x in lazy] == [type(x.layer) for x in eager]
    assert repr(lazy[1]) == "Part(down_blocks.0.resnets.0)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_dtypes_are_those_of_diffusers(tmp_path, dtype):
    small_unet().half().save_pretrained(tmp_path)
    expected = UNet2DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    assert_same_state(state_of(from_pretrained(tmp_path, torch_dtype=dtype)), expected.state_dict())
    assert torch.get_default_dtype() == torch.float32


def test_weights_with_the_names_of_old_versions(tmp_path, saved):
    weights = load_file(saved / WEIGHTS)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, name in old.items():
        for key in [key for key in weights if f".attentions.0.{new}." in key]:
            weights[key.replace(new, name)] = weights.pop(key)
    shutil.copy(saved / "config.json", tmp_path)
    save_file(weights, tmp_path / WEIGHTS)
    assert_same_state(state_of(from_pretrained(tmp_path)), small_unet().state_dict())


def test_every_build_is_a_layer_of_its_own(saved):
    layer = from_pretrained(saved)[1]
    first, second = layer.build(), layer.build()
    with torch.no_grad():
        next(first.parameters()).add_(1)
    assert not torch.equal(next(first.parameters()), next(second.parameters()))
    assert first.origin is second.origin
    assert first.training
    assert all(parameter.requires_grad for parameter in first.parameters())


def test_counting_parameters_reads_no_files(tmp_path, saved):
    shutil.copytree(saved, tmp_path / "unet")
    layers = from_pretrained(tmp_path / "unet")
    shutil.rmtree(tmp_path / "unet")
    assert sum(parameter_counts(layers)) == sum(p.numel() for p in small_unet().parameters())
    with pytest.raises(FileError, match="cannot be read"):
        layers[0].build()


def test_measuring_holds_one_layer_at_a_time(saved):
    layers = from_pretrained(saved)
    alive: list[weakref.ref[torch.Tensor]] = []

    def build(layer: Any) -> nn.Module:
        assert all(one() is None for one in alive), "the layer before is still there"
        made = layer.build()
        alive.extend(map(weakref.ref, made.parameters()))
        return made

    graph = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(layers)))
    entries = pixel_entries()
    gc.disable()
    try:
        measure_layers(
            graph,
            [lambda x=x: build(x) for x in layers],
            LayerInputs(hidden=entries.pop("sample"), values=entries),
            torch.device("cpu"),
        )
    finally:
        gc.enable()
    assert len(alive) == len(list(small_unet().parameters()))


# ------------------------------------------------------------------------------------ from_config


def test_initial_weights_depend_on_the_seed_alone():
    config = config_of(small_unet())
    expected = state_of(from_config(config, seed=3))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    layers = from_config(config, seed=3)
    for index in (5, 0, len(layers) - 1):  # a rank builds some of the layers, in its own order
        found = layers[index].build().state_dict()
        assert_same_state(found, {key: expected[key] for key in found})
    assert torch.equal(torch.get_rng_state(), before)
    other = state_of(from_config(config, seed=4))
    assert any(not torch.equal(other[key], expected[key]) for key in expected)


@pytest.mark.parametrize("make", [small_sd_unet, small_unet, small_hunyuan_dit, small_uvit])
def test_initial_weights_have_the_distribution_of_the_constructor(make):
    kind, config = type(make()), make().config
    skeleton = Skeleton(lambda: kind.from_config(config))
    ours = skeleton.initial(list(skeleton.entries))
    theirs = [kind.from_config(config).state_dict() for _ in range(2)]
    for key, first in theirs[0].items():
        if torch.equal(first, theirs[1][key]):  # no random numbers in it
            assert torch.equal(ours[key], first), key
        elif first.numel() >= 64:
            assert ours[key].std() == pytest.approx(float(first.std()), rel=0.4), key
            assert abs(float(ours[key].mean())) < 5 * float(first.std()) / first.numel() ** 0.5 + 1e-3, key
    drawn = [value.flatten()[:4] for value in ours.values() if value.std() > 0]
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn), "two parameters were drawn alike"


class Awkward(nn.Module):
    """Initialised in ways that draw into tensors of their own, depend on what was drawn, or draw several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        nn.init.trunc_normal_(self.first.weight, std=0.5, a=-0.5, b=0.5)
        self.table = nn.Parameter(torch.randn(4, 8) / 8**0.5)
        self.second = nn.Linear(8, 8)
        for module in (self.first, self.second):
            nn.init.orthogonal_(module.weight.data.view(8, -1))
            nn.init.trunc_normal_(module.bias, a=1.5, b=2.5)
        self.third = nn.Linear(8, 8)
        self.third.weight.data.normal_().mul_(2)
        early = nn.Parameter(torch.empty(64))
        nn.init.trunc_normal_(early)
        self.early = early


def test_what_a_parameter_gets_does_not_depend_on_the_others():
    skeleton = Skeleton(Awkward)
    together = skeleton.initial(list(skeleton.entries))
    for key in skeleton.entries:
        assert_same_state(skeleton.initial([key]), {key: together[key]})
    first = together["first.weight"]
    assert torch.allclose(first @ first.T, torch.eye(8), atol=1e-5)
    assert together["second.bias"].min() >= 1.5
    assert together["early"].std() > 0.5


def test_the_constructor_runs_once_for_several_layers_that_are_built_in_a_row(monkeypatch):
    """They get what each gets alone, and little is held beside them; what was not built is not kept."""
    layers = from_config({**config_of(small_unet()), "layers_per_block": 8})
    alone = [layer.build().state_dict() for layer in layers]
    model = sum(tensor.numel() for state in alone for tensor in state.values())
    held, runs, construct = [], [], Skeleton._construct

    def counted(self: Skeleton, keep: Any) -> Any:
        runs.append(keep)
        return construct(self, keep)

    monkeypatch.setattr(Skeleton, "_construct", counted)
    with in_a_row(layers[3:]):
        for layer, expected in zip(layers[3:], alone[3:], strict=True):
            assert_same_state(layer.build().state_dict(), expected)
            held.append(sum(tensor.numel() for tensor in layer._skeleton._ahead.values()))
        assert 1 < len(runs) < len(layers) / 2
        assert 0 < max(held) <= model / 16 and held[-1] == 0
    with in_a_row(layers):
        layers[5].build()  # of another order: right, if slower
        assert_same_state(layers[3].build().state_dict(), alone[3])
    assert not layers[0]._skeleton._ahead and not layers[0]._skeleton._coming


def test_a_config_is_a_dict_a_file_or_a_folder(saved, tmp_path):
    content = json.loads((saved / "config.json").read_text())
    other = tmp_path / "my model.json"
    other.write_text(json.dumps(content))
    first = from_config(content)[0].build().state_dict()
    for config, options in (
        (saved, {}),
        (saved / "config.json", {}),
        (other, {}),
        (saved.parent, {"subfolder": "unet"}),
    ):
        assert_same_state(from_config(config, **options)[0].build().state_dict(), first)


def test_a_new_model_in_another_dtype(saved):
    half = from_config(saved, dtype=torch.bfloat16)
    whole = state_of(from_config(saved))
    assert_same_state(state_of(half), {key: value.bfloat16() for key, value in whole.items()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


def test_tied_parameters_are_refused():
    with pytest.raises(GraphError, match="Tied has one parameter under two names"):
        Skeleton(Tied)


# ---------------------------------------------------------------------------------------- prepare


def test_prepare_freezes(saved):
    layers = from_pretrained(saved, prepare=lambda model: freeze(model, "*.norm?.*"))
    frozen = {name for layer in layers for name, p in layer.build().named_parameters() if not p.requires_grad}
    assert frozen == {name for name in small_unet().state_dict() if ".norm1." in name or ".norm2." in name}


def test_prepare_adds_adapters_that_start_alike(saved):
    def add(model: Any) -> None:
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "to_v"]), model)

    layers = from_pretrained(saved, prepare=add)
    whole = small_unet()
    expected = interpret(to_layers(whole), pixel_entries())
    with torch.no_grad():
        assert torch.equal(interpret(built(layers), pixel_entries()), expected)  # B starts at zero
    parameters = {name: p for layer in layers for name, p in layer.build().named_parameters()}
    assert {name for name, p in parameters.items() if p.requires_grad} == {n for n in parameters if ".lora_" in n}
    again = state_of(from_pretrained(saved, prepare=add))
    assert_same_state(again, {name: parameters[name].detach() for name in again})
    a = {name: p for name, p in parameters.items() if "lora_A" in name}
    assert a
    assert all(p.any() for p in a.values())


def magnitudes(model: Any) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"], use_dora=True), model)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (magnitudes, "to_q.lora_magnitude_vector.default.weight is computed from weights that are not there yet"),
        (lambda model: nn.init.zeros_(model.conv_in.weight), "the values of a parameter 'weight' were changed"),
        (lambda model: setattr(model, "conv_in", nn.Conv2d(3, 32, 3)), "2 parameters are no longer part of the model"),
        (
            lambda model: model.to(torch.bfloat16),
            "cast from torch.float32 .*; pass dtype=torch.bfloat16 beside",
        ),
        (lambda model: model.to("meta"), "conv_in.weight is computed from weights .*, or replaces some"),
    ],
    ids=["DoRA", "initialise", "replace", "cast", "move"],
)
def test_prepare_has_no_weights(saved, prepare, message):
    with pytest.raises(ConfigError, match=message):
        from_pretrained(saved, prepare=prepare)


# -------------------------------------------------------------------------------------- bad input


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def reconfigure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def cut_off(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def shard(folder: Path) -> None:
    small_unet().save_pretrained(folder, max_shard_size="1MB")
    (folder / WEIGHTS).unlink()


def lose_shard(folder: Path) -> None:
    shard(folder)
    next(folder.glob("*-00002-of-*")).unlink()


def edit_index(folder: Path, change: Any) -> None:
    shard(folder)
    path = folder / f"{WEIGHTS}.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


BAD = {
    "no folder": (shutil.rmtree, "expected a folder with config.json and weights, found none; a model of the Hugging"),
    "no config": (lambda f: (f / "config.json").unlink(), "expected a config.json, found none$"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: not a JSON file"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object, found list"),
    "unknown class": (
        lambda f: reconfigure(f, _class_name="UNet2dModel"),
        r'expected one of .* in _class_name, found UNet2dModel \(did you mean "UNet2DModel"\?\)',
    ),
    "no class": (lambda f: reconfigure(f, _class_name=None), r"expected one of .* in _class_name, found None"),
    "unusable field": (
        lambda f: reconfigure(f, down_block_types=["Nothing2D"] * 3),
        "UNet2DModel refuses the config: ValueError: Nothing2D does not exist",
    ),
    "quantized": (
        lambda f: reconfigure(f, quantization_config={"quant_method": "gguf"}),
        "expected no quantization_config: only the library that made",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), rf"expected {WEIGHTS} or an index .*, found only config\.json"),
    "pickle": (
        as_pickle,
        r"pickle files \(diffusion_pytorch_model\.bin\)\. Pickle can run code, so it is not read\..*conv",
    ),
    "pickle in disguise": (
        lambda f: torch.save({}, f / WEIGHTS),
        rf"{WEIGHTS}: is a pickle file under another name",
    ),
    "another variant": (
        lambda f: (f / WEIGHTS).rename(f / WEIGHTS.replace(".safe", ".fp16.safe")),
        "found the variants fp16; pass variant=",
    ),
    "git-lfs": (lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "cut off": (cut_off, rf"{WEIGHTS}: is damaged or incomplete"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), rf"{WEIGHTS}: is damaged or incomplete"),
    "garbage": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 99), rf"{WEIGHTS}: is damaged or incomplete"),
    "missing keys": (
        lambda f: rewrite(f, lambda w: [w.pop(key) for key in list(w) if key.startswith("conv_")]),
        r"6 missing from the weights: conv_in.weight, conv_in.bias, .* and 1 more$",
    ),
    "extra keys": (
        lambda f: rewrite(f, lambda w: w.update(more=torch.zeros(1))),
        "1 in the weights but not in the model: more$",
    ),
    "shapes": (
        lambda f: rewrite(f, lambda w: w.update({"conv_in.bias": torch.zeros(3)})),
        r"1 of another shape: conv_in\.bias is \[3\], expected \[32\]$",
    ),
    "another model's config": (lambda f: reconfigure(f, layers_per_block=2), r"\d+ missing from the weights: down_blo"),
    "missing shard": (lose_shard, r"names 1 files that are not there: diffusion_pytorch_model-00002-of-"),
    "index leaves the folder": (
        lambda f: edit_index(f, lambda m: m.update({"conv_in.bias": "../x.safetensors"})),
        "expected names of safetensors files in the same folder, found '../x.safetensors'",
    ),
    "index names a pickle": (
        lambda f: edit_index(f, lambda m: m.update({"conv_in.bias": "x.bin"})),
        "expected names of safetensors files in the same folder, found 'x.bin'",
    ),
    "index and shards differ": (
        lambda f: edit_index(f, lambda m: m.pop("conv_in.bias")),
        r"does not fit its shards: conv_in\.bias of .*00001-of-.* is not in the index$",
    ),
    "index is no index": (
        lambda f: (f / f"{WEIGHTS}.index.json").write_text("{}"),
        r'index\.json: field "weight_map": expected an object',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders(tmp_path, saved, name):
    """Before anything is built, one error that says which file and what was expected."""
    spoil, message = BAD[name]
    folder = tmp_path / "unet"
    shutil.copytree(saved, folder)
    spoil(folder)
    with pytest.raises(FileError, match=message) as found:
        from_pretrained(folder)
    assert str(folder) in str(found.value)


def test_a_pipeline_folder_names_its_models(tmp_path, saved):
    shutil.copytree(saved, tmp_path / "unet")
    with pytest.raises(FileError, match="it has models in unet: pass subfolder="):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, r"dtype: expected a floating-point torch\.dtype"),
        ({"torch_dtype": "bf16"}, "found 'bf16'"),
        ({"dtype": torch.float32, "torch_dtype": torch.float16}, "the same option"),
        ({"granularity": "coarse"}, 'expected "block" or "fine"'),
    ],
)
def test_bad_options(saved, options, message):
    with pytest.raises(ConfigError, match=message):
        from_pretrained(saved, **options)


def test_a_derived_class(saved):
    class Mine(UNet2DModel):
        pass

    assert from_pretrained(saved, model_class=Mine)[0].unit.origin.model_class is Mine
    with pytest.raises(FileError, match="expected the 193 tensors of the UNet2DConditionModel"):
        from_pretrained(saved, model_class=UNet2DConditionModel)
