"""What a training run is made of: images, pipeline folder, engine, frozen encoders."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from arguments import configuration, refuse
from batches import Batch, Batches, Views, example, raw_example, weighted_error
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from encode import CACHE_CHUNK, Cached, Encoders, OnTheFly, Raw, frozen_parts
from folder import UNET, PipelineFolder
from images import Captioned, Images, check_captions, keep_captions, read_captions
from peft import LoraConfig
from validate import Validation

from deepspeed_pulse import PipelineModule
from deepspeed_pulse.config import parse_pulse
from deepspeed_pulse.models import from_pretrained

SMALL_PIPELINE = "small_pipeline"
WAIT_SECONDS = 1800.0
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")  # what LoRA adapts


class Run:
    """Made on every rank; each has its own layers in the engine, and those that read data have encoders."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises DataError and FolderError, the same on every rank."""
        self.args = args
        self.entries = read_captions(args.train_data_dir, column=args.caption_column)
        self.folder = PipelineFolder.read(
            args.pretrained_model_name_or_path or small_folder(args.output_dir, self.entries, seed=args.seed),
            prediction_type=args.prediction_type,
        )
        self.resolution = args.resolution or self.folder.resolution
        self.latents = self.folder.latents(self.resolution)
        self.config = configuration(args)
        bf16 = self.config.get("bf16", {}).get("enabled", False)
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.views = self._views()
        self.num_steps = args.max_train_steps or self.views.steps(epochs=args.num_train_epochs)
        self.scheduler = DDPMScheduler.from_config(self.folder.scheduler)
        self.frozen = self._frozen()
        self.engine = self._engine()
        self.encoders = self._encoders()

    def _views(self) -> Views:
        args, world = self.args, int(os.environ.get("WORLD_SIZE", "1"))
        return Views(
            entries=self.entries,
            size=self.config["train_micro_batch_size_per_gpu"],
            microbatches=self.config["gradient_accumulation_steps"],
            num_pipelines=world // (args.pipeline_ranks or world),
            center_crop=args.center_crop,
            random_flip=args.random_flip,
            empty_prompts=args.proportion_empty_prompts,
            seed=args.seed,
        )

    def _engine(self) -> Any:
        args = self.args
        layers = from_pretrained(
            self.folder.path,
            subfolder=UNET,
            dtype=self.dtype,
            prepare=self._add_adapters if args.rank else None,
            upsample_size=self.latents[-1] % self.folder.unet_factor != 0,
        )
        module = PipelineModule(
            layers=layers,
            num_stages=args.pipeline_ranks or int(os.environ.get("WORLD_SIZE", "1")),
            loss_fn=weighted_error,
            input="sample",
            example_batch=self.example() if self.frozen is None else self._raw_example(),
            config=self.config,
            frozen=None
            if self.frozen is None
            else frozen_parts(self.frozen, self.scheduler, scaling_factor=self.folder.scaling_factor, dtype=self.dtype),
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=self.config,
            lr_scheduler=lambda optimizer: get_scheduler(
                args.lr_scheduler,
                optimizer,
                num_warmup_steps=args.lr_warmup_steps,
                num_training_steps=self.num_steps,
            ),
        )
        return engine

    def _frozen(self) -> Encoders | None:
        """Encoders for the pipeline's idle time, on every rank; None where they run otherwise.

        A velocity to predict follows from clean latents, which the rank of the loss does not have.
        """
        pulse = parse_pulse(self.config.get("pulse"))
        velocity = self.scheduler.config.prediction_type == "v_prediction"
        if self.args.cache_latents or velocity or pulse is None or not pulse.enabled:
            return None
        return Encoders(self.folder.path, device=torch.device("cpu"), dtype=self.dtype)

    def _raw_example(self) -> Batch:
        shape, tokens = self.latents, self.folder.tokens
        return raw_example(size=self.views.size, shape=shape, resolution=self.resolution, tokens=tokens)

    def _add_adapters(self, unet: Any) -> None:
        torch.manual_seed(self.args.seed)  # the same first adapters on every rank
        unet.requires_grad_(False)
        unet.add_adapter(LoraConfig(r=self.args.rank, lora_alpha=self.args.rank, target_modules=list(ATTENTION)))

    def _encoders(self) -> Encoders | None:
        """VAE and text encoder, on ranks that read data: the first, or upstream's first and last without pulse."""
        engine = self.engine
        reads = engine.is_first_stage() or (engine.is_last_stage() and not engine.module.pulse_enabled)
        return Encoders(self.folder.path, device=engine.device, dtype=self.dtype) if reads else None

    def example(self) -> Batch:
        """Zeros of the shapes and dtypes of a batch."""
        text = self.folder.tokens, self.folder.width
        return example(size=self.views.size, shape=self.latents, text=text, dtype=self.dtype)

    def batches(self) -> Batches | None:
        """The training data; None on ranks that read none."""
        images = Images(self.entries, resolution=self.resolution)
        source: Any = None
        if self.frozen is not None:
            source = Raw(images, self.frozen, self.latents)
        elif self.args.cache_latents:
            source = cached(images, self.encoders, mirror=self.args.random_flip)
        elif self.encoders is not None:
            source = OnTheFly(images, self.encoders)
        if source is None:
            return None
        return Batches(
            self.views,
            source,
            self.scheduler,
            scaling_factor=self.folder.scaling_factor,
            noise_offset=self.args.noise_offset,
            snr_gamma=self.args.snr_gamma,
            dtype=self.dtype,
        )

    def validation(self) -> Validation | None:
        """The images to watch; None without prompts."""
        if not self.args.validation_prompts:
            return None
        return Validation(
            self.engine,
            self.args.validation_prompts,
            encoders=self.encoders,
            example=self.example(),
            scheduler_config=self.folder.scheduler,
            num_inference_steps=self.args.num_inference_steps,
            guidance_scale=self.args.guidance_scale,
            seed=self.args.seed,
        )


def small_folder(out: Path, entries: Sequence[Captioned], *, seed: int) -> Path:
    """The small pipeline in the output folder; the first rank makes it when there is none, the others wait."""
    folder = out / SMALL_PIPELINE
    deadline = time.monotonic() + WAIT_SECONDS
    if os.environ.get("RANK", "0") == "0" and not folder.is_dir():
        print(f"no --pretrained_model_name_or_path: making a small pipeline in {folder}", flush=True)
        make_small(folder, entries, seed=seed)
    while not folder.is_dir():
        if time.monotonic() > deadline:
            refuse(f"{folder}: the first rank made no pipeline in {WAIT_SECONDS:.0f} s", alone=True)
        time.sleep(0.2)
    check_captions(folder, entries)
    return folder


def make_small(folder: Path, entries: Sequence[Captioned], *, seed: int) -> None:
    """Whole or absent, with all cores of the ranks that wait."""
    import small_pipeline  # which loads much of diffusers

    making = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(making, ignore_errors=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(os.cpu_count() or 1, threads * int(os.environ.get("LOCAL_SIZE", "1"))))
    small_pipeline.make(making, entries, seed=seed)
    keep_captions(making, entries)
    torch.set_num_threads(threads)
    making.rename(folder)


def cached(images: Images, encoders: Encoders | None, *, mirror: bool) -> Cached | None:
    """Latents and text states of all images; ranks without encoders wait for the others, a while at a time."""
    if encoders is not None:
        return Cached(images, encoders, mirror=mirror, pause=torch.distributed.barrier)
    for _ in range(0, len(images.entries), CACHE_CHUNK):
        torch.distributed.barrier()
    return None
