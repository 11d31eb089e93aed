"""Which way to run a model on so many ranks: all ways, bounded, then planned and simulated, the most promising first.

A way is a :class:`~deepspeed_pulse.ir.choice.Choice`: pipeline ranks P, data-parallel pipelines G with P * G ranks,
placement, microbatch size b with G * b * M = global batch, ZeRO stage 0 or 1, and how ranks are numbered. The planner
chooses cuts, order and what is recomputed. All choices train the same batch, so the shortest step is the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.choice import Given, Tuning
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.frozen import FrozenParts
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.tuning.remedies import nothing_fits
from deepspeed_pulse.planner.tuning.sizes import Sizes
from deepspeed_pulse.planner.tuning.tuner import Progress, Tuner, rank_of


def tune(
    profiles: Sequence[Profile],
    *,
    cluster: Cluster,
    global_batch: int,
    world_size: int | None = None,
    memory_bytes: int | None = None,
    solver_seconds: float = 10.0,
    exhaustive: bool = False,
    progress: Progress | None = None,
    given: Given | None = None,
    frozen: FrozenParts | None = None,
) -> Tuning:
    """Every way to train ``global_batch`` samples a step on ``world_size`` ranks of a cluster, the best first.

    Args:
        profiles: one model at one or more microbatch sizes (:class:`~deepspeed_pulse.planner.tuning.sizes.Sizes`).
        world_size: all ranks of the cluster, where not given.
        memory_bytes: cap on a rank's ``peak_bytes``; None takes the cluster's.
        solver_seconds: search for better orders of the best choices; 0: known schedules only.
        exhaustive: simulate what a bound excludes, too.
        given: what is settled already.
        frozen: encoders that run in idle time; None: what they give is in the data.

    Raises:
        ConfigError: an argument is unusable, or nothing divides the global batch.
        InfeasibleError: no choice fits the memory; says how much memory, or how many ranks, would do.
    """
    world = cluster.num_ranks if world_size is None else world_size
    _check(cluster, world, global_batch)
    for part in () if frozen is None else frozen.parts:
        if part.ranks is not None:
            raise ConfigError(
                f"frozen part {part.name!r}: ranks: expected none, as the number of ranks is to be chosen, found "
                f"{list(part.ranks)}"
            )
    limit = cluster.memory_bytes if memory_bytes is None else memory_bytes
    tuner = Tuner(Sizes(profiles), cluster, world, global_batch, limit, given or Given(), frozen)
    trials = tuner.run(exhaustive=exhaustive, progress=progress)
    if not any(trial.plan for trial in trials):
        raise nothing_fits(tuner, trials)
    trials = tuner.searched(sorted(trials, key=rank_of), solver_seconds)
    sizes = {trial.choice.microbatch_size for trial in trials}
    return Tuning(trials=tuple(trials), memory_bytes=limit, profiles={size: tuner.sizes.at(size) for size in sizes})


def _check(cluster: Cluster, world: int, global_batch: int) -> None:
    for name, count in (("world size", world), ("global batch", global_batch)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}: expected an integer >= 1, found {count!r}")
    if world > cluster.num_ranks:
        raise ConfigError(
            f"world size: {world} ranks, the cluster {cluster.name!r} has {cluster.num_ranks} ({cluster.nodes} nodes "
            f"of {cluster.ranks_per_node}); use fewer ranks or another cluster file"
        )
