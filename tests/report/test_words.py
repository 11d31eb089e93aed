"""Numbers as a person reads them."""

import doctest
import io
from types import SimpleNamespace

import pytest

from deepspeed_pulse.ir import units
from deepspeed_pulse.report import progress, words


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(words).failed + doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (999_600, "1M"), (1_000_000, "1M"), (52_345_678, "52.3M")],
)
def test_count(number: int, text: str) -> None:
    assert words.count(number) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0.00"), (1_500_000, "0.0015"), (1.5e9, "1.50"), (80e9, "80.00")])
def test_gigabytes(size: float, text: str) -> None:
    assert words.gigabytes(size) == text


@pytest.mark.parametrize(("ms", "text"), [(0.5, "0.5 ms"), (59.71, "59.7 ms"), (1320.0, "1.32 s"), (2.5e6, "2500 s")])
def test_milliseconds(ms: float, text: str) -> None:
    assert words.milliseconds(ms) == text


def test_progress_is_one_line() -> None:
    assert doctest.testmod(progress).failed == 0
    assert "\n" not in progress.describe(57.0, 57.0)


def test_progress_in_a_file_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 11.0, 15.0, 22.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # not other threads' clock
    monkeypatch.setattr(progress, "EVERY_SECONDS", 10.0)
    file = io.StringIO()
    with progress.counting(file) as move:
        for done in range(4):
            move(done + 1, 9, 10.0 * done)
    assert file.getvalue() == "2 of 9, 11 s: best 10 samples/s\n4 of 9, 22 s: best 30 samples/s\n"
