"""Plans and profiles of several backbones as files, and what is said about malformed ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_pulse.errors import ConfigError, FileError, PlanError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.joined import joined_by_size, joined_profile
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import Job, SearchOptions, make_plan
from deepspeed_pulse.planner.checks.audit import audit
from deepspeed_pulse.planner.problem import Problem

LINK = Link(bandwidth_gb_per_s=100.0, latency_us=1.0)
CLUSTER = Cluster(name="toy", nodes=1, ranks_per_node=4, memory_bytes=10**9, intra_node=LINK, inter_node=LINK)


def one(name: str, size: int = 1, **more: Any) -> Profile:
    costs = {"forward_ms": 1.0, "backward_ms": 2.0, "param_bytes": 4, "activation_bytes": 8, "output_bytes": 8}
    layers = tuple(LayerCost(name=f"layer{at}", **costs) for at in range(4))
    skips = (Skip(name="skip", source=0, target=3, bytes=8),)
    return replace(
        Profile(name=name, device="x", dtype="float32", microbatch_size=size, layers=layers, skips=skips), **more
    )


JOINED = joined_profile([one("base"), one("upscaler")])
PLAN = make_plan(
    Job(profile=JOINED, cluster=CLUSTER, pipeline_ranks=2, microbatches=2),
    SearchOptions(placement="wave", solver_seconds=0.0),
)


def test_layers_and_values_have_the_backbone_s_name_before_them() -> None:
    assert JOINED.name == "base + upscaler"
    assert [layer.name for layer in JOINED.layers][3:5] == ["base.layer3", "upscaler.layer0"]
    assert [(skip.name, skip.source, skip.target) for skip in JOINED.skips] == [
        ("base.skip", 0, 3),
        ("upscaler.skip", 4, 7),
    ]
    assert [(part.name, part.layers) for part in JOINED.backbones] == [("base", (0, 4)), ("upscaler", (4, 8))]
    assert joined_profile([one("base")]) == one("base")


def test_files_are_read_as_they_were_written() -> None:
    assert Profile.from_json(JOINED.to_json(), "p") == JOINED
    read = Plan.from_json(PLAN.to_json(), "p")
    assert read == PLAN
    assert read.placement.starts == (0, 4)
    assert json.loads(PLAN.to_json())["backbones"] == [
        {"name": "base", "stages": [0, 4]},
        {"name": "upscaler", "stages": [4, 8]},
    ]


def test_with_one_backbone_files_do_not_have_the_field() -> None:
    assert "backbones" not in json.loads(one("base").to_json())
    assert Plan.from_json(PLAN.to_json(), "p").backbones


BAD = [
    ([["a", 0, 3], ["b", 4, 8]], "backbones that follow one another from 0 to 8"),
    ([["a", 0, 5], ["b", 4, 8]], "backbones that follow one another from 0 to 8"),
    ([["a", 0, 4], ["b", 4, 7]], "backbones that follow one another from 0 to 8"),
    ([["a", 1, 4], ["b", 4, 8]], "backbones that follow one another from 0 to 8"),
    ([["a", 0, 0], ["b", 0, 8]], "backbones that follow one another from 0 to 8"),
    ([["a", 0, 4], ["a", 4, 8]], "at least two backbones of different names"),
    ([["a", 0, 8]], "at least two backbones of different names"),
]


@pytest.mark.parametrize(("parts", "message"), BAD)
@pytest.mark.parametrize(("text", "key"), [(JOINED.to_json(), "layers"), (PLAN.to_json(), "stages")])
def test_ranges_that_leave_something_out_or_overlap_are_refused(
    parts: list[Any], message: str, text: str, key: str
) -> None:
    data = json.loads(text)
    data["backbones"] = [{"name": name, key: [first, end]} for name, first, end in parts]
    with pytest.raises(FileError, match=f"backbones.*{message}"):
        (Profile if key == "layers" else Plan).from_json(json.dumps(data), "file")


@pytest.mark.parametrize("found", [7, "a", [{"name": "a"}], [{"layers": [0, 4]}], [{"name": 1, "layers": [0, 4]}]])
def test_what_is_no_list_of_backbones_is_refused(found: Any) -> None:
    data = {**json.loads(JOINED.to_json()), "backbones": found}
    with pytest.raises(FileError, match="file: "):
        Profile.from_json(json.dumps(data), "file")


def test_a_value_from_one_backbone_to_another_is_refused() -> None:
    data = json.loads(JOINED.to_json())
    data["skips"][0]["target"] = 5
    with pytest.raises(FileError, match="skip"):
        Profile.from_json(json.dumps(data), "file")


def test_profiles_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="different names, found 'base' twice; rename"):
        joined_profile([one("base"), one("base")])
    with pytest.raises(ConfigError, match="one dtype, found 'float32' of base and 'bfloat16' of up"):
        joined_profile([one("base"), one("up", dtype="bfloat16")])


def test_profiles_of_several_names_are_joined_at_each_size() -> None:
    found = joined_by_size([one("base", 4), one("base", 1), one("up", 1), one("up", 4)])
    assert [(profile.microbatch_size, profile.name) for profile in found] == [(1, "base + up"), (4, "base + up")]
    assert joined_by_size([one("base", 1), one("base", 4)]) == [one("base", 1), one("base", 4)]
    with pytest.raises(ConfigError, match="same microbatch sizes, found base of 1, 4; up of 1; profiles of different"):
        joined_by_size([one("base", 1), one("base", 4), one("up", 1)])


def test_a_plan_of_other_backbones_than_the_profile_s_is_said_once() -> None:
    other = joined_profile([one("base"), one("other")])
    with pytest.raises(PlanError, match=r"expected \(by layers\) base 0..3, other 4..7, found base 0..3, upscaler"):
        Problem(PLAN, other, CLUSTER)
    plain = replace(JOINED, backbones=())
    found = audit(replace(PLAN, profile_fingerprint=None), plain, CLUSTER).problems
    assert len(found) == 1
    assert "expected (by layers) one, found base 0..3, upscaler 4..7; plan it anew" in found[0]
