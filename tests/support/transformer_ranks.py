"""What ranks run in the tests of families: training equals one process, and what is saved loads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support import small_models as unets
from support import small_transformers as small
from support.cases import run_each
from support.parity import by_rank_0, share_groups
from support.reference import error

STEPS, MICROBATCHES = 2, 2

CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    # model, batch, options of to_layers, "pulse"
    "hunyuan-dit": (small.small_hunyuan_dit, small.hunyuan_dit_batch, {}, {"placement": "wave"}),
    "hunyuan-dit relayed": (small.small_hunyuan_dit, small.hunyuan_dit_batch, {}, {"enabled": False}),
    "unidiffuser": (small.small_unidiffuser, small.unidiffuser_batch, {"granularity": "fine"}, {"placement": "wave"}),
    "flux": (small.small_flux, small.flux_batch, {"granularity": "fine"}, {"placement": "linear"}),
    "flux relayed": (small.small_flux, small.flux_batch, {"granularity": "fine"}, {"enabled": False}),
    "svd": (unets.small_svd_unet, unets.svd_entries, {}, {"placement": "wave"}),
    "numbers, data on the first rank only": (
        lambda: small.small_unidiffuser(use_data_type_embedding=True),
        lambda: {**small.unidiffuser_batch(), "timestep_img": 3, "timestep_text": 40.0, "data_type": 0},
        {"data_type": True},
        {"placement": "wave"},
    ),
    "an entry that no layer reads": (small.small_unidiffuser, small.unidiffuser_batch, {}, {"placement": "wave"}),
    "numbers relayed": (
        lambda: unets.small_unet(time_embedding_type="fourier"),
        lambda: {**unets.pixel_entries(), "timestep": 7},
        {},
        {"enabled": False},
    ),
    "numbers, measured": (
        lambda: unets.small_unet(time_embedding_type="fourier"),
        lambda: {**unets.pixel_entries(), "timestep": 7},
        {},
        {"placement": "wave"},
    ),
    "hunyuan-video": (small.small_hunyuan_video, small.hunyuan_video_batch, {}, {"placement": "wave"}),
}


REFUSED = ("an entry that no layer reads",)


def trains(folder: str) -> None:
    """Losses, and the weights that ``save_pretrained`` writes, equal one process's."""
    import deepspeed

    deepspeed.init_distributed()
    share_groups()
    run_each(CASES, lambda name: train_case(name, Path(folder, name)))


def train_case(name: str, folder: Path) -> None:
    import deepspeed

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.models import save_pretrained, to_layers

    make, make_batch, options, pulse = CASES[name]
    model = make()
    expected, weights = by_rank_0(lambda: train_alone(copy.deepcopy(model), make_batch))
    first = next(iter(make_batch()))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"enabled": False} if "enabled" in pulse else {"solver_seconds": 0, **pulse},
    }
    layers = to_layers(model, **options)
    example = next(batches(make_batch, 0)) if "measured" in name else None
    module = PipelineModule(
        layers=layers, num_stages=2, loss_fn=loss_of, config=config, input=first, example_batch=example
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd(module), config=config)
    if name in REFUSED:
        refuses_what_no_layer_reads(engine, make_batch)
        engine.destroy()
        return
    for step, wanted in enumerate(expected):
        data = batches(make_batch, step) if "first rank only" not in name or engine.is_first_stage() else None
        found = float(engine.train_batch(data).detach())
        assert abs(found - wanted) <= 1e-5 * abs(wanted), (name, step, found, wanted)
    save_pretrained(engine, folder)
    loaded = type(model).from_pretrained(folder).state_dict()
    for key, weight in weights.items():
        assert error(loaded[key], weight) <= 1e-5, (name, key)
    engine.destroy()


def refuses_what_no_layer_reads(engine: Any, make_batch: Any) -> None:
    """On both ranks, before the first step, by data that only the first has."""
    from deepspeed_pulse.errors import BatchError

    batch = {**make_batch(), "cross_attention_kwargs": {"scale": 0.5}}
    try:
        engine.train_batch(itertools.repeat((batch, None)) if engine.is_first_stage() else None)
    except BatchError as problem:
        assert "has 'cross_attention_kwargs.scale', which UniDiffuserModel reads and no layer" in str(problem), problem
    else:
        raise AssertionError("not refused")


def train_alone(model: Any, make_batch: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and weights after the last step."""
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        found = []
        for inputs, labels in itertools.islice(batches(make_batch, step), MICROBATCHES):
            output = model(**inputs, **({} if "prompt_embeds" in inputs else {"return_dict": False}))
            found.append(loss_of(output if len(output) > 1 else output[0], labels))
        (sum(found) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(found).detach()) / MICROBATCHES)
    return losses, model.state_dict()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def batches(make_batch: Any, step: int) -> Iterator[Any]:
    """The example with other samples in every microbatch."""
    for microbatch in itertools.count():
        batch = make_batch()
        first = next(iter(batch))
        batch[first] = batch[first] * (1 + 0.1 * step) - 0.2 * microbatch
        yield batch, batch[first].flatten(1)[:, :8]


def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of all outputs."""
    parts = output if isinstance(output, tuple) else (output,)
    others = [part.square().mean() for part in parts[1:]]
    return torch.nn.functional.mse_loss(parts[0].flatten(1)[:, :8], labels) + parts[0].square().mean() + sum(others)
