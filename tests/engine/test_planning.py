"""Plans that the engine asks for, without ranks."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.module import PipelineModule as UpstreamModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from support.pulse_files import write_files

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.gradients.memory import is_fused
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.engine.plans.costs import PlanRequest, known_profile
from deepspeed_pulse.engine.plans.planning import Planned, known_cluster, make_planned, reorder
from deepspeed_pulse.errors import ConfigError, InfeasibleError, PlanError
from deepspeed_pulse.ir.backbones import BackboneLayers
from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import Job, SearchOptions, estimate, make_plan


def layer_list() -> tuple[Layer, ...]:
    """That of the profile file."""
    skips = {i: f"skip{i}" for i in range(4)}
    return tuple(
        Layer(name=f"block{i}", stash=(skips[i],) if i < 4 else (), pop=(skips[7 - i],) if i >= 4 else ())
        for i in range(8)
    )


def from_files(request: PlanRequest) -> Planned:
    return make_planned(request, Profile.load(request.pulse.profile), known_cluster(request), "files")


def request_for(pulse: PulseConfig, *, data_parallel: int) -> PlanRequest:
    """Two pipeline ranks, four microbatches of the profile file's layers."""
    return PlanRequest(
        graph=Graph(layers=layer_list()),
        layers=[torch.nn.Identity()] * 8,
        pulse=pulse,
        pipeline_ranks=2,
        data_parallel=data_parallel,
        microbatches=4,
        microbatch_size=1,
        partition_method="profile",
        example=None,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("optimizer", "fused"),
    [
        (None, False),
        ({"type": "AdamW", "params": {"lr": 1e-4}}, True),
        ({"type": "adam"}, True),
        ({"type": "AdamW", "params": {"torch_adam": True}}, False),
        ({"type": "SGD"}, False),
        ("AdamW", False),
    ],
)
def test_deepspeeds_own_adam_makes_nothing_in_a_step(optimizer: Any, fused: bool) -> None:
    """What is not understood is DeepSpeed's to refuse."""
    assert is_fused({} if optimizer is None else {"optimizer": optimizer}) == fused


def test_zero_1_shares_the_optimizer_state_in_plans_and_their_new_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160 MB of state a rank, 40 to step; where four pipelines share it 150, a bucket among them, and a second one."""
    monkeypatch.chdir(tmp_path)
    write_files()
    machine = Cluster.load("cluster.json")
    Path("cluster.json").write_text(replace(machine, ranks_per_node=8).to_json())
    block = {"profile": "profile.json", "cluster": "cluster.json", "placement": "wave", "solver_seconds": 0}
    pulse = PulseConfig.model_validate({**block, "memory_gb": 0.195})
    request = request_for(pulse, data_parallel=4)
    with pytest.raises(InfeasibleError, match=r"fits 0\.195 GB"):
        from_files(request)
    shared = from_files(replace(request, rules=Rules(zero_stage=1)))
    for plan in (shared.plan, reorder(shared, pulse, 8)):
        assert 190e6 <= peak(plan) <= 195e6


def test_buckets_are_sized_by_times_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 4 MiB on links of 1 GB/s."""
    monkeypatch.chdir(tmp_path)
    write_files()
    profile = Profile.load("profile.json")
    layers = [replace(cost, param_bytes=4 * 2**20) for cost in profile.layers]
    Path("profile.json").write_text(replace(profile, layers=tuple(layers)).to_json())
    machine = Cluster.load("cluster.json")
    link = Link(bandwidth_gb_per_s=1.0, latency_us=10.0)
    machine = replace(machine, ranks_per_node=8, intra_node=link, inter_node=link, memory_bytes=10**12)
    Path("cluster.json").write_text(machine.to_json())
    block = {"profile": "profile.json", "cluster": "cluster.json", "placement": "linear", "solver_seconds": 0}
    request = request_for(PulseConfig.model_validate(block), data_parallel=4)
    timed = from_files(request)
    assert timed.measured and timed.plan.bucket_bytes < BUCKET_BYTES
    linears = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]
    request = replace(request, layers=linears, partition_method="uniform")
    profile, costs = known_profile(replace(request, pulse=request.pulse.model_copy(update={"profile": "auto"})))
    assert profile is not None
    weighed = make_planned(request, profile, machine, costs)
    assert weighed.plan.bucket_bytes == BUCKET_BYTES
    assert weighed.plan.estimate == estimate(weighed.plan, profile, machine)


@pytest.mark.parametrize("method", ["parameters", "uniform", "type:linear"])
def test_linear_stages_by_upstreams_methods_are_upstreams(method: str) -> None:
    """So random numbers inside layers are drawn by the ranks that draw them there."""
    layers: list[torch.nn.Module] = [torch.nn.Linear(2, width) for width in (2, 9, 4, 1, 7, 3, 5)] + [torch.nn.ReLU()]
    pulse = PulseConfig.model_validate({"placement": "linear", "solver_seconds": 0})
    request = replace(request_for(pulse, data_parallel=1), layers=layers, partition_method=method, pipeline_ranks=3)
    profile, costs = known_profile(request)
    assert profile is not None
    found = make_planned(request, profile, known_cluster(request), costs).plan
    topology = PipeDataParallelTopology(num_pp=3, num_dp=1)
    own = types.SimpleNamespace(_layer_specs=layers, num_stages=3, global_rank=1, _topo=topology, loss_fn=None)
    for name in ("_count_layer_params", "_find_layer_type"):
        setattr(own, name, types.MethodType(getattr(UpstreamModule, name), own))
    own._set_bounds = lambda **bounds: None
    UpstreamModule._partition_layers(own, method)
    assert list(found.boundaries) == own.parts
    wave = replace(request, pulse=PulseConfig.model_validate({"placement": "wave", "solver_seconds": 0}))
    assert len(make_planned(wave, profile, known_cluster(wave), costs).plan.placement) == 6


def peak(plan: Plan) -> int:
    assert plan.estimate is not None
    return max(plan.estimate.peak_bytes)


def test_the_memory_limit_outlasts_a_change_of_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster file allows 10 GB a rank, the block less: 16 microbatches alone would take 172 MB."""
    monkeypatch.chdir(tmp_path)
    write_files()
    block = {"profile": "profile.json", "cluster": "cluster.json", "placement": "wave", "solver_seconds": 0.1}

    def planned(**more: object) -> tuple[Plan, Plan]:
        pulse = PulseConfig.model_validate(block | more)
        request = replace(request_for(pulse, data_parallel=1), rules=Rules(fused_optimizer=True))
        first = from_files(request)
        return first.plan, reorder(first, pulse, 16)

    _, longer = planned()
    assert peak(longer) > 170e6
    assert max(map(peak, planned(memory_gb=0.17))) <= 170e6


def test_the_start_says_how_costs_and_links_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    profile, cluster = Profile.load("profile.json"), Cluster.load("cluster.json")
    spread = replace(profile, layers=tuple(replace(layer, spread=0.04) for layer in profile.layers))
    plan = make_plan(
        Job(profile=profile, cluster=cluster, pipeline_ranks=2, microbatches=2), SearchOptions(solver_seconds=0)
    )
    planned = Planned(plan=plan, profile=profile, cluster=cluster, costs="measured")
    assert planned.sources == "measured"
    measured = replace(planned, profile=spread, cluster=replace(cluster, name="measured", nodes=2))
    assert measured.sources == (
        "measured; a layer's times differ by 4% of their median; links measured: 10 GB/s after 50 us inside a node, "
        "10 GB/s after 50 us between nodes"
    )


def test_a_profile_of_smaller_microbatches_is_scaled_and_of_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    pulse = PulseConfig.model_validate({"profile": "profile.json"})
    request, given = request_for(pulse, data_parallel=1), Profile.load("profile.json")
    skips = {(v.name, v.source, target) for v in request.graph.values for target in v.targets}
    assert skips == {(skip.name, skip.source, skip.target) for skip in given.skips}
    monkeypatch.setattr(planning, "known_profile", lambda request: (given, "profile profile.json"))
    assert planning._profile_of_size(request) == (given, "profile profile.json")
    found, costs = planning._profile_of_size(replace(request, microbatch_size=3))
    assert found is not None and found.microbatch_size == 3
    assert costs == "profile profile.json, scaled from microbatches of 1"
    assert found.layers[0].activation_bytes == 3 * given.layers[0].activation_bytes
    pairs = replace(given, microbatch_size=2)
    monkeypatch.setattr(planning, "known_profile", lambda request: (pairs, "profile profile.json"))
    with pytest.raises(ConfigError, match=r"profile.json: expected costs of microbatches of 3 samples .* found of 2"):
        planning._profile_of_size(replace(request, microbatch_size=3))


def test_a_plan_of_other_microbatches_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    block = {"profile": "profile.json", "cluster": "cluster.json", "placement": "wave", "solver_seconds": 0}
    request = request_for(PulseConfig.model_validate(block), data_parallel=1)
    plan = from_files(request).plan
    Path("plan.json").write_text(plan.to_json())
    asked = replace(request, pulse=PulseConfig.model_validate({"plan": "plan.json"}))
    assert planning._given(asked).plan == plan
    with pytest.raises(PlanError, match=r"'microbatch_size': expected 4 as this job runs, found 1"):
        planning._given(replace(asked, microbatch_size=4))


def test_a_plan_of_other_backbones_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layers, cut between others, or of one backbone: none would run as it should."""
    monkeypatch.chdir(tmp_path)
    write_files()
    costs = replace(Profile.load("profile.json"), skips=())

    def named(*parts: tuple[str, int, int]) -> tuple[BackboneLayers, ...]:
        return tuple(BackboneLayers(name=name, layers=(first, end)) for name, first, end in parts)

    one, pair = named(), named(("base", 0, 4), ("upper", 4, 8))
    uneven, others = named(("base", 0, 3), ("upper", 3, 8)), named(("base", 0, 4), ("lower", 4, 8))
    bare = request_for(PulseConfig.model_validate({"plan": "plan.json"}), data_parallel=1)
    request = replace(bare, graph=Graph(layers=tuple(Layer(name=f"block{i}") for i in range(8))))
    options = SearchOptions(placement="linear", solver_seconds=0, backbone_steps="together")
    for planned, run, told in (
        (pair, pair, None),
        (one, pair, "base 0..3, upper 4..7, found one"),
        (pair, one, "one, found base 0..3, upper 4..7"),
        (uneven, pair, "base 0..3, upper 4..7, found base 0..2, upper 3..7"),
        (others, pair, "base 0..3, upper 4..7, found base 0..3, lower 4..7"),
    ):
        job = Job(
            profile=replace(costs, backbones=planned),
            cluster=Cluster.load("cluster.json"),
            pipeline_ranks=2,
            microbatches=4,
        )
        plan = make_plan(job, options)
        Path("plan.json").write_text(plan.to_json())
        asked = replace(request, backbones=run)
        if told is None:
            assert planning._given(asked).plan == plan
            continue
        with pytest.raises(PlanError) as refused:
            planning._given(asked)
        said = f"plan.json: the plan's backbones are not those of the module: expected (by layers) {told}\n"
        assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("card_gb", "block_gb", "used_gb"), [(None, None, 10), (40, None, 10), (4, None, 4), (4, 6, 6)]
)
def test_a_cluster_file_says_how_much_of_a_card_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card_gb: int | None, block_gb: int | None, used_gb: int
) -> None:
    """The file allows 10 GB; the block has the last word."""
    monkeypatch.chdir(tmp_path)
    write_files()
    block = {"cluster": "cluster.json", "memory_gb": block_gb or "auto"}
    request = request_for(PulseConfig.model_validate(block), data_parallel=1)
    assert known_cluster(request, None if card_gb is None else card_gb * 10**9).memory_bytes == used_gb * 10**9


def test_pipelines_on_hosts_of_their_own_are_told_where_they_are_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream numbers replicas first, so that two hosts of two have half of each of two pipelines."""
    monkeypatch.chdir(tmp_path)
    write_files()
    costs = Profile.load("profile.json")
    profile = replace(costs, layers=tuple(replace(layer, param_bytes=4) for layer in costs.layers))
    slow = Link(bandwidth_gb_per_s=0.001, latency_us=1000.0)
    cluster = replace(Cluster.load("cluster.json"), nodes=2, ranks_per_node=2, inter_node=slow)

    def planned(layout: Layout) -> Planned:
        job = Job(profile=profile, cluster=cluster, pipeline_ranks=2, microbatches=4, data_parallel=2, layout=layout)
        plan = make_plan(job, SearchOptions(placement="wave", solver_seconds=0))
        return Planned(plan=plan, profile=profile, cluster=cluster, costs="measured")

    upstreams = planned(Layout.PIPE_MAJOR)
    found = planning.with_neighbours_ms(upstreams)
    assert found is not None and upstreams.plan.estimate is not None
    assert found < upstreams.plan.estimate.step_ms
    assert planning.with_neighbours_ms(planned(Layout.DATA_MAJOR)) is None
    assert planning.with_neighbours_ms(replace(upstreams, cluster=replace(cluster, nodes=1))) is None
