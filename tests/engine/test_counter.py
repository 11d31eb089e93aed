"""Operations and bytes of layers on the meta device, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_pulse.engine.measure.counter import Counted, FusedAttention, count_layers
from deepspeed_pulse.errors import RunError
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.stage import SavedBytes


def counted(*layers: tuple[Any, Layer], hidden: Tensor, **entries: Tensor) -> Counted:
    graph = Graph(layers=tuple(declared for _, declared in layers))
    return count_layers(graph, [lambda layer=layer: layer for layer, _ in layers], hidden, entries)


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(*shape, device="meta", **options)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def test_a_matrix_product_is_two_operations_a_weight_and_row():
    found = counted((linear(8, 16), Layer(name="a")), (linear(16, 4), Layer(name="b")), hidden=meta(5, 8))
    first, second = found.layers
    assert first.forward_flop == 2 * 5 * 8 * 16
    # The input of the model needs no gradient, the hidden state between the layers does.
    assert (first.backward_flop, first.weight_grad_flop) == (2 * 5 * 8 * 16, 2 * 5 * 8 * 16)
    assert (second.backward_flop, second.weight_grad_flop) == (2 * (2 * 5 * 16 * 4), 2 * 5 * 16 * 4)
    assert (second.param_bytes, second.output_bytes) == (4 * 64, 4 * 5 * 4)
    assert second.activation_bytes == 4 * 5 * 16, "its input; weights are no activations"


def test_frozen_weights_have_no_gradient_to_compute():
    frozen = linear(16, 4).requires_grad_(False)
    _, second = counted((linear(8, 16), Layer(name="a")), (frozen, Layer(name="b")), hidden=meta(5, 8)).layers
    assert (second.backward_flop, second.weight_grad_flop) == (second.forward_flop, 0)


def test_named_values_have_bytes_and_say_whether_they_have_a_gradient():
    def stash(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden, hidden, torch.zeros(3, dtype=torch.int64, device=hidden.device)

    def pop(hidden: Tensor, skip: Tensor, sizes: Tensor) -> Tensor:
        return hidden + skip * sizes.sum()

    found = counted(
        (linear(8, 16), Layer(name="a")),
        (stash, Layer(name="b", stash=("skip", "sizes"))),
        (pop, Layer(name="c", pop=("skip", "sizes"))),
        hidden=meta(5, 8),
    )
    assert found.value_bytes == {"skip": (4 * 5 * 16, True), "sizes": (24, False)}
    assert found.layers[1].activation_bytes == 4 * 5 * 16 + 24, "what a layer stashes lives until its backward"


def test_saved_bytes_tell_storages_of_the_meta_device_apart():
    first, second = (meta(6, requires_grad=True) for _ in range(2))
    with SavedBytes([first]) as saved:
        product = first * second
        product = product * second
    assert saved.bytes == 2 * 24, "second and the product; first is a parameter"


@pytest.mark.parametrize("masked", [False, True])
def test_attention_keeps_no_scores(masked: bool):
    """Two products forward, five backward: the scores are made again."""

    def attention(hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)

    heads, tokens, width = 2, 64, 8
    pop = ("mask",) if masked else ()
    found = counted(
        (linear(width, width), Layer(name="a")),
        (attention, Layer(name="b", pop=pop)),
        hidden=meta(1, heads, tokens, width),
        mask=meta(1, 1, tokens, tokens, dtype=torch.bool),
    )
    product = 2 * heads * tokens * tokens * width
    assert (found.layers[1].forward_flop, found.layers[1].backward_flop) == (2 * product, 5 * product)
    kept = 4 * heads * tokens * (width + width + 1) + (4 * tokens * tokens if masked else 0)
    # Input, output, a sum for each row of scores, the mask, and the state of the random numbers.
    assert kept <= found.layers[1].activation_bytes <= kept + 64


def test_forward_counts_do_not_depend_on_how_attention_is_run():
    query = meta(2, 4, 32, 8)
    totals = []
    for fused in (False, True):
        with FlopCounterMode(display=False) as counter:
            if fused:
                with FusedAttention():
                    functional.scaled_dot_product_attention(query, query, query)
            else:
                functional.scaled_dot_product_attention(query, query, query)
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_layer_that_looks_at_values_is_named():
    with pytest.raises(RunError, match="in layer nosy"):
        counted((lambda hidden: hidden[: int(hidden.sum())], Layer(name="nosy")), hidden=meta(5, 8))


def test_real_tensors_are_counted_by_their_shapes():
    layer = nn.Linear(8, 16)
    found = counted((layer.to("meta"), Layer(name="a")), hidden=torch.ones(5, 8))
    assert found.layers[0].forward_flop == 2 * 5 * 8 * 16
