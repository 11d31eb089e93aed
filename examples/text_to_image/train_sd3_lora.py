"""Fine-tune the transformer of a Stable Diffusion 3 pipeline with LoRA, split over pipeline ranks.

    deepspeed --num_accelerators 2 examples/text_to_image/train_sd3_lora.py --validation_prompt "a cup of coffee"

The base is bfloat16 and read layer by layer, the adapters float32. Latents and text states are made once, on the first
rank. ``--output_dir`` gets ``lora/``, checkpoints, and an image of the prompt by the whole pipeline on the first rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from arguments import refuse
from diffusers import StableDiffusion3Pipeline
from diffusers.training_utils import cast_training_params
from images import Captioned, DataError, Images, View, check_captions, keep_captions, read_captions
from peft import LoraConfig
from torch import Tensor

from deepspeed_pulse import PipelineModule
from deepspeed_pulse.models import from_pretrained, gather_model, save_lora

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
DTYPE = torch.bfloat16
MEET_EVERY = 64
"""Images that the first rank encodes while the others wait: not for longer than ranks wait for one another."""
Sample = dict[str, Tensor]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained_model_name_or_path", type=Path, metavar="FOLDER", help="a local folder of a "
                        "StableDiffusion3Pipeline (default: a small one with random weights is made)")  # fmt: skip
    parser.add_argument("--train_data_dir", type=Path, help="images and a metadata.jsonl (default: scikit-image's)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/sd3_lora"))
    parser.add_argument("--resolution", type=int, help="side in pixels (default: the model's own)")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--max_train_steps", type=int, default=100)
    parser.add_argument("--checkpointing_steps", type=int, default=50)
    parser.add_argument("--checkpoints_total_limit", type=int, default=2)
    parser.add_argument("--validation_prompt")
    parser.add_argument("--num_inference_steps", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    return parser.parse_args(words)


def add_adapters(transformer: Any, args: argparse.Namespace) -> None:
    """Called before the transformer is cut: only the adapters train, in float32."""
    torch.manual_seed(args.seed)  # the same first adapters on every rank
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=list(ATTENTION)))
    cast_training_params(transformer, dtype=torch.float32)


@torch.no_grad()
def encoded(folder: Path, entries: Sequence[Captioned], resolution: int, device: torch.device) -> list[Sample]:
    """Latents and text states of every image: mean and width of its latents, text states, pooled text."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, transformer=None, torch_dtype=DTYPE).to(device)
    images, vae, samples = Images(entries, resolution=resolution), pipeline.vae, []
    for index, entry in enumerate(entries):
        pixels = images.pixels(View(index=index, caption=entry.captions[0]))[None].to(device, DTYPE)
        latents = vae.encode(pixels).latent_dist.mode().float()
        text, _, pooled, _ = pipeline.encode_prompt(
            entry.captions[0], None, None, do_classifier_free_guidance=False, device=device
        )
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        samples.append({"latents": latents[0], "text": text[0], "pooled": pooled[0]})
        if len(samples) % MEET_EVERY == 0:
            torch.distributed.barrier()
    return samples


def batches(samples: list[Sample], args: argparse.Namespace, size: int, *, first: int) -> Iterator[Any]:
    """Endless, from microbatch ``first`` on, each a function of seed and number: rectified flow, logit-normal times."""
    number = first
    while True:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
        chosen = [samples[i] for i in torch.randint(len(samples), (size,), generator=generator)]
        clean, text, pooled = (torch.stack([one[key] for one in chosen]) for key in ("latents", "text", "pooled"))
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        sigma = torch.randn(size, generator=generator).sigmoid().to(clean.device)
        width = sigma[:, None, None, None]
        inputs = {
            "hidden_states": ((1 - width) * clean + width * noise).to(DTYPE),
            "timestep": sigma * 1000,
            "encoder_hidden_states": text,
            "pooled_projections": pooled,
        }
        yield inputs, noise - clean
        number += 1


def flow_error(predicted: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(predicted.float(), target)


def sample(engine: Any, folder: Path, args: argparse.Namespace) -> None:
    """The prompt's image, by the whole pipeline on the first rank; the others wait at what comes next."""
    transformer = gather_model(engine)
    if transformer is None:
        return
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, transformer=transformer, torch_dtype=DTYPE)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline.to(engine.device)(
        args.validation_prompt,
        height=args.resolution,
        width=args.resolution,
        num_inference_steps=args.num_inference_steps,
        generator=torch.Generator().manual_seed(args.seed),
    )
    made.images[0].save(args.output_dir / f"step{engine.global_steps:06d}.png")


def pipeline_folder(args: argparse.Namespace, entries: Sequence[Captioned]) -> Path:
    """The one given, or a small one that the first rank makes."""
    if (given := args.pretrained_model_name_or_path) is not None:
        if not all((given / part / "config.json").is_file() for part in ("transformer", "vae")):
            raise DataError(
                f"--pretrained_model_name_or_path {given}: expected the folder of a StableDiffusion3Pipeline, found no "
                "transformer/config.json and vae/config.json in it"
            )
        return given
    folder = args.output_dir / "small_pipeline"
    if torch.distributed.get_rank() == 0 and not (folder / "model_index.json").is_file():
        import small_sd3

        small_sd3.make(folder, entries, seed=args.seed)
        keep_captions(folder, entries)
    torch.distributed.barrier()
    check_captions(folder, entries)
    return folder


def resolution(folder: Path) -> int:
    """Pixels that the transformer of the pipeline was made for."""
    transformer, vae = (json.loads((folder / part / "config.json").read_text()) for part in ("transformer", "vae"))
    return int(transformer["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1))


def main(words: list[str] | None = None) -> list[float]:
    """A whole run; the losses of its steps."""
    args = parse_arguments(words)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    deepspeed.init_distributed()
    config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    try:
        entries = read_captions(args.train_data_dir)
        folder = pipeline_folder(args, entries)
    except DataError as problem:  # the same on every rank
        refuse(str(problem))
    args.resolution = args.resolution or resolution(folder)
    module = PipelineModule(
        from_pretrained(folder, subfolder="transformer", dtype=DTYPE, prepare=lambda model: add_adapters(model, args)),
        num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=flow_error,
        input="hidden_states",
        config=config,
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=trained, config=config)
    if (args.output_dir / "latest").is_file():
        engine.load_checkpoint(str(args.output_dir))
    data = None
    if engine.is_first_stage():
        first = engine.global_steps * engine.gradient_accumulation_steps()
        try:
            samples = encoded(folder, entries, args.resolution, engine.device)
        except DataError as problem:  # known where images are read
            refuse(str(problem), alone=True)
        data = batches(samples, args, engine.train_micro_batch_size_per_gpu(), first=first)
    else:
        for _ in range(len(entries) // MEET_EVERY):
            torch.distributed.barrier()
    losses: list[float] = []
    if engine.global_rank == 0 and engine.global_steps >= args.max_train_steps:
        print(f"all {args.max_train_steps} steps are done: --max_train_steps trains further, another --output_dir anew")
    while engine.global_steps < args.max_train_steps:
        losses.append(float(engine.train_batch(data)))
        if engine.global_steps % args.checkpointing_steps == 0 or engine.global_steps == args.max_train_steps:
            engine.save_checkpoint(
                str(args.output_dir),
                tag=f"checkpoint-{engine.global_steps}",
                checkpoints_total_limit=args.checkpoints_total_limit,
            )
    if args.validation_prompt:
        sample(engine, folder, args)
    save_lora(engine, args.output_dir / "lora")
    if engine.global_rank == 0 and losses:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; wrote {args.output_dir / 'lora'}")
    return losses


if __name__ == "__main__":
    main()
