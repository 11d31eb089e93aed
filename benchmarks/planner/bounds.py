"""What the planner promises, each with the figure of this run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cases import Row

MEAN_GAP = {4: 0.01, 8: 0.015, 16: 0.015}
"""By ranks (M = 2P), stage times x U(0.6, 1.4)."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One promise: in words, what was measured, and whether it holds."""

    promise: str
    figure: str
    met: bool

    def __str__(self) -> str:
        return f"{self.promise}: {self.figure}"


def of_rows(rows: Sequence[Row]) -> Iterator[Bound]:
    """Targets, mean gaps and comparisons of the schedules that were run."""
    for name in dict.fromkeys(row.case.name for row in rows if row.case.target is not None):
        yield _targets(name, [row for row in rows if row.case.name == name])
    near = [row for row in rows if row.case.name == "uneven" or (row.case.name == "uneven, split" and not row.case.cap)]
    for name, sizes in dict.fromkeys((row.case.name, row.case.sizes) for row in near):
        yield _mean_gap([row for row in near if (row.case.name, row.case.sizes) == (name, sizes)])
    for name in dict.fromkeys(row.case.name for row in rows):
        yield _never_worse(name, [row for row in rows if row.case.name == name])


def _targets(name: str, rows: Sequence[Row]) -> Bound:
    missed = [f"{row.case.sizes}: {row.makespan:g} > {row.case.target:g}" for row in rows if not row.reached]
    reached = ", ".join(f"{row.makespan:g} (<= {row.case.target:g})" for row in rows)
    return Bound(
        promise=f"{name}: makespans within their targets",
        figure="; ".join(missed) or reached,
        met=not missed,
    )


def _mean_gap(rows: Sequence[Row]) -> Bound:
    gaps = [row.gap for row in rows]
    mean, case = sum(gaps) / len(gaps), rows[0].case
    return Bound(
        promise=f"{case.name}, {case.sizes}: mean gap at most {100 * MEAN_GAP[case.ranks]:g} %",
        figure=f"{100 * mean:.3f} % over {len(gaps)} seeds, largest {100 * max(gaps):.2f} %",
        met=mean <= MEAN_GAP[case.ranks],
    )


def _never_worse(name: str, rows: Sequence[Row]) -> Bound:
    worse = [f"{row.case.sizes}, seed {row.case.seed}" for row in rows if not row.never_worse]
    return Bound(
        promise=f"{name}: never worse than a generator that fits",
        figure="; ".join(worse) or f"{len(rows)} problems{_against_dualpipev(rows)}",
        met=not worse,
    )


def _against_dualpipev(rows: Sequence[Row]) -> str:
    """The figure that is promised for messages: how much shorter than DualPipeV."""
    shares = [1 - r.makespan / r.generators["dualpipev"] for r in rows if "dualpipev" in r.generators]
    if not shares or rows[0].case.name != "messages":
        return ""
    mean = sum(shares) / len(shares)
    return (
        f", {100 * min(shares):.1f} to {100 * max(shares):.1f} % shorter than DualPipeV, {100 * mean:.1f} % on average"
    )


def table(bounds: Sequence[Bound]) -> str:
    lines = ["| promise | figure | met |", "|---|---|---|"]
    lines += [f"| {bound.promise} | {bound.figure} | {'yes' if bound.met else 'NO'} |" for bound in bounds]
    return "\n".join(lines) + "\n"
