"""Random networks written as plain PyTorch: the layer list is the network, or the refusal says why not."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.random_nets import RandomNet, net_batch
from support.traced import assert_equal, gradients_of
from support.zoo import output_of

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models import to_layers

SIZES = ((2, 6), (3, 8), (1, 6), (2, 5))


def check(seed: int) -> str:
    """What became of the network of a seed."""
    model = RandomNet(seed)
    try:
        gradients_of(model, output_of, net_batch())
    except RuntimeError:
        return "is no network: changes what its backward needs"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model's own checkpoints")
        layers = to_layers(model, example_batch=net_batch())
        for number, (samples, tokens) in enumerate(SIZES):
            try:
                assert_equal(model, layers, net_batch(samples, tokens, seed=number))
            except BatchError as problem:
                assert "branch" in model.steps, (seed, problem)
                return "refused at another size: its branch hands on other values"
    return "equal"


@pytest.mark.parametrize("seed", range(2))
def test_a_few_random_networks(seed):
    check(seed)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_two_hundred_random_networks():
    torch.set_num_threads(1)
    found = [check(seed) for seed in range(260)]
    told = {one: found.count(one) for one in dict.fromkeys(found)}
    assert told["equal"] >= 150, told
    assert sum(count for one, count in told.items() if "no network" not in one) >= 200, told
