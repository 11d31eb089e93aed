import gc

import pytest

from deepspeed_pulse.planner.garbage import rare_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("set_to", "inside"),
    [((700, 10, 10), (10_000, 10, 10)), ((50_000, 5, 5), (50_000, 5, 5)), ((0, 10, 10), (0, 10, 10))],
)
def test_collections_are_rarer_while_a_plan_is_made(set_to, inside):
    gc.set_threshold(*set_to)
    seen = []

    @rare_collections()
    def planned(error):
        seen.append(gc.get_threshold())
        if error:
            raise error

    planned(None)
    with pytest.raises(ValueError, match="infeasible"):
        planned(ValueError("infeasible"))
    assert seen == [inside, inside] and gc.get_threshold() == set_to
