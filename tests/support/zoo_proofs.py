"""What every traced model has to show beside equality at three sizes.

Dropout is on in all of them. Where ranks run microbatches in an order of their own, each module draws from a seed of
its own name, so that the unpartitioned model draws the same.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from support.families import TOLERANCE, another, assert_close, mean_gradients, planned_gradients, plans
from support.traced import assert_equal
from support.zoo import Batch, output_of
from support.zoo_table import runs
from torch import nn
from torch.utils._pytree import tree_map_only

from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.models import to_layers

LORA_PARTS = ("to_q", "to_v", "to_out.0", "qkv", "conv1")


def with_dropout(model: nn.Module, *, seeded: bool = False) -> None:
    """Set every dropout to 0.1. ``seeded``: what drops values or labels draws from a seed made of its name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        if seeded and (isinstance(module, nn.Dropout) or (name and hasattr(module, "dropout_prob"))):
            module.register_forward_pre_hook(partial(_seeded, zlib.crc32(name.encode())))


def _seeded(seed: int, *_: Any) -> None:
    torch.manual_seed(seed)


def in_bfloat16(batch: Batch) -> Batch:
    return tree_map_only(torch.Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, batch)  # type: ignore[no-any-return]


def add_adapters(model: nn.Module) -> int:
    """LoRA on linear and convolutional parts, as peft puts it; the number of adapted modules."""
    from peft import LoraConfig, inject_adapter_in_model

    kinds = (nn.Linear, nn.Conv2d, nn.Conv1d)
    names = [name for name, module in model.named_modules() if type(module) in kinds and _groups(module) == 1]
    ends = tuple(f".{part}" for part in LORA_PARTS)
    targets = [name for name in names if f".{name}".endswith(ends)] or names[1:4]
    torch.manual_seed(3)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
    model.requires_grad_(True).train()
    return len(targets)


def _groups(module: nn.Module) -> int:
    return getattr(module, "groups", 1)


def listed(model: nn.Module, batch: Batch, granularity: Any = "block") -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return to_layers(model, example_batch=batch, granularity=granularity, trace=True)


# ------------------------------------------------------------------------------------------ the proofs


def assert_all_at_once(model: nn.Module, batch: Batch) -> None:
    """Bit for bit in train mode with dropout, in bf16, with LoRA before the cut; base weights are trained too.

    In fp32 where the model's own forward cannot do with bf16.
    """
    assert add_adapters(model)
    with_dropout(model)
    if runs(copy.deepcopy(model).bfloat16(), in_bfloat16(batch)):
        model, batch = model.bfloat16(), in_bfloat16(batch)
    assert_equal(model, listed(model, batch), batch)


def assert_ranks_agree(model: nn.Module, batch: Batch) -> None:
    """Loss and all gradients on 2 and 4 ranks of one process, wave and linear, with dropout.

    Layers run again in backward in every other of these.
    A list that is too short for a wave on 4 ranks is made of finer layers for it.
    """
    with_dropout(model, seeded=True)
    batches = [batch, another(batch)]
    expected, losses = mean_gradients(copy.deepcopy(model), batches, output_of)
    layers = listed(model, batch)
    for count in (2, 4):
        placements = ("wave", "linear")
        if len(layers) < 2 * count:
            layers = listed(model, batch, "fine")
        if len(layers) < 2 * count:
            placements = ("linear",)
        graph = Graph(layers=tuple(describe(index, layer) for index, layer in enumerate(layers)))
        for number, plan in enumerate(plans(graph, count, len(batches), placements)):
            recompute = (number + count // 2) % 2 == 0
            again = tuple(range(len(layers))) if recompute else ()
            found, found_losses = planned_gradients(model, layers, graph, replace(plan, recompute=again), batches)
            where = f"{count} ranks, waves {plan.waves}, recomputed {recompute}"
            off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found_losses, losses, strict=True))
            assert off < TOLERANCE, f"{where}: losses differ by {off:.1e}"
            assert_close(found, expected, where)
