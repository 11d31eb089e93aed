"""Optimizers that reckon with the whole model: which are refused, and what of their state is no user's option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.optimizers import Adapting, Exchanging, ExchangingElsewhere, NamedAlike

from deepspeed_pulse.engine.checkpoints.optimizer_state import SavedState, check_state, write_state
from deepspeed_pulse.engine.gradients import whole_model
from deepspeed_pulse.errors import PlanError

OF_TORCH = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, None) for kind in OF_TORCH),
        (Exchanging, "all_gather"),
        (ExchangingElsewhere, "all_reduce"),
        (NamedAlike, None),
        (Adapting, "all_reduce"),
    ],
)
def test_a_step_that_speaks_to_other_ranks_is_seen_in_its_code(kind: type, expected: str | None) -> None:
    assert whole_model._collective_in(kind) == expected


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, True),
        ({"model_sharding": True}, True),
        ({"model_sharding": False}, False),
        ({"process_group": None}, True),
        ({"process_group": 2}, False),
        ({"process_group": 4}, True),
    ],
)
def test_who_is_told_not_to_or_speaks_to_some_ranks_only_is_let_be(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], refused: bool
) -> None:
    """A group stands here as its size."""
    monkeypatch.setattr(whole_model.dist, "get_world_size", lambda group=4: group)
    optimizer = Exchanging([torch.nn.Parameter(torch.zeros(2))])
    vars(optimizer).update(options)
    assert (whole_model._problem(SimpleNamespace(basic_optimizer=optimizer)) is not None) is refused


@pytest.mark.parametrize(
    ("stages", "backbones", "carries", "said"),
    [
        (1, 1, False, []),
        (2, 1, False, ["each rank steps others"]),
        (1, 2, False, ["steps all backbones together"]),
        (2, 2, False, ["each rank steps others", "steps all backbones together"]),
        (1, 2, True, []),
        (2, 2, True, ["each rank steps others"]),
    ],
)
def test_who_shares_an_estimate_of_the_learning_rate_is_told(
    stages: int, backbones: int, carries: bool, said: list[str]
) -> None:
    plan = SimpleNamespace(carries=carries)
    module = SimpleNamespace(num_stages=stages, has_several=backbones > 1, plan=plan)
    more = {"dp_world_size": 1, "using_bf16_optimizer": False, "zero_optimization": lambda: False}
    optimizers = [Adapting([torch.nn.Parameter(torch.zeros(2))]), torch.optim.SGD([torch.zeros(2)])]
    found, none = (
        list(whole_model.own_rates(SimpleNamespace(basic_optimizer=one, module=module, **more))) for one in optimizers
    )
    assert not none and [what in line for what, line in zip(said, found, strict=True)] == [True] * len(said)


def saved_with(**options: tuple[Any, Any]) -> tuple[Any, dict[Any, str], SavedState]:
    """Two weights of one group now, and their options as two ranks had them."""
    names = {torch.nn.Parameter(torch.zeros(2)): name for name in ("a", "b")}
    rows = {name: {key: pair[place] for key, pair in options.items()} for place, name in enumerate(("a", "b"))}
    return Adapting(list(names)), names, SavedState(scalars={"a": {}, "b": {}}, options=rows)


def test_learning_rates_that_ranks_adapted_go_on_from_the_smallest() -> None:
    optimizer, names, saved = saved_with(lr=(1.0, 1.0), d=(0.5, 0.25), d_max=(0.5, 0.3), k=(4, 3))
    check_state(optimizer, names, saved)
    write_state(optimizer, names, saved)
    (group,) = optimizer.param_groups
    assert (group["d"], group["d_max"], group["k"]) == (0.25, 0.3, 3)


@pytest.mark.parametrize("more", [{"d": (0.5, 0.25)}, {}])
def test_what_a_user_has_set_is_still_compared(more: dict[str, Any]) -> None:
    optimizer, names, saved = saved_with(lr=(1.0, 0.5), k=(4, 4), **more)
    with pytest.raises(PlanError, match=r"different options: {'lr': 1\.0.* and {'lr': 0\.5"):
        check_state(optimizer, names, saved)


def test_counters_of_others_are_compared() -> None:
    optimizer, names, saved = saved_with(lr=(1.0, 1.0), k=(4, 3))
    with pytest.raises(PlanError, match="with different options"):
        check_state(optimizer, names, saved)


@pytest.mark.parametrize(("moment", "slope"), [((2, 3), (6,)), ((6,), (2, 3))])
def test_state_of_a_shape_of_its_own_keeps_it(moment: tuple[int, ...], slope: tuple[int, ...]) -> None:
    """Out of a flat buffer, where the moment is flat too, all state takes the weight's shape."""
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    tensors = {"exp_avg": torch.arange(6.0).view(moment), "s": torch.arange(6.0)}
    optimizer = Adapting([weight])
    write_state(optimizer, {weight: "a"}, SavedState(tensors={"a": tensors}, scalars={"a": {"step": 1}}))
    assert {key: value.shape for key, value in optimizer.state[weight].items() if key != "step"} == {
        "exp_avg": (2, 3),
        "s": slope,
    }
