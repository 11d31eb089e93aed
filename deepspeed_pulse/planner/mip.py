"""Mixed-integer programs, solved by HiGHS: columns and rows by number. The only import of the solver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

Term = tuple[int, float]
"""A column and its coefficient."""

_FEASIBLE = 2


_PATIENCE = 10
"""Times the processor time that a search may take, after which it ends whatever the machine does meanwhile."""


class Mip:
    """A program that is minimised.

    Args:
        seconds: of processor time to search for; HiGHS's own limit is of the clock's.
        options: HiGHS's own, by name.
    """

    def __init__(self, *, seconds: float, **options: float | bool | str) -> None:
        import highspy  # loaded only when a program is solved

        self._infinity: float = highspy.kHighsInf
        self._integer, self._solution = highspy.HighsVarType.kInteger, highspy.HighsSolution
        self.solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in {"output_flag": False, "threads": 1, **options}.items():
            self.solver.setOptionValue(option, value)
        self.solver.setOptionValue("time_limit", _PATIENCE * float(seconds))
        self._seconds, self._num_columns = seconds, 0

    def column(self, low: float, high: float, *, cost: float = 0.0, integer: bool = False) -> int:
        """A variable between two bounds."""
        number, self._num_columns = self._num_columns, self._num_columns + 1
        self.solver.addVar(low, high)
        if integer:
            self.solver.changeColIntegrality(number, self._integer)
        if cost:
            self.solver.changeColCost(number, cost)
        return number

    def row(self, terms: Sequence[Term], low: float | None, high: float | None = None) -> None:
        """``low <= sum of terms <= high``; None for no bound."""
        columns, factors = [column for column, _ in terms], [factor for _, factor in terms]
        least = -self._infinity if low is None else low
        self.solver.addRow(least, self._infinity if high is None else high, len(columns), columns, factors)

    def start_from(self, values: Sequence[float]) -> None:
        """A known solution."""
        known = self._solution()
        known.col_value = list(values)
        self.solver.setSolution(known)

    def solve(self) -> list[float] | None:
        """Values of the columns in the best solution found; None without one."""
        deadline = time.process_time() + self._seconds

        def is_over(event: Any) -> None:
            if time.process_time() > deadline:
                event.interrupt()

        for limited in (self.solver.cbMipInterrupt, self.solver.cbSimplexInterrupt):
            limited.subscribe(is_over)
        self.solver.run()
        values = list(self.solver.getSolution().col_value)
        return values if values and self.solver.getInfo().primal_solution_status == _FEASIBLE else None
