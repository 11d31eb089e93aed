"""Switches and hooks that layers would bypass are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from diffusers import PyramidAttentionBroadcastConfig, UNet2DConditionModel
from diffusers.hooks import apply_layerwise_casting
from diffusers.models.attention import BasicTransformerBlock
from support.families import interpret
from support.small_models import sd_entries, small_sd_unet
from support.small_transformers import small_cogvideox, small_wan, wan_batch
from torch import nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models import to_layers


def test_hooks_that_no_layer_calls():
    model = small_wan()
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(GraphError, match=r"the model itself has forward hooks, and no layer calls it: remove them"):
        to_layers(model)
    handle.remove()
    model.blocks[0].register_forward_hook(lambda *_: None)
    to_layers(model)
    with pytest.raises(GraphError, match=r"blocks\.0 has forward hooks, and no layer calls it"):
        to_layers(model, granularity="fine")


def test_a_derived_model_with_an_embedding_of_its_own():
    class MyUNet(UNet2DConditionModel):
        def get_time_embed(self, sample, timestep):
            return 2 * super().get_time_embed(sample, timestep)

    with pytest.raises(GraphError, match=r"has a get_time_embed of its own \(MyUNet's\), and no layer calls it"):
        to_layers(small_sd_unet(kind=MyUNet))


def test_derived_blocks_run_whole_and_are_not_cut_further():
    class MyBlock(BasicTransformerBlock):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states + 2 * super().forward(hidden_states, *args, **kwargs)

    model, batch = small_sd_unet(), sd_entries()
    model.mid_block.attentions[0].transformer_blocks[0].__class__ = MyBlock
    assert torch.equal(interpret(to_layers(model), batch), model(**batch).sample)
    with pytest.raises(GraphError, match=r"mid_block\.attentions\.0\.transformer_blocks\.0 has a forward of its own"):
        to_layers(model, granularity="fine")


def test_a_function_put_in_the_place_of_a_method_of_diffusers(monkeypatch):
    own = UNet2DConditionModel.get_time_embed

    @functools.wraps(own)
    def decorated(*args, **kwargs):
        return 2 * own(*args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "get_time_embed", decorated)
    with pytest.raises(GraphError, match=r"has a get_time_embed that was replaced by .*test_switches's decorated"):
        to_layers(small_sd_unet())


def test_a_partial_method_in_the_place_of_a_forward(monkeypatch):
    own = UNet2DConditionModel.forward
    monkeypatch.setattr(UNet2DConditionModel, "forward", functools.partialmethod(own, timestep_cond=None))
    with pytest.raises(GraphError, match=r"the model itself has a forward that was replaced by a partialmethod"):
        to_layers(small_sd_unet())


def test_a_list_of_blocks_that_drops_some():
    class Dropping(nn.ModuleList):
        def __iter__(self):
            return iter([block for block in super().__iter__() if torch.rand(()) > 0.1])

    model = small_wan()
    model.blocks.__class__ = Dropping
    with pytest.raises(GraphError, match=r"blocks has a __iter__ of its own \(Dropping's\)"):
        to_layers(model)


def test_a_parameter_that_is_computed():
    model = small_wan()
    torch.nn.utils.parametrize.register_parametrization(model, "scale_shift_table", nn.Tanh())
    with pytest.raises(GraphError, match=r"scale_shift_table is computed \(a parametrization\)"):
        to_layers(model)


def test_a_parametrization_of_what_a_layer_calls_goes_on():
    model, batch = small_wan(), wan_batch()
    torch.nn.utils.parametrize.register_parametrization(model.proj_out, "weight", nn.Tanh())
    assert torch.equal(interpret(to_layers(model), batch), model(**batch).sample)


def test_classes_of_the_same_name_as_those_of_diffusers():
    model = small_wan()
    model.blocks[1].__class__ = type("WanTransformerBlock", (nn.Module,), {"forward": lambda self, hidden: hidden})
    with pytest.raises(GraphError, match=r"blocks\.1 is a WanTransformerBlock, supported: WanTransformerBlock"):
        to_layers(model)
    with pytest.raises(GraphError, match=r"knows no family for WanTransformer3DModel.*pass example_batch="):
        to_layers(type("WanTransformer3DModel", (nn.Module,), {})())


def test_hooks_of_all_modules():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(GraphError, match=r"has a hook of torch's register_module_forward_hook"):
            to_layers(small_wan())
    finally:
        handle.remove()


def test_compiling_the_whole_model_is_said_to_be_bypassed():
    model = small_wan()
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"compile\(\) is bypassed"):
        to_layers(model)


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


def test_a_compiled_model_is_taken_out_of_its_wrapper():
    model, batch = small_sd_unet(), sd_entries()
    with pytest.warns(UserWarning, match=r"torch\.compile\(UNet2DConditionModel\) is bypassed: .* compile those"):
        layers = to_layers(torch.compile(model, backend="eager"))
    assert torch.equal(interpret(layers, batch), model(**batch).sample)


def test_what_layers_take_apart_is_not_compiled():
    model = small_sd_unet()
    model.mid_block.resnets[0].compile(backend="eager")  # a layer calls it
    to_layers(model)
    for block in model.down_blocks:
        block.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"down_blocks\.0\.compile\(\) is bypassed \(so 4 modules\).*down_blocks\.0\."):
        to_layers(model)


def test_a_model_in_a_wrapper_of_replicas_is_named():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    with pytest.raises(GraphError, match=r"found DistributedDataParallel around a UNet2DConditionModel: .*\.module"):
        to_layers(DistributedDataParallel(small_sd_unet()))
