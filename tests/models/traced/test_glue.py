"""Functions between blocks that read the numbers in tensors, kept whole with ``glue=``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import glued_nets as nets
from support.families import interpret
from support.small_models import small_unet
from support.traced import assert_equal
from support.zoo import ZOO

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models import to_layers

GLUE = [nets.mask_of, "support.glued_nets:Ragged.bounded"]


def glued(kind: str = "", *more: Any) -> Any:
    return to_layers(nets.Ragged(kind), example_batch=nets.ragged_batch(), glue=[*GLUE, *more])


def called_in(layer: Any) -> list[str]:
    """Names of what a layer calls, its own and what any layer could."""
    unit = layer.layer
    code, calls = unit.traced.base.codes[unit.run_number], unit.traced.base.trace.calls
    return [calls[index].name for index in (*code.piece.makes, *code.piece.calls)]


def test_glue_runs_as_it_is() -> None:
    """Output and all gradients, for numbers that take either branch, at other sizes; and nothing stays replaced."""
    torch.manual_seed(0)
    model, functions = nets.Ragged(), (nets.mask_of, vars(nets.Ragged)["bounded"])
    layers = to_layers(model, example_batch=nets.ragged_batch(), glue=GLUE)
    assert functions == (nets.mask_of, vars(nets.Ragged)["bounded"])
    assert [layer.name for layer in layers] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert sum("bounded" in called_in(layer) for layer in layers) == 1
    assert sum("mask_of" in called_in(layer) for layer in layers) == 1
    small = {**nets.ragged_batch(), "x": nets.ragged_batch()["x"] * 1e-3}
    assert_equal(model, layers, nets.ragged_batch(), nets.ragged_batch(3, 9, seed=1), nets.ragged_batch(1, 4), small)


@pytest.mark.parametrize(("glue", "line"), [([], "bounded"), (GLUE[1:], "mask_of")])
def test_without_it_the_error_names_it(glue: Any, line: str) -> None:
    with pytest.raises(GraphError, match=rf"glued_nets.py:\d+ \({line}\).*glue=\["):
        to_layers(nets.Ragged(), example_batch=nets.ragged_batch(), glue=glue)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("longest", r"glue function longest reads the numbers.*: its sizes, or what else it gives, follow"),
        (
            "trimmed",
            r"glue function trimmed reads the numbers.*: its sizes, or what else it gives, follow",
        ),
        ("scaled", r"glue function scaled reads the numbers.*: it changes an argument in place"),
        ("mixed", r"hands a module \(Linear\) to the glue function mixed"),
        ("unused", r"between its blocks Ragged does not call unused with this example_batch"),
    ],
)
def test_glue_that_cannot_be_kept_whole(kind: str, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        glued("" if kind == "unused" else kind, getattr(nets, kind))


def test_a_size_that_follows_from_numbers_is_refused_when_it_comes() -> None:
    layers = glued("first_tokens", nets.first_tokens)
    with pytest.raises(BatchError, match=r"gave the shape \[2, 6, 8\], where the trace expects \[2, 1, 8\]"):
        interpret(layers, {**nets.ragged_batch(), "lengths": torch.tensor([6, 2])})


@pytest.mark.parametrize(
    ("glue", "told"),
    [
        ("mask_of", r"expected a list of functions, or of names"),
        ([torch.relu], r"expected a function that stands in a module"),
        (["support.glued_nets:mask_off"], r"no 'mask_off' in support.glued_nets.*did you mean"),
        (["nowhere:mask_of"], r'expected "package.module:function", found \'nowhere:mask_of\': No module named'),
    ],
)
def test_what_is_no_function(glue: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        to_layers(nets.Ragged(), example_batch=nets.ragged_batch(), glue=glue)


def test_a_family_takes_none() -> None:
    with pytest.raises(GraphError, match=r"glue= is for models that are traced; UNet2DModel has a family"):
        to_layers(small_unet(), glue=[nets.mask_of])


def test_a_model_whose_hidden_state_has_such_sizes_is_refused() -> None:
    """Lumina 2 joins text and picture up to the longest caption, in its forward."""
    name = "Lumina2Transformer2DModel"
    with pytest.raises(GraphError, match=r"reads the numbers in a tensor at .*transformer_lumina2.py"):
        to_layers(ZOO[name].model(name), example_batch=ZOO[name].example())
