"""Two U-Nets and their encoders on 8 to 64 A100: the sides of DiffusionPipe's paper beside ours, by simulation.

Usage: python benchmarks/backbones/run.py [--quick] [--write]. Ends with status 1 when a promise is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
from backbones.costs import NAMES, SIZE, backbones, of_backbone

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions
from deepspeed_pulse.planner.making.best import best_plan
from deepspeed_pulse.planner.making.maker import Maker

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- the table below is written by run.py -->", "<!-- end of the table -->"
RANKS, MICROBATCHES = 8, 8
"""Of one pipeline, whatever the number of pipelines."""

WORLDS = (8, 16, 32, 64)
MOST_OVER = 1.001
"""Of the shortest step of the other sides that fit, what ours may take."""


class Case:
    """Both backbones, each ``SIZE`` x ``MICROBATCHES`` samples a pipeline and step, on so many GPUs."""

    def __init__(self, world: int, joint: Profile, frozen: Sequence[FrozenPart], seconds: float) -> None:
        self.pipelines = world // RANKS
        self.world, self.joint, self.frozen, self.seconds = world, joint, tuple(frozen), seconds
        self.cluster: Cluster = load_cluster(f"a100:{self.pipelines}x8")

    def job(self, profile: Profile, ranks: int, groups: int, frozen: Sequence[FrozenPart] = ()) -> Job:
        """A backbone's, or both's, samples of a step on ``ranks`` x ``groups`` GPUs."""
        samples = SIZE * MICROBATCHES * self.pipelines
        return Job(
            profile=profile,
            cluster=self.cluster,
            pipeline_ranks=ranks,
            microbatches=samples // (SIZE * groups),
            data_parallel=groups,
            recompute="auto",
            frozen=tuple(frozen),
        )

    def alone_ms(self, index: int, ranks: int, groups: int, schedule: str) -> float:
        """One backbone's step, its encoders before it, divided by the ranks without a rest."""
        job = self.job(self.joint.part(index), ranks, groups)
        options = SearchOptions(schedule=schedule, split_backward=False, solver_seconds=0.0)
        plan = best_plan(Maker(job=job, options=options), [Placement.linear(ranks)])
        own = of_backbone(self.frozen, NAMES[index])
        layers = sum(layer.forward_ms for part in own for layer in part.layers)
        return step_ms(plan) + job.microbatches * layers / ranks

    def together(self, places: Sequence[Placement], *, split: bool | None) -> float:
        """Both in one pipeline, encoders in its idle time."""
        job = self.job(self.joint, RANKS, self.pipelines, self.frozen)
        maker = Maker(job=job, options=SearchOptions(split_backward=split, solver_seconds=self.seconds))
        return step_ms(best_plan(maker, places))

    def sides(self) -> dict[str, Callable[[], float]]:
        wave, linear = Placement.wave(RANKS), Placement.linear(RANKS)
        both = range(len(NAMES))
        directions = [Placement.of_backbones([wave, second]) for second in (wave, wave.mirrored)]
        return {
            "data parallel, one after the other": lambda: sum(
                self.alone_ms(index, 1, self.world, "auto") for index in both
            ),
            "data parallel, each on half": lambda: max(
                self.alone_ms(index, 1, self.world // 2, "auto") for index in both
            ),
            "GPipe": lambda: sum(self.alone_ms(index, RANKS, self.pipelines, "gpipe") for index in both),
            "1F1B": lambda: sum(self.alone_ms(index, RANKS, self.pipelines, "1f1b") for index in both),
            "linear, opposite, filled": lambda: self.together(
                [Placement.of_backbones([linear, linear.mirrored])], split=False
            ),
            "ours: waves, filled": lambda: self.together(directions, split=None),
        }


def step_ms(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_ms


def main() -> int:
    options = _options()
    joint, frozen = backbones(options.profiles)
    worlds = WORLDS[: 1 if options.quick else None]
    found: dict[str, list[float | None]] = {}
    for world in worlds:
        for side, measure in Case(world, joint, frozen, options.seconds).sides().items():
            found.setdefault(side, []).append(_or_none(measure))
            print(f"{world} GPUs, {side}: {found[side][-1]}", flush=True)
    table = _table(found, worlds)
    print("\n" + table)
    if options.write:
        readme.write(README, table, BEGIN, END)
    missed = _missed(found, worlds)
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def _or_none(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except InfeasibleError:
        return None


def _table(found: dict[str, list[float | None]], worlds: Sequence[int]) -> str:
    """ms of a step, and how many times ours is as fast."""
    *_, ours = found.values()
    lines = ["| step ms (times ours) | " + " | ".join(f"{world} GPUs" for world in worlds) + " |"]
    lines.append("|---|" + "---|" * len(worlds))
    for side, figures in found.items():
        cells = [_cell(ms, own) for ms, own in zip(figures, ours, strict=True)]
        lines.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(ms: float | None, ours: float | None) -> str:
    if ms is None:
        return "does not fit"
    return f"{ms:.0f}" + ("" if ours is None else f" ({ms / ours:.2f})")


def _missed(found: dict[str, list[float | None]], worlds: Sequence[int]) -> list[str]:
    """Where another pipeline's step is shorter than ours."""
    *others, ours = found
    return [
        f"{world} GPUs: {found[side][at]:.1f} ms of {side} < {found[ours][at]} ms"
        for at, world in enumerate(worlds)
        for side in others
        if not side.startswith("data parallel")
        and found[side][at] is not None
        and (found[ours][at] is None or found[ours][at] > MOST_OVER * found[side][at])
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path("build/backbones"), help="where costs are kept")
    parser.add_argument("--seconds", type=float, default=5.0, help="processor time to search for better orders")
    parser.add_argument("--quick", action="store_true", help="8 GPUs only")
    return readme.keep_option(parser, "quick", "seconds")


if __name__ == "__main__":
    raise SystemExit(main())
