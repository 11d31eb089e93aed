"""Entries of a batch: what the model's forward would read is read or refused, and numbers are what the model makes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import small_models as unets
from support import small_transformers as small
from support.every_family import FAMILIES, forward, layers_of
from support.families import interpret
from torch import nn

from deepspeed_pulse.engine.data.batches import SplitBatch, flatten
from deepspeed_pulse.engine.rules import rules_of
from deepspeed_pulse.engine.specs import describe, spec
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.entries import NUMBERS

SINGLE = [family for family in FAMILIES if "with" not in family]
RESIDUAL = (torch.ones(()),)


def split(layers: list[Any], batch: dict[str, Any]) -> SplitBatch:
    """As the engine splits a batch."""
    graph = Graph(layers=tuple(describe(index, layer) for index, layer in enumerate(layers)))
    rules = rules_of(layers, [value.name for value in graph.batch_entries])
    return SplitBatch((batch, None), graph, next(iter(batch)), rules=rules)


def through(layers: list[Any], batch: dict[str, Any]) -> Any:
    found = split(layers, batch)
    return interpret(layers, {next(iter(batch)): found.inputs, **found.entries})


def outcome(model: Any, batch: dict[str, Any]) -> Any:
    try:
        return forward(model, batch)
    except Exception as problem:  # whatever a model says to what it cannot use
        return problem


def same(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(*pair) for pair in pairs)


def values_of(name: str, model: Any, batch: dict[str, Any]) -> Any:
    """What an argument may be given: a mask that drops something, or else something that a model trips over."""
    text = batch.get("encoder_hidden_states")
    pixels = 1 if next(iter(batch.values())).ndim < 4 else next(iter(batch.values()))[0, 0].numel()
    if name == "encoder_attention_mask" and text is not None:
        return torch.cat([torch.ones(len(text), 1), torch.zeros(len(text), text.shape[1] - 1)], dim=1)
    if name == "attention_mask":
        return torch.arange(pixels).lt(pixels // 2).float().expand(2, -1)
    if name == "added_cond_kwargs":
        return {"resolution": torch.ones(2, 2), "aspect_ratio": torch.ones(2, 1)}
    if name.endswith("kwargs"):
        return {"scale": torch.tensor(0.5)}
    return RESIDUAL if "residual" in name or "samples" in name or name == "skip_layers" else torch.ones(2, 1)


@pytest.mark.parametrize("family", SINGLE)
def test_every_argument_of_forward_is_read_or_refused(family):
    """Where the model's output changes, or the model refuses: by name. What it does not look at may be there."""
    make, make_batch = FAMILIES[family]
    model, batch = make(), make_batch()
    layers = layers_of(model, "block")
    popped = {name.partition(".")[0] for layer in layers for name in layer.pop} | {next(iter(batch))}
    expected = forward(model, batch)
    wrong = []
    for name in inspect.signature(type(model).forward).parameters:
        if name in ("self", "return_dict", *popped):
            continue
        more = {**batch, name: values_of(name, model, batch)}
        found = outcome(model, more)
        read = isinstance(found, Exception) or not same(found, expected)
        try:
            split(layers, more)
            refused = ""
        except BatchError as problem:
            refused = str(problem)
        if read and f"{family} reads and no layer of this list does" not in refused:
            wrong.append(f"{name}: the model reads it (or says {found!r:.60}), and it is not refused")
        split(layers, {**batch, name: None})
    assert not wrong, "\n".join(wrong)


def test_a_mask_that_the_list_was_made_without():
    model, batch = unets.small_sd_unet(), unets.sd_entries()
    batch["encoder_attention_mask"] = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    with pytest.raises(BatchError, match=r"make the list with to_layers\(model, encoder_attention_mask=True\)"):
        split(to_layers(model), batch)
    layers = to_layers(model, encoder_attention_mask=True)
    assert same(through(layers, batch), forward(model, batch))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cross_attention_kwargs", {"scale": 0.5}, "set a LoRA scale on the model"),
        ("mid_block_additional_residual", torch.ones(1), "hand over the ControlNet itself"),
        ("timestep_cond", torch.ones(2, 8), "the model takes none: its config.time_cond_proj_dim is None"),
    ],
)
def test_what_to_do_is_said(name, value, message):
    with pytest.raises(BatchError, match=message):
        split(to_layers(unets.small_sd_unet()), {**unets.sd_entries(), name: value})


def test_a_condition_that_the_model_takes_is_an_option_of_the_list():
    layers = to_layers(unets.small_sd_unet(time_cond_proj_dim=8))
    with pytest.raises(BatchError, match=r"to_layers\(model, timestep_cond=True\)"):
        split(layers, {**unets.sd_entries(), "timestep_cond": torch.ones(2, 8)})


def test_a_scale_goes_to_the_list_with_its_controlnet():
    layers = to_layers(unets.small_controlled_unet(), controlnet=unets.small_controlnet())
    with pytest.raises(BatchError, match=r"pass it to to_layers\(unet, controlnet=controlnet, conditioning_scale="):
        split(layers, {**unets.sd_entries(), "controlnet_cond": torch.ones(2, 3, 128, 128), "conditioning_scale": 0.5})


def test_an_entry_that_the_model_does_not_look_at():
    batch = {**unets.sd_entries(), "class_labels": torch.ones(2), "added_cond_kwargs": {"image_embeds": torch.ones(2)}}
    split(to_layers(unets.small_sd_unet()), batch)


TYPED = {"use_data_type_embedding": True}
NUMBER_CASES = [
    *((family, None, "timestep", value) for family in NUMBERS if family in FAMILIES for value in (7, 3.7)),
    *(("UniDiffuserModel", TYPED, name, value) for name in ("timestep_img", "timestep_text") for value in (7, 3.7)),
    *(("UniDiffuserModel", TYPED, "data_type", value) for value in (0, 1, 1.0)),
    ("UNet2DModel", {"time_embedding_type": "fourier"}, "timestep", 3.7),
    ("UNet2DConditionModel", {"time_embedding_type": "fourier"}, "timestep", 3.7),
]
MAKERS = {
    "UniDiffuserModel": small.small_unidiffuser,
    "UNet2DModel": unets.small_unet,
    "UNet2DConditionModel": unets.small_sdxl_unet,
}


@pytest.mark.parametrize(
    ("family", "config", "name", "value"),
    [case for case in NUMBER_CASES if case[0] != "UniDiffuserModel" or case[2] != "timestep"],
    ids=lambda value: "fourier" if isinstance(value, dict) and value is not TYPED else None,
)
def test_numbers(family, config, name, value):
    """An entry that is a Python number gives what it gives in the model, bit for bit."""
    make, make_batch = FAMILIES[family]
    model = make() if config is None else MAKERS[family](**config)
    batch = {**make_batch(), name: value}
    options = {"data_type": True} if name == "data_type" else {}
    layers = to_layers(model, **options) if options else layers_of(model, "block")
    assert same(through(layers, batch), forward(model, batch))


def test_numbers_where_the_model_takes_none():
    with pytest.raises(BatchError, match="'timestep': FluxTransformer2DModel takes a tensor, found the number 3"):
        split(to_layers(small.small_flux()), {**small.flux_batch(), "timestep": 3})


def test_flattened_numbers_of_other_lists_stay():
    assert flatten({"a": {"n": 3}}) == {"a.n": 3}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cond: Any = None) -> torch.Tensor:
        return self.second(self.first(x) + sum(one for one in (cond or {}).values() if isinstance(one, torch.Tensor)))


class Keywords(Nested):
    def forward(self, x: torch.Tensor, **cond: torch.Tensor) -> torch.Tensor:
        return super().forward(x, cond)


HIDDEN, TEXT = torch.ones(2, 8), torch.full((2, 8), 2.0)
BESIDE = [
    (Nested, {"cond": {"text": TEXT}}, {"cond": {"text": TEXT, "image": TEXT}}),
    (Nested, {"cond": {"deep": {}, "text": TEXT}}, {"cond": {"deep": {"image": TEXT}, "text": TEXT}}),
    (Nested, {"cond": {}}, {"cond": {"image": TEXT}}),
    (Keywords, {"text": TEXT}, {"text": TEXT, "image": TEXT}),
    (Keywords, {}, {"image": TEXT}),
]


@pytest.mark.parametrize(("kind", "had", "more"), BESIDE)
def test_what_a_traced_model_would_read_beside_its_example(kind, had, more):
    model = kind()
    layers = to_layers(model, example_batch={"x": HIDDEN, **had})
    assert torch.equal(through(layers, {"x": HIDDEN, **had}), model(x=HIDDEN, **had))
    reads = "may read" if kind is Keywords else "reads"
    told = rf"the batch has '(cond\.)?(deep\.)?image', which {kind.__name__} {reads} .* example_batch that has it, or"
    with pytest.raises(BatchError, match=told):
        split(layers, {"x": HIDDEN, **more})


def test_a_traced_model_that_was_listed_with_a_tensor():
    layers = to_layers(Nested(), example_batch=HIDDEN)
    with pytest.raises(BatchError, match=r"the batch has 'cond', which Nested reads"):
        split(layers, {"hidden": HIDDEN, "cond": TEXT})


def test_a_traced_model_leaves_other_layers_their_entries():
    layers = [*to_layers(Keywords(), example_batch={"x": HIDDEN}), spec(torch.add, pop=["image"])]
    assert split(layers, {"x": HIDDEN, "image": TEXT}).unread() == []
