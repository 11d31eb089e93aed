"""Text and file round trips, and what is said about malformed ones."""

import copy
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.plan import Estimate, Plan, Route, Solver
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.ir.schedule import Action, Op, format_schedule

ops = st.sampled_from([op for op in Op if op is not Op.LANDING])
actions = st.builds(Action, st.integers(0, 10**6), ops, st.integers(0, 10**6))
times = st.floats(0, 1e6, allow_nan=False)
sizes = st.integers(0, 2**40)
names = st.text(max_size=8)


@given(actions)
@settings(deadline=None)
def test_an_action_is_its_text(action):
    assert Action.parse(str(action)) == action


@given(st.lists(st.lists(actions, max_size=4), max_size=3))
@settings(deadline=None)
def test_a_schedule_is_its_texts(schedule):
    rows = tuple(map(tuple, schedule))
    assert tuple(tuple(map(Action.parse, row)) for row in format_schedule(rows)) == rows


def test_the_language_by_example():
    assert [str(a) for a in (Action(2, Op.FORWARD, 0), Action(10, Op.WEIGHT_GRAD, 3))] == ["2F0", "10W3"]


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "2f0", "02F0", "2F00", " 2F0", "2F0\n", "-1F0", "2F0B1"])
def test_anything_else_is_no_action(text):
    with pytest.raises(FileError, match="expected an action such as '2F0'"):
        Action.parse(text)


HALVES = (
    {"weight_grad_ms": st.none() | times},
    {"weight_grad_ms": st.just(4e5), "input_grad_ms": st.floats(6e5, 2e6)},
)
"""What is known of a backward of 1e6 ms in two halves."""


@st.composite
def profiles(draw):
    layers = draw(
        st.lists(
            st.builds(
                LayerCost,
                name=names,
                forward_ms=times,
                backward_ms=st.just(1e6),
                param_bytes=sizes,
                activation_bytes=sizes,
                output_bytes=sizes,
                **draw(st.sampled_from(HALVES)),
                spread=st.none() | times,
            ),
            min_size=2,
            max_size=5,
        )
    )
    skips = [Skip(name="v", source=0, target=t, bytes=7, gradient=draw(st.booleans())) for t in range(1, len(layers))][
        :1
    ]
    return Profile(
        name=draw(names), device="d", dtype="bfloat16", microbatch_size=3, layers=tuple(layers), skips=tuple(skips)
    )


@settings(max_examples=40, deadline=None)
@given(profiles())
def test_a_profile_survives_its_file(profile):
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.fingerprint == profile.fingerprint


LINK = Link(
    bandwidth_gb_per_s=25.0, latency_us=10.0, overhead_us=2.5, bus_gb_per_s=20.0, bus_latency_us=5.0, one_port=True
)
CLUSTER = Cluster(name="c", nodes=2, ranks_per_node=4, memory_bytes=10**9, intra_node=LINK, inter_node=LINK)
ESTIMATE = Estimate(
    makespan_ms=3.0,
    step_ms=4.0,
    lower_bound_ms=2.5,
    gap=0.2,
    bubble_ratio=0.25,
    peak_bytes=(1, 2),
    p2p_bytes_per_microbatch=5,
    samples_per_second=9.5,
)
PLAN = Plan(
    pipeline_ranks=2,
    data_parallel=1,
    microbatches=1,
    microbatch_size=1,
    boundaries=(0, 1, 2, 3, 4),
    placement=(0, 1, 1, 0),
    schedule=tuple(tuple(map(Action.parse, row.split())) for row in ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")),
    routes=(Route(name="temb", source_stage=0, hops=((0, 1),)), Route(name="s", source_stage=1)),
    profile_fingerprint="ab",
    estimate=ESTIMATE,
    solver=Solver(name="search", optimal=True, seed=3, generator="wave", generator_step_ms=4.5),
)
PROFILE = Profile(
    name="p",
    device="d",
    dtype="float32",
    microbatch_size=1,
    layers=tuple(
        LayerCost(name=f"l{i}", forward_ms=1.0, backward_ms=2.0, param_bytes=3, activation_bytes=4, output_bytes=5)
        for i in range(3)
    ),
    skips=(Skip(name="s", source=0, target=2, bytes=8),),
)


def test_plan_and_cluster_survive_their_files(tmp_path):
    for thing in (PLAN, CLUSTER, PROFILE):
        path = tmp_path / "thing.json"
        path.write_text(thing.to_json(), encoding="utf-8")
        assert type(thing).load(path) == thing


def test_what_a_plan_may_leave_out():
    data = PLAN.to_dict()
    for name in ("profile_fingerprint", "estimate", "solver"):
        del data[name]
    bare = Plan.from_json(json.dumps(data))
    assert (bare.profile_fingerprint, bare.estimate, bare.solver) == (None, None, None)
    nulls = data | dict.fromkeys(("profile_fingerprint", "estimate", "solver"))
    assert Plan.from_json(json.dumps(nulls)) == bare


def test_a_plan_of_the_first_format_was_made_for_plain_rules():
    data = replace(PLAN, rules=Rules(zero_stage=1, reduce_early=False)).to_dict()
    assert Plan.from_json(json.dumps(data)).rules == Rules.of(1)
    del data["rules"]
    assert Plan.from_json(json.dumps({**data, "format": "pulse-plan/1"})) == PLAN


DELETE = object()


def broken(thing, path, value):
    """The thing's data with one place changed."""
    data = copy.deepcopy(thing.to_dict())
    spot = data
    for key in path[:-1]:
        spot = spot[key]
    if value is DELETE:
        del spot[path[-1]]
    else:
        spot[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("thing", "path", "value", "parts"),
    [
        (PROFILE, ["format"], "pulse-profile/2", ["'format'", "'pulse-profile/1'", "'pulse-profile/2'"]),
        (PROFILE, ["format"], "pulse-plan/1", ["'format'", "expected 'pulse-profile/1'"]),
        (PROFILE, ["layer"], [], ["unknown field 'layer'", 'did you mean "layers"?']),
        (PROFILE, ["name"], 3, ["'name'", "a text", "found 3"]),
        (PROFILE, ["microbatch_size"], True, ["'microbatch_size'", "an integer >= 1", "found True"]),
        (PROFILE, ["microbatch_size"], 1.0, ["an integer >= 1", "found 1.0"]),
        (PROFILE, ["layers"], [], ["'layers'", "at least one layer"]),
        (PROFILE, ["layers"], {}, ["'layers'", "a list"]),
        (PROFILE, ["layers", 1], 5, ["layers[1]", "expected an object, found 5"]),
        (PROFILE, ["layers", 1, "forward_ms"], "1", ["layers[1]", "'forward_ms'", "a finite number >= 0", "'1'"]),
        (PROFILE, ["layers", 1, "forward_ms"], True, ["'forward_ms'", "found True"]),
        (PROFILE, ["layers", 1, "forward_ms"], -1, ["'forward_ms'", "found -1"]),
        (PROFILE, ["layers", 1, "forward_ms"], math.nan, ["not a JSON file", "NaN is not a number"]),
        (PROFILE, ["layers", 1, "forward_ms"], math.inf, ["not a JSON file", "Infinity is not a number"]),
        (PROFILE, ["layers", 1, "forward_ms"], 10**400, ["'forward_ms'", "a finite number"]),
        (PROFILE, ["layers", 1, "param_bytes"], 2**63, ["'param_bytes'", "an integer"]),
        (PROFILE, ["layers", 1, "weight_grad_ms"], 3, ["'weight_grad_ms'", "at most backward_ms = 2"]),
        (PROFILE, ["layers", 1, "input_grad_ms"], 3, ["'input_grad_ms'", "weight_grad_ms beside it"]),
        (PROFILE, ["layers", 1, "output_bytes"], DELETE, ["'output_bytes'", "found nothing"]),
        (PROFILE, ["skips", 0, "target"], 3, ["skips[0] (s)", "'target'", "below 3", "found 3"]),
        (PROFILE, ["skips", 0, "name"], "", ["skips[0]", "'name'", "expected a name"]),
        (PROFILE, ["skips", 0, "source"], 2, ["skips[0] (s)", "runs forward"]),
        (PROFILE, ["skips", 0, "gradient"], 1, ["'gradient'", "true or false", "found 1"]),
        (CLUSTER, ["nodes"], 0, ["'nodes'", "an integer >= 1", "found 0"]),
        (CLUSTER, ["intra_node"], DELETE, ["intra_node", "expected an object"]),
        (CLUSTER, ["intra_node", "bandwidth_gb_per_s"], 0, ["'bandwidth_gb_per_s'", "a finite number > 0"]),
        (CLUSTER, ["intra_node", "bus_gb_per_s"], 0, ["'bus_gb_per_s'", "a finite number > 0"]),
        (CLUSTER, ["intra_node", "one_port"], 1, ["'one_port'", "true or false", "found 1"]),
        (CLUSTER, ["intra_node", "overhead_us"], -1, ["'overhead_us'", "a finite number >= 0"]),
        (CLUSTER, ["intra_node", "bandwith"], 1, ["unknown field 'bandwith'"]),
        (PLAN, ["rules", "zero_stage"], 2, ["'zero_stage'", "0 or 1", "found 2"]),
        (PLAN, ["rules", "zero"], 1, ["unknown field 'zero'", "known: zero_stage, reduce_early"]),
        (PLAN, ["placement"], [0, 2, 2, 0], ["'placement'", "every rank 0..1 at least once"]),
        (PLAN, ["boundaries"], [0, 1, 2, 4], ["'boundaries'", "5 layer indices for 4 stages"]),
        (PLAN, ["boundaries"], [0, 1, 1, 3, 4], ["'boundaries'", "strictly increasing"]),
        (PLAN, ["boundaries"], [0, 1, 2, True, 4], ["'boundaries'", "a list of integers"]),
        (PLAN, ["schedule"], [["0F0"]], ["'schedule'", "one list of actions for each of the 2 ranks"]),
        (PLAN, ["schedule", 1], "1F0", ["'schedule'", "a list of action lists"]),
        (PLAN, ["schedule", 1, 0], "1G0", ["schedule[1]", "such as '2F0'", "'1G0'"]),
        (PLAN, ["schedule", 1, 0], 7, ["schedule[1]", "such as '2F0'"]),
        (PLAN, ["routes", 0, "hops"], [[0]], ["routes[0]", "'hops'", "a list of [from_stage, to_stage]"]),
        (PLAN, ["routes", 0, "hops"], [[0, True]], ["routes[0]", "'hops'"]),
        (PLAN, ["routes", 1, "name"], "temb", ["'routes'", "each name at most once"]),
        (PLAN, ["estimate", "gap"], "0", ["estimate", "'gap'", "a finite number"]),
        (PLAN, ["estimate", "extra"], 0, ["estimate", "unknown field 'extra'"]),
        (PLAN, ["solver", "optimal"], "yes", ["solver", "'optimal'", "true or false"]),
        (PLAN, ["solver", "generator_step_ms"], -1, ["solver", "'generator_step_ms'", "a finite number >= 0"]),
        (PLAN, ["profile_fingerprint"], 1, ["'profile_fingerprint'", "a text"]),
    ],
)
def test_malformed_files_name_file_field_found_and_expected(thing, path, value, parts):
    with pytest.raises(FileError) as caught:
        type(thing).from_json(broken(thing, path, value), "some.json")
    for part in ("some.json", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1, "a": 2}', "[" * 100000])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(FileError, match=r"some\.json"):
        Cluster.from_json(text, "some.json")


def test_entries_of_one_name_must_agree():
    skips = PROFILE.to_dict()["skips"]
    data = PROFILE.to_dict() | {"skips": [*skips, {"name": "s", "source": 0, "target": 1, "bytes": 9}]}
    with pytest.raises(FileError, match="entries of one name share source, bytes and gradient"):
        Profile.from_json(json.dumps(data))
    data["skips"][1] = skips[0]
    with pytest.raises(FileError, match="target 2 is listed twice"):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "gone.json"
    if content:
        path.write_bytes(content)
    with pytest.raises(FileError, match=r"gone\.json: cannot be read"):
        Plan.load(path)


def test_the_fingerprint_follows_every_figure():
    other = json.loads(PROFILE.to_json())
    other["layers"][0]["forward_ms"] = 1.5
    assert Profile.from_json(json.dumps(other)).fingerprint != PROFILE.fingerprint


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 4), ("bfloat16", 8), ("float16", 8), ("float64", 4)])
def test_state_factor(dtype, factor):
    data = PROFILE.to_dict() | {"dtype": dtype}
    assert Profile.from_json(json.dumps(data)).state_factor == factor


@pytest.mark.parametrize("dtype", ["bf16", "half", "torch.bfloat16", "fp32"])
def test_another_name_of_a_dtype_is_no_fp32(dtype):
    """Half of the state would be planned, without a word."""
    with pytest.raises(FileError, match=r"field 'dtype': expected torch's name of a floating type, .* found"):
        Profile.from_json(json.dumps(PROFILE.to_dict() | {"dtype": dtype}))


def test_a_folder_of_plans_is_written_by_processes_of_one_number(tmp_path, monkeypatch):
    """Ranks in containers have the same on every host: none may rename what another has begun."""
    monkeypatch.setattr(os, "getpid", lambda: 77)

    def write(number):
        for _ in range(100):
            write_whole(tmp_path / "kept.json", f"{number}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write, range(8))) == [None] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_nothing_is_left_of_a_file_that_cannot_be_kept(tmp_path):
    (tmp_path / "kept.json").mkdir()
    with pytest.raises(FileError, match=r"plan_cache: cannot keep kept\.json"):
        write_whole(tmp_path / "kept.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
