"""Known families, traced: equal to their models, with the skips of the list that was written by hand."""

from __future__ import annotations

import warnings

import pytest
from support.every_family import FAMILIES
from support.family_batches import FAMILY_BATCHES, batches_of
from support.skips import long_skips, within
from support.traced import assert_equal
from support.zoo_proofs import assert_all_at_once, assert_ranks_agree

from deepspeed_pulse.models import to_layers

FINER = {"Kandinsky3UNet", "UNetSpatioTemporalConditionModel"}
"""Families whose layers the trace cuts further."""

WITHOUT = {
    "CogVideoXTransformer3DModel",
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "SD3Transformer2DModel",
}
"""Families without long skips."""

QUICK = {"PixArtTransformer2DModel", "UViTModel"}
PAIRS = {name for name in FAMILIES if " with " in name}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.soak) for one in FAMILIES if one not in PAIRS]
)
def test_a_traced_family_has_the_skips_of_the_family(kind: str) -> None:
    """By the rule of docs/any_model.md."""
    make, make_batch = FAMILIES[kind]
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, known = to_layers(model, example_batch=make_batch(), trace=True), to_layers(model)
    assert (len(traced) > len(known)) is (kind in FINER), (len(traced), len(known))
    places = list(range(len(known)))
    at = within(traced, known) if kind in FINER else places
    assert at == sorted(at) and set(at) == set(places), at
    expected = long_skips(known, places)
    assert long_skips(traced, at) == expected
    assert expected or kind in WITHOUT


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", FAMILY_BATCHES)
def test_a_traced_family_equals_its_model(kind: str) -> None:
    make, batches = FAMILIES[kind][0], batches_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make().train()
        assert_equal(model, to_layers(model, example_batch=batches[0], trace=True), *batches)
        assert_all_at_once(make().train(), batches[0])
        assert_ranks_agree(make().train(), batches[0])


def test_every_family_has_batches() -> None:
    assert FAMILY_BATCHES.keys() == FAMILIES.keys() - PAIRS
