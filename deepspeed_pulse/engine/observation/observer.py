"""Which steps are measured over all ranks, and what becomes of it: tables, advice, trace, run file, events."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_pulse.engine.device import EngineDevice
from deepspeed_pulse.engine.observation import events, figures
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.run import Difference, MeasuredStep, Run

if TYPE_CHECKING:
    from deepspeed_pulse.engine.engine import PulseEngine

REPORT_STEP = 3
"""Measured figures are printed after this many steps of the process (the first ones warm up)."""

TRACED_STEPS = (1, REPORT_STEP)
"""Steps of the process that are traced where ``trace_steps`` says nothing."""

KEPT_STEPS = 20
"""Measured steps in the trace and the run file; older ones are dropped."""


class Observer:
    """Decides before a training step whether it is measured, alike on all ranks, and reports on it afterwards.

    Other steps cost no communication.
    """

    def __init__(self, engine: PulseEngine, device: EngineDevice) -> None:
        self._engine, self._device = engine, device
        self._pulse, self._planned = engine.module.pulse, engine.module.planned
        self._plan: Plan = engine.module.plan
        self._num_steps = 0
        self._due: frozenset[str] = frozenset()
        """What the step is measured for."""
        self._began: Any = None
        """A mark of the device."""
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=events.MOST_STEPS)
        """Of the device at the ends of each step since the last event."""
        self._kept: deque[MeasuredStep] = deque(maxlen=KEPT_STEPS)
        self._difference: Difference | None = None

    def begin_step(self) -> None:
        """All ranks have come to a step, which lasts from now on; decide whether it is measured."""
        self._began = self._device.mark()
        step = self._engine.global_steps + 1
        self._num_steps += 1
        due = {
            "table": self._num_steps == REPORT_STEP,
            "trace": self._pulse.trace is not None and self._is_chosen(step),
            "events": events.due(self._engine, step),
        }
        self._due = frozenset(name for name, is_due in due.items() if is_due)

    def _is_chosen(self, step: int) -> bool:
        chosen = self._pulse.trace_steps
        if chosen is None:
            return self._num_steps in TRACED_STEPS
        return step % chosen == 0 if isinstance(chosen, int) else step in chosen

    def end_step(self, plan: Plan) -> None:
        """Report on the step of that plan if it was measured; collective then, and the device ends the step first."""
        marks = self._began, self._device.mark()
        if self._engine.monitor.enabled:
            self._marks.append(marks)
        if not self._due:
            return
        found = self._engine.gather_figures()
        if found is not None and self._engine.global_rank == 0:
            timeline, ranks = found
            step, step_ms = self._engine.global_steps, self._device.mean_ms([marks])
            self._report(plan, MeasuredStep(step=step, step_ms=step_ms, ranks=tuple(ranks), timeline=timeline))
        if "events" in self._due:
            self._marks.clear()

    def _report(self, plan: Plan, measured: MeasuredStep) -> None:
        if plan is not self._plan:
            self._kept.clear()  # a run file holds steps of one plan
        self._plan = plan
        if self._due & {"table", "trace"}:
            difference = planning.difference(self._planned, plan, measured)
            if "trace" in self._due or self._pulse.trace is None:
                self._kept.append(measured)
                self._difference = difference
            if "table" in self._due and self._planned.measured:
                figures.print_measured(plan, measured, difference)
        if "trace" in self._due:
            figures.write_trace_files(Path(str(self._pulse.trace)), self.run())
        if "events" in self._due:
            predicted = plan.estimate if self._planned.measured else None
            mean_ms = self._device.mean_ms(self._marks)
            events.write(self._engine, events.figures_of(measured, mean_step_ms=mean_ms, predicted=predicted))

    def run(self) -> Run:
        """What is known of this run so far; measured steps on global rank 0 only."""
        return Run(
            plan=self._plan,
            layers=tuple(layer.name for layer in self._engine.module.graph.layers),
            costs=self._planned.costs,
            planned=planning.planned_timeline(self._planned, self._plan),
            steps=tuple(self._kept),
            difference=self._difference,
        )
