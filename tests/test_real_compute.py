"""The parts of benchmarks/real_compute that need no network and no time: its layers and its verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


@pytest.mark.parametrize("name", ["unet", "uvit"])
def test_a_whole_model_makes_no_gradients_of_its_inputs(name: str) -> None:
    """Sides that hand values from rank to rank do, as upstream differentiates all of them; weights' are the same."""
    from real_compute.cases import RealCase

    case = RealCase(name=name)
    (inputs, _), found = case.batch(), {}
    for way in ("whole", "relaying"):
        made: Any = tuple(value.clone() for value in inputs)
        layers = [kind(*arguments) for kind, *arguments in getattr(case, way)()]
        values: Any = made
        for layer in layers:
            values = layer(values)
        values.square().mean().backward()
        given = [value.requires_grad for value in made if value.is_floating_point()]
        assert given == [False, *[way == "relaying"] * (len(given) - 1)]
        found[way] = [weight.grad for layer in layers for weight in layer.parameters()]
    assert all((one == other).all() for one, other in zip(found["whole"], found["relaying"], strict=True))
