"""How much of a pipeline's idle time do frozen encoders fill? Usage: python benchmarks/fill/run.py [--quick] [--write]

Stable Diffusion 2.1's U-Net at 512 px with its VAE and text encoder, by simulation: layer costs are operation counts on
the meta device, kept in the folder ``--profiles``. Ends with status 1 when a promise is missed, and says which.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
from sources import kept

from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.frozen import FrozenParts, TimedLayer, TimedPart
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions, make_plan

README = Path(__file__).with_name("README.md")
MARK = "<!-- the table below is written by run.py -->"
TFLOPS = 125.0
MICROBATCH_SIZE = 4
CASES = ((4, 4), (4, 8), (8, 8), (8, 16))
GAIN, IDLE = 0.9, 0.05
TOKENS = 77


@dataclass(frozen=True, kw_only=True)
class Case:
    """ms of a step: the pipeline alone, encoding before it, and filled. ``even``: all work divided by the ranks.

    Filled twice, with backwards whole and in halves: weight halves and frozen work want the same idle time.
    """

    ranks: int
    microbatches: int
    pipeline_ms: float
    frozen_ms: float
    even_ms: float
    whole: Plan
    halves: Plan

    @property
    def plan(self) -> Plan:
        """What ``"auto"`` takes."""
        return min(self.whole, self.halves, key=_makespan_ms)

    @property
    def up_front_ms(self) -> float:
        """Frozen work divided by the ranks without a rest, then the pipeline."""
        return self.pipeline_ms + self.frozen_ms / self.ranks

    @property
    def filled_ms(self) -> float:
        return _makespan_ms(self.plan)

    @property
    def possible_ms(self) -> float:
        """No step with this order of actions is shorter."""
        return max(self.even_ms, self.pipeline_ms)

    @property
    def gain(self) -> float:
        """Of what is possible."""
        return (self.up_front_ms - self.filled_ms) / (self.up_front_ms - self.possible_ms)

    @property
    def even_gain(self) -> float:
        """Of what perfectly even work would gain."""
        return (self.up_front_ms - self.filled_ms) / (self.up_front_ms - self.even_ms)

    def problems(self) -> Iterator[str]:
        assert self.plan.estimate is not None
        where = f"P={self.ranks} M={self.microbatches}"
        if self.gain < GAIN:
            yield f"{where}: {100 * self.gain:.1f} % of the possible gain < {100 * GAIN:.0f} %"
        if self.even_ms > self.pipeline_ms and self.plan.estimate.bubble_ratio > IDLE:
            yield f"{where}: {100 * self.plan.estimate.bubble_ratio:.1f} % idle > {100 * IDLE:.0f} %"

    def cells(self) -> tuple[str, ...]:
        assert self.plan.estimate is not None and self.plan.fill is not None
        filled = _makespan_ms(self.whole), _makespan_ms(self.halves)
        times = (self.pipeline_ms, self.up_front_ms, self.even_ms, *filled)
        speed = f"{self.up_front_ms / self.even_ms:.2f}", f"{self.up_front_ms / self.filled_ms:.2f}"
        shares = (self.gain, self.even_gain, self.plan.estimate.bubble_ratio)
        return (
            f"{self.ranks}, {self.microbatches}",
            *(f"{ms:.0f}" for ms in times),
            *speed,
            *(f"{100 * share:.1f} %" for share in shares),
            str(self.plan.fill.solver),
        )


COLUMNS = (
    "P, M",
    "pipeline ms",
    "up front ms",
    "even work ms",
    "filled, whole backwards ms",
    "filled, in halves ms",
    "bound x",
    "found x",
    "of the possible gain",
    "of even work's gain",
    "idle",
    "by",
)


def _makespan_ms(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.makespan_ms


def main() -> int:
    options = _options()
    profile, frozen = _costs(options.profiles)
    cluster = load_cluster("a100:1x8")
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    missed: list[str] = []
    for ranks, microbatches in CASES[: 2 if options.quick else None]:
        job = Job(profile=profile, cluster=cluster, pipeline_ranks=ranks, microbatches=microbatches)
        parts = frozen.at(profile.microbatch_size)
        alone = make_plan(job, SearchOptions(placement="wave", solver_seconds=options.seconds))
        whole, halves = (
            make_plan(
                replace(job, frozen=parts),
                SearchOptions(placement="wave", split_backward=split, solver_seconds=options.seconds),
            )
            for split in (False, True)
        )
        frozen_ms = microbatches * sum(part.forward_ms for part in parts)
        work_ms = microbatches * sum(layer.forward_ms + layer.backward_ms for layer in profile.layers)
        case = Case(
            ranks=ranks,
            microbatches=microbatches,
            pipeline_ms=_makespan_ms(alone),
            frozen_ms=frozen_ms,
            even_ms=(work_ms + frozen_ms) / ranks,
            whole=whole,
            halves=halves,
        )
        lines.append("| " + " | ".join(case.cells()) + " |")
        print(lines[-1], flush=True)
        missed += case.problems()
    share = sum(p.forward_ms for p in frozen.at(MICROBATCH_SIZE)) / sum(
        layer.forward_ms + layer.backward_ms for layer in profile.layers
    )
    lines += ["", f"Frozen work is {100 * share:.0f} % of the U-Net's."]
    print("\n" + "\n".join(lines))
    if options.write:
        readme.write(README, "\n".join(lines), MARK)
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path("build/fill"), help="where costs are kept")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the solver, for the order and for the fill")
    parser.add_argument("--quick", action="store_true", help="P=4 only")
    return readme.keep_option(parser, "quick", "seconds")


def _costs(folder: Path) -> tuple[Profile, FrozenParts]:
    unet = kept(folder / "unet.json", lambda: _estimated()[0].to_json(), Path(__file__))
    encoders = kept(folder / "encoders.json", lambda: _estimated()[1].to_json(), Path(__file__))
    return Profile.from_json(unet), FrozenParts.from_json(encoders)


@functools.cache
def _estimated() -> tuple[Profile, FrozenParts]:
    logging.disable(logging.WARNING)
    import torch
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    from deepspeed_pulse.engine.plans.profiles import estimate_profile
    from deepspeed_pulse.engine.specs import Workload
    from deepspeed_pulse.models import to_layers
    from deepspeed_pulse.models.catalogue.published import PUBLISHED
    from deepspeed_pulse.models.catalogue.sources import DTYPES, build_model, example_batch
    from deepspeed_pulse.models.encoders import text_encoder_layers, vae_encoder_layers

    size, dtype = MICROBATCH_SIZE, torch.bfloat16
    unet = build_model({**PUBLISHED["sd21"], "sample_size": 64}, dtype="bfloat16")
    batch = example_batch(unet, microbatch_size=size, dtype=DTYPES["bfloat16"])
    with torch.device("meta"):
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=4,
        ).to(dtype)
        text = CLIPTextModel(
            CLIPTextConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16)
        ).to(dtype)
        pixels = torch.empty(size, 3, 512, 512, dtype=dtype)
        ids = torch.empty(size, TOKENS, dtype=torch.long)

    def estimated(name: str, layers: list[object], inputs: object) -> Profile:
        job = Workload(name=name, layers=layers, batch=(inputs, None), microbatch_size=size)
        return estimate_profile(job, tflops=TFLOPS).profile

    profile = estimated("sd21 at 512 px", to_layers(unet), batch)
    latents = estimated("vae", vae_encoder_layers(vae), pixels)
    states = estimated("text", text_encoder_layers(text), ids)
    reading = [i for i, layer in enumerate(profile.layers) if ".attentions." in layer.name]
    pairs = ((latents, "latents", (0,)), (states, "encoder_hidden_states", tuple(reading)))
    parts = tuple(
        TimedPart(name=name, targets=targets, layers=tuple(_per_sample(cost) for cost in found.layers))
        for found, name, targets in pairs
    )
    return profile, FrozenParts(name="VAE and CLIP of sd21", device=profile.device, dtype="bfloat16", parts=parts)


def _per_sample(cost: object) -> TimedLayer:
    """Without backward a layer holds its input and its result, about; its weights are counted as trained ones are."""
    return TimedLayer(
        name=cost.name,
        forward_ms={MICROBATCH_SIZE: cost.forward_ms},
        param_bytes=cost.param_bytes,
        output_bytes=cost.output_bytes // MICROBATCH_SIZE,
        activation_bytes=2 * cost.output_bytes // MICROBATCH_SIZE,
    )


if __name__ == "__main__":
    raise SystemExit(main())
