"""What save_pretrained writes is what the model's own save_pretrained writes, from any number of ranks."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from safetensors import safe_open
from safetensors.torch import load_file
from support.small_models import pixel_entries, sd_entries, small_sd_unet, small_unet

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.export import CONFIG, WEIGHTS, save_pretrained


class FakeModule:
    """The part of PipelineModule that the export uses; ranks are threads that meet at a barrier."""

    def __init__(self, layers: list[Any], owners: list[int], rank: int, shared: SimpleNamespace) -> None:
        self.layer_list, self.owners, self.rank, self.shared = layers, owners, rank, shared
        self.most_bytes = 0

    def local_layers(self) -> list[tuple[int, Any]]:
        return [(i, x.layer) for i, x in enumerate(self.layer_list) if self.owners[i] == self.rank]

    def gather_to_first(self, item: Any) -> list[Any] | None:
        self.most_bytes = max(self.most_bytes, sum(t.nbytes for t in (item or {}).values()))
        self.shared.slots[self.rank] = item
        self.shared.barrier.wait()
        found = list(self.shared.slots) if self.rank == 0 else None
        self.shared.barrier.wait()
        return found


def export(layers: list[Any], folder: Any, *, ranks: int = 1) -> list[FakeModule]:
    """Run ``save_pretrained`` on ranks that each hold a wave: layer i of n and layer n - i together."""
    owners = [min(i, len(layers) - 1 - i) * 2 * ranks // (len(layers) + 1) for i in range(len(layers))]
    shared = SimpleNamespace(slots=[None] * ranks, barrier=threading.Barrier(ranks, timeout=60))
    modules = [FakeModule(layers, owners, rank, shared) for rank in range(ranks)]
    engines = [
        SimpleNamespace(module=module, grid=SimpleNamespace(data_parallel_id=0), global_rank=module.rank)
        for module in modules
    ]
    threads = [threading.Thread(target=save_pretrained, args=(engine, folder)) for engine in engines[1:]]
    for thread in threads:
        thread.start()
    save_pretrained(engines[0], folder)
    for thread in threads:
        thread.join()
    return modules


@pytest.mark.parametrize("ranks", [1, 3])
def test_same_files_as_the_models_own_save(tmp_path, ranks):
    model = small_sd_unet()
    layers = to_layers(model)
    with torch.no_grad():
        for layer in layers:  # "training": weights change after the list was made
            for parameter in layer.layer.parameters():
                parameter.add_(0.01)
    model.save_pretrained(tmp_path / "theirs")
    export(layers, tmp_path / "ours", ranks=ranks)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [CONFIG, WEIGHTS]
    theirs, ours = (load_file(tmp_path / name / WEIGHTS) for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) and theirs[key].dtype == ours[key].dtype for key in theirs)
    metadata = [safe_open(tmp_path / name / WEIGHTS, "pt").metadata() for name in ("theirs", "ours")]
    assert metadata[0] == metadata[1]
    configs = [json.loads((tmp_path / name / CONFIG).read_text()) for name in ("theirs", "ours")]
    assert configs[0] == configs[1]


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


def test_half_precision_stays(tmp_path):
    export(to_layers(small_unet().to(torch.bfloat16)), tmp_path)
    assert {value.dtype for value in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}


def test_no_rank_sends_more_than_a_layer_at_a_time(tmp_path):
    layers = to_layers(small_sd_unet())
    largest = max(sum(t.nbytes for t in layer.layer.state_dict().values()) for layer in layers)
    assert all(module.most_bytes <= largest for module in export(layers, tmp_path, ranks=3))


def test_data_parallel_replicas_send_nothing(tmp_path):
    sent = []
    layers = to_layers(small_unet())
    module = SimpleNamespace(
        layer_list=layers,
        local_layers=lambda: [(index, layer.layer) for index, layer in enumerate(layers)],
        gather_to_first=sent.append,
    )
    replica = SimpleNamespace(module=module, grid=SimpleNamespace(data_parallel_id=1), global_rank=1)
    save_pretrained(replica, tmp_path / "nothing")
    assert sent == [None] * len(layers)
    assert not (tmp_path / "nothing").exists()


def test_an_older_sharded_save_does_not_shadow_the_new_one(tmp_path):
    model = small_unet()
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / f"{WEIGHTS}.index.json").exists()
    with torch.no_grad():
        model.conv_in.weight.add_(1)
    export(to_layers(model), tmp_path)
    assert torch.equal(UNet2DModel.from_pretrained(tmp_path).conv_in.weight, model.conv_in.weight)


def test_layers_of_the_users_own_may_stand_beside_the_models(tmp_path):
    export([*to_layers(small_unet()), spec(torch.nn.Conv2d(3, 3, 1), name="mine")], tmp_path)
    UNet2DModel.from_pretrained(tmp_path)


def test_lists_that_are_not_from_diffusers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"layers of 0 models; use engine\.save_checkpoint"):
        export([spec(torch.nn.Linear(2, 2))], tmp_path)
    with pytest.raises(ConfigError, match="layers of 2 models"):
        export(to_layers(small_unet()) + to_layers(small_unet()), tmp_path)


def test_a_list_with_layers_left_out_is_refused_and_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"holds 4 of the \d+ entries of the UNet2DModel, the first is conv_norm"):
        export(to_layers(small_unet())[:-1], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_failed_write_leaves_the_old_files(tmp_path, monkeypatch):
    export(to_layers(small_unet()), tmp_path)
    before = (tmp_path / WEIGHTS).read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("deepspeed_pulse.models.export.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export(to_layers(small_unet(num_class_embeds=7)), tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
