"""The parts of examples/cascade that need no ranks: data, models, sampler, picture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("pairs", "sample", "train")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The example's modules, imported the way its scripts import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "cascade"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in (*NAMES, "data", "runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def batches(example: SimpleNamespace) -> SimpleNamespace:
    photographs = example.pairs.Photographs(size=example.pairs.SIZE)
    return example.pairs.PairBatches(photographs, microbatch_size=3)


def same(a, b) -> bool:
    """Of nested containers of tensors, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_batch_depends_on_its_place_alone(batches):
    assert same(batches.batch(5, 1, 2), batches.batch(5, 1, 2))
    for other in ((6, 1, 2), (5, 0, 2), (5, 1, 3)):
        assert not same(batches.batch(5, 1, 2), batches.batch(*other))


def test_iteration_resumes_at_any_step(batches):
    whole = list(islice(batches.iterate(first_step=0, microbatches=3, data_index=0), 9))
    resumed = list(islice(batches.iterate(first_step=2, microbatches=3, data_index=0), 3))
    assert same(whole[6:], resumed)


def test_batches_fit_the_models(example, batches):
    inputs, labels = batches.batch(0, 0, 0)
    models = {"base": example.train.build_base(6), "upscaler": example.train.build_upscaler(6)}
    for name, model in models.items():
        given = inputs[name]
        found = model(given["sample"], given["timestep"], given["class_labels"]).sample
        assert found.shape == labels[name].shape
        assert example.train.backbones(6)[name].layers


def test_the_upscaler_reads_the_small_picture_enlarged(example):
    small, noisy = torch.rand(2, 3, 16, 16), torch.randn(2, 3, 32, 32)
    found = example.pairs.read_by_upscaler(noisy, small, torch.zeros_like(small))
    assert torch.equal(found[:, :3], noisy)
    assert torch.allclose(example.pairs.shrunk(found[:, 3:])[:, :, 1:-1, 1:-1].mean(), small.mean(), atol=0.05)


def test_exported_folders_are_sampled_and_drawn(example, batches, tmp_path):
    torch.manual_seed(0)
    example.train.build_base(6).save_pretrained(tmp_path / "base")
    example.train.build_upscaler(6).save_pretrained(tmp_path / "upscaler")
    cascade = example.sample.Cascade(tmp_path)
    once, again = (cascade.sample([0, 1], steps=2, seed=3) for _ in range(2))
    assert [tuple(images.shape) for images in once] == [(2, 3, 16, 16), (2, 3, 32, 32)]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    example.sample.draw(cascade, batches.photographs, tmp_path / "cascade.png", count=1, steps=1)
    with Image.open(tmp_path / "cascade.png") as picture:
        assert min(picture.size) > 200


def test_a_loss_stands_under_its_model(example, tmp_path):
    """Where backbones make their own steps, one may have ended none yet."""
    engine = SimpleNamespace(global_rank=0, global_steps=0, losses={"upscaler": torch.tensor(0.5)})
    table = example.train.LossTable(tmp_path / "loss.csv", engine, 2)
    table.add(1)
    engine.losses = {"upscaler": torch.tensor(0.25), "base": torch.tensor(1.0)}
    table.add(2)
    assert (tmp_path / "loss.csv").read_text().split() == ["step,base,upscaler", "1,,0.5", "2,1.0,0.25"]


def test_no_trained_model_is_one_readable_line(example, tmp_path):
    with pytest.raises(SystemExit, match=r"no trained model in .*; train one with train\.py"):
        example.sample.Cascade(tmp_path)
