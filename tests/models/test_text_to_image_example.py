"""examples/text_to_image: its data and its arguments here, whole runs of it on real ranks."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusion3Pipeline, StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from support.launch import launch

pytestmark = pytest.mark.timeout(600)

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_image"
MODULES = ("arguments", "batches", "encode", "folder", "images", "losses", "small_pipeline", "validate")
PROMPTS = ("a cup of coffee", "the moon")


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported the way its scripts import each other."""
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(EXAMPLE))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def pipeline(example, tmp_path_factory) -> Path:
    """A small pipeline whose autoencoder had one step of training."""
    folder = tmp_path_factory.mktemp("pipeline")
    example.small_pipeline.make(folder, example.images.read_captions(None), vae_steps=1)
    return folder


# ------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def runs(pipeline, tmp_path_factory) -> dict[str, Path]:
    """Three steps on two ranks: in one go, resumed with cached latents, in another placement, without pulse, more."""
    out = tmp_path_factory.mktemp("runs")
    common = [
        *("--pretrained_model_name_or_path", str(pipeline), "--center_crop", "--random_flip"),
        *("--train_batch_size", "2", "--gradient_accumulation_steps", "2", "--snr_gamma", "5", "--noise_offset", "0.1"),
        *("--proportion_empty_prompts", "0.2", "--num_inference_steps", "2", "--learning_rate", "1e-3"),
        *("--lr_scheduler", "linear", "--checkpointing_steps", "2", "--checkpoints_total_limit", "2"),
    ]

    def words(name: str, pulse: object, *more: str) -> list[str]:
        config = json.loads((EXAMPLE / "ds_config.json").read_text()) | {"pulse": pulse}
        (out / f"{name}.json").write_text(json.dumps(config))
        return [*common, "--output_dir", str(out / name), "--deepspeed_config", str(out / f"{name}.json"), *more]

    wave = {"placement": "wave", "solver_seconds": 0, "plan_cache": str(out / "plans")}
    whole = ("--max_train_steps", "3", "--validation_prompts", *PROMPTS)
    cached = ("--max_train_steps", "3", "--cache_latents", "--use_ema")
    noise = ("--pretrained_model_name_or_path", str(of_noise(pipeline, out / "of_noise")))
    sd3 = [*("--checkpointing_steps", "1", "--checkpoints_total_limit", "1"), *wave_config(out)]
    launch(
        "support.text_to_image_ranks:run_all",
        2,
        {
            "out": str(out),
            "train": [
                words("whole", wave, *whole),
                words("cached", wave, *cached),
                words("cached", wave, *cached, "--resume_from_checkpoint", "checkpoint-2"),
                words("linear", wave | {"placement": "linear"}, *whole, "--use_ema"),
                words("relayed", False, *whole),
                words("lora", wave, *whole, "--rank", "2"),
                words("noise", wave, *noise, *whole),  # encoders run in idle time, one for the other
            ],
            "broken": [*words("broken", wave, *whole), "--train_data_dir", str(no_images(out / "no_images"))],
            "no_pipeline": [*sd3, "--output_dir", str(out / "sd3"), "--pretrained_model_name_or_path", str(out)],
            "train_sd3_lora": [
                [*sd3, "--output_dir", str(out / name), "--max_train_steps", str(steps), *more]
                for name, steps, more in (
                    ("sd3", 3, ("--validation_prompt", PROMPTS[0], "--num_inference_steps", "2")),
                    ("sd3_resumed", 2, ()),
                    ("sd3_resumed", 3, ()),
                )
            ],
        },
        timeout=550,
    )
    return {path.name: path for path in out.iterdir() if path.is_dir()}


def of_noise(pipeline: Path, target: Path) -> Path:
    """The pipeline for a U-Net that predicts noise."""
    shutil.copytree(pipeline, target)
    config = target / "scheduler" / "scheduler_config.json"
    changed = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False}
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    return target


def no_images(folder: Path) -> Path:
    """A folder of data whose images are texts."""
    folder.mkdir()
    (folder / "cat.png").write_text("no picture")
    (folder / "metadata.jsonl").write_text('{"file_name": "cat.png", "text": "a ginger cat"}')
    return folder


def wave_config(out: Path) -> list[str]:
    """Of the example, without solving for better orders."""
    config = json.loads((EXAMPLE / "ds_config.json").read_text())
    config["pulse"] = {"placement": "wave", "solver_seconds": 0}
    (out / "sd3.json").write_text(json.dumps(config | {"train_micro_batch_size_per_gpu": 2}))
    return ["--deepspeed_config", str(out / "sd3.json")]


def losses(out: Path) -> list[float]:
    with (out / "loss.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", ["cached", "linear", "relayed"])
def test_the_same_losses_however_it_runs(runs, name):
    assert len(losses(runs["whole"])) == 3
    np.testing.assert_allclose(losses(runs[name]), losses(runs["whole"]), rtol=1e-4)


def unet_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def test_the_trained_unet_is_exported(runs, pipeline):
    trained, before = unet_of(runs["whole"]), unet_of(pipeline)
    assert trained.keys() == before.keys()
    assert sum(not torch.equal(trained[key], before[key]) for key in before) > 0.9 * len(before)


def test_averages_are_exported_and_survive_a_resume(runs):
    resumed, whole, last = unet_of(runs["cached"]), unet_of(runs["linear"]), unet_of(runs["whole"])
    weights = [key for key in whole if whole[key].ndim > 1]
    same, other = (max(relative(found[key], whole[key]) for key in weights) for found in (resumed, last))
    assert same < 1e-3
    assert other > 3 * same, (same, other)


@pytest.mark.parametrize("name", ["whole", "linear", "relayed", "lora", "noise"])
def test_validation_images_are_those_of_the_pipeline(runs, pipeline, name):
    """The ranks denoise as diffusers does with the folder they leave."""
    loaded = StableDiffusionPipeline.from_pretrained(pipeline if name == "lora" else runs[name])
    loaded.set_progress_bar_config(disable=True)
    if name == "lora":
        loaded.load_lora_weights(runs[name] / "lora")
    latents = torch.randn((2, 8, 16, 16), generator=torch.Generator().manual_seed(0))
    expected = loaded(list(PROMPTS), latents=latents, num_inference_steps=2, guidance_scale=5.0).images
    for index, image in enumerate(expected):
        with Image.open(runs[name] / f"{index}.png") as found:
            difference = np.abs(np.asarray(image, np.int16) - np.asarray(found, np.int16))
        assert difference.max() <= 1
    assert (runs[name] / "validation" / "step000003.png").is_file()


def test_a_transformer_is_tuned_and_resumes(runs):
    """Adapters in fp32 over a bf16 base, read by diffusers; one checkpoint stays; the prompt has its picture."""
    whole, begun, resumed = json.loads((runs["sd3"].parent / "sd3_losses.json").read_text())
    np.testing.assert_allclose(begun + resumed, whole, rtol=1e-4)
    assert (runs["sd3"] / "step000003.png").is_file()
    for name in ("sd3", "sd3_resumed"):
        assert [path.name for path in runs[name].glob("checkpoint-*")] == ["checkpoint-3"]
    weights = load_file(runs["sd3"] / "lora" / "pytorch_lora_weights.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(bool(tensor.any()) for key, tensor in weights.items() if "lora_B" in key and "to_out" in key)
    loaded = StableDiffusion3Pipeline.from_pretrained(runs["sd3"] / "small_pipeline")
    loaded.load_lora_weights(runs["sd3"] / "lora")
    assert loaded.transformer.peft_config


# ------------------------------------------------------------------------------------------ data


def test_the_small_tokenizer_is_the_same_each_time(example, tmp_path):
    """Ties between pairs fall by number, so the numbers of letters are ours to say."""
    captions = [caption for entry in example.images.read_captions(None) for caption in entry.captions]
    made = set()
    for index in range(20):
        example.small_pipeline.make_tokenizer(tmp_path / str(index), captions)
        made.add((tmp_path / str(index) / "merges.txt").read_text())
    assert len(made) == 1


def batches(example, *, source=None, **flags):
    """Batches over the bundled captions whose latents are the index of the image."""
    entries = example.images.read_captions(None)

    class Indices:
        def encode(self, views):
            mean = torch.stack([torch.full((4, 2, 2), float(view.index)) for view in views])
            return torch.cat([mean, torch.full_like(mean, -60.0)], dim=1), torch.zeros(len(views), 3, 8)

    defaults = {"center_crop": False, "random_flip": True, "empty_prompts": 0.1, "seed": 3, "num_pipelines": 2}
    views = example.batches.Views(entries=entries, size=3, microbatches=2, **defaults)
    scheduler = DDPMScheduler(prediction_type=flags.pop("prediction_type", "epsilon"))
    return example.batches.Batches(views, source or Indices(), scheduler, scaling_factor=1.0, **flags)


def same(a, b) -> bool:
    return all(torch.equal(a[0][key], b[0][key]) for key in a[0]) and all(map(torch.equal, a[1], b[1]))


def test_a_batch_depends_on_its_place_alone(example):
    def place(step, data_index, microbatch):
        return example.batches.Place(step=step, data_index=data_index, microbatch=microbatch)

    first, second = batches(example), batches(example)
    assert same(first.batch(place(5, 1, 0)), second.batch(place(5, 1, 0)))
    for other in (place(6, 1, 0), place(5, 0, 0), place(5, 1, 1)):
        assert not same(first.batch(place(5, 1, 0)), first.batch(other))
    resumed = list(islice(second.iterate(first_step=5, data_index=1), 2))
    assert same(resumed[0], first.batch(place(5, 1, 0)))
    assert same(resumed[1], first.batch(place(5, 1, 1)))


def test_an_epoch_has_every_image_once(example):
    made = batches(example)
    generator = torch.Generator().manual_seed(0)
    count = len(made.views.entries)
    places = [(step, data, micro) for step in range(count) for micro in range(2) for data in range(2)]
    seen = [
        view.index
        for step, data, micro in places
        for view in made.views.at(example.batches.Place(step=step, data_index=data, microbatch=micro), generator)
    ]
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert seen[:count] != seen[count : 2 * count]
    assert made.views.steps(epochs=1) == -(-count // 12)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_weights_are_min_snr(example, prediction_type):
    made = batches(example, snr_gamma=5.0, prediction_type=prediction_type)
    inputs, (target, weights) = made.batch(example.batches.Place(step=0, data_index=0, microbatch=0))
    alphas = made.scheduler.alphas_cumprod[inputs["timestep"]]
    snr = alphas / (1 - alphas)
    expected = torch.minimum(snr, torch.tensor(5.0)) / (snr if prediction_type == "epsilon" else snr + 1)
    torch.testing.assert_close(weights, expected)
    predicted = torch.zeros_like(target)
    error = (target.pow(2).mean((1, 2, 3)) * expected).mean()
    torch.testing.assert_close(example.batches.weighted_error(predicted, (target, weights)), error)


def test_crops_stay_inside(example, tmp_path):
    Image.new("RGB", (90, 40), (255, 0, 0)).save(tmp_path / "red.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "red.png", "caption": "red"}\n\n')
    entries = example.images.read_captions(tmp_path, column="caption")
    assert entries[0].captions == ("red",)
    images = example.images.Images(entries, resolution=16)
    for place in (0.0, 0.5, 0.999999, 1.0):
        crop = images.pixels(example.images.View(index=0, caption="red", down=place, right=place, mirrored=True))
        assert crop.shape == (3, 16, 16)
        assert (crop[0] == 1).all()


# -------------------------------------------------------------------------------------- mistakes

METADATA_MISTAKES = {
    None: "expected a folder with images and a metadata.jsonl",
    "": "expected at least one line",
    '{"file_name": "a.png"}': r"line 1: expected an object with file_name and 'text'",
    "[1]": "line 1: expected an object",
    '{"file_name": "a.png", "text": 3}': "line 1: expected an object",
    '{"file_name": "none.png", "text": "a"}': "line 1: no file",
}


@pytest.mark.parametrize("text", METADATA_MISTAKES)
def test_mistakes_in_metadata_are_named(example, tmp_path, text):
    if text is not None:
        (tmp_path / "metadata.jsonl").write_text(text)
    with pytest.raises(example.images.DataError, match=METADATA_MISTAKES[text]):
        example.images.read_captions(tmp_path)


def test_a_file_that_is_no_image_is_named(example, tmp_path):
    (tmp_path / "a.png").write_text("no image")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}')
    images = example.images.Images(example.images.read_captions(tmp_path), resolution=16)
    with pytest.raises(example.images.DataError, match=r"a\.png is no image"):
        images.pixels(example.images.View(index=0, caption="a"))


def test_a_small_pipeline_of_other_images_is_refused(example, tmp_path):
    mine = [example.images.Captioned(path=Path("a.png"), captions=("a",))]
    other = [example.images.Captioned(path=Path("b.png"), captions=("a",))]
    example.images.check_captions(tmp_path, mine)
    example.images.keep_captions(tmp_path, mine)
    example.images.check_captions(tmp_path, mine)
    with pytest.raises(example.images.DataError, match=r"was made of other images or captions.*give another --output"):
        example.images.check_captions(tmp_path, other)


def test_fp16_is_refused(example, capsys, tmp_path):
    config = json.loads((EXAMPLE / "ds_config.json").read_text()) | {"fp16": {"enabled": True}}
    (tmp_path / "fp16.json").write_text(json.dumps(config))
    args = example.arguments.parse_arguments(["--deepspeed_config", str(tmp_path / "fp16.json")])
    with pytest.raises(SystemExit):
        example.arguments.configuration(args)
    assert 'expected float32 or "bf16", found "fp16"' in capsys.readouterr().out


ARGUMENT_MISTAKES = {
    "--cache_latents": "add --center_crop",
    "--train_batch_size 0": "--train_batch_size",
    "--validation_steps 5": "need --validation_prompts",
    "--proportion_empty_prompts 1.5": "a share from 0 to 1",
    "--snr_gamma 0": "above 0",
    "--max_train_steps 3 --num_train_epochs 2": "not allowed with",
    "--resume_from_checkpoint checkpoint-7": "no folder checkpoint-7",
    "--lr_scheduler sometimes": "invalid choice",
    "--pipeline_ranks 3": "ranks",
    "--no_such_flag": "--no_such_flag",
}


@pytest.mark.parametrize("words", ARGUMENT_MISTAKES)
def test_a_bad_argument_is_one_line(example, capsys, monkeypatch, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        example.arguments.parse_arguments(words.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert err == ""
    assert out.count("\n") == 1
    assert out.startswith("train.py: ")
    assert ARGUMENT_MISTAKES[words] in out


def test_only_the_first_rank_tells(example, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        example.arguments.parse_arguments(["--cache_latents"])
    assert capsys.readouterr().out == ""


FOLDER_MISTAKES = {
    "model_index.json": ({"_class_name": "FluxPipeline"}, "expected a StableDiffusionPipeline, found a FluxPipeline"),
    "unet/config.json": ({"in_channels": 9}, "takes the 8 channels of the latents, found one for 9"),
    "scheduler/scheduler_config.json": ({"prediction_type": "epsilon"}, "ends in pure noise"),
    "vae/config.json": (None, "config.json"),
}


@pytest.mark.parametrize("part", FOLDER_MISTAKES)
def test_a_pipeline_that_does_not_fit_is_named(example, pipeline, tmp_path, part):
    changed, message = FOLDER_MISTAKES[part]
    for path in pipeline.rglob("*.json"):
        copy = tmp_path / path.relative_to(pipeline)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    config = tmp_path / part
    config.write_text(json.dumps(json.loads(config.read_text()) | changed) if changed else "{")
    with pytest.raises(example.folder.FolderError, match=message):
        example.folder.PipelineFolder.read(tmp_path)


def test_sizes_follow_from_the_folder(example, pipeline):
    folder = example.folder.PipelineFolder.read(pipeline)
    assert (folder.resolution, folder.factor, folder.latents(64), folder.tokens) == (64, 4, (8, 16, 16), 16)
    with pytest.raises(example.folder.FolderError, match="a multiple of 4, found 66"):
        folder.latents(66)


def test_the_tokenizer_keeps_any_text(pipeline):
    tokenizer = StableDiffusionPipeline.from_pretrained(pipeline).tokenizer
    assert tokenizer.tokenize("A cup of coffee") == ["a</w>", "cup</w>", "of</w>", "coffee</w>"]
    ids = tokenizer("xylophöne?").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "xylophöne ?"
    assert tokenizer.unk_token_id not in ids[1:-1]
