"""Train a small class-conditional diffusion U-Net on crops of photographs, split over pipeline ranks.

    deepspeed --num_accelerators 4 examples/unet/train.py --deepspeed_config examples/unet/ds_config.json

With ``ds_config_auto.json`` and ``--ranks auto`` everything but the global batch is measured and chosen at start.
Started again, it goes on from the last checkpoint in the output folder. It leaves there
``model/`` (a diffusers pipeline folder), ``checkpoints/``, ``loss.csv`` and the pictures ``loss.png``,
``samples.png`` and ``timeline.png`` (who computed what in the last step).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from data import Batches, Photographs
from diffusers import UNet2DModel
from plots import draw_loss, draw_samples, draw_timeline
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from runs import check_run, keep_run
from sample import MODEL, complete_pipeline

from deepspeed_pulse import PipelineModule
from deepspeed_pulse.models import save_pretrained, to_layers

STEPS_PER_LINE = 50
"""Where a bar cannot be drawn: the output is a file."""
WARMUP_STEPS = 50

EXAMPLE_SIZE = 4
"""Samples in the batch on which layers are measured where the microbatch size is to be chosen."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of images, one class per subfolder or per file (default: photographs "
                        "that ship with scikit-image)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps in all")
    parser.add_argument("--size", type=int, default=32, help="side of a crop in pixels, divisible by 8")
    parser.add_argument("--ranks", type=ranks, help='pipeline ranks, or "auto" (default: all ranks of the run)')
    parser.add_argument("--out", type=Path, default=Path("out/unet"), help="output folder")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    args = parser.parse_args()
    if args.size % 8:
        parser.error(f"--size {args.size}: expected a multiple of 8, the model halves the image three times")
    return args


def ranks(text: str) -> int | str:
    return text if text == "auto" else int(text)


def build_unet(*, num_classes: int, size: int) -> UNet2DModel:
    """3.8 M parameters; attention at the inner two of four levels."""
    return UNet2DModel(
        sample_size=size,
        block_out_channels=(32, 64, 96, 128),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=32,
        num_class_embeds=num_classes,
    )


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to zero: with it samples are as good as with averaged weights."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))


def share_cores() -> None:
    """Ranks of one machine divide its cores, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", "1"))))


def train(engine: Any, batches: Batches, args: argparse.Namespace) -> None:
    """Steps from where the engine stands to ``args.steps``, with checkpoints in between and at the end."""
    data = batches.iterate(
        first_step=engine.global_steps,
        microbatches=engine.gradient_accumulation_steps(),
        data_index=engine.grid.data_parallel_id,
    )
    first = engine.global_rank == 0
    table = args.out / "loss.csv"
    if first:
        keep_rows_until(table, engine.global_steps)
        if engine.global_steps >= args.steps:
            print(f"all {args.steps} steps are done: --steps trains further, another --out starts anew", flush=True)
    with ProgressBar(engine, args.steps) if first else nullcontext() as report:
        while engine.global_steps < args.steps:
            loss = float(engine.train_batch(data))
            step = engine.global_steps
            if first:
                with table.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerow([step, loss])
                report(loss)
            if step % args.checkpoint_every == 0 or step == args.steps:
                engine.save_checkpoint(str(args.out / "checkpoints"), tag=f"step{step}")
                draw_timeline(engine, args.out / "timeline.png")


def keep_rows_until(table: Path, step: int) -> None:
    """Drop losses that a resumed run will compute again."""
    rows: list[list[str]] = []
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            rows = [row for row in list(csv.reader(file))[1:] if int(row[0]) <= step]
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["step", "loss"], *rows])


class ProgressBar:
    """A bar on the first rank; called with the loss after every step."""

    def __init__(self, engine: Any, num_steps: int) -> None:
        self.engine = engine
        self.progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:.0f} samples/s  {task.fields[sent]}"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(
            "", total=num_steps, completed=engine.global_steps, loss=math.nan, speed=0.0, sent=""
        )
        self.last = time.perf_counter()
        self.speed = 0.0
        self.loss = math.nan

    def __enter__(self) -> ProgressBar:
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def __call__(self, loss: float) -> None:
        now = time.perf_counter()
        speed, self.last = self.engine.train_batch_size() / (now - self.last), now
        self.speed = 0.9 * self.speed + 0.1 * speed if self.speed else speed
        self.loss = 0.95 * self.loss + 0.05 * loss if self.loss == self.loss else loss
        self.progress.update(self.task, advance=1, loss=self.loss, speed=self.speed, sent=self.sent())
        if not self.progress.console.is_terminal and self.engine.global_steps % STEPS_PER_LINE == 0:
            print(f"step {self.engine.global_steps}: loss {self.loss:.4f}, {self.speed:.0f} samples/s", flush=True)

    def sent(self) -> str:
        """What this rank put on the wire in the last step."""
        if not hasattr(self.engine, "pulse_stats"):
            return ""
        megabytes = sum(self.engine.pulse_stats()["p2p_bytes"].values()) / 1e6
        return f"rank 0 sent {megabytes:.1f} MB"


def finish(engine: Any, photographs: Photographs, batches: Batches, out: Path) -> None:
    """Export the model on all ranks; the first one samples from what was written and draws."""
    save_pretrained(engine, out / MODEL / "unet")
    if engine.global_rank == 0:
        complete_pipeline(out / MODEL, batches.scheduler.config, photographs.names)
        draw_loss(out / "loss.csv", out / "loss.png")
        draw_samples(out, photographs, out / "samples.png")
        print(f"wrote {', '.join(str(path) for path in (out / MODEL, *sorted(out.glob('*.png'))))}")


def main() -> None:
    args = parse_arguments()
    share_cores()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    photographs = Photographs(args.data, size=args.size)
    check_run(args.out, classes=photographs.names, size=args.size)
    config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    given = config.get("train_micro_batch_size_per_gpu", "auto")
    example = Batches(photographs, microbatch_size=EXAMPLE_SIZE if given == "auto" else given, seed=args.seed)
    module = PipelineModule(
        layers=to_layers(build_unet(num_classes=len(photographs.names), size=args.size)),
        num_stages=args.ranks or int(os.environ.get("WORLD_SIZE", "1")),
        loss_fn=torch.nn.functional.mse_loss,
        input="sample",
        example_batch=example.batch(0, 0, 0),
        config=config,
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, args.steps)
        ),
    )
    batches = Batches(photographs, microbatch_size=engine.train_micro_batch_size_per_gpu(), seed=args.seed)
    if (args.out / "checkpoints" / "latest").is_file():
        engine.load_checkpoint(str(args.out / "checkpoints"))
    if engine.global_rank == 0:
        keep_run(args.out, classes=photographs.names, size=args.size)
    train(engine, batches, args)
    finish(engine, photographs, batches, args.out)


if __name__ == "__main__":
    main()
