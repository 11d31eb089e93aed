"""Does the tuner choose as published? Usage: python benchmarks/tuner/run.py [--profiles FOLDER] [PART ...]

Layer costs are operation counts of models on the meta device, kept as profiles in the folder; nothing is timed but the
tuner itself.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from estimated import TFLOPS, Profiles
from simulated import slower, with_relays

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.choice import Trial, Tuning
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, estimate, make_plan, tune
from deepspeed_pulse.planner.tuning.sizes import Sizes
from deepspeed_pulse.report.tuning import describe

PUBLISHED_TFLOPS = 16.0
"""What a rank does in the paper: 237.8 samples/s of 4.2 TFLOP each on 64 of them."""
BATCH = 512
ABLATION = {
    "uvit-1b": ("U-ViT 1 B", 2),
    "hunyuan-dit": ("Hunyuan-DiT 1.5 B", 2),
    "sdv2-1.7b": ("SDv2 1.7 B (1.4 times as wide)", 4),
}
"""Title and published number of pipeline ranks."""
V100, ASCEND, A100 = load_cluster("v100:1x8"), load_cluster("910a:8x8"), load_cluster("a100:8x8")


# -- the parts -----------------------------------------------------------------------------------


def ablation(profiles: Profiles) -> Iterator[str]:
    """The best of each P on 8 V100, and how large a microbatch fits at M = P, the paper's setting."""
    yield "| model | P=1 | P=2 | P=4 | P=8 | published | largest b at M = P = 2, 4, 8 |"
    yield "|---|---|---|---|---|---|---|"
    for name, (title, published) in ABLATION.items():
        profile = profiles(name)
        found = tune(OpenJob(profiles=[profile], cluster=V100, global_batch=256), solver_seconds=0)
        rates = " | ".join(_rate(found, ranks) for ranks in (1, 2, 4, 8))
        sizes = ", ".join(str(_largest(profile, ranks)) for ranks in (2, 4, 8))
        yield f"| {title} | {rates} | P={published} | {sizes} |"


def _rate(found: Tuning, ranks: int) -> str:
    """Of the best plan; what bounds allow where none was made."""
    mine = [trial for trial in found.trials if trial.choice.pipeline_ranks == ranks and trial.samples_per_second]
    best = max(mine, key=lambda trial: (trial.plan is not None, trial.samples_per_second or 0.0), default=None)
    if best is None:
        return "does not fit"
    shared = f" (ZeRO-{best.choice.zero_stage})" if best.plan and best.choice.zero_stage else ""
    return f"{'' if best.plan else '<= '}{best.samples_per_second:.4g}{shared}"


def _largest(profile: Profile, ranks: int) -> int:
    """Power of two, nothing recomputed."""
    sizes, best = Sizes([profile]), 0
    for size in sizes.dividing(1024):
        try:
            make_plan(
                Job(
                    profile=sizes.at(size),
                    cluster=V100,
                    pipeline_ranks=ranks,
                    microbatches=ranks,
                    data_parallel=8 // ranks,
                ),
                SearchOptions(placement="wave", solver_seconds=0),
            )
        except InfeasibleError:
            break
        best = size
    return best


def order(profiles: Profiles) -> Iterator[str]:
    """U-ViT 2.7 B on 64 Ascend 910A: a wave, data parallel with ZeRO, 1F1B with relayed skips."""
    yield "| TFLOP/s a rank | wave | data parallel, ZeRO-1 | 1F1B, skips relayed | the same at M = P |"
    yield "|---|---|---|---|---|"
    for tflops in (TFLOPS, PUBLISHED_TFLOPS):
        profile = slower(profiles("uvit-2.7b"), TFLOPS / tflops)
        found = tune(OpenJob(profiles=[profile], cluster=ASCEND, global_batch=BATCH), solver_seconds=0)
        wave = next(trial for trial in found.ranked if trial.choice.waves)
        data = max((t for t in found.trials if t.choice.pipeline_ranks == 1), key=_known)
        relayed, square = (max(_relayed(profile, sizes), default=(0.0, "-")) for sizes in ((1, 2, 4), (8,)))
        rate = f"{'' if data.plan else '<= '}{_known(data):.4g}"
        yield (
            f"| {tflops:g} | {_known(wave):.4g} ({describe(wave.choice)}) | {rate} | "
            f"{relayed[0]:.4g} ({relayed[1]}) | {square[0]:.4g} ({square[1]}) |"
        )


def _known(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def _relayed(profile: Profile, sizes: Sequence[int]) -> Iterator[tuple[float, str]]:
    """1F1B on linear placement with every skip sent hop by hop; microbatches of eight are as many as ranks."""
    for ranks in (2, 4, 8, 16, 32):
        group = 64 // ranks
        for size in sizes:
            try:
                plan = make_plan(
                    Job(
                        profile=Sizes([profile]).at(size),
                        cluster=ASCEND,
                        pipeline_ranks=ranks,
                        microbatches=BATCH // group // size,
                        data_parallel=group,
                    ),
                    SearchOptions(placement="linear", schedule="1f1b", solver_seconds=0),
                )
            except InfeasibleError:
                continue
            figures = estimate(with_relays(plan, profile), Sizes([profile]).at(size), ASCEND)
            if max(figures.peak_bytes) <= ASCEND.memory_bytes:
                yield figures.samples_per_second, f"P={ranks}, microbatches of {size}"


def linear(profiles: Profiles) -> Iterator[str]:
    """Few small skips: at P = 8 a wave sends more than it saves."""
    yield "| P = 8, M = 16 | link, GB/s | wave, ms | linear, ms | chosen |"
    yield "|---|---|---|---|---|"
    for name, speed in itertools.product(("kandinsky3", "sd15-controlnet"), (300.0, 10.0, 2.5)):
        link = Link(bandwidth_gb_per_s=speed, latency_us=10.0)
        links = replace(V100, memory_bytes=10**12, intra_node=link, inter_node=link)
        steps = {}
        for placement in ("wave", "linear", "auto"):
            plan = make_plan(
                Job(profile=profiles(name), cluster=links, pipeline_ranks=8, microbatches=16),
                SearchOptions(placement=placement, solver_seconds=0),
            )
            assert plan.estimate is not None
            steps[placement] = plan.estimate.step_ms
        chosen = min(("wave", "linear"), key=lambda way: steps[way])
        assert steps["auto"] == steps[chosen]
        yield f"| {name} | {speed:g} | {steps['wave']:.1f} | {steps['linear']:.1f} | {chosen} |"


def speed(profiles: Profiles) -> Iterator[str]:
    """SDXL over 64 ranks."""
    began, spent = time.monotonic(), time.process_time()
    found = tune(OpenJob(profiles=[profiles("sdxl")], cluster=A100, global_batch=256), solver_seconds=10)
    wall, spent = time.monotonic() - began, time.process_time() - spent
    yield (
        f"SDXL, 64 ranks, 256 samples a step: {len(found.trials)} choices in {wall:.0f} s ({spent:.0f} s of one core, "
        f"at most 10 s of it in the search); best: {describe(found.best.choice)}"
    )


PARTS = {"ablation": ablation, "order": order, "linear": linear, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="folder of estimated profiles")
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"expected parts among {', '.join(PARTS)}, found {part!r}")
    logging.disable(logging.WARNING)
    for part in arguments.parts:
        for line in PARTS[part](Profiles(arguments.profiles)):
            print(line, flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
