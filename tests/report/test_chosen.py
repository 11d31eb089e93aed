"""What was chosen is told in words, beside what was not and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from deepspeed_pulse.ir.choice import Choice, Trial, Tuning, Verdict
from deepspeed_pulse.report.chosen import RUNNER_UPS, chosen_table, options, rejected


def trial(sample, ranks: int, **figures: float) -> Trial:
    """With ``step_ms``, ``makespan_ms`` and ``bubble_ratio``; four ranks in all."""
    choice = Choice(pipeline_ranks=ranks, data_parallel=4 // ranks, waves=1, microbatch_size=2, microbatches=ranks)
    estimate = replace(sample.plan.estimate, **{"makespan_ms": figures["step_ms"], "bubble_ratio": 0.0, **figures})
    plan = replace(sample.plan, estimate=replace(estimate, samples_per_second=8e3 / estimate.step_ms))
    return Trial(choice=choice, verdict=Verdict.PLANNED, plan=plan, samples_per_second=8e3 / estimate.step_ms)


def tuning(*trials: Trial) -> Tuning:
    return Tuning(trials=trials, memory_bytes=10**9, profiles={})


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"step_ms": 150.0}, "its step takes 50.0 % longer: ranks work longer"),
        (
            {"step_ms": 150.0, "bubble_ratio": 0.4},
            "its step takes 50.0 % longer: ranks wait longer (bubble 40.0 % instead of 0.0 %)",
        ),
        ({"step_ms": 150.0, "makespan_ms": 90.0}, "its step takes 50.0 % longer: reducing gradients adds 60 ms"),
        (
            {"step_ms": 150.0, "makespan_ms": 100.0, "optimizer_ms": 50.0},
            "its step takes 50.0 % longer: the optimizer's step adds 50 ms",
        ),
        ({"step_ms": 98.0}, "its step is planned 2.0 % shorter, but sends more, which takes cores from the work"),
        ({"step_ms": 100.0}, "as fast, with more ranks in a pipeline or more memory"),
    ],
)
def test_why_another_was_not_chosen(sample, figures, why) -> None:
    found = options(tuning(trial(sample, 2, step_ms=100.0), trial(sample, 4, **figures)))
    behind = "2.0 % behind the fastest, and sends less"
    assert [option.why for option in found] == [behind if figures["step_ms"] < 100 else "the fastest", why]


def test_each_number_of_ranks_has_a_place(sample) -> None:
    """Before a second choice of one of them, in order of speed."""
    trials = [trial(sample, ranks, step_ms=100.0 + at) for at, ranks in enumerate((2, 2, 2, 2, 1, 4))]
    found = options(tuning(*trials))
    assert [option.choice.pipeline_ranks for option in found] == [2, 2, 1, 4]
    assert len(found) == 1 + RUNNER_UPS
    assert [option.step_ms for option in found] == [100.0, 101.0, 104.0, 105.0]


def test_the_table_says_it_in_words(sample) -> None:
    full = replace(trial(sample, 1, step_ms=1.0), verdict=Verdict.MEMORY, plan=None, reason="needs 3.000 GB a rank")
    found = tuning(trial(sample, 4, step_ms=100.0), full)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(chosen_table(["num_stages"], options(found), rejected(found), ["a note"]))
    text = captured.get()
    assert "pulse: chosen for num_stages: 8 samples a step on 4 ranks" in text
    assert "P=4 G=1 wave, 4 microbatches of 2" in text
    nearest = "P=1 G=4 data parallel in 2 stages, 1 microbatch of 2"
    assert f"1 too little memory, for example {nearest}: needs 3.000 GB a rank" in text
    assert text.rstrip().endswith("a note")


def test_options_are_plain_data(sample) -> None:
    (option,) = options(tuning(trial(sample, 4, step_ms=100.0)))
    data = option.told()
    assert (data["num_stages"], data["gradient_accumulation_steps"], data["step_ms"]) == (4, 4, 100.0)
    assert data["peak_bytes"] == list(sample.plan.estimate.peak_bytes)
