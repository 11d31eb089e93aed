"""Averages of the weights: the schedule, files and state of diffusers' EMAModel. Real ranks: test_lora.py."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from support.small_models import small_unet
from support.thread_ranks import on_ranks
from torch import nn

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.models import EMA, freeze, save_pretrained, to_layers
from deepspeed_pulse.models.weights.folder import CONFIG, WEIGHTS

STEPS = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"decay": 0.6, "min_decay": 0.2, "use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75},
    {"decay": 0.5, "update_after_step": 2, "foreach": True},
]


def small() -> Any:
    model = small_unet()
    freeze(model, "conv_in.*", "down_blocks.0.*")
    return model


@torch.no_grad()
def train(parameters: Any, step: int) -> None:
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.add_(0.01 * (step + 1))


def reference(options: dict[str, Any]) -> tuple[Any, EMAModel]:
    model = small()
    average = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config, **options)
    for step in range(STEPS):
        train(model.parameters(), step)
        average.step(model.parameters())
    return model, average


def test_weights_that_train_later_are_averaged_from_then_on() -> None:
    def run(engine: Any) -> None:
        ema = EMA(engine, decay=0.5)
        mine = {f"{i}.{name}": p for i, layer in engine.module.local_layers() for name, p in layer.named_parameters()}
        late = [name for name, parameter in mine.items() if not parameter.requires_grad]
        for step in range(4):
            if step == 2:
                [parameter.requires_grad_(True) for parameter in mine.values()]
            train(mine.values(), step)
            if step == 2:
                begun = {name: mine[name].detach().clone() for name in late}
            ema.step()
        averages, rate = ema.averages(), 1 - ema.cur_decay_value
        assert averages.keys() == mine.keys()
        for name in late:
            assert torch.allclose(averages[name], begun[name] + rate * (mine[name] - begun[name])), name

    on_ranks(to_layers(small()), run, ranks=2)


@pytest.mark.parametrize("options", OPTIONS)
def test_cur_decay_value_is_diffusers(options):
    _, average = reference(options)
    on_ranks(to_layers(small()), lambda engine: check_none(EMA(engine).cur_decay_value))
    averaged(lambda engine, ema: check_same(ema.cur_decay_value, average.cur_decay_value), options)


def check_none(value: Any) -> None:
    assert value is None


def check_same(found: Any, expected: Any) -> None:
    assert found == expected


def averaged(
    act: Callable[[Any, EMA], Any], options: dict[str, Any] | None = None, *, ranks: int = 3, model: Any = None
) -> None:
    """Train on ranks that are threads, then ``act(engine, ema)``."""

    def run(engine: Any) -> None:
        ema = EMA(engine, **(options or {}))
        for step in range(STEPS):
            for _, layer in engine.module.local_layers():
                train(layer.parameters(), step)
            ema.step()
        act(engine, ema)

    on_ranks(to_layers(model or small()), run, ranks=ranks)


@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model name")  # diffusers about itself
@pytest.mark.parametrize("options", OPTIONS)
def test_the_folder_beside_the_model_is_the_one_diffusers_writes(tmp_path, options):
    model, average = reference(options)
    model.save_pretrained(tmp_path / "theirs")
    average.save_pretrained(tmp_path / "theirs_ema")
    averaged(lambda engine, ema: save_pretrained(engine, tmp_path / "ours", ema=ema), options)
    for kind in ("", "_ema"):
        theirs, ours = tmp_path / f"theirs{kind}", tmp_path / f"ours{kind}"
        assert json.loads((theirs / CONFIG).read_text()) == json.loads((ours / CONFIG).read_text())
        expected, found = load_file(theirs / WEIGHTS), load_file(ours / WEIGHTS)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    read = EMAModel.from_pretrained(tmp_path / "ours_ema", UNet2DModel)
    assert (read.optimization_step, read.decay) == (STEPS, options.get("decay", 0.9999))


def test_averages_of_bfloat16_weights_are_float32_and_follow_what_full_precision_gives(tmp_path):
    averaged(lambda engine, ema: save_pretrained(engine, tmp_path / "ours", ema=ema), model=small().to(torch.bfloat16))
    assert {t.dtype for t in load_file(tmp_path / "ours" / WEIGHTS).values()} == {torch.bfloat16}
    assert {t.dtype for t in load_file(tmp_path / "ours_ema" / WEIGHTS).values()} == {torch.float32}


def test_one_weight_at_a_time_is_there_in_full_precision():
    def run(engine: Any) -> None:
        given: list[weakref.ref[torch.Tensor]] = []

        def full_precision(parameter: Any) -> Any:
            assert all(one() is None for one in given)
            full = parameter.detach().float()
            given.append(weakref.ref(full))
            return full

        engine.module.full_precision = full_precision
        ema = EMA(engine)
        ema.step()
        assert len(given) == 2 * len(ema.averages()) and ema.schedule()["optimization_step"] == 1

    on_ranks(to_layers(small().to(torch.bfloat16)), run)


def test_a_rank_of_frozen_layers_counts_its_steps():
    def run(engine: Any) -> None:
        ema = EMA(engine)
        ema.step()
        assert ema.schedule()["optimization_step"] == 1

    on_ranks(to_layers(small().requires_grad_(False)), run)


def test_the_folder_of_averages_stands_beside_one_with_a_slash_behind(tmp_path):
    averaged(lambda engine, ema: save_pretrained(engine, f"{tmp_path}/ours/", ema=ema))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "ours_ema"]


class Wrapper(nn.Module):
    """A layer of the user's own, with a child of the name by which a tied call holds its module."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))


def test_all_weights_of_a_layer_with_a_child_called_module_are_averaged():
    names = []
    on_ranks([spec(Wrapper())], lambda engine: names.extend(EMA(engine).averages()))
    assert sorted(names) == ["0.module.bias", "0.module.weight", "0.scale"]


def test_store_copy_to_restore():
    def swap(engine: Any, ema: EMA) -> None:
        weights = {f"{i}.{n}": p for i, layer in engine.module.local_layers() for n, p in layer.named_parameters()}
        before = {name: p.detach().clone() for name, p in weights.items()}
        with pytest.raises(ConfigError, match="nothing is stored; call store"):
            ema.restore()
        ema.store()
        ema.copy_to()
        for name, average in ema.averages().items():
            assert torch.equal(weights[name], average) and not torch.equal(average, before[name])
        with pytest.raises(ConfigError, match=r"call restore\(\) before training"):
            ema.step()
        ema.restore()
        assert all(torch.equal(weights[name], before[name]) for name in weights)

    averaged(swap, {"decay": 0.5})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_continues_exactly_on_other_ranks(tmp_path, ranks):
    """Files of three ranks, read by one and by two."""
    averaged(lambda engine, ema: ema.save(tmp_path), OPTIONS[1])
    model, average = reference(OPTIONS[1])
    train(model.parameters(), STEPS)
    average.step(model.parameters())
    expected = dict(zip(dict(model.named_parameters()), average.shadow_params, strict=True))

    def go_on(engine: Any) -> None:
        ema = EMA(engine)
        ema.load(tmp_path)
        for _, layer in engine.module.local_layers():
            train(layer.parameters(), STEPS)
        ema.step()
        for name, found in ema.averages().items():
            assert torch.equal(found, expected[name.partition(".")[2]])
        assert ema.schedule() == {k: v for k, v in average.state_dict().items() if k != "shadow_params"}

    again, _ = reference(OPTIONS[1])
    on_ranks(to_layers(again), go_on, ranks=ranks)


def test_states_of_all_ranks_join(tmp_path):
    states: list[dict[str, Any]] = []
    averaged(lambda engine, ema: states.append(ema.state_dict()))
    joined = {**states[0], "shadow_params": {k: v for state in states for k, v in state["shadow_params"].items()}}
    on_ranks(to_layers(small()), lambda engine: EMA(engine).load_state_dict(joined), ranks=2)
    with pytest.raises(
        ConfigError, match=r"no average of \d+ of this rank's \d+ trainable weights, the first is \d+\."
    ):
        on_ranks(to_layers(small()), lambda engine: EMA(engine).load_state_dict(states[0]))
    name = next(iter(joined["shadow_params"]))
    joined["shadow_params"][name] = torch.zeros(2, 2, 2)
    with pytest.raises(ConfigError, match=r"expected shape \[.*\], found \[2, 2, 2\]; the state belongs to another"):
        on_ranks(to_layers(small()), lambda engine: EMA(engine).load_state_dict(joined))


def damage(folder: Path, how: str) -> None:
    layer = sorted(folder.glob("layer_*"))[1]
    if how == "gone":
        layer.unlink()
    elif how == "cut":
        layer.write_bytes(layer.read_bytes()[:100])
    elif how == "foreign":
        (folder / "ema.json").write_text("{}")
    elif how == "renamed":
        save_file({f"{name}x": t for name, t in load_file(layer).items()}, layer)
    elif how == "bit":
        content = bytearray(layer.read_bytes())
        content[-3] ^= 1
        layer.write_bytes(content)
    elif how in ("decay", "schedule"):
        state = json.loads((folder / "ema.json").read_text())
        if how == "decay":  # as an earlier version wrote it
            del state["sha256"]
        (folder / "ema.json").write_text(json.dumps({**state, "decay": 7.0}))


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("gone", FileError, r"layer_\d\d.safetensors: expected the averages of layer \d+, found: No such file"),
        ("cut", FileError, r"layer_\d\d.safetensors: is damaged: not the averages of layer \d+"),
        ("foreign", FileError, "ema.json: expected the format pulse-ema/1"),
        ("renamed", FileError, r"layer_\d\d.safetensors: is damaged: not the averages of layer \d+"),
        ("bit", FileError, r"layer_\d\d.safetensors: is damaged: not the averages of layer \d+"),
        ("schedule", FileError, r"ema.json: is damaged: not the schedule"),
        ("decay", ConfigError, "Decay must be between 0 and 1"),
    ],
)
def test_damaged_files_fail_on_every_rank(tmp_path, how, kind, text):
    averaged(lambda engine, ema: ema.save(tmp_path))
    damage(tmp_path, how)
    with pytest.raises(kind, match=text):
        on_ranks(to_layers(small()), lambda engine: EMA(engine).load(tmp_path), ranks=1)

    def load(engine: Any) -> None:
        ema = EMA(engine)
        before, weights = ema.schedule(), {name: t.clone() for name, t in ema.averages().items()}
        try:
            ema.load(tmp_path)
        finally:  # nothing was changed, on no rank
            assert ema.schedule() == before
            assert all(torch.equal(t, weights[name]) for name, t in ema.averages().items())

    with pytest.raises(kind, match=text):
        on_ranks(to_layers(small()), load, ranks=2)


def test_a_folder_that_is_a_file_fails_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="averages cannot be written"):
        averaged(lambda engine, ema: ema.save(tmp_path / "file"))


def test_a_save_that_broke_off_does_not_load(tmp_path, monkeypatch):
    averaged(lambda engine, ema: ema.save(tmp_path))

    def fail(path: Path, content: bytes) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched, pytest.raises(FileError, match="averages cannot be written: disk full"):
        patched.setattr(Path, "write_bytes", fail)
        averaged(lambda engine, ema: ema.save(tmp_path), ranks=2)
    with pytest.raises(FileError, match=r"ema\.json: expected what EMA\.save"):
        on_ranks(to_layers(small()), lambda engine: EMA(engine).load(tmp_path))


def test_options_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="EMA: Decay must be between 0 and 1"):
        on_ranks(to_layers(small()), lambda engine: EMA(engine, decay=2.0), ranks=2)
