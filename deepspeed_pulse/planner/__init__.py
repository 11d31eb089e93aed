"""Plans from profiles: what a pipeline of given ranks does, and which ranks and sizes to choose.

The verbs: :func:`make_plan` (cuts, routes and order of a :class:`Job`), :func:`reorder` (for another number of
microbatches), :func:`tune` (every way to run an :class:`OpenJob`), :func:`simulate` and :func:`estimate` (a plan's
timeline and its figures), :func:`check` and :func:`violations` (what is wrong with a plan).
"""

from deepspeed_pulse.planner.checks.validate import check, violations
from deepspeed_pulse.planner.job import Job, SearchOptions
from deepspeed_pulse.planner.make import forward_schedule, make_plan, reorder
from deepspeed_pulse.planner.simulator import estimate, simulate
from deepspeed_pulse.planner.tuning.open_job import OpenJob
from deepspeed_pulse.planner.tuning.tune import tune

__all__ = [
    "Job",
    "OpenJob",
    "SearchOptions",
    "check",
    "estimate",
    "forward_schedule",
    "make_plan",
    "reorder",
    "simulate",
    "tune",
    "violations",
]
