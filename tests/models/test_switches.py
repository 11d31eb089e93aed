"""Switches and hooks that layers would bypass are refused."""

from __future__ import annotations

import pytest
import torch
from diffusers import PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_layerwise_casting
from support.small_transformers import small_cogvideox, small_wan

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models import to_layers


def test_hooks_that_no_layer_calls():
    model = small_wan()
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(GraphError, match="hooks or a changed forward on the model itself, which no layer calls"):
        to_layers(model)
    handle.remove()
    model.blocks[0].register_forward_hook(lambda *_: None)
    to_layers(model)
    with pytest.raises(GraphError, match=r"hooks or a changed forward on blocks\.0, "):
        to_layers(model, granularity="fine")


def test_a_cache_of_block_outputs():
    model = small_cogvideox()
    skipping = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 1
    )
    model.enable_cache(skipping)
    with pytest.raises(GraphError, match=r"a cache of block outputs is on; call model\.disable_cache\(\)"):
        to_layers(model)
    model.disable_cache()
    to_layers(model)


def test_casting_of_single_layers_goes_on():
    model = small_wan()
    apply_layerwise_casting(model, storage_dtype=torch.float16, compute_dtype=torch.float32)
    to_layers(model, granularity="fine")


def test_recomputing_blocks_is_said_to_be_bypassed():
    model = small_wan()
    model.enable_gradient_checkpointing()
    with pytest.warns(UserWarning, match="most of it is bypassed"):
        to_layers(model)
