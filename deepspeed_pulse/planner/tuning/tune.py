"""Which way to run a model on so many ranks: all ways, bounded, then planned and simulated, the most promising first.

A way is a :class:`~deepspeed_pulse.ir.choice.Choice`: pipeline ranks P, data-parallel pipelines G with P * G ranks,
placement, microbatch size b with G * b * M = global batch, ZeRO stage 0 or 1, and how ranks are numbered. The planner
chooses cuts, order and what is recomputed. All choices train the same batch, so the shortest step is the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.choice import Choice, Trial, Tuning, Verdict
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.units import gigabytes
from deepspeed_pulse.planner.garbage import rare_collections
from deepspeed_pulse.planner.tuning.open_job import OpenJob
from deepspeed_pulse.planner.tuning.tuner import Progress, Tuner, fewest_layers

_MARGINS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Times what an error asks for, as memory that may do where nothing fits."""

_TIMES = (2, 4, 8, 16, 32, 64)
"""So many times the world size are tried."""


@rare_collections()
def tune(
    job: OpenJob,
    *,
    solver_seconds: float = 10.0,
    exhaustive: bool = False,
    progress: Progress | None = None,
    most_seconds: float = math.inf,
) -> Tuning:
    """Every way to run a job, the best first: the fastest.

    Where hosts send messages themselves, it is what sends least of those that are planned within 3 % of that.

    Args:
        solver_seconds: search for better orders of the best choices; 0: known schedules only.
        exhaustive: simulate what a bound excludes, too.
        most_seconds: after which no other choice is tried, once one is planned; the search comes on top.

    Raises:
        ConfigError: the job is unusable, or nothing divides its global batch.
        InfeasibleError: no choice fits the memory; says how much memory, or how many ranks, would do.
    """
    job.check()
    tuner = Tuner(job, most_seconds)
    trials = tuner.run(exhaustive=exhaustive, progress=progress)
    if not any(trial.plan for trial in trials):
        raise _nothing_fits(tuner, trials)
    trials = tuner.searched(trials, solver_seconds)
    sizes = {trial.choice.microbatch_size for trial in trials}
    profiles = {size: job.sizes.at(size) for size in sizes}
    return Tuning(trials=tuple(trials), memory_bytes=job.limit_bytes, profiles=profiles)


def _nothing_fits(tuner: Tuner, trials: Sequence[Trial]) -> InfeasibleError:
    """Says the smallest memory found that would do, and the smallest multiple of the world size."""
    limited = [trial for trial in trials if trial.verdict is Verdict.MEMORY]
    if not limited:
        reasons = sorted({f"{trial.verdict.value}: {trial.reason}" for trial in trials})
        return InfeasibleError(
            f"no way to run {tuner.job.global_batch} samples a step on {tuner.job.world} ranks; "
            f"{'; '.join(reasons[:3])}; use another global batch, fewer ranks or finer layers"
        )
    memory, ranks = _memory_that_would_do(tuner, limited), _ranks_that_would_do(tuner)
    ways = [
        f"{gigabytes(memory, enough=True)} GB a rank would do" if memory else "",
        f"{ranks} ranks would do" if ranks else "",
    ]
    means = ["layers recomputed"] if tuner.given.recompute is None else []
    means += ["the optimizer shared"] if tuner.given.zero_stage != 0 else []
    saved = f", {' and '.join(means)}" if means else ""
    hint = "; zero_optimization.stage 1 would share the optimizer's state among replicas"
    return InfeasibleError(
        f"nothing fits {gigabytes(tuner.job.limit_bytes, enough=True)} GB a rank on {tuner.job.world} ranks"
        f"{saved}: {' or '.join(filter(None, ways)) or 'no memory or number of ranks found that would do'}"
        f"{hint if tuner.given.zero_stage == 0 and tuner.job.world > 1 else ''}",
        needed_bytes=memory,
        more="memory",
    )


def _memory_that_would_do(tuner: Tuner, limited: Sequence[Trial]) -> int | None:
    """The smallest that a choice was planned with, those that need least first."""
    best = math.inf
    frugal = (trial.choice for trial in limited if _is_frugal(tuner, trial.choice))
    for choice in sorted(frugal, key=tuner.least_held_bytes):
        if tuner.least_held_bytes(choice) >= best:
            break
        best = min(best, _least_memory(tuner, choice))
    return None if math.isinf(best) else int(best)


def _is_frugal(tuner: Tuner, choice: Choice) -> bool:
    """Nothing that only takes memory: the smallest microbatches, the optimizer shared, one wave at most."""
    given = tuner.given
    small = given.sets_microbatches or choice.microbatch_size == tuner.least_size(choice)
    shared = choice.zero_stage == 1 or choice.data_parallel == 1 or given.zero_stage is not None
    plain = choice.layout is Layout.PIPE_MAJOR or given.layout is not None
    fewest = choice.waves <= max(1, min(given.waves or given.loops)) and choice.loop <= (not given.waves)
    return small and shared and plain and fewest


def _least_memory(tuner: Tuner, choice: Choice) -> float:
    """With everything recomputed; planned again with it, as other limits lead to other cuts. Infinite: none found."""
    try:
        tuner.frugal(choice, memory_bytes=1)
    except InfeasibleError as problem:
        if problem.needed_bytes is None:
            return math.inf
        for margin in _MARGINS:
            memory = math.ceil(problem.needed_bytes * margin / 1e6) * 10**6
            if _fits(tuner, choice, memory):
                return memory
    return math.inf


def _fits(tuner: Tuner, choice: Choice, memory_bytes: int) -> bool:
    try:
        tuner.frugal(choice, memory_bytes=memory_bytes)
    except InfeasibleError:
        return False
    return True


def _ranks_that_would_do(tuner: Tuner) -> int | None:
    """The smallest power of two times the world size on which a choice fits."""
    for times in _TIMES:
        world = tuner.job.world * times
        nodes = max(tuner.job.cluster.nodes, -(-world // tuner.job.cluster.ranks_per_node))
        cluster = replace(tuner.job.cluster, nodes=nodes)
        if _anything_fits(Tuner(replace(tuner.job, cluster=cluster, world_size=world))):
            return world
    return None


def _anything_fits(tuner: Tuner) -> bool:
    try:
        families = list(tuner.families())
    except ConfigError:
        return False
    for choice in (replace(family, zero_stage=max(tuner.zero_stages(family))) for family in families):
        many = len(choice.placement) > fewest_layers(tuner.sizes.smallest)
        hopeless = many or tuner.least_held_bytes(choice) > tuner.job.limit_bytes
        if _is_frugal(tuner, choice) and not hopeless and _fits(tuner, choice, tuner.job.limit_bytes):
            return True
    return False
