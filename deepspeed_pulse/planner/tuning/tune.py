"""Which way to run a model on so many ranks: all ways, bounded, then planned and simulated, the most promising first.

A way is a :class:`~deepspeed_pulse.ir.choice.Choice`: pipeline ranks P, data-parallel pipelines G with P * G ranks,
placement, microbatch size b with G * b * M = global batch, ZeRO stage 0 or 1, and how ranks are numbered. The planner
chooses cuts, order and what is recomputed. All choices train the same batch, so the shortest step is the best.
"""

from __future__ import annotations

from deepspeed_pulse.ir.choice import Tuning
from deepspeed_pulse.planner.tuning.open_job import OpenJob
from deepspeed_pulse.planner.tuning.remedies import nothing_fits
from deepspeed_pulse.planner.tuning.tuner import Progress, Tuner, rank_of


def tune(
    job: OpenJob, *, solver_seconds: float = 10.0, exhaustive: bool = False, progress: Progress | None = None
) -> Tuning:
    """Every way to run a job, the best first.

    Args:
        solver_seconds: search for better orders of the best choices; 0: known schedules only.
        exhaustive: simulate what a bound excludes, too.

    Raises:
        ConfigError: the job is unusable, or nothing divides its global batch.
        InfeasibleError: no choice fits the memory; says how much memory, or how many ranks, would do.
    """
    job.check()
    tuner = Tuner(job)
    trials = tuner.run(exhaustive=exhaustive, progress=progress)
    if not any(trial.plan for trial in trials):
        raise nothing_fits(tuner, trials)
    trials = tuner.searched(sorted(trials, key=rank_of), solver_seconds)
    sizes = {trial.choice.microbatch_size for trial in trials}
    profiles = {size: job.sizes.at(size) for size in sizes}
    return Tuning(trials=tuple(trials), memory_bytes=job.limit_bytes, profiles=profiles)
