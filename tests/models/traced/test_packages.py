"""U-Nets of other packages, traced: equal at three sizes, in bf16 with LoRA and dropout, and on several ranks."""

from __future__ import annotations

import warnings

import pytest
from support.packages import PACKAGED
from support.traced import assert_equal
from support.zoo_proofs import assert_all_at_once, assert_ranks_agree

from deepspeed_pulse.models import to_layers


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PACKAGED)
def test_a_unet_of_another_package(name):
    one = PACKAGED[name]
    if not one.is_here:
        pytest.skip(f"{one.package} is not installed: `make test-packages` puts it into a folder of its own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batches = one.model(), one.batches()
        layers = to_layers(model, example_batch=batches[0])
        assert_equal(model, layers, *batches)
        assert_all_at_once(one.model(), batches[0])
        assert_ranks_agree(model, batches[0])
