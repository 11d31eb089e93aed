"""Our U-ViT: the model, its sizes, and its layer list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler
from support.families import assert_matches_export, assert_transparent
from support.small_transformers import small_uvit, uvit_batch
from torch import Tensor

from deepspeed_pulse.errors import BatchError, ConfigError
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.transformers.uvit import SIZES, UViTModel, uvit


def forward(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_dict=False)[0]


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_transparent(granularity):
    assert_transparent(small_uvit(), uvit_batch(), forward, granularity=granularity)


def test_matches_the_exported_model():
    model = small_uvit()
    assert_matches_export(model, to_layers(model), uvit_batch(), forward, to_layers(model, granularity="fine"))


def test_text_tokens():
    model, batch = small_uvit(text_dim=12, num_text_tokens=5), uvit_batch(text_dim=12)
    layers = assert_transparent(model, batch, forward, ranks=(1,))
    assert layers[0].pop == ("timestep", "class_labels", "encoder_hidden_states")


def test_every_skip_joins_the_mirror_block():
    layers = to_layers(small_uvit())
    stack = []
    for layer in layers:
        for name in layer.pop:
            assert not name.startswith("skip") or stack.pop() == name
        stack += layer.stash
    assert not stack
    assert [layer.name for layer in layers[3:6]] == ["in_blocks.2", "mid_block", "out_blocks.0"]


@pytest.mark.parametrize(
    ("size", "millions"),
    [("M/2", 131), ("M/4", 131), ("L/2", 287), ("L/4", 287), ("H/2", 501), ("H/4", 501), ("1B", 984), ("2.7B", 2671)],
)
def test_published_sizes(size, millions):
    with torch.device("meta"):
        model = uvit(size)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    assert len(to_layers(model)) == SIZES[size]["num_layers"] + 3
    assert model.embedding.positions.shape[1] == 258


def test_a_new_model_is_initialised():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = UViTModel(sample_size=8, hidden_size=64, num_layers=2, num_attention_heads=4, num_classes=11)
    block = model.out_blocks[0]
    assert 0.015 < block.attention.join.weight.std() < 0.025
    assert 0.015 < model.embedding.positions.std() < 0.025
    assert not block.mlp.up.bias.any()


def test_saved_and_loaded_by_diffusers(tmp_path):
    model = small_uvit()
    model.save_pretrained(tmp_path)
    loaded = UViTModel.from_pretrained(tmp_path)
    assert loaded.config.num_classes == 11
    assert torch.equal(forward(loaded, uvit_batch()), forward(model, uvit_batch()))


def test_a_diffusers_pipeline_runs_on_it():
    pipeline = DDPMPipeline(unet=small_uvit(num_classes=None), scheduler=DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 4)


def test_unknown_size():
    with pytest.raises(ConfigError, match=r"expected one of M/2, .*, found 'H/3' \(did you mean"):
        uvit("H/3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers": 5}, "expected num_layers to be a multiple of 2, found 5"),
        ({"sample_size": 9}, "expected sample_size to be a multiple of 2, found 9"),
        ({"num_attention_heads": 5}, "expected hidden_size to be a multiple of 5, found 64"),
    ],
)
def test_impossible_configurations(config, message):
    with pytest.raises(ConfigError, match=message):
        small_uvit(**config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": torch.zeros(2, 4, 8, 10)}, r"sample: expected shape \[2, 4, 8, 8\], found shape \[2, 4, 8, 10\]"),
        ({"class_labels": None}, r"class_labels: expected shape \[2\], found none"),
        ({"encoder_hidden_states": torch.zeros(2, 5, 3)}, r"encoder_hidden_states: expected none, found shape"),
    ],
)
def test_batches_that_do_not_fit(change, message):
    with pytest.raises(BatchError, match=message):
        small_uvit()(**{**uvit_batch(), **change})
