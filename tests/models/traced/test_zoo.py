"""Every class of the zoo: a row of the table of docs/any_model.md, and what it shows beside it."""

from __future__ import annotations

import warnings

import pytest
from support.zoo import ZOO
from support.zoo_proofs import assert_all_at_once, assert_ranks_agree
from support.zoo_table import row, written


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ZOO)
def test_a_class_is_what_the_table_says(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that diffusers will rename, and of autocast on the CPU
        found = row(name)
        assert found in written()
        if "equal" in found:
            assert_all_at_once(ZOO[name].model(name), ZOO[name].example())
            assert_ranks_agree(ZOO[name].model(name), ZOO[name].example())


def test_the_table_has_forty_classes_that_are_equal():
    lines = [line for line in written().splitlines() if "equal" in line]
    assert len(lines) >= 40
    assert {line.split("|")[1].strip() for line in written().splitlines()[2:]} == set(ZOO)
