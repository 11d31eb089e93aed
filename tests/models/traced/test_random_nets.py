"""Random networks written as plain PyTorch: the layer list is the network, or the refusal says why not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.random_nets import RandomNet, net_batch
from support.traced import assert_close, assert_equal, gradients_of
from support.zoo import output_of

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models import to_layers

SIZES = ((2, 6), (3, 8), (1, 6), (2, 5))


@contextmanager
def without_checkpoints(model: RandomNet) -> Iterator[None]:
    model.checkpoints = False
    try:
        yield
    finally:
        model.checkpoints = True


def check(seed: int) -> str:
    """What became of the network of a seed.

    The list bypasses the network's own checkpoints. Those give gradients the memory layout of a block's input, which
    moves the last bit of sums behind it, so bits are compared without them, and with them what training takes.
    """
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
                with without_checkpoints(model):
                    assert_equal(model, layers, net_batch(samples, tokens, seed=number))
                if "checkpointed" in model.steps:
                    assert_close(model, layers, net_batch(samples, tokens, seed=number))
            except BatchError as problem:
                assert "hands other values from layer to layer" in str(problem), (seed, problem)
                assert model.leaves_out_a_block(tokens) != model.leaves_out_a_block(SIZES[0][1]), (seed, problem)
                return "refused at another size: its branch leaves out a block"
    return "equal"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_few_random_networks(seed):
    assert check(seed) == "equal"


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_two_hundred_random_networks():
    torch.set_num_threads(1)
    found = [check(seed) for seed in range(260)]
    told = {one: found.count(one) for one in dict.fromkeys(found)}
    assert told["equal"] >= 150, told
    assert sum(count for one, count in told.items() if "no network" not in one) >= 200, told
