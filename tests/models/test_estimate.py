"""Estimates of models, small and published: counts equal the whole model's, and the planner finds collocated cuts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from support.small_models import small_sd_unet, small_unet
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_pulse.engine.measure.counter import FusedAttention
from deepspeed_pulse.engine.plans.profiles import Estimated, estimate_profile, measure_profile
from deepspeed_pulse.engine.specs import Workload
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.catalogue.published import PUBLISHED
from deepspeed_pulse.models.catalogue.sources import build_model, example_batch, find_workload
from deepspeed_pulse.models.families import FAMILIES
from deepspeed_pulse.planner import Job, SearchOptions, make_plan
from deepspeed_pulse.planner.make import cuts

pytestmark = pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # what Chroma's class of diffusers says

PARAMETERS = {
    "sd15": 859.5,
    "sd21": 865.9,
    "sdxl": 2567.5,
    "svd": 1524.6,
    "svd-xt": 1524.6,
    "text-to-video": 1411.2,
    "animatediff": 1312.7,
    "hunyuan-dit-1.1": 1516.5,
    "hunyuan-dit": 1500.0,
    "unidiffuser": 952.5,
    "uvit-m": 130.9,
    "uvit-l": 286.8,
    "uvit-h": 500.8,
    "uvit-1b": 984.2,
    "uvit-2.7b": 2671.3,
    "kandinsky3": 3055.3,
    "pixart-alpha": 611.3,
    "pixart-sigma": 610.9,
    "sd3-medium": 2028.3,
    "sd3.5-large": 8056.6,
    "flux-dev": 11901.4,
    "wan-1.3b": 1419.0,
    "wan-14b": 14288.5,
    "hunyuan-video": 12821.0,
    "cogvideox-2b": 1693.8,
    "cogvideox-5b": 5570.3,
    "sana-0.6b": 591.7,
    "sana-1.6b": 1604.5,
    "cogview4": 6369.1,
    "chroma": 8900.0,
    "qwen-image": 20430.4,
    "flux2-dev": 32223.3,
    "ltx-video": 1923.4,
}
"""Millions: as published, to the digits published.

From sana-0.6b on these are rounded where they are published: 590 M, 1604 M, 6 B, 8.9 B, 20 B, 32 B, 2 B.
"""

FIGURES = {
    "sd15": (803, 12, 13.3),
    "sd21": (2149, 12, 29.9),
    "sdxl": (6761, 9, 51.1),
    "svd-xt": (79948, 12, 746.5),
    "hunyuan-dit": (14366, 19, 219.2),
    "uvit-h": (266, 14, 8.3),
    "unidiffuser": (2329, 15, 50.9),
}
"""GFLOP of a forward, skips, and their MB in bfloat16."""

LARGE = {"sd15", "sd21", "sdxl", "svd-xt", "hunyuan-dit", "unidiffuser", "uvit-h"}
"""Counted for a long time; the slow proofs do."""


def whole_model(model: nn.Module, batch: dict[str, Any]) -> tuple[int, int]:
    """Operations of the model's own forward and backward."""
    with FusedAttention():
        with FlopCounterMode(display=False) as forward:
            found = model(**batch)
            outputs = tuple(found.values()) if isinstance(found, Mapping) else found
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward([output.sum() for output in outputs])
    return forward.get_total_flops(), backward.get_total_flops()


def total(estimated: Estimated, name: str) -> int:
    return sum(getattr(count, name) for count in estimated.counts)


def skips(profile: Profile) -> dict[str, int]:
    return {skip.name: skip.bytes for skip in profile.skips if skip.name.startswith("skip")}


def test_layers_count_what_the_whole_model_counts() -> None:
    model = small_unet().to("meta")
    batch = example_batch(model, microbatch_size=2, dtype=torch.float32)
    estimated = estimate_profile(Workload(name="small", layers=to_layers(model), batch=(batch, None)), tflops=1)
    assert (total(estimated, "forward_flop"), total(estimated, "backward_flop")) == whole_model(model, batch)
    assert total(estimated, "param_bytes") == sum(4 * p.numel() for p in model.parameters())
    assert estimated.profile.microbatch_size == 2


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - set(FIGURES)))
@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_layers_of_published_models_count_what_the_whole_model_counts(name: str, granularity: str) -> None:
    estimated = estimate_profile(find_workload(name, granularity=granularity), tflops=312)
    model = build_model(PUBLISHED[name], dtype="bfloat16")
    batch = example_batch(model, microbatch_size=1, dtype=torch.bfloat16)
    assert (total(estimated, "forward_flop"), total(estimated, "backward_flop")) == whole_model(model, batch)


def test_times_are_operations_over_the_rate_and_say_so() -> None:
    model = small_unet().to("meta")
    batch = example_batch(model, microbatch_size=1, dtype=torch.float32)
    estimated = estimate_profile(Workload(name="small", layers=to_layers(model), batch=(batch, None)), tflops=2)
    for count, cost in zip(estimated.counts, estimated.profile.layers, strict=True):
        assert cost.forward_ms == pytest.approx(count.forward_flop / 2e12 * 1e3)
        assert cost.backward_ms == pytest.approx(count.backward_flop / 2e12 * 1e3)
        assert 0 <= cost.weight_grad_ms <= cost.backward_ms
    assert estimated.profile.device == "estimated at 2 TFLOP/s"
    assert estimated.profile.name == "small (estimate)"
    assert Profile.from_json(estimated.profile.to_json()) == estimated.profile


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_numbers_of_parameters(name: str) -> None:
    model = build_model(PUBLISHED[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == PARAMETERS[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LARGE else name for name in FIGURES]
)
def test_operations_and_skips_as_published(name: str) -> None:
    """Counts equal the whole model's; every skip stays on its rank at P = 2, 4, 8."""
    estimated = estimate_profile(find_workload(name), tflops=312)
    profile, (gigaflop, num_skips, megabytes) = estimated.profile, FIGURES[name]
    model = build_model(PUBLISHED[name], dtype="bfloat16")
    batch = example_batch(model, microbatch_size=1, dtype=torch.bfloat16)
    assert (total(estimated, "forward_flop"), total(estimated, "backward_flop")) == whole_model(model, batch)
    assert round(total(estimated, "forward_flop") / 1e9) == gigaflop
    assert len(skips(profile)) == num_skips
    assert round(sum(skips(profile).values()) / 1e6, 1) == megabytes
    for ranks in (2, 4, 8):
        assert not travelling_skips(profile, ranks)


LINK = Link(bandwidth_gb_per_s=300.0, latency_us=5.0)
CLUSTER = Cluster(name="node", nodes=1, ranks_per_node=64, memory_bytes=10**12, intra_node=LINK, inter_node=LINK)


def planned(profile: Profile, ranks: int) -> Plan:
    return make_plan(
        Job(profile=profile, cluster=CLUSTER, pipeline_ranks=ranks, microbatches=2 * ranks),
        SearchOptions(placement="wave", solver_seconds=0),
    )


def travelling_skips(profile: Profile, ranks: int) -> list[str]:
    """Skips that a wave over this many ranks sends."""
    return [route.name for route in planned(profile, ranks).routes if route.hops and route.name in skips(profile)]


@pytest.mark.soak
def test_fine_layers_balance_where_blocks_cannot() -> None:
    """SDXL on eight ranks: 1.30 with a layer for each transformer, 1.03 with one for each of its blocks.

    The plan's cuts may be less even: with two microbatches a rank, fill and drain count, too.
    """
    profile = estimate_profile(find_workload("sdxl", granularity="fine"), tflops=312).profile
    plan = planned(profile, 8)
    even = cuts(Job.of(plan, profile, CLUSTER), SearchOptions(placement="wave"))
    work = [layer.forward_ms + layer.backward_ms for layer in profile.layers]
    loads = [sum(work[index] for index in replace(plan, boundaries=even).layers_of(rank)) for rank in range(8)]
    assert max(loads) * 8 / sum(loads) < 1.04
    assert not travelling_skips(profile, 8)


def test_every_family_has_an_example_and_every_published_model_its_number() -> None:
    modules = [importlib.import_module(f"deepspeed_pulse.models.{name}") for name in FAMILIES.values()]
    assert all(callable(module.example) and callable(module.to_layers) for module in modules)
    assert PARAMETERS.keys() == PUBLISHED.keys()


def test_an_example_has_the_sizes_of_the_config() -> None:
    batch = example_batch(build_model(PUBLISHED["sd21"]), microbatch_size=3, dtype=torch.float16)
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "sample": ((3, 4, 96, 96), torch.float16),
        "timestep": ((3,), torch.int64),
        "encoder_hidden_states": ((3, 77, 1024), torch.float16),
    }


def test_an_example_of_a_pixel_model_has_classes() -> None:
    model = UNet2DModel(
        sample_size=(16, 24),
        block_out_channels=(32, 32),
        num_class_embeds=5,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    batch = example_batch(model, microbatch_size=1, dtype=torch.float32)
    assert (tuple(batch["sample"].shape), tuple(batch["class_labels"].shape)) == ((1, 3, 16, 24), (1,))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_estimated_sizes_are_exactly_the_measured_ones(dtype: str) -> None:
    """Of the small SD-like U-Net: parameters, outputs and named values; parameters are the whole model's."""
    model = small_sd_unet().to(getattr(torch, dtype))
    batch = example_batch(model, microbatch_size=2, dtype=getattr(torch, dtype))
    job = Workload(name="small", layers=to_layers(model), batch=(batch, None))
    estimated, measured = estimate_profile(job, tflops=1).profile, measure_profile(job)
    for one, other in zip(estimated.layers, measured.layers, strict=True):
        assert (one.name, one.param_bytes, one.output_bytes) == (other.name, other.param_bytes, other.output_bytes)
    assert estimated.skips == measured.skips and estimated.dtype == measured.dtype == dtype
    element = 4 if dtype == "float32" else 2
    assert measured.param_bytes == element * sum(p.numel() for p in model.parameters())
