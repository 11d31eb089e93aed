"""What the user settled and what "auto" leaves open, read from the arguments, the config and the "pulse" block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.gradients.memory import is_fused
from deepspeed_pulse.engine.starting.start import check_divides
from deepspeed_pulse.engine.starting.supported import check_zero_stage
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.choice import Choice, Constraints
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan

AUTO = "auto"
BATCH, MICROBATCH, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH_KEYS = (BATCH, MICROBATCH, STEPS)
_KEYS = ("num_stages", *BATCH_KEYS)

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A choice to be made: ``names`` are the settings that are "auto", ``given`` is what is settled."""

    names: tuple[str, ...]
    world: int
    global_batch: int
    """Samples a step of all pipelines together."""
    given: Constraints
    batch: tuple[Any, ...]
    """The config's three batch settings as the user wrote them."""
    derived: str | None = None
    """How the global batch came about where the user gave none."""


def num_stages_of(num_stages: Any, config: Config | None) -> Any:
    """The number of pipeline ranks: the argument, else the config's ``pipeline.stages``; a number settles "auto".

    A ConfigError where both are numbers that differ.
    """
    found = _within(config or {}, "pipeline", "stages")
    if found is None or num_stages == found or (found == AUTO and num_stages is not None):
        return num_stages
    if num_stages in (None, AUTO):
        return found
    raise ConfigError(
        f"num_stages: PipelineModule was given {num_stages!r}, the config's pipeline.stages says {found!r}; give one"
    )


def _within(config: Config, block: str, key: str) -> Any:
    """A setting of one of the config's blocks; None where there is none."""
    found = config.get(block)
    return found.get(key) if isinstance(found, Mapping) else None


def batch_settings(config: Config) -> tuple[Any, ...]:
    """The three batch settings as written, None where there is none; a global batch that is "auto" is none given."""
    batch = config.get(BATCH)
    return (None if batch == AUTO else batch, config.get(MICROBATCH), config.get(STEPS))


def asked_of(
    num_stages: Any, topology: Any, config: Config | None, pulse: PulseConfig | None, *, plan: Plan | None, world: int
) -> Asked | None:
    """What is to be chosen; None where nothing is "auto".

    ``num_stages`` is as :func:`num_stages_of` settled it; ``topology`` and ``plan`` are the user's own, and the plan
    settles all it says. A ConfigError where what is given contradicts itself or the job.
    """
    settings = batch_settings(config or {})
    names = tuple(key for key, value in zip(_KEYS, (num_stages, *settings), strict=True) if value == AUTO)
    if pulse is None or not pulse.enabled:
        if names:
            needs = 'add a "pulse" block to the config that does not disable it'
            raise ConfigError(f'{names[0]}: "auto" needs pulse: {needs}')
        return None
    batch, size, steps = (_number(key, value) for key, value in zip(BATCH_KEYS, settings, strict=True))
    if pulse.waves == AUTO and plan is None:
        names = (*names, "waves")
    if not names:
        return None
    if config is None:
        raise ConfigError(f'{names[0]}: "auto" needs the global batch: pass config= to PipelineModule, with {BATCH}')
    _refuse(names, num_stages, topology, config)
    waves = (1, 2) if pulse.waves == AUTO else (int(pulse.waves),)
    stage = _within(config, "zero_optimization", "stage")
    given = Constraints(
        pipeline_ranks=_ranks(num_stages, topology, world),
        microbatch_size=size,
        microbatches=steps,
        waves={"auto": (0, *waves), "wave": waves, "linear": (0,), "loop": ()}[pulse.placement],  # 0: linear placement
        loops=waves if pulse.placement in ("auto", "loop") else (),
        zero_stage=check_zero_stage(stage if isinstance(stage, int) else 0),  # upstream says what is wrong with another
        fused_optimizer=is_fused(config),
        layout=None if topology is None else layout_of(topology),
        schedule=pulse.schedule,
        split_backward=pulse.halves,
    )
    if plan is not None:
        given = _of_plan(given, plan)
    elif names == ("waves",) and given.microbatches is None and None in (batch, given.microbatch_size):
        given = replace(given, microbatches=1)  # upstream's rule
    global_batch, derived = _global_batch(batch, given, world)
    _check_divides(global_batch, given, world)
    return Asked(names=names, world=world, global_batch=global_batch, given=given, batch=settings, derived=derived)


def trial_config(config: Config) -> dict[str, Any]:
    """With batch settings that upstream can parse whatever is "auto", to read the rest of it."""
    return {**{key: value for key, value in config.items() if key != BATCH}, MICROBATCH: 1, STEPS: 1}


def settled(config: dict[str, Any], chosen: tuple[Asked, Choice] | None) -> dict[str, Any]:
    """A config with numbers in place of "auto"; a ConfigError where it asks for something else.

    ``chosen``: what the module asked for and what was chosen; None where its own config had numbers.
    """
    brought = batch_settings(config)
    if chosen is None:
        if AUTO in brought:
            key = BATCH_KEYS[brought.index(AUTO)]
            raise ConfigError(
                f'{key}: deepspeed.initialize brings "auto", which PipelineModule was not planned with; pass config= '
                "to PipelineModule, the same as to initialize"
            )
        return {key: value for key, value in config.items() if key != BATCH or value != AUTO}
    asked, choice = chosen
    numbers = (choice.global_batch, choice.microbatch_size, choice.microbatches)
    if brought not in (asked.batch, numbers):
        raise ConfigError(
            f"deepspeed.initialize brings {_batch_text(brought)}, PipelineModule chose for {_batch_text(asked.batch)}; "
            "pass the same config to both"
        )
    return {**config, **dict(zip(BATCH_KEYS, numbers, strict=True))}


def _batch_text(settings: tuple[Any, ...]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in zip(BATCH_KEYS, settings, strict=True) if value is not None)


def _refuse(names: tuple[str, ...], num_stages: Any, topology: Any, config: Config) -> None:
    what = f'{names[0]}: "auto"'
    if num_stages == AUTO and topology is not None:
        raise ConfigError(f"{what} beside topology=, which says the number of ranks; leave one of them out")
    if _within(config, "autotuning", "enabled"):
        raise ConfigError(
            f"{what} beside DeepSpeed's autotuning, which would start runs to choose the same; remove "
            'the "autotuning" block, or give numbers'
        )
    split = _within(config, "tensor_parallel", "autotp_size")
    if (isinstance(split, int) and split > 1) or config.get("sequence_parallel_size", 1) not in (None, 1):
        raise ConfigError(
            f"{what} chooses pipeline and data-parallel ranks only: expected no tensor_parallel.autotp_size and no "
            f"sequence_parallel_size, found {split or config.get('sequence_parallel_size')}; remove it"
        )


def _number(name: str, value: Any) -> int | None:
    """None where it is open."""
    if value is None or value == AUTO:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f'{name}: expected an integer >= 1 or "auto", found {value!r}')
    return value


def _ranks(num_stages: Any, topology: Any, world: int) -> int | None:
    if topology is not None:
        return int(topology.get_dim("pipe"))
    found = _number("num_stages", num_stages)
    if found is not None:
        check_divides(world, found)
    return found


def layout_of(topology: Any) -> Layout:
    """How a topology numbers ranks."""
    axes = list(topology.get_axis_names())
    return Layout.PIPE_MAJOR if axes.index("pipe") < axes.index("data") else Layout.DATA_MAJOR


def _of_plan(given: Constraints, plan: Plan) -> Constraints:
    """The plan's numbers; what the user gave beside it must be the same."""
    numbers: dict[str, Any] = {n: getattr(plan, n) for n in ("pipeline_ranks", "microbatch_size", "microbatches")}
    for name, planned in numbers.items():
        mine = getattr(given, name)
        if mine not in (None, planned):
            raise ConfigError(
                f"the plan is for {name} {planned}, the config or num_stages says {mine}; change it to {planned} or "
                '"auto", or plan anew'
            )
    return replace(given, **numbers, layout=plan.layout)


def _global_batch(batch: int | None, given: Constraints, world: int) -> tuple[int, str | None]:
    """Samples a step, and how they came about where the user did not say."""
    size, steps, ranks = given.microbatch_size, given.microbatches, given.pipeline_ranks
    if batch is not None:
        return batch, None
    if size and steps and ranks:
        return size * steps * (world // ranks), None
    if size and not steps:
        return size * world, f"{MICROBATCH} x {world} ranks, as there is no {BATCH}"
    raise ConfigError(
        f"{BATCH}: expected the global batch, an integer >= 1, found none: how many samples a step averages over "
        f"changes what is learned, so it is not chosen; give it (or a {MICROBATCH} alone: then it is that times the "
        "number of ranks)",
        more="global-batch",
    )


def _check_divides(batch: int, given: Constraints, world: int) -> None:
    if not divisions(batch, given, world):
        near = sorted(range(max(1, batch - _REACH), batch + _REACH), key=lambda other: (abs(other - batch), other))
        would_do = [other for other in near if divisions(other, given, world)][:2]
        named = {"num_stages": given.pipeline_ranks, MICROBATCH: given.microbatch_size, STEPS: given.microbatches}
        settled = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        raise ConfigError(
            f"{BATCH}: {batch} samples are no whole number of microbatches on {world} ranks with "
            f"{settled or 'any microbatch size'}: expected {MICROBATCH} x {STEPS} x data-parallel pipelines; "
            + (f"{' or '.join(map(str, sorted(would_do)))} would do" if would_do else 'make one of them "auto"')
        )


_REACH = 2000
"""Global batches so near are looked at for one that would do."""


def divisions(batch: int, given: Constraints, world: int) -> dict[int, tuple[int, ...]]:
    """Per number of pipeline ranks, the microbatch sizes that divide the global batch.

    >>> divisions(4, Constraints(), 2)
    {1: (1, 2), 2: (1, 2, 4)}
    """
    found: dict[int, tuple[int, ...]] = {}
    for ranks in _divisors(world):
        share, rest = divmod(batch, world // ranks)
        if not rest and given.pipeline_ranks in (None, ranks):
            found[ranks] = given.sizes_of(share, () if given.sets_microbatches else _divisors(share))
    return {ranks: sizes for ranks, sizes in found.items() if sizes}


def sizes_to_measure(asked: Asked) -> tuple[int, ...]:
    """Microbatch sizes whose costs the choice needs.

    Where none is settled: divisors of the global batch, each at least twice the one before, as far as pipelines of all
    the ranks would still have a microbatch a rank.

    >>> settled = Constraints()
    >>> sizes_to_measure(Asked(names=("num_stages",), world=2, global_batch=24, given=settled, batch=(24, None, None)))
    (1, 2, 4, 8)
    """
    sizes = sorted({size for row in divisions(asked.global_batch, asked.given, asked.world).values() for size in row})
    if asked.given.sets_microbatches:
        return tuple(sizes)
    kept = sizes[:1]
    for size in sizes:
        if 2 * kept[-1] <= size <= asked.global_batch // asked.world:
            kept.append(size)
    return tuple(kept)


def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
