"""AudioLDM2's U-Net: which of the transformers after a resnet reads which text."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import assert_matches_export, assert_transparent
from support.small_models import audio_entries, small_audioldm2
from torch import Tensor

from deepspeed_pulse.models import to_layers


def forward(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_dict=False)[0]


def test_two_texts():
    model, batch = small_audioldm2(), audio_entries()
    layers = assert_transparent(model, batch, forward, encoder_attention_mask_1=True)
    pops = {layer.name: layer.pop for layer in layers}
    assert [pops[f"down_blocks.0.attentions.{index}"] for index in range(4)] == [
        (),
        ("encoder_hidden_states",),
        (),
        ("encoder_hidden_states_1", "encoder_attention_mask_1"),
    ]
    finer = to_layers(model, granularity="fine", encoder_attention_mask_1=True)
    assert_matches_export(model, layers, batch, forward, finer)


def test_transformers_cut_further():
    assert_transparent(small_audioldm2(), audio_entries(), forward, granularity="fine", encoder_attention_mask_1=True)


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_one_text_and_any_size_of_spectrogram(granularity):
    """Without a second text all transformers read the first, as in the model; one width a block is also a list."""
    batch = {
        **audio_entries(size=(9, 15)),
        "encoder_attention_mask": audio_entries()["encoder_attention_mask_1"][:, :5],
    }
    del batch["encoder_hidden_states_1"], batch["encoder_attention_mask_1"]
    options = {"encoder_hidden_states_1": False, "encoder_attention_mask": True, "upsample_size": True}
    for widths in (((None, 24, None, 24),) * 2, 24):
        model = small_audioldm2(cross_attention_dim=widths)
        assert_transparent(model, batch, forward, ranks=(1,), granularity=granularity, **options)
