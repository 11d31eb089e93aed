"""Which way named values travel."""

from toys import layer, profile, skip

from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import make_routes
from deepspeed_pulse.ir.profile import Value


def hops(boundaries, placement, source, *targets):
    (route,) = make_routes(boundaries, placement, [NamedValue(name="v", source=source, targets=targets)])
    return route.source_stage, route.hops


BOUNDS = tuple(range(9))


def test_a_time_embedding_rides_down_the_v_once():
    assert hops(BOUNDS, Placement.wave(4), 0, *range(1, 8)) == (0, ((0, 1), (1, 2), (2, 3)))


def test_it_skips_ranks_that_do_not_read_it_and_comes_back_where_first_needed():
    """Rank 1 reads it only on the way up (stage 6), rank 2 never."""
    assert hops(BOUNDS, Placement.wave(4), 0, 3, 6) == (0, ((0, 3), (3, 6)))


def test_a_nested_skip_stays_and_is_listed():
    assert hops(BOUNDS, Placement.wave(4), 1, 6) == (1, ())
    assert hops((0, 4, 8), (0, 1), 1, 3) == (0, ())


def test_an_irregular_skip_goes_straight_to_its_consumer():
    assert hops(BOUNDS, Placement.wave(4), 1, 5) == (1, ((1, 5),))
    assert hops(BOUNDS[:5], Placement.linear(4), 0, 3) == (0, ((0, 3),))


def test_two_waves_visit_each_rank_once():
    assert hops(BOUNDS, Placement.wave(2, 2), 0, *range(1, 8)) == (0, ((0, 1),))


def test_any_rank_list_works():
    assert hops(BOUNDS, (2, 0, 1, 2, 0, 1, 2, 0), 1, 2, 3, 4, 7) == (1, ((1, 2), (2, 3)))


def test_values_of_a_profile_are_grouped_by_name_and_batch_entries_have_no_route():
    costs = profile([layer()] * 4, [skip("temb", 0, 3), skip("odd", 1, 2), skip("temb", 0, 1)])
    assert costs.values == (
        Value(name="temb", source=0, targets=(1, 3), bytes=1, gradient=True),
        Value(name="odd", source=1, targets=(2,), bytes=1, gradient=True),
    )
    assert make_routes((0, 4), (0,), [NamedValue(name="mask", source=None, targets=(1,))]) == ()
