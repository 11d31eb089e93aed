"""Loading and saving with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel, UNet2DModel
from safetensors.torch import load_file
from support.launch import launch
from support.reference import error
from support.small_models import small_sd_unet


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What 4 ranks wrote; their own assertions are in :mod:`support.model_ranks`."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: root / name for name in ("pretrained", "large", "precisions", "trained", "expected")}
    small_sd_unet().save_pretrained(folders["pretrained"], max_shard_size="1MB")
    large_unet().save_pretrained(folders["large"], max_shard_size="10MB")
    ran = launch("support.model_ranks:run", 4, {name: str(path) for name, path in folders.items()})
    for rank, (_, output) in enumerate(ran):
        for line in output.splitlines():
            if line.startswith("SHARE"):
                print(f"rank {rank}: {line}")
    return folders


def test_the_trained_model_is_the_one_that_was_trained_whole(folders):
    """The same files, keys and config; weights as close as two orders of summing are."""
    found, expected = folders["trained"], folders["expected"]
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in expected.iterdir():
        if path.suffix == ".json":
            assert json.loads(path.read_text()) == json.loads((found / path.name).read_text())
            continue
        ours, theirs = load_file(found / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert error(ours[key], value) <= 1e-5, key


def test_a_pipeline_of_diffusers_paints_with_it(folders):
    """Stable Diffusion's, with a small autoencoder and given text states."""
    unet = UNet2DConditionModel.from_pretrained(folders["trained"])
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    pipeline = StableDiffusionPipeline(
        vae,
        None,
        None,
        unet,
        DDIMScheduler(steps_offset=1, clip_sample=False),
        None,
        None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    text = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    images = pipeline(
        prompt_embeds=text, negative_prompt_embeds=torch.zeros_like(text), num_inference_steps=2, output_type="np"
    ).images
    assert images.shape == (1, 32, 32, 3)
    assert images.std() > 0


def large_unet() -> UNet2DModel:
    """Levels of one width, so that a quarter of the layers is about a quarter of the 45 MB."""
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(128, 128, 128, 128),
        down_block_types=("DownBlock2D",) * 4,
        up_block_types=("UpBlock2D",) * 4,
        layers_per_block=2,
        add_attention=False,
    )
