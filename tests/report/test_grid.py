"""The grid in the terminal, drawn as it looks."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

from rich.console import Console

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Span, Timeline
from deepspeed_pulse.report.grid import schedule_grid


def timeline_of(*spans: tuple[int, str, float, float]) -> Timeline:
    ranks = 1 + max(rank for rank, *_ in spans)
    return Timeline(
        num_ranks=ranks,
        spans=tuple(Span(rank=r, work=Action.parse(text), start_ms=a, end_ms=b) for r, text, a, b in spans),
    )


V = timeline_of(
    (0, "0F0", 0, 1),
    (0, "3F0", 3, 4),
    (0, "3B0", 4, 6),
    (0, "0B0", 10, 12),
    (1, "1F0", 1, 2),
    (1, "2F0", 2, 3),
    (1, "2B0", 6, 8),
    (1, "1B0", 8, 10),
)


def test_staircase_of_one_microbatch() -> None:
    assert schedule_grid(V, Placement.wave(2), width=80).plain == dedent(
        """\
        makespan 12 ms, bubble 50.0 %
                |0 ms               |4 ms               |8 ms
        rank 0  0F0>>..........3F0>>3B0<<<<<<<....................0B0<<<<<<<
        rank 1  .....1F0>>2F0>>...............2B0<<<<<<<1B0<<<<<<<..........
        STAGE OP MICROBATCH: F> forward  B< backward  . idle"""
    )


def test_halves_of_the_backward_differ() -> None:
    split = timeline_of((0, "0F0", 0, 1), (0, "0I0", 1, 2), (0, "0W0", 2, 3))
    text = schedule_grid(split, Placement((0,)), width=80).plain
    assert "0F0>>0I0((0W0~~" in text
    assert "I( input gradient  W~ weight gradient" in text


def test_no_line_is_wider_than_asked(large: Any) -> None:
    for width in (40, 80, 200):
        lines = schedule_grid(large.timeline, large.plan.placement, width=width).plain.splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= 80


def test_every_action_is_named_where_there_is_room(sample: Any) -> None:
    text = schedule_grid(sample.timeline, sample.plan.placement, width=1000).plain
    assert all(str(action) in text for row in sample.plan.schedule for action in row)


def test_forward_and_backward_have_different_colours() -> None:
    console = Console(width=80, force_terminal=True, color_system="256")
    with console.capture() as capture:
        console.print(schedule_grid(V, Placement.wave(2), width=80))
    coloured = {cell: capture.get().split(cell)[0].rpartition("\x1b[")[2] for cell in ("0F0", "3F0", "0B0", "3B0")}
    assert len(set(coloured.values())) == 4


def test_actions_of_no_length_do_not_break_the_grid() -> None:
    assert "0F1" in schedule_grid(timeline_of((0, "0F0", 0, 0), (0, "0F1", 0, 1)), Placement((0,)), width=80).plain
    assert "rank 0" in schedule_grid(timeline_of((0, "0F0", 0, 0)), Placement((0,)), width=80).plain
