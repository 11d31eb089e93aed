"""Train a cascade on crops of photographs: a base model at 16 pixels and a super-resolution model to 32, together.

    deepspeed --num_accelerators 4 examples/cascade/train.py --deepspeed_config examples/cascade/ds_config.json

Both are split over the same ranks, and the work of one fills what the other leaves idle; each trains as if it were
alone. Started again, it goes on from the last checkpoint in the output folder. It leaves there ``base/`` and
``upscaler/`` (diffusers models), ``checkpoints/``, ``loss.csv`` and ``cascade.png``: samples beside real crops.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from diffusers import UNet2DModel
from pairs import SIZE, PairBatches, Photographs
from runs import check_run, keep_run
from sample import MODELS, Cascade, draw

from deepspeed_pulse import Backbone, PipelineModule
from deepspeed_pulse.models import save_pretrained, to_layers

WARMUP_STEPS = 50
SHOWN_EVERY = 25
"""Steps between lines of losses."""

LEARNING_RATES = {"base": 2e-3, "upscaler": 2e-3}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of images, one class per subfolder or per file (default: photographs "
                        "that ship with scikit-image)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps in all")
    parser.add_argument("--ranks", type=int, help="pipeline ranks (default: all ranks of the run)")
    parser.add_argument("--out", type=Path, default=Path("out/cascade"), help="output folder")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    return parser.parse_args()


def build_base(num_classes: int) -> UNet2DModel:
    """Noise to pictures of 16 pixels; attention at the inner two of three levels."""
    return UNet2DModel(
        sample_size=SIZE // 2,
        block_out_channels=(40, 80, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=32,
        num_class_embeds=num_classes,
    )


def build_upscaler(num_classes: int) -> UNet2DModel:
    """Noise and a small picture, enlarged, to the picture at 32 pixels."""
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=6,
        out_channels=3,
        block_out_channels=(24, 48, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        num_class_embeds=num_classes,
    )


def backbones(num_classes: int) -> dict[str, Backbone]:
    models = {"base": build_base(num_classes), "upscaler": build_upscaler(num_classes)}
    loss = torch.nn.functional.mse_loss
    return {name: Backbone(to_layers(model), loss_fn=loss, input="sample") for name, model in models.items()}


def initialize(args: argparse.Namespace, photographs: Photographs) -> Any:
    """The engine of both models, each with a learning rate of its own."""
    size = deepspeed.DeepSpeedConfig(args.deepspeed_config).train_micro_batch_size_per_gpu
    module = PipelineModule(
        backbones=backbones(len(photographs.names)),
        num_stages=args.ranks or int(os.environ.get("WORLD_SIZE", "1")),
        example_batch=PairBatches(photographs, microbatch_size=size, seed=args.seed).batch(0, 0, 0),
        config=args.deepspeed_config,
    )
    groups = [{"params": module.backbone_parameters(name), "lr": rate} for name, rate in LEARNING_RATES.items()]
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=groups,
        config=args.deepspeed_config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, args.steps)
        ),
    )
    return engine


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to zero: with it samples are as good as with averaged weights."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))


def train(engine: Any, batches: PairBatches, args: argparse.Namespace) -> None:
    """Steps from where the engine stands to ``args.steps``, with checkpoints in between and at the end."""
    data = batches.iterate(
        first_step=engine.global_steps,
        microbatches=engine.gradient_accumulation_steps(),
        data_index=engine.grid.data_parallel_id,
    )
    table = LossTable(args.out / "loss.csv", engine, args.steps)
    while engine.global_steps < args.steps:
        engine.train_batch(data)
        step = engine.global_steps
        table.add(step)
        if step % args.checkpoint_every == 0 or step == args.steps:
            engine.save_checkpoint(str(args.out / "checkpoints"), tag=f"step{step}", checkpoints_total_limit=2)


class LossTable:
    """Losses of both models: each step in a CSV file, a line on the screen now and then; on the first rank."""

    def __init__(self, path: Path, engine: Any, num_steps: int) -> None:
        self.path, self.engine, self.is_first = path, engine, engine.global_rank == 0
        self.means: dict[str, float] = {}
        self.num_steps = num_steps
        self.begun, self.start = time.perf_counter(), engine.global_steps
        if self.is_first:
            self._keep_rows_until(engine.global_steps)
            if engine.global_steps >= num_steps:
                print(f"all {num_steps} steps are done: --steps trains further, another --out starts anew", flush=True)

    def _keep_rows_until(self, step: int) -> None:
        """Drop losses that a resumed run will compute again."""
        rows: list[list[str]] = []
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in list(csv.reader(file))[1:] if int(row[0]) <= step]
        with self.path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["step", *MODELS], *rows])

    def add(self, step: int) -> None:
        losses = {name: float(loss) for name, loss in self.engine.losses.items()}
        self.means = {name: 0.95 * self.means.get(name, loss) + 0.05 * loss for name, loss in losses.items()}
        if not self.is_first:
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([step, *(losses.get(name, "") for name in MODELS)])
        if step % SHOWN_EVERY == 0 or step == self.num_steps:
            means = ", ".join(f"{name} {mean:.4f}" for name, mean in self.means.items())
            speed = (step - self.start) / (time.perf_counter() - self.begun)
            print(f"step {step} of {self.num_steps}: mean losses {means}; {speed:.2f} steps/s", flush=True)


def finish(engine: Any, photographs: Photographs, out: Path) -> None:
    """Export both models on all ranks; the first one samples from what was written and draws."""
    for name in MODELS:
        save_pretrained(engine, out / name, backbone=name)
    if engine.global_rank == 0:
        draw(Cascade(out), photographs, out / "cascade.png")
        print(f"wrote {', '.join(str(out / name) for name in (*MODELS, 'loss.csv', 'cascade.png'))}")


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    photographs = Photographs(args.data, size=SIZE)
    check_run(args.out, classes=photographs.names, size=SIZE)
    engine = initialize(args, photographs)
    batches = PairBatches(photographs, microbatch_size=engine.train_micro_batch_size_per_gpu(), seed=args.seed)
    if (args.out / "checkpoints" / "latest").is_file():
        engine.load_checkpoint(str(args.out / "checkpoints"))
    if engine.global_rank == 0:
        keep_run(args.out, classes=photographs.names, size=SIZE)
    train(engine, batches, args)
    finish(engine, photographs, args.out)


if __name__ == "__main__":
    main()
