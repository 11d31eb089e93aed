"""A model that is none of diffusers' comes back from the ranks: whole, as a file, and its adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from huggingface_hub import load_torch_model
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from support.plain_nets import PlainUNet, plain_unet_batch
from support.thread_ranks import on_ranks
from torch import nn

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models import EMA, gather_model, save_lora, save_pretrained, to_layers


class Tied(nn.Module):
    """A weight under two names, a table that is not saved, and a buffer that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.first(x)) + self.table))


def tied_batch() -> dict[str, Any]:
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(2))}


def with_adapters() -> nn.Module:
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=["out", "time.0"], init_lora_weights=False)
    return inject_adapter_in_model(config, PlainUNet())


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "a plain U-Net": (PlainUNet, PlainUNet, plain_unet_batch),
    "a shared weight": (Tied, Tied, tied_batch),
    "adapters": (with_adapters, PlainUNet, plain_unet_batch),
}
"""How the one that trains is made, a new one, and a batch."""


def moved(name: str) -> tuple[nn.Module, list[Any]]:
    """A model that has trained, and its layers."""
    make, _, batch = OWN[name]
    model = make()
    layers = to_layers(model, example_batch=batch())
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1 if not tensor.is_floating_point() else 0.01 * torch.rand_like(tensor))
    return model, layers


@torch.no_grad()
def output(model: nn.Module, name: str) -> torch.Tensor:
    return model.eval()(**OWN[name][2]())


@pytest.mark.parametrize("name", OWN)
def test_the_whole_model_is_gathered(name: str) -> None:
    model, layers = moved(name)
    found: list[Any] = []
    random = torch.random.get_rng_state()
    on_ranks(layers, lambda engine: found.append(gather_model(engine, build=OWN[name][1])), ranks=2)
    assert torch.equal(torch.random.get_rng_state(), random)  # the ranks' dropout draws as if nobody had sampled
    whole = next(one for one in found if one is not None)
    assert type(whole) is type(model) and not whole.training
    assert whole.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(output(whole, name), output(model, name))
    if name == "a shared weight":
        assert whole.first.weight is whole.last.weight


@pytest.mark.parametrize("shards", ["10GB", "10KB"])
@pytest.mark.parametrize("name", ["a plain U-Net", "a shared weight"])
def test_files_are_those_that_the_hub_reads(tmp_path: Path, name: str, shards: str) -> None:
    model, layers = moved(name)

    def save(engine: Any) -> None:
        save_pretrained(engine, tmp_path / "net", max_shard_size=shards, ema=EMA(engine))

    on_ranks(layers, save, ranks=2)
    for folder in ("net", "net_ema"):
        there = {path.name for path in (tmp_path / folder).iterdir()}
        assert "config.json" not in there and ("model.safetensors" in there or "model.safetensors.index.json" in there)
        found = OWN[name][1]()
        load_torch_model(found, tmp_path / folder, strict=True)
        assert torch.equal(output(found, name), output(model, name))


def test_adapters_are_read_by_peft(tmp_path: Path) -> None:
    model, layers = moved("adapters")
    on_ranks(layers, lambda engine: save_lora(engine, tmp_path / "lora", format="peft"), ranks=2)
    on_ranks(layers, lambda engine: save_pretrained(engine, tmp_path / "base"), ranks=2)
    base = PlainUNet()
    load_torch_model(base, tmp_path / "base", strict=True)
    found = PeftModel.from_pretrained(base, tmp_path / "lora").get_base_model()
    assert torch.equal(output(found, "adapters"), output(model, "adapters"))
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["r"] == 2


class TiedMixin(ModelMixin, ConfigMixin):
    """A class of diffusers' kind with one parameter under two names."""

    @register_to_config
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


def test_a_class_of_diffusers_with_a_shared_weight_needs_no_build() -> None:
    model, found = TiedMixin(), []
    layers = to_layers(model, example_batch=tied_batch())
    on_ranks(layers, lambda engine: found.append(gather_model(engine)), ranks=2)
    whole = next(one for one in found if one is not None)
    assert whole.first.weight is whole.last.weight and torch.equal(whole(**tied_batch()), model(**tied_batch()))


def test_a_table_comes_in_the_dtype_in_which_it_trains() -> None:
    model, found = Tied().to(torch.bfloat16).eval(), []
    batch = {"x": tied_batch()["x"].bfloat16()}
    on_ranks(to_layers(model, example_batch=batch), lambda e: found.append(gather_model(e, build=Tied)), ranks=2)
    whole = next(one for one in found if one is not None)
    assert whole.table.dtype == torch.bfloat16 and torch.equal(whole(**batch), model(**batch))


class Wider(PlainUNet):
    """Another model in the same list."""


def test_the_class_itself_goes_before_those_derived_from_it() -> None:
    models = (PlainUNet(), Wider())
    layers = [layer for model in models for layer in to_layers(model, example_batch=plain_unet_batch())]
    for model in models:
        found: list[Any] = []
        kind = type(model)
        on_ranks(layers, lambda e, k=kind, f=found: f.append(gather_model(e, build=k, model_class=k)), ranks=2)
        whole = next(one for one in found if one is not None)
        assert type(whole) is kind and all(map(torch.equal, whole.parameters(), model.parameters()))


@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16"])
def test_weights_are_floating_point(tmp_path: Path, dtype: Any) -> None:
    layers = moved("adapters")[1]
    acts: list[Callable[[Any], Any]] = [
        lambda e: gather_model(e, build=PlainUNet, dtype=dtype),
        lambda e: save_pretrained(e, tmp_path, dtype=dtype),
        lambda e: save_lora(e, tmp_path, format="peft", dtype=dtype),
    ]
    for act in acts:
        with pytest.raises(ConfigError, match=r"dtype: expected a floating-point torch\.dtype"):
            on_ranks(layers, act, ranks=2)


def test_what_cannot_be_given_back_is_told_by_all_ranks(tmp_path: Path) -> None:
    def refused(match: str, layers: list[Any], act: Callable[[Any], Any]) -> None:
        with pytest.raises(ConfigError, match=match):
            on_ranks(layers, act, ranks=2)

    layers = moved("a plain U-Net")[1]
    refused(r"nothing says how a PlainUNet is made; pass build=", layers, gather_model)
    other = "the Tied that build= returns has other parts than the one that trains, the first is first.weight"
    refused(other, layers, lambda engine: gather_model(engine, build=Tied))
    refused(
        "build=: expected a function that returns a module, found dict", layers, lambda e: gather_model(e, build=dict)
    )
    refused(r"no layer of the list holds \d+ of the \d+ entries", layers[:-1], lambda e: save_pretrained(e, tmp_path))
    twice = [*layers, *moved("a plain U-Net")[1]]
    refused("2 of them are a PlainUNet; make a class", twice, lambda e: gather_model(e, model_class=PlainUNet))
    refused("none of them is a Tied; pass the class of", layers, lambda e: gather_model(e, model_class=Tied))
    refused("diffusers loads no adapters into a PlainUNet", moved("adapters")[1], lambda e: save_lora(e, tmp_path))
    assert not list(tmp_path.iterdir())
