"""Do the layers' measured costs add up to the whole model's?

    python benchmarks/profile/run.py --write     # everything: about 2 minutes on a quiet core
    python benchmarks/profile/run.py --quick

The small Stable Diffusion U-Net is measured layer by layer, and run whole by diffusers, in turns. Ends with status 1
when the sums differ by more than 10 %, and says at which microbatch size.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
import torch
from diffusers import UNet2DConditionModel
from small_models import small_unet

from deepspeed_pulse.engine.plans.profiles import measure_profile
from deepspeed_pulse.engine.specs import Workload
from deepspeed_pulse.models import to_layers

README = Path(__file__).with_name("README.md")
MARK = "<!-- table: everything below is written by run.py -->"
SIZES = (1, 2, 4, 8)
ROUNDS, REPEATS = 7, 5
WITHIN = (0.9, 1.1)
"""Sum of the layers over the whole model, forward and backward together."""

Times = tuple[float, float]
"""ms of forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the rounds."""

    size: int
    layers: Times
    whole: Times
    ratio: float
    spread: float


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    began = time.perf_counter()
    rows = [measured(size, rounds=2 if options.quick else ROUNDS) for size in options.sizes]
    text = "\n".join([_conditions(time.perf_counter() - began), table(rows)])
    print(text)
    if options.write:
        readme.write(README, text, MARK)
    missed = [row for row in rows if not WITHIN[0] <= row.ratio <= WITHIN[1]]
    for row in missed:
        print(f"MISSED microbatches of {row.size}: layers over whole {row.ratio:.3f}, not in {WITHIN}", file=sys.stderr)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds of one microbatch size")
    options = readme.keep_option(parser, "quick")
    options.sizes = SIZES[1:2] if options.quick else SIZES
    return options


def trained_unet() -> UNet2DConditionModel:
    """No weight is zero."""
    torch.manual_seed(0)
    unet = small_unet(sample_size=16)
    with torch.no_grad():
        for parameter in unet.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return unet


def measured(size: int, *, rounds: int) -> Row:
    unet = trained_unet()
    entries = {
        "sample": torch.randn(size, 4, 16, 16),
        "timestep": torch.randint(0, 1000, (size,)),
        "encoder_hidden_states": torch.randn(size, 77, 32),
    }
    job = Workload(name="small", layers=to_layers(unet), batch=(entries, None))
    layers, whole, spreads = [], [], []
    for _ in range(rounds):
        whole.append(times_of(lambda: unet(**entries).sample))
        profile = measure_profile(job)
        layers.append((sum(x.forward_ms for x in profile.layers), sum(x.backward_ms for x in profile.layers)))
        spreads.append(statistics.median(layer.spread or 0.0 for layer in profile.layers))
    whole.append(times_of(lambda: unet(**entries).sample))
    # what runs before and after a measurement stands beside it: a slow phase of the machine meets both
    ratios = [2 * sum(mine) / (sum(before) + sum(after)) for mine, before, after in zip(layers, whole, whole[1:])]  # noqa: B905
    return Row(
        size=size,
        layers=_medians(layers),
        whole=_medians(whole),
        ratio=statistics.median(ratios),
        spread=statistics.median(spreads),
    )


def times_of(forward: Callable[[], torch.Tensor]) -> Times:
    """Medians of a few runs after a warm-up; gradients add up as over microbatches."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        output = forward()
        middle = time.perf_counter()
        output.backward(torch.ones_like(output))
        times.append(((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3))
    return _medians(times[1:])


def _medians(times: list[Times]) -> Times:
    return statistics.median(f for f, _ in times), statistics.median(b for _, b in times)


def _conditions(seconds: float) -> str:
    host = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread"
    return f"torch {torch.__version__}, {host}, load {os.getloadavg()[0]:.1f}, {seconds / 60:.1f} minutes.\n"


def table(rows: list[Row]) -> str:
    lines = [
        "| microbatch | layers, forward + backward ms | whole model, ms | layers / whole | spread of a layer's times |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        layers, whole = (f"{forward:.1f} + {backward:.1f}" for forward, backward in (row.layers, row.whole))
        lines.append(f"| {row.size} | {layers} | {whole} | {row.ratio:.3f} | {100 * row.spread:.0f} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
