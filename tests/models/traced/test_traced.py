"""Any model as a layer list: output and all gradients equal the model's, bit for bit, at other sizes too."""

from __future__ import annotations

import copy
import gc
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from support import small_models as unets
from support.families import assert_transparent, interpret
from support.plain_nets import ExpertNet, NamedAsLayers, Odd, PlainLevel, PlainUNet, plain_unet_batch
from support.traced import assert_equal
from support.zoo import ZOO
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel, T5Config, T5EncoderModel, ViTConfig, ViTModel

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.errors import BatchError, FileError, GraphError
from deepspeed_pulse.models import from_pretrained, to_layers
from deepspeed_pulse.models.traced.layers import Traced


def odd_batch(samples: int = 2, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 8, generator=generator)}


def test_a_plain_unet_at_other_sizes():
    model = PlainUNet()
    layers = to_layers(model, example_batch=plain_unet_batch())
    assert [layer.name for layer in layers] == [
        "inc", "down1", "down2", "mid", "mid (2)", "up2", "up1", "up0", "out"
    ]  # fmt: skip
    assert_equal(model, layers, plain_unet_batch(), plain_unet_batch(3, 24), plain_unet_batch(1, 17))


def test_a_plain_unet_under_every_plan():
    torch.manual_seed(0)
    assert_transparent(
        PlainUNet(),
        plain_unet_batch(),
        lambda model, batch: model(**batch),
        make=lambda model: to_layers(model, example_batch=plain_unet_batch()),
        one_owner=False,
    )


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("buffers_and_constants", {}),
        ("dropout", {}),
        ("view_across", {}),
        ("autocast", {}),
        ("batch_alone", {"mask": torch.eye(8)[:2], "scale": 0.5}),
        ("sizes", {}),
        ("checks", {}),
        ("late_input", {}),
        ("own_backward", {}),
        ("fills_caches", {}),
        ("reads_a_state", {}),
        ("scale_or_none", {"mask": None, "scale": None}),
        ("tuples", {}),
        ("shared_weight", {}),
    ],
)
def test_what_stands_between_blocks(kind, others):
    model = Odd(kind)
    batch = {**odd_batch(), **others}
    layers = to_layers(model, example_batch=batch)
    assert len(layers) == 3
    for count in (5, 1):
        mine = {"mask": torch.eye(8)[:count], "scale": 2.0} if kind == "batch_alone" else others
        assert_equal(model, layers, batch, {**odd_batch(count, seed=1), **mine})
    model.eval()
    assert_equal(model, [turned(layer) for layer in layers], batch)


def turned(layer: Any) -> Any:
    layer.layer.eval()
    return layer


def test_weights_and_constants_in_another_dtype():
    """Complex tables stay, sizes of floats follow the weights."""
    model = Odd("buffers_and_constants")
    layers = to_layers(model, example_batch=odd_batch())
    model.bfloat16()
    assert model.waves.is_complex()
    for layer in layers:
        layer.layer.bfloat16()
    assert_equal(model, layers, {"x": odd_batch()["x"].bfloat16()})


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [torch.float32, torch.bfloat16, torch.float64])
def test_a_batch_in_another_dtype(weights, batch):
    """A bfloat16 block and its batches, with an example in float32."""
    model = Odd("dtypes")
    layers = to_layers(model, example_batch=odd_batch())
    model.to(weights)
    for layer in layers:
        layer.layer.to(weights)
    assert_equal(model, layers, {"x": odd_batch()["x"].to(batch)}, {"x": odd_batch(3)["x"].to(batch)}, odd_batch())


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("kind", ["island", "dtypes", "asks_for_autocast", "autocast"])
def test_autocast_around_the_model(kind, made_inside):
    """What the code between blocks has switched off stays off, and a dtype that it reads is the one of now."""
    model = Odd(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=made_inside):
        layers = to_layers(model, example_batch=odd_batch())
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert_equal(model, layers, odd_batch(), odd_batch(3))


def test_a_cut_stays_where_autocast_makes_another_one_cheaper():
    class Narrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.LayerNorm(8), nn.SiLU()
            self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("turn", torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.norm(x)) @ self.turn
            return self.third(self.second(y + torch.ones(8, dtype=y.dtype)))

    model = Narrows()
    layers = to_layers(model, example_batch=odd_batch())
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(model, layers, odd_batch())


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_parts_of_two_dtypes_that_are_cast_to_one(first):
    """DeepSpeed casts what a model keeps in float32, too; a layer that had that dtype before cannot tell by itself."""
    model = Odd("head_dtype")
    model.first.to(first), model.second.bfloat16()
    batch = {"x": odd_batch()["x"].to(first)}
    layers = to_layers(model, example_batch=batch)
    assert_equal(model, layers, batch)
    model.bfloat16()
    assert_equal(model, layers, {"x": batch["x"].bfloat16()})
    model.float()
    assert_equal(model, layers, odd_batch())


@pytest.mark.parametrize("buffers", [torch.float32, torch.bfloat16])
def test_buffers_that_are_cast_or_stay(buffers):
    """DeepSpeed casts parameters alone."""
    model = Odd("buffer_dtype")
    layers = to_layers(model, example_batch=odd_batch())
    for module in (model, *(layer.layer for layer in layers)):
        module.bfloat16()
        for buffer in module.buffers():
            buffer.data = buffer.data.to(buffers)
    assert_equal(model, layers, {"x": odd_batch()["x"].bfloat16()})


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cond: dict[str, Tensor | None], mask: Tensor | None) -> Tensor:
        y = self.first(x) * cond["a"]
        return self.last(y if cond["b"] is None and mask is None else -y)


def test_an_entry_that_is_none_stays_none():
    model, cond = Conditioned(), {"a": torch.ones(8), "b": None}
    batch = {**odd_batch(), "cond": cond, "mask": None, "not an argument": None}
    layers = to_layers(model, example_batch=batch)
    found = interpret(layers, {**odd_batch(), "cond": {"a": torch.ones(8)}})
    assert torch.equal(found, model(**odd_batch(), cond=cond, mask=None))
    with pytest.raises(BatchError, match=r"the batch has 'mask', which Conditioned reads and no layer of this"):
        layers[0].layer.entry_rules.apply({"mask": torch.ones(8)})


def test_dropout_of_a_batch_entry_draws_once():
    """A list that was made in evaluation mode."""
    model, batch = Odd("dropped_mask").eval(), {**odd_batch(), "mask": torch.ones(2, 8)}
    layers = to_layers(model, example_batch=batch)
    assert_equal(model, layers, batch)
    model.train()
    for layer in layers:
        layer.layer.train()
    assert_equal(model, layers, batch)


def test_checkpoints_of_the_models_own_are_bypassed():
    model = Odd("checkpointed")
    with pytest.warns(UserWarning, match="checkpoints around its blocks are bypassed"):
        layers = to_layers(model, example_batch=odd_batch())
    assert_equal(model, layers, odd_batch())


def test_a_branch_on_a_size_is_traced_again_or_refused():
    """A U-Net at a size that does not divide: its own forward hands sizes to the upsamplers."""
    model = unets.small_unet()
    batch = unets.pixel_entries()
    layers = to_layers(model, example_batch=batch, trace=True)
    assert_equal(model, layers, batch)


@pytest.mark.parametrize(
    "name", [pytest.param("QwenImageTransformer2DModel", marks=pytest.mark.soak), "StableCascadeUNet"]
)
def test_a_class_without_a_family(name):
    model = ZOO[name].model(name)
    layers = to_layers(model, example_batch=ZOO[name].example())
    assert_equal(model, layers, ZOO[name].example(), ZOO[name].example(1))


class OwnTransformer(PreTrainedModel):
    """A user's model on transformers' base class, around one of theirs; its forward takes any name."""

    config_class = ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.vit, self.head = ViTModel(config, add_pooling_layer=False), nn.Linear(16, 8)
        self.post_init()

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Tensor:
        return self.head(self.vit(pixel_values, **kwargs).last_hidden_state)


def test_parts_with_names_that_layers_have():
    model = NamedAsLayers()
    layers = to_layers(model, example_batch=odd_batch())
    assert len(layers) > 3
    assert_equal(model, layers, odd_batch(), odd_batch(5))
    assert {key for layer in layers for key in layer.layer.state_dict()} == {*model.state_dict()}
    model.traced = model.skip
    model.skip = nn.Sequential(model.traced)
    with pytest.raises(GraphError, match=r"an attribute 'traced' of their own, and the model has a part of that name"):
        to_layers(model, example_batch=odd_batch())


def test_an_encoder_of_transformers():
    """Its embedding has two names."""
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5EncoderModel(T5Config(vocab_size=20, **size))
    batch, other = (
        {"input_ids": torch.arange(2 * width).view(2, width) % 20, "attention_mask": torch.ones(2, width).long()}
        for width in (6, 5)
    )
    assert_equal(model, to_layers(model, example_batch=batch), batch, other)


def test_a_model_of_transformers():
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = OwnTransformer(ViTConfig(image_size=8, patch_size=4, **size))
    batch, other = ({"pixel_values": torch.randn(samples, 3, 8, 8)} for samples in (2, 3))
    layers = to_layers(model, example_batch=batch)
    assert len(layers) > 3
    assert_equal(model, layers, batch, other)
    words = {"file_names": ["a", "b"]}
    assert layers[0].layer.entry_rules.apply(words) == words, "a script's own"
    with pytest.raises(BatchError, match="the batch has 'head_mask', which OwnTransformer may read"):
        layers[0].layer.entry_rules.apply({"head_mask": torch.ones(2)})


def test_a_profile_is_estimated_without_memory(tmp_path: Path) -> None:
    """Skips are listed with their ends."""
    from deepspeed_pulse.cli import main
    from deepspeed_pulse.ir.profile import Profile

    out = tmp_path / "profile.json"
    assert main(["profile", "support.plain_nets:plain_unet_workload", "--estimate", "--out", str(out)]) == 0
    profile = Profile.from_json(out.read_text())
    names = [layer.name for layer in profile.layers]
    skips = {(names[skip.source], names[skip.target]) for skip in profile.skips}
    assert {("inc", "up0"), ("down1", "up1"), ("down2", "up2")} <= skips


def test_a_folder_is_read_layer_by_layer(tmp_path: Path) -> None:
    """A class without a family; together the layers have the model's keys, and its output."""
    name = "SanaTransformer2DModel"
    model, batch = ZOO[name].model(name), ZOO[name].example()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        FileError, match=r"no family knows a SanaTransformer2DModel, so it is traced: pass example_batch="
    ):
        from_pretrained(tmp_path)
    lazy = from_pretrained(tmp_path, example_batch=batch)
    assert all(not layer.unit.state_dict() or layer.reads_files for layer in lazy)
    built = [spec(layer.build(), stash=layer.stash, pop=layer.pop, name=layer.layer_name) for layer in lazy]
    state = {key: value for layer in built for key, value in layer.layer.state_dict().items()}
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(interpret(built, batch), model(**batch).sample)


def test_a_module_that_chooses_experts_is_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it has a list of blocks: between those the sizes of values follow from numbers."""
    torch.manual_seed(0)
    model, batch = ExpertNet(), odd_batch()
    layers = to_layers(model, example_batch=batch)
    assert [layer.name for layer in layers] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert_equal(model, layers, batch, odd_batch(7, seed=1), odd_batch(1))
    monkeypatch.setattr(Traced, "routing", lambda _: frozenset())
    assert any("experts" in layer.name for layer in to_layers(model, example_batch=batch)), "what routing() prevents"


def test_fine_layers_open_the_blocks():
    name = "Transformer2DModel"
    model, batch = ZOO[name].model(name), ZOO[name].example()
    whole, fine = (to_layers(model, example_batch=batch, granularity=how) for how in ("block", "fine"))
    assert len(fine) > len(whole)
    assert_equal(model, fine, batch)


def adapted(model: nn.Module, *targets: str) -> nn.Module:
    torch.manual_seed(3)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False), model)
    return model.requires_grad_(True).train()


def test_adapters_do_not_change_the_layers():
    """The targets that diffusers' own scripts have: a list is in each block, and an adapter has parts with weights."""
    name = "SanaTransformer2DModel"
    model, batch = ZOO[name].model(name), ZOO[name].example()
    plain = [layer.name for layer in to_layers(model, example_batch=batch)]
    layers = to_layers(adapted(model, "to_q", "to_k", "to_v", "to_out.0"), example_batch=batch)
    assert [layer.name for layer in layers] == plain
    assert_equal(model, layers, batch)


@pytest.mark.parametrize("how", ["adapters", "whole copies", "parametrizations"])
def test_what_stands_around_a_part_is_no_block(how):
    model = PlainLevel()
    if how == "adapters":
        adapted(model, "net.0", "net.2")
    elif how == "whole copies":
        config = LoraConfig(r=2, target_modules=["mid.net.0"], modules_to_save=["inc"])
        model = get_peft_model(model, config).get_base_model().requires_grad_(True)
    else:
        for module in [one for one in model.modules() if isinstance(one, nn.Conv2d)]:
            parametrizations.weight_norm(module)
    batch = plain_unet_batch()
    for granularity in ("block", "fine"):
        layers = to_layers(model, example_batch=batch, granularity=granularity)
        assert [layer.name for layer in layers] == ["inc", "mid", "up"]
    assert_equal(model, layers, batch)


# ------------------------------------------------------------------------------------------ what is refused


def test_a_new_user_is_told_what_to_pass():
    with pytest.raises(GraphError, match=r"knows no family for PlainUNet.*pass example_batch=, a dict of the"):
        to_layers(PlainUNet())
    with pytest.raises(GraphError, match=r"takes a model \(a torch.nn.Module\), found type"):
        to_layers(PlainUNet, example_batch=plain_unet_batch())
    with pytest.raises(BatchError, match=r"expected at least one tensor"):
        to_layers(PlainUNet(), example_batch={"x": 1})
    with pytest.raises(BatchError, match=r"its first entry 't' is the first layer's input"):
        to_layers(PlainUNet(), example_batch={"t": 1.0, "x": torch.ones(1, 3, 8, 8)})
    with pytest.raises(BatchError, match=r"PlainUNet.forward takes no 'tt' \(did you mean \"t\"\?\); it takes x, t"):
        to_layers(PlainUNet(), example_batch={"x": torch.ones(1, 3, 8, 8), "tt": torch.ones(1)})
    with pytest.raises(BatchError, match=r"PlainUNet.forward needs 't', too; found x$"):
        to_layers(PlainUNet(), example_batch={"x": torch.ones(1, 3, 8, 8)})
    with pytest.raises(BatchError, match=r"PlainUNet.forward needs 't', too; found a tensor$"):
        to_layers(PlainUNet(), example_batch=torch.ones(1, 3, 8, 8))
    with pytest.raises(BatchError, match=r"entry 't': expected a tensor, a number.*found ndarray; make it a tensor"):
        to_layers(PlainUNet(), example_batch={"x": torch.ones(1, 3, 8, 8), "t": np.ones(1)})
    with pytest.raises(GraphError, match=r"forward fails at .*plain_nets.py:\d+"):
        to_layers(PlainUNet(), example_batch={"x": torch.ones(1, 5, 8, 8), "t": torch.ones(1)})
    with pytest.raises(GraphError, match=r"forward fails at .*got \[2, 7\] X \[8, 8\]"):
        to_layers(Odd("sizes"), example_batch={"x": torch.ones(2, 7)})
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(GraphError, match=r"of a scripted model.*pass the model itself"):
        to_layers(scripted, example_batch={"input": torch.ones(2, 8)})
    with pytest.raises(GraphError, match=r"blocks: PlainUNet has no module 'down9'.*did you mean"):
        to_layers(PlainUNet(), example_batch=plain_unet_batch(), blocks=["down9"])
    for blocks in ("down", 3, [], [nn.Linear]):
        with pytest.raises(GraphError, match=r'blocks: expected "auto" or a list of paths of modules, found'):
            to_layers(PlainUNet(), example_batch=plain_unet_batch(), blocks=blocks)
    with pytest.raises(GraphError, match=r"found the option 'attention_mask', which is for families"):
        to_layers(PlainUNet(), example_batch=plain_unet_batch(), attention_mask=True)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("reads_content", r"reads the numbers in a tensor at .*plain_nets.py:\d+ \(reads_content\).*blocks="),
        ("counts", r"changes step in its forward \(from 0 to 1\)"),
        ("tensor_hook", r"plain_nets.py:\d+ \(tensor_hook\): puts a hook on a tensor between blocks.*blocks="),
        ("numpy_random", r"draws from numpy's random in its forward"),
        ("unregistered", r"plain_nets.py:\d+ \(unregistered\): reads a weight of shape \[8\] that no module"),
        ("sets_a_block", r"\(sets_a_block\): calls first, which can read first.height, and code between blocks has"),
        ("sets_a_state", r"calls first, which can read first.state.height, and code between blocks has set that"),
        ("hooks_a_block", r"calls first, which can read first._forward_hooks, and code between blocks has set that"),
        ("swaps_weights", r"calls first, which can read first.weight, and code between blocks has set that"),
        ("averages", r"sets saved to a tensor that its forward computes.*return it with the output"),
        ("counts_in_a_buffer", r"sets saved to a tensor that its forward computes"),
        ("leaves_a_loss", r"sets step to a tensor that its forward computes"),
        ("leaves_another_loss", r"sets waves to a tensor that its forward computes"),
    ],
)
def test_what_cannot_be_traced_is_named(kind, told):
    with pytest.raises(GraphError, match=told):
        to_layers(Odd(kind), example_batch=odd_batch())


class Tells(nn.Module):
    """A block reads what the model around it has set, and counts its own calls."""

    class Reads(nn.Linear):
        calls = 0

        def __init__(self, around: list[Any]) -> None:
            super().__init__(8, 8)
            self.around = around

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + self.around[0].condition

    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.block, self.last = self.Reads([self]), nn.Linear(8, 8)
        self.condition, self.tells = 0.5, tells

    def forward(self, x: Tensor) -> Tensor:
        if self.tells:
            self.condition = x.shape[0]
        return self.last(self.block(self.block(x)))


def test_what_a_block_reads_of_the_model_around_it():
    model = Tells(tells=False)
    assert_equal(model, to_layers(model, example_batch=odd_batch()), odd_batch(), odd_batch(5))
    with pytest.raises(GraphError, match=r"calls block, which can read condition, and code between blocks has set"):
        to_layers(Tells(tells=True), example_batch=odd_batch())


@lru_cache
def table(rows: int, columns: int) -> Tensor:
    return torch.linspace(0, 1, rows * columns).view(rows, columns)


class LooksUp(nn.Module):
    """Adds a table of the sizes it meets, which is made once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + table(x.shape[0], x.shape[1])


made_late: list[Any] = []


class MakesItsCache(LooksUp):
    """When it runs for the first time."""

    def forward(self, x: Tensor) -> Tensor:
        if not made_late:
            made_late.append(lru_cache(table.__wrapped__))
        for block in self.blocks:
            x = block(x)
        return x + made_late[0](x.shape[0], x.shape[1])


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_trace_puts_into_a_cache_of_sizes_is_thrown_out(frozen):
    """Also where the program has frozen what it imported, so that the collector does not list the cache."""
    made_late.clear()
    for model in (LooksUp(), MakesItsCache()):
        if frozen:
            gc.freeze()
        try:
            layers = to_layers(model, example_batch=odd_batch())
            assert bool(gc.get_freeze_count()) is frozen
        finally:
            gc.unfreeze()
        assert [cache.cache_info().currsize for cache in (table, *made_late)] == [0] * (1 + len(made_late))
        assert_equal(model, layers, odd_batch())
        table.cache_clear()
    assert made_late


def test_what_an_earlier_forward_has_left_is_a_cache():
    model = Odd("fills_caches")
    model(**odd_batch())
    assert_equal(model, to_layers(model, example_batch=odd_batch()), odd_batch())


def test_hooks_between_blocks_are_refused():
    model = PlainUNet()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(GraphError, match="the model itself has forward hooks"):
        to_layers(model, example_batch=plain_unet_batch())


def test_nothing_of_the_model_is_touched():
    """No hook fires, no cache fills, no number changes."""
    model = PlainUNet()
    before, fired = copy.deepcopy(model.state_dict()), []
    model.inc.register_forward_hook(lambda *_: fired.append(1))
    layers = to_layers(model, example_batch=plain_unet_batch())
    assert not fired
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    interpret(layers, plain_unet_batch())
    assert fired, "a hook inside a block runs when the layer does"


def test_a_batch_of_another_kind_is_refused_by_name():
    layers = to_layers(PlainUNet(), example_batch=plain_unet_batch())
    with pytest.raises(BatchError, match=r"batch entry 'x': PlainUNet was traced with 4 dimensions, found the shape"):
        interpret(layers, {**plain_unet_batch(), "x": torch.ones(3, 8, 8)})


def test_blocks_by_name_keep_what_cannot_be_traced_whole():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.before, self.behind = Odd("dropout"), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.behind(self.inside(self.before(x)))

    model = Around()
    layers = to_layers(model, example_batch=odd_batch(), blocks=["before", "inside"])
    assert [layer.name for layer in layers] == ["before", "inside", "behind"]
    assert_equal(model, layers, odd_batch())
    model.inside.kind = "reads_inside"
    assert_equal(model, to_layers(model, example_batch=odd_batch(), blocks=["inside"]), odd_batch(), odd_batch(5))
