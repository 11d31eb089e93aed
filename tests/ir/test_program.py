"""Placements, a plan's look-ups, and the messages it lowers to."""

import pytest

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.ir.program import Channel, Lowering, channel_of, lower
from deepspeed_pulse.ir.schedule import Action

PLAN = Plan(
    pipeline_ranks=2,
    data_parallel=1,
    microbatches=1,
    microbatch_size=1,
    boundaries=(0, 2, 3, 5, 9),
    placement=(0, 1, 1, 0),
    schedule=tuple(tuple(map(Action.parse, row.split())) for row in ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")),
    routes=(Route(name="temb", source_stage=0, hops=((0, 1),)), Route(name="s", source_stage=0)),
)


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        (Placement.wave(3), "wave"),
        (Placement.wave(2, 3), "wave x 3"),
        (Placement.linear(4), "linear"),
        (Placement.linear(1), "linear"),
        (Placement.wave(1), "wave"),
        (Placement((0, 1, 0, 1)), "loop x 2"),
    ],
)
def test_placements_are_recognised(placement, name):
    assert placement.name == name


def test_a_wave_is_a_snake_and_mirrors():
    placement = Placement.wave(3, 2)
    assert placement == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)
    assert placement == placement[::-1]
    assert placement.stages_of(1) == (1, 4, 7, 10)


def test_look_ups():
    assert [PLAN.stage_of(layer) for layer in range(9)] == [0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert PLAN.layers_of(0) == (0, 1, 5, 6, 7, 8)
    assert PLAN.rank_of_layer(4) == 1


def labels(messages):
    return [(m.label, m.source_stage, m.target_stage) for m in messages]


def test_every_action_knows_its_messages():
    steps = {str(step.action): step for row in lower(PLAN) for step in row}
    assert labels(steps["0F0"].sends) == [("hidden", 0, 1), ("value:temb", 0, 1)]
    assert labels(steps["1F0"].receives) == labels(steps["0F0"].sends)
    assert steps["1F0"].sends == ()
    assert labels(steps["2F0"].sends) == [("hidden", 2, 3)]
    assert labels(steps["3B0"].sends) == [("hidden_grad", 3, 2)]
    assert labels(steps["1B0"].sends) == [("hidden_grad", 1, 0), ("value_grad:temb", 1, 0)]
    assert labels(steps["0B0"].receives) == labels(steps["1B0"].sends)


def test_what_is_sent_is_what_is_received():
    steps = [step for row in lower(PLAN) for step in row]
    sent = {m for step in steps for m in step.sends}
    received = {m for step in steps for m in step.receives}
    assert sent == received
    assert {m.forward_edge for m in sent if m.name == "temb"} == {("temb", 0, 1)}


def test_input_gradients_send_and_weight_gradients_do_not():
    lowering = Lowering(PLAN)
    assert lowering.step(Action.parse("1I0")).sends == lowering.step(Action.parse("1B0")).sends
    assert lowering.step(Action.parse("1W0")).sends == lowering.step(Action.parse("1W0")).receives == ()


def test_a_channel_is_a_directed_pair_of_ranks_whatever_it_carries():
    lowering = Lowering(PLAN)
    (down, _), (up,) = lowering.step(Action.parse("0F0")).sends, lowering.step(Action.parse("3B0")).sends
    (back,) = lowering.step(Action.parse("2F0")).sends
    channels = [channel_of(m, PLAN.placement) for m in (down, up, back)]
    assert channels == [Channel(0, 1), Channel(0, 1), Channel(1, 0)]
