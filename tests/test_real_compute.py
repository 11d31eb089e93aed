"""The parts of benchmarks/real_compute that need no network and no time: its layers and its verdicts."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deepspeed_pulse.ir.profile import LayerCost, Profile


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


class Ranks:
    """In place of launched ones. ``fails``: whether a side does, given how many of its rounds went before."""

    def __init__(self, step_ms: Any, fails: Any = lambda job, number: False) -> None:
        self.step_ms, self.fails = step_ms, fails
        self.count: dict[str, int] = {}

    def __call__(self, what: Any, ranks: int, job: Any, **_: Any) -> Any:
        from ranks import RanksFailed
        from real_compute import run
        from slow_network import plans

        if what is run.profiled:
            costs = {"param_bytes": 8, "activation_bytes": 8, "output_bytes": 8}
            layers = tuple(LayerCost(name=str(i), forward_ms=1, backward_ms=2, **costs) for i in range(8))
            return Profile(name="p", device="cpu", dtype="float32", microbatch_size=4, layers=layers).to_dict()
        if what is run.connected:
            return plans.nominal(job.case).to_dict()
        side = f"{job.side} {sorted(job.options.items())}"
        number = self.count[side] = self.count.get(side, -1) + 1
        if self.fails(job, number):
            raise RanksFailed("ranks 1 took too long\n--- rank 0")
        return {"free": [{"step_ms": self.step_ms(job, number)}] * job.steps}


def measured(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, *line: str) -> dict[str, Any]:
    from real_compute import run
    from real_compute.cases import RealCase
    from slow_network import plans

    monkeypatch.setattr(run, "launch", ranks)
    monkeypatch.setattr(run, "bridged", lambda _: nullcontext())
    monkeypatch.setattr(plans, "SOLVER_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["run.py", *line])
    return run.measured(RealCase(name="unet"), run.parse())


def ddp(job: Any) -> bool:
    return bool(job.side == "data_parallel" and not job.options["zero"])


def test_data_parallel_and_ddp_are_compared_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine becomes slower from round to round; in every round but one ours takes 0.9 of DDP's step."""
    from real_compute import run

    found = measured(
        monkeypatch, Ranks(lambda job, number: (1.0 if ddp(job) else 2.0 if number == 4 else 0.9) * 2**number)
    )
    assert found["data_parallel_over_ddp"] == pytest.approx(1 / 0.9)
    assert found["sides"]["DDP"]["rounds_ms"] == [1, 2, 4, 8, 16]
    assert not any("of DDP" in line for line in run.promises(found))
    assert "Tuned: P=" in run.table(found) and "in paired rounds: 1.111." in run.table(found)


def test_a_side_that_fails_is_a_miss_in_one_round_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from real_compute import run

    ranks = Ranks(
        lambda job, number: 10.0 + number,
        lambda job, number: job.side == "pipelining" or (ddp(job) and number == 1),
    )
    found = measured(monkeypatch, ranks, "--rounds", "2")
    told = [line for line in run.promises(found) if "failed" in line]
    title = found["title"]
    assert told == [f"{title}: {name} failed: ranks 1 took too long" for name in ("ZB-V", "interleaved", "DDP")]
    text = run.table(found)
    assert "| ZB-V | failed: ranks 1 took too long |" in text
    assert "| DDP (failed in a round: ranks 1 took too long) | 1600.0 |" in text
    assert found["data_parallel_over_ddp"] == 1.0
