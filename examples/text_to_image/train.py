"""Train or fine-tune the U-Net of a Stable Diffusion pipeline on captioned images, split over pipeline ranks.

    deepspeed --num_accelerators 4 examples/text_to_image/train.py --validation_prompts "a cup of coffee"

The flags are those of diffusers' own text-to-image script where they make sense; optimizer, precision and
clipping are ds_config's. ``--output_dir`` becomes a pipeline folder (with ``--rank``: gets LoRA weights for one), with
checkpoints, ``loss.csv`` and the images of ``validation/`` beside it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from arguments import parse_arguments, refuse
from diffusers.utils import logging as diffusers_logging
from folder import UNET, FolderError
from images import DataError
from losses import Losses
from run import Run
from validate import save_row

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models import EMA, save_lora, save_pretrained

AVERAGES = "ema"  # inside a checkpoint
LORA = "lora"


def share_cores() -> None:
    """Ranks of one machine divide its cores, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", "1"))))


class Training:
    """The loop over steps: where it starts, and what it leaves behind."""

    def __init__(self, run: Run) -> None:
        self.run, self.args, self.engine = run, run.args, run.engine
        self.out = self.args.output_dir
        self.first = self.engine.global_rank == 0
        if self.args.resume_from_checkpoint:
            self.engine.load_checkpoint(str(self.out), tag=self.args.resume_from_checkpoint)
        self.ema = self._averages() if self.args.use_ema else None
        self.batches, self.validation = run.batches(), run.validation()

    def _averages(self) -> EMA:
        """Averages that go on from the checkpoint, or start with its weights."""
        ema, name = EMA(self.engine), self.args.resume_from_checkpoint
        if name and (self.out / name / AVERAGES).is_dir():
            ema.load(self.out / name / AVERAGES)
        elif name and self.first:
            print(f"{name} has no averages: they start from its weights")
        return ema

    def all_steps(self) -> None:
        """Every step there is still to do, then what is left of them."""
        start, end = self.engine.global_steps, self.run.num_steps
        if self.first and start >= end:
            print(f"all {end} steps are done: --max_train_steps trains further, another --output_dir starts anew")
        data = None
        if self.batches is not None:
            data = self.batches.iterate(first_step=start, data_index=self.engine.grid.data_parallel_id)
        table = Losses(self.out / "loss.csv", first_step=start, num_steps=end) if self.first else nullcontext()
        with table as losses:
            for step in range(start + 1, end + 1):
                loss = float(self.engine.train_batch(data))
                if self.ema is not None:
                    self.ema.step()
                if losses is not None:
                    losses.add(step, loss)
                if step == end or step % self.args.checkpointing_steps == 0:
                    self._save(f"checkpoint-{step}")
                if self._is_validated(step):
                    self._validate(step)
        self._export()

    def _save(self, name: str) -> None:
        self.engine.save_checkpoint(
            str(self.out), tag=name, ema=self.ema, checkpoints_total_limit=self.args.checkpoints_total_limit
        )

    def _is_validated(self, step: int) -> bool:
        args = self.args
        every = args.validation_steps or self.run.views.steps(epochs=args.validation_epochs or 0)
        return self.validation is not None and (step == self.run.num_steps or (every > 0 and step % every == 0))

    def _validate(self, step: int) -> None:
        with self._averaged():
            images = self.validation.images()
        if images is not None:
            picture = self.out / "validation" / f"step{step:06d}.png"
            save_row(images, self.validation.prompts, picture, title=f"after {step} steps")

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Averages in place of the weights, where there are some."""
        if self.ema is None:
            yield
            return
        self.ema.store()
        self.ema.copy_to()
        yield
        self.ema.restore()

    def _export(self) -> None:
        """The output folder becomes a pipeline whose U-Net is the trained one, or gets LoRA weights for one."""
        save, target = (save_lora, self.out / LORA) if self.args.rank else (save_pretrained, self.out / UNET)
        save(self.engine, target, dtype=torch.float32, ema=self.ema)
        if not self.first:
            return
        if self.ema is not None:
            put_in_place(target.with_name(f"{target.name}_ema"), target)
        base = self.run.folder
        if self.args.rank:
            print(f"wrote {target}: load_lora_weights({str(target)!r}) adds it to the pipeline of {base.path}")
        else:
            base.copy_frozen(self.out)
            print(f"wrote {self.out}: StableDiffusionPipeline.from_pretrained({str(self.out)!r}) loads it")


def put_in_place(averages: Path, target: Path) -> None:
    """The averaged weights instead of the last ones, with the config of the latter."""
    for weights in averages.glob("*.safetensors*"):
        weights.replace(target / weights.name)
    shutil.rmtree(averages)


def main(words: list[str] | None = None) -> Run:
    """A whole run, by the words of a command line."""
    args = parse_arguments(words)
    share_cores()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        run = Run(args)
    except (DataError, FolderError) as problem:  # the same on every rank
        refuse(str(problem))
    try:
        Training(run).all_steps()
    except DataError as problem:  # known where data is read
        refuse(str(problem), alone=True)
    except BatchError as problem:  # in a step's first batch: told to every rank
        refuse(str(problem))
    return run


if __name__ == "__main__":
    main()
