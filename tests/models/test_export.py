"""What save_pretrained writes is what the model's own save_pretrained writes, from any number of ranks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from safetensors.torch import load_file
from support.small_models import (
    pixel_entries,
    sd_entries,
    small_controlled_unet,
    small_controlnet,
    small_sd_unet,
    small_unet,
)
from support.thread_ranks import FakeModule, fake_engine, on_ranks

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.models import EMA, to_layers
from deepspeed_pulse.models.weights.export import save_pretrained
from deepspeed_pulse.models.weights.folder import WEIGHTS


def export(layers: list[Any], folder: Any, *, ranks: int = 1, **options: Any) -> list[FakeModule]:
    """Run ``save_pretrained`` on ranks that are threads."""
    return on_ranks(layers, lambda engine: save_pretrained(engine, folder, **options), ranks=ranks)


def trained(model: Any) -> list[Any]:
    """The layers of a model whose weights change after the list was made."""
    layers = to_layers(model)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.layer.parameters():
                parameter.add_(0.01)
    return layers


def assert_same_folders(theirs: Path, ours: Path) -> None:
    """The same files; tensors, metadata, index and config in them."""
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    for path in theirs.iterdir():
        if path.suffix == ".json":
            assert json.loads(path.read_text()) == json.loads((ours / path.name).read_text())
        else:
            assert path.read_bytes() == (ours / path.name).read_bytes()


@pytest.mark.parametrize(
    ("ranks", "max_shard_size", "variant"), [(1, "10GB", None), (3, "2MB", "fp16"), (3, 10**6, None)]
)
def test_same_files_as_the_models_own_save(tmp_path, ranks, max_shard_size, variant):
    model = small_sd_unet()
    layers = trained(model)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size, variant=variant)
    export(layers, tmp_path / "ours", ranks=ranks, max_shard_size=max_shard_size, variant=variant)
    assert_same_folders(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "make", "entries"),
    [(UNet2DConditionModel, small_sd_unet, sd_entries), (UNet2DModel, small_unet, pixel_entries)],
    ids=["conditional", "pixel"],
)
def test_from_pretrained_gives_the_trained_model(tmp_path, kind, make, entries):
    model = make()
    export(to_layers(model), tmp_path, ranks=2)
    read = kind.from_pretrained(tmp_path).train()
    with torch.no_grad():
        assert torch.equal(read(**entries()).sample, model(**entries()).sample)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_shared_weight_is_written_under_each_of_its_names(tmp_path, ranks):
    """Its places in two layers and in one; diffusers' own save refuses them."""
    model = small_sd_unet()
    first, last = model.down_blocks[0].resnets[0], model.up_blocks[-1].resnets[0]
    last.conv2 = first.conv2
    last.norm2.weight = first.norm1.weight = first.norm2.weight
    on_ranks(to_layers(model), lambda engine: save_pretrained(engine, tmp_path / "unet", ema=EMA(engine)), ranks=ranks)
    for folder in ("unet", "unet_ema"):
        read = UNet2DConditionModel.from_pretrained(tmp_path / folder)
        found = read.state_dict()
        for key, value in model.state_dict().items():
            assert torch.equal(found[key], value), (folder, key)


def test_half_precision_stays(tmp_path):
    export(to_layers(small_unet().to(torch.bfloat16)), tmp_path)
    assert {value.dtype for value in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}


def test_another_dtype_is_asked_for(tmp_path):
    export(to_layers(small_unet()), tmp_path, dtype=torch.float16, variant="fp16")
    read = UNet2DModel.from_pretrained(tmp_path, variant="fp16", torch_dtype=torch.float16)
    assert {value.dtype for value in read.state_dict().values()} == {torch.float16}


def test_the_first_rank_holds_one_shard_at_a_time(tmp_path):
    modules = export(to_layers(small_sd_unet()), tmp_path, ranks=3, max_shard_size="1MB")
    shards = list(tmp_path.glob("*-of-*"))
    assert len(shards) > 5
    assert 0 < max(modules[0].received_bytes) <= max(path.stat().st_size for path in shards)


def test_data_parallel_replicas_send_nothing(tmp_path):
    layers = to_layers(small_unet())
    shared = SimpleNamespace(slots=[None, None], barrier=threading.Barrier(2, timeout=60))
    first, replica = (FakeModule(layers, [0] * len(layers), rank, shared) for rank in range(2))
    replica.local_layers = first.local_layers
    replica.ranks.gather_to_first = lambda item: [item, replica.meet(None)][0]
    engines = [fake_engine(module, replica=index) for index, module in enumerate((first, replica))]
    sent = []
    replica.ranks.bring_to_first = lambda tensor, **_: [sent.append(tensor), replica.meet(None)][0]
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(save_pretrained, engine, tmp_path) for engine in engines]:
            one.result()
    assert set(sent) == {None}
    UNet2DModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("before", ["10GB", "1MB", "800KB"])
@pytest.mark.parametrize("after", ["10GB", "1MB"])
def test_an_earlier_save_does_not_shadow_the_new_one(tmp_path, before, after):
    model = small_unet()
    model.save_pretrained(tmp_path / "ours", max_shard_size=before)
    (tmp_path / "ours" / "README.md").write_text("the user's own")
    layers = trained(model)
    export(layers, tmp_path / "ours", max_shard_size=after)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=after)
    (tmp_path / "theirs" / "README.md").write_text("the user's own")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(
        path.name for path in (tmp_path / "theirs").iterdir()
    )
    assert torch.equal(UNet2DModel.from_pretrained(tmp_path / "ours").conv_in.weight, model.conv_in.weight)


def test_layers_of_the_users_own_may_stand_beside_the_models(tmp_path):
    export([*to_layers(small_unet()), spec(torch.nn.Conv2d(3, 3, 1), name="mine")], tmp_path)
    UNet2DModel.from_pretrained(tmp_path)


def test_lists_that_are_not_from_diffusers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no layer of this list was made of one .* use engine\.save_checkpoint"):
        export([spec(torch.nn.Linear(2, 2))], tmp_path)
    with pytest.raises(
        ConfigError, match="made of UNet2DModel, UNet2DModel, and which one was not said; pass model_class="
    ):
        export(to_layers(small_unet()) + to_layers(small_unet()), tmp_path)


def test_one_of_two_models_is_saved(tmp_path):
    models = (small_controlled_unet(), small_controlnet())
    layers = to_layers(models[0], controlnet=models[1])
    for model in models:
        name = type(model).__name__
        model.save_pretrained(tmp_path / "theirs" / name)
        export(layers, tmp_path / "ours" / name, ranks=2, model_class=type(model))
        assert_same_folders(tmp_path / "theirs" / name, tmp_path / "ours" / name)
    with pytest.raises(ConfigError, match="made of UNet2DConditionModel, ControlNetModel, and none of them is a UNet2"):
        export(layers, tmp_path, model_class=UNet2DModel)


def test_a_list_with_layers_left_out_is_refused_and_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"holds 4 of the \d+ entries to be saved, the first is conv_norm"):
        export(to_layers(small_unet())[:-1], tmp_path / "none", ranks=2)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("size", ["5 bananas", "huge"])
def test_a_shard_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ConfigError, match="max_shard_size: expected bytes or text"):
        export(to_layers(small_unet()), tmp_path, max_shard_size=size)


@pytest.mark.parametrize("at", [0, 2])
def test_a_failed_write_leaves_the_old_files_and_fails_on_every_rank(tmp_path, monkeypatch, at):
    export(to_layers(small_unet()), tmp_path, max_shard_size="1MB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = iter(range(100))

    def fail(tensors: Any, path: Path, **kwargs: Any) -> None:
        path.write_text("half")
        if next(calls) == at:
            raise OSError("disk full")

    monkeypatch.setattr("deepspeed_pulse.models.weights.shards.save_file", fail)
    with pytest.raises(FileError, match="cannot be written: disk full"):
        export(trained(small_unet(num_class_embeds=7)), tmp_path, ranks=2, max_shard_size="1MB")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        export(to_layers(small_unet()), tmp_path / "file")
