"""Ways to train, simulated: of each the samples a second with the best setting that fits the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from machines import NODE, Machines
from simulated import with_relays

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, estimate, make_plan, tune
from deepspeed_pulse.planner.making.maker import TooSlow
from deepspeed_pulse.planner.partition.cuts import partition
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.reduction import reduction_ms
from deepspeed_pulse.planner.tuning.sizes import Sizes
from deepspeed_pulse.report.tuning import describe

PIPELINES, DEEP, MICROBATCHES = (2, 4, 8), (16, 32), (1, 2, 4)
"""The second for other sides only, whose orders are known at once: the tuner tries ours in them."""
MOST_MICROBATCHES = 128
"""Of a step; more would only hide the bubble further."""
UNLIMITED = 2**62
BYTES_PER_PARAMETER, SHARED = 16, 14
"""Of mixed-precision Adam in all, and the part that ZeRO-2 shares (all but the weights); parameters have two bytes."""
RELAYED: dict[str, tuple[Callable[[int], tuple[int, ...]], dict[str, Any]]] = {
    "1F1B, relayed": (Placement.linear, {"placement": "linear", "schedule": "1f1b"}),
    "DualPipeV, relayed": (Placement.wave, {"placement": "wave", "schedule": "dualpipev"}),
    "ZB-V, relayed": (Placement.wave, {"placement": "wave", "schedule": "zbv", "split_backward": True}),
    "interleaved, relayed": (
        lambda ranks: Placement.loop(ranks, 2),
        {"placement": "auto", "schedule": "interleaved"},
    ),
}
"""Placement for so many ranks, and what the planner is asked for."""
OURS: dict[str, dict[str, Any]] = {
    "wave": {"placement": "wave"},
    "wave, parted": {"placement": "wave", "part_skips": True},
    "linear": {"placement": "linear", "schedule": "1f1b"},
}
"""What the planner is asked for. With a known schedule: what a search adds is for benchmarks/planner."""
OTHERS = (*RELAYED, "ZeRO-2", "DDP")
SIDES = (*OURS, *OTHERS, "tuned")


@dataclass(frozen=True, kw_only=True)
class Point:
    machines: Machines
    model: str
    ranks: int
    batch: int
    scaling: str
    profile: Profile


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A pipeline of a point, replicated; ``within_ms``: a longer step is of no interest."""

    costs: Profile
    cluster: Cluster
    ranks: int
    group: int
    microbatches: int
    within_ms: float = math.inf

    @property
    def way(self) -> str:
        return f"P={self.ranks}, {self.microbatches} microbatches of {self.costs.microbatch_size}"


@dataclass(frozen=True, kw_only=True)
class Best:
    """``way``: the setting that the rate was found with."""

    samples_per_second: float
    way: str


def simulated(point: Point) -> dict[str, Best]:
    """By side; those that fit with no setting are left out."""
    best: dict[str, Best] = {}
    for setting in _settings(point):
        for name in RELAYED if setting.ranks in DEEP else (*OURS, *RELAYED):
            known = best[name].samples_per_second if name in best else 0.0
            within_ms = point.batch / known * 1e3 if known else math.inf
            for found in _pipelines(name, replace(setting, within_ms=within_ms)):
                best[name] = max(best.get(name, found), found, key=_rate)
    for found_name, found in _data_parallel(point):
        best[found_name] = max(best.get(found_name, found), found, key=_rate)
    best["tuned"] = _tuned(point)
    return best


def _rate(best: Best) -> float:
    return best.samples_per_second


def _settings(point: Point) -> Iterator[Setting]:
    """Of each number of pipeline ranks the smallest microbatches: larger ones only add to the bubble and to memory."""
    sizes, cluster = Sizes([point.profile]), point.machines.cluster(point.ranks)
    for ranks in (ranks for ranks in (*PIPELINES, *DEEP) if ranks <= point.ranks):
        group = point.ranks // ranks
        counts = {samples: point.batch // (group * samples) for samples in MICROBATCHES}
        samples = min((n for n, count in counts.items() if count <= MOST_MICROBATCHES), default=0)
        if samples and point.batch % (group * samples) == 0 and counts[samples]:
            yield Setting(
                costs=sizes.at(samples), cluster=cluster, ranks=ranks, group=group, microbatches=counts[samples]
            )


def _pipelines(name: str, setting: Setting) -> Iterator[Best]:
    if name in RELAYED:
        found = [_sharded(setting, _relayed, name)]
    else:
        layouts = tuple(Layout) if setting.cluster.num_ranks > NODE and setting.group > 1 else (Layout.PIPE_MAJOR,)
        found = [_sharded(setting, _ours, name, layout) for layout in layouts]
    yield from (best for best in found if best)


def _sharded(setting: Setting, make: Callable[..., Best], *arguments: Any) -> Best | None:
    """With ZeRO-1 between replicas only where it does not fit without."""
    for shard in (False, True)[: 1 + (setting.group > 1)]:
        try:
            return make(setting, shard, *arguments)
        except TooSlow:
            return None
        except (InfeasibleError, ConfigError):  # memory; too few layers or microbatches for the schedule
            continue
    return None


def _ours(setting: Setting, shard: bool, name: str, layout: Layout) -> Best:
    plan = _planned(setting, shard, layout=layout, **OURS[name])
    assert plan.estimate is not None
    way = setting.way + (", ZeRO-1" if shard else "")
    return Best(samples_per_second=plan.estimate.samples_per_second, way=way)


def _relayed(setting: Setting, shard: bool, name: str) -> Best:
    """Cuts for time alone; upstream's numbering of ranks."""
    place, options = RELAYED[name]
    cuts = _balanced(setting.costs.layers, place(setting.ranks))
    plan = with_relays(_planned(setting, shard, boundaries=cuts, **options), setting.costs)
    figures = estimate(plan, setting.costs, setting.cluster)
    if max(figures.peak_bytes) > setting.cluster.memory_bytes:
        raise InfeasibleError("relayed values do not fit")
    return Best(samples_per_second=figures.samples_per_second, way=setting.way + (", ZeRO-1" if shard else ""))


def _planned(setting: Setting, shard: bool, **options: Any) -> Plan:
    layout = options.pop("layout", Layout.PIPE_MAJOR)
    job = Job(
        profile=setting.costs,
        cluster=setting.cluster,
        pipeline_ranks=setting.ranks,
        data_parallel=setting.group,
        microbatches=setting.microbatches,
        rules=Rules.of(int(shard)),
        layout=layout,
    )
    return make_plan(job, SearchOptions(solver_seconds=0.0, within_ms=setting.within_ms, **options))


def _balanced(layers: tuple[LayerCost, ...], placement: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts for time alone, which microbatches of any size have in common."""
    unit = layers[0].forward_ms
    work = tuple((round(layer.forward_ms / unit, 6), round(layer.backward_ms / unit, 6)) for layer in layers)
    return _cuts(work, placement)


@cache
def _cuts(work: tuple[tuple[float, float], ...], placement: tuple[int, ...]) -> tuple[int, ...]:
    layers = tuple(
        LayerCost(name=str(i), forward_ms=f, backward_ms=b, param_bytes=0, activation_bytes=0, output_bytes=0)
        for i, (f, b) in enumerate(work)
    )
    costs = Profile(name="time", device="none", dtype="bfloat16", microbatch_size=1, layers=layers, skips=())
    link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)
    ranks = max(placement) + 1
    cluster = Cluster(
        name="time", nodes=1, ranks_per_node=ranks, memory_bytes=UNLIMITED, intra_node=link, inter_node=link
    )
    return partition(
        Job(profile=costs, cluster=cluster, pipeline_ranks=max(placement) + 1, microbatches=2 * ranks), placement
    )


def _data_parallel(point: Point) -> Iterator[tuple[str, Best]]:
    """Where it fits: sums once a step, which favours ZeRO-2, hidden behind backward as far as that lasts.

    DDP steps all parameters on every rank. ZeRO-2 scatters its sums, half of what DDP sends, and gathers the weights
    when it has stepped them, the other half.
    """
    cluster = point.machines.cluster(point.ranks)
    for samples in MICROBATCHES:
        passes, rest = divmod(point.batch, point.ranks * samples)
        if rest or not 1 <= passes <= MOST_MICROBATCHES:
            continue
        costs = replace(Sizes([point.profile]).at(samples), skips=())
        activations = sum(layer.activation_bytes for layer in costs.layers)
        params = sum(layer.param_bytes for layer in costs.layers) / 2
        for name, shards in (("ZeRO-2", point.ranks), ("DDP", 1)):
            if params * (BYTES_PER_PARAMETER - SHARED + SHARED / shards) + activations > cluster.memory_bytes:
                continue
            plan, sent = _summed(costs, 1 if shards == 1 else 2, cluster, passes)
            assert plan.estimate is not None
            step_ms = plan.estimate.step_ms + costs.optimizer_ms_per_gb * costs.param_bytes / 1e9 / shards
            step_ms += 0.0 if shards == 1 else reduction_ms(Problem(plan, sent, cluster), 0)
            rate = 1e3 * samples * passes * point.ranks / step_ms
            yield name, Best(samples_per_second=rate, way=f"{passes} passes of {samples}")


def _summed(costs: Profile, parts: int, cluster: Cluster, passes: int) -> tuple[Plan, Profile]:
    """A whole model on every rank, of whose gradients one of so many parts is sent; and costs with so many bytes."""
    layers = tuple(replace(layer, param_bytes=layer.param_bytes // parts) for layer in costs.layers)
    # bfloat16's optimizer would share the state by itself
    sent = replace(costs, layers=layers, dtype="float16", optimizer_ms_per_gb=0.0)
    job = Job(
        profile=sent,
        cluster=cluster,
        pipeline_ranks=1,
        data_parallel=cluster.num_ranks,
        microbatches=passes,
        memory_bytes=UNLIMITED,
    )
    return make_plan(job, SearchOptions(placement="linear", solver_seconds=0.0)), sent


def _tuned(point: Point) -> Best:
    """What ``ds_pulse tune`` chooses without a search for better orders."""
    cluster = point.machines.cluster(point.ranks)
    trial = tune(OpenJob(profiles=[point.profile], cluster=cluster, global_batch=point.batch), solver_seconds=0.0).best
    return Best(samples_per_second=trial.samples_per_second or 0.0, way=describe(trial.choice))
