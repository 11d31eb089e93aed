"""A way to run a model on the ranks of a job, what came of trying it, and all ways that were tried."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from deepspeed_pulse.ir.codec import File, Form
from deepspeed_pulse.ir.layout import Grid, Layout
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import Rules


@dataclass(frozen=True, kw_only=True)
class Choice:
    """``waves`` 0: linear placement; of a ``loop``, half of its rounds. ``zero_stage`` 1: data-parallel peers share the
    optimizer state."""

    pipeline_ranks: int
    data_parallel: int
    waves: int
    microbatch_size: int
    microbatches: int
    zero_stage: int = 0
    layout: Layout = Layout.PIPE_MAJOR
    loop: Annotated[bool, Form(left_out=True)] = False

    @property
    def placement(self) -> Placement:
        """Rank of each stage."""
        return Placement.shaped(self.pipeline_ranks, self.waves, loop=self.loop)

    @property
    def grid(self) -> Grid:
        return Grid(pipeline_ranks=self.pipeline_ranks, data_parallel=self.data_parallel, layout=self.layout)

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    @property
    def global_batch(self) -> int:
        return self.microbatch_size * self.microbatches * self.data_parallel

    def ds_config(self, profile: Profile, plan_path: str, *, apart: bool = False) -> dict[str, Any]:
        """DeepSpeed's settings for it; the optimizer and its schedule are the user's.

        ``apart``: backbones make steps of their own.
        """
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(profile.dtype)
        return {
            "train_batch_size": self.global_batch,
            "train_micro_batch_size_per_gpu": self.microbatch_size,
            "gradient_accumulation_steps": self.microbatches,
            "zero_optimization": {"stage": self.zero_stage},
            **({precision: {"enabled": True}} if precision else {}),
            "pulse": {"plan": plan_path, **({"backbone_steps": "each"} if apart else {})},
        }


def may_step_apart(dtype: str) -> bool:
    """Several backbones may make steps of their own; in fp16 one loss scale is for all."""
    return dtype != "float16"


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What the user has settled; the rest is chosen.

    Attributes:
        waves: numbers that are tried, 0 for linear placement; of several, more than those where more are faster.
        loops: the same of loops, which are tried where microbatches are few, more of them where memory costs time.
        fused_optimizer: as in :class:`~deepspeed_pulse.ir.rules.Rules`.
        reduce_early: gradients are summed early whatever the ZeRO stage, or never; None: as the engine does.
        schedule: a generator's name, or "auto".
        recompute: layers that run again in backward; None: as memory needs it.
        split_backward: backwards may run in halves; None: where it is known what these take.
        backbone_steps: when several backbones make their optimizer steps: "together", "each" or "auto".
    """

    pipeline_ranks: int | None = None
    microbatch_size: int | None = None
    microbatches: int | None = None
    waves: tuple[int, ...] = (0, 1, 2)
    loops: tuple[int, ...] = (1, 2)
    zero_stage: int | None = None
    fused_optimizer: bool = False
    reduce_early: bool | None = None
    layout: Layout | None = None
    schedule: str = "auto"
    recompute: tuple[int, ...] | None = None
    split_backward: bool | None = None
    backbone_steps: str = "together"

    def rules(self, zero_stage: int) -> Rules:
        """Of a choice with this ZeRO stage."""
        found = Rules.of(zero_stage, fused_optimizer=self.fused_optimizer)
        return found if self.reduce_early is None else replace(found, reduce_early=self.reduce_early)

    @property
    def sets_microbatches(self) -> bool:
        """Their size or number is settled."""
        return self.microbatch_size is not None or self.microbatches is not None

    def sizes_of(self, share: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Microbatch sizes that divide a pipeline's share of the global batch, of ``sizes`` where none is given.

        >>> Constraints(microbatches=3).sizes_of(12, (1, 2)), Constraints(microbatch_size=5).sizes_of(12, (1, 2))
        ((4,), ())
        >>> Constraints().sizes_of(12, (1, 2, 8))
        (1, 2)
        """
        if self.microbatch_size is not None:
            sizes = (self.microbatch_size,)
        elif self.microbatches is not None:
            sizes = (share // self.microbatches,)
        return tuple(
            size for size in sizes if size and share % size == 0 and self.microbatches in (None, share // size)
        )


class Verdict(enum.Enum):
    """What came of a choice."""

    PLANNED = "planned"
    SLOW = "too slow"
    MEMORY = "too little memory"
    LAYERS = "too few layers"
    SIZE = "too many microbatches"
    NO_GAIN = "no gain"
    UNTRIED = "not tried in time"
    FAILED = "failed when run"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A choice with its plan, or with the reason why there is none.

    Attributes:
        samples_per_second: the plan's; where it is too slow, what it cannot exceed, or makes without regard to memory;
            None where neither is known.
        needed_bytes: of the fullest rank: the plan's; where memory is too small, what would do at least.
        measured: samples/s of a few real steps, where the plan was run.
    """

    choice: Choice
    verdict: Verdict
    plan: Plan | None = None
    reason: str = ""
    samples_per_second: float | None = None
    needed_bytes: int | None = None
    measured: float | None = None

    @property
    def planned(self) -> Plan:
        assert self.plan is not None
        return self.plan

    @property
    def figures(self) -> Estimate:
        """The plan's."""
        return self.planned.figures


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All that was tried for one job: those with a plan first, the best of them first; what was run before all.

    ``memory_bytes``: what a rank has. ``profiles``: what the choices were simulated with, by microbatch size.
    """

    trials: tuple[Trial, ...]
    memory_bytes: int
    profiles: dict[int, Profile]

    @property
    def best(self) -> Trial:
        return self.trials[0]

    @property
    def ranked(self) -> tuple[Trial, ...]:
        """Those with a plan."""
        return tuple(trial for trial in self.trials if trial.plan is not None)

    @property
    def rejected(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.plan is None)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A choice as it is reported. ``why``: it was taken, or not. ``peak_bytes``: per pipeline rank."""

    choice: Choice
    samples_per_second: float
    step_ms: float
    bubble_ratio: float
    peak_bytes: tuple[int, ...]
    why: str

    def told(self) -> dict[str, Any]:
        """In DeepSpeed's words."""
        choice = self.choice
        return {
            "num_stages": choice.pipeline_ranks,
            "data_parallel": choice.data_parallel,
            "waves": choice.waves,
            **({"loop": True} if choice.loop else {}),
            "train_micro_batch_size_per_gpu": choice.microbatch_size,
            "gradient_accumulation_steps": choice.microbatches,
            "layout": choice.layout.value,
            "samples_per_second": self.samples_per_second,
            "step_ms": self.step_ms,
            "bubble_ratio": self.bubble_ratio,
            "peak_bytes": list(self.peak_bytes),
            "why": self.why,
        }


@dataclass(frozen=True, kw_only=True)
class Decision(File):
    """What a tuning came to: the best choice with its plan, beside its runner-ups and why others were rejected."""

    FORMATS = ("pulse-choice/1",)
    WHAT = "choice"

    choice: Choice
    plan: Plan
    options: tuple[Option, ...]
    reasons: tuple[str, ...]
