"""The parts of examples/unet that need no ranks: data, sampler, pictures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import UNet2DModel
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "unet"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The example's modules, imported the way its scripts import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("data", "sample", "plots", "runs")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def same(a, b) -> bool:
    return all(torch.equal(a[0][name], b[0][name]) for name in a[0]) and torch.equal(a[1], b[1])


def test_a_batch_depends_on_its_place_alone(example):
    first, second = (example.data.Batches(example.data.Photographs(), microbatch_size=3) for _ in range(2))
    assert same(first.batch(5, 1, 2), second.batch(5, 1, 2))
    for other in ((6, 1, 2), (5, 0, 2), (5, 1, 3)):
        assert not same(first.batch(5, 1, 2), first.batch(*other))


def test_iteration_resumes_at_any_step(example):
    batches = example.data.Batches(example.data.Photographs(), microbatch_size=2)
    whole = list(islice(batches.iterate(first_step=0, microbatches=3, data_index=0), 9))
    resumed = list(islice(batches.iterate(first_step=2, microbatches=3, data_index=0), 3))
    assert all(same(a, b) for a, b in zip(whole[6:], resumed, strict=True))


def test_batches_fit_the_model(example):
    inputs, target = example.data.Batches(example.data.Photographs(size=24), microbatch_size=4).batch(0, 0, 0)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "sample": (4, 3, 24, 24),
        "timestep": (4,),
        "class_labels": (4,),
    }
    assert target.shape == inputs["sample"].shape


def test_the_users_images(example, tmp_path):
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (tmp_path / "classes" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (90, 70), colour).save(tmp_path / "classes" / name / f"{index}.png")
    by_folder = example.data.Photographs(str(tmp_path / "classes"), size=16)
    assert by_folder.names == ("blue", "red")
    assert [len(images) for images in by_folder.images] == [2, 2]
    assert example.data.Photographs(str(tmp_path / "classes" / "red"), size=16).names == ("0", "1")
    crop = by_folder.crop(1, torch.Generator().manual_seed(0))
    assert crop.shape == (3, 16, 16)
    assert crop[0].min() == 1
    assert crop[2].max() == -1
    with pytest.raises(SystemExit, match="no images"):
        (tmp_path / "empty").mkdir()
        example.data.Photographs(str(tmp_path / "empty"))
    with pytest.raises(SystemExit, match="takes a folder"):
        example.data.Photographs(str(tmp_path / "nowhere"))


def test_exported_folder_is_sampled_and_drawn(example, tmp_path):
    photographs = example.data.Photographs(size=16)
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        num_class_embeds=len(photographs.names),
    )
    unet.save_pretrained(tmp_path / "model" / "unet")
    example.sample.complete_pipeline(tmp_path / "model", example.data.noise_scheduler().config, photographs.names)
    pipeline = example.sample.load_pipeline(tmp_path)
    assert pipeline.config.class_names[:2] == ["chelsea", "coffee"]
    once, again = (pipeline([0, 1], num_inference_steps=2, seed=3).images for _ in range(2))
    assert [image.tobytes() for image in once] == [image.tobytes() for image in again]
    assert example.sample.sheet([once, again[:1]], zoom=2).size == (2 * 38 + 6, 2 * 38 + 6)
    (tmp_path / "loss.csv").write_text("step,loss\n1,0.9\n2,0.5\n3,0.4\n")
    example.plots.draw_loss(tmp_path / "loss.csv", tmp_path / "loss.png")
    example.plots.draw_samples(tmp_path, photographs, tmp_path / "samples.png", count=1)
    for name in ("loss.png", "samples.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 200


def test_a_run_on_other_classes_or_of_another_size_is_no_continuation(example, tmp_path):
    mine = {"classes": ("cat", "dog"), "size": 32}
    example.runs.check_run(tmp_path, **mine)
    example.runs.keep_run(tmp_path, **mine)
    example.runs.check_run(tmp_path, **mine)
    with pytest.raises(SystemExit, match=r"holds a run with classes cat, dog, found cat, owl: give another --out"):
        example.runs.check_run(tmp_path, classes=("cat", "owl"), size=32)
    with pytest.raises(SystemExit, match=r"holds a run with size 32, found 64"):
        example.runs.check_run(tmp_path, classes=("cat", "dog"), size=64)


def test_no_trained_model_is_one_readable_line(example, tmp_path):
    with pytest.raises(SystemExit, match=r"no trained model in .*; train one with train\.py"):
        example.sample.load_pipeline(tmp_path)
