"""Parameters are chosen by patterns; a pattern that matches nothing is an error that helps."""

from __future__ import annotations

import pytest
from support.small_models import small_unet

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models import freeze, to_layers, unfreeze


def trainable(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_patterns_match_dots_and_return_names():
    model = small_unet()
    frozen = freeze(model, "down_blocks.*", "*.norm?.bias")
    assert frozen == [name for name, p in model.named_parameters() if not p.requires_grad]
    assert all(name.startswith("down_blocks.") or name.endswith(("norm1.bias", "norm2.bias")) for name in frozen)
    assert any(name.startswith("up_blocks.") for name in frozen)


def test_everything_but():
    model = small_unet()
    freeze(model, "*")
    assert not trainable(model)
    assert trainable(model) == set() and set(unfreeze(model, "*.to_[qv].weight")) == trainable(model)
    assert all(name.endswith(("to_q.weight", "to_v.weight")) for name in trainable(model))


def test_layers_made_before_see_it():
    model = small_unet()
    layers = to_layers(model)
    freeze(model, "conv_in.*")
    assert not any(p.requires_grad for n, p in layers[0].layer.named_parameters() if n.startswith("conv_in"))


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("down_blocks.0", r"for everything in that module write 'down_blocks\.0\.\*'"),
        ("down_block.1.*", r"close to it: down_blocks\.1"),
        ("*.to_qq.weight", r"close to it: .*to_q\.weight"),
        ("Conv_in.*", r"close to it: conv_in"),
    ],
)
def test_a_pattern_without_a_match_shows_close_names_and_freezes_nothing(pattern, advice):
    model = small_unet()
    with pytest.raises(ConfigError, match=rf"matches none of the \d+ parameters of the UNet2DModel; {advice}"):
        freeze(model, "conv_out.*", pattern)
    assert trainable(model) == dict(model.named_parameters()).keys()


def test_no_pattern_is_an_error():
    with pytest.raises(ConfigError, match="at least one pattern"):
        freeze(small_unet())
