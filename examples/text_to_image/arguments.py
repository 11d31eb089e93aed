"""The command line of train.py and the DeepSpeed config that follows from it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import deepspeed

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


class OneLine(argparse.ArgumentParser):
    """A mistake is one line, told by the first rank alone."""

    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(message: str, *, alone: bool = False) -> NoReturn:
    """End this rank with status 2. Mistakes are met by every rank and told by the first; ``alone``: by this one."""
    if alone or os.environ.get("RANK", "0") == "0":
        print(f"train.py: {message}", flush=True)
    raise SystemExit(2)


def positive(text: str) -> int:
    """An integer above zero."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def amount(text: str) -> float:
    """A finite number that is not negative."""
    if not 0 <= float(text) < float("inf"):
        raise ValueError
    return float(text)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = OneLine(
        description="Train or fine-tune the U-Net of a Stable Diffusion pipeline, split over pipeline ranks."
    )
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_output(parser.add_argument_group("output"))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    args = parser.parse_args(words)
    _check(args)
    return args


def _add_data(group: Any) -> None:
    group.add_argument("--pretrained_model_name_or_path", type=Path, metavar="FOLDER", help="a local folder of a "
                       "StableDiffusionPipeline (default: a small one with random weights is made)")  # fmt: skip
    group.add_argument("--train_data_dir", type=Path, metavar="FOLDER", help="images and a metadata.jsonl with "
                       "file_name and caption (default: photographs of scikit-image)")  # fmt: skip
    group.add_argument("--caption_column", default="text", help="key of the caption in metadata.jsonl: one or a list")
    group.add_argument("--resolution", type=positive, help="side in pixels (default: the model's own)")
    group.add_argument("--center_crop", action="store_true", help="crop in the middle instead of anywhere")
    group.add_argument("--random_flip", action="store_true", help="mirror half of the images")
    group.add_argument("--cache_latents", action="store_true", help="run VAE and text encoder once at the start")
    group.add_argument("--proportion_empty_prompts", type=amount, default=0.0, metavar="SHARE",
                       help="captions dropped, which classifier-free guidance needs")  # fmt: skip


def _add_training(group: Any) -> None:
    group.add_argument("--train_batch_size", type=positive, help="of a microbatch (default: ds_config's)")
    group.add_argument("--gradient_accumulation_steps", type=positive, help="microbatches (default: ds_config's)")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--num_train_epochs", type=positive, default=100)
    length.add_argument("--max_train_steps", type=positive, help="optimizer steps in all, instead of epochs")
    group.add_argument("--learning_rate", type=amount, help="(default: ds_config's)")
    group.add_argument("--lr_scheduler", default="constant", choices=SCHEDULES)
    group.add_argument("--lr_warmup_steps", type=int, default=0)
    group.add_argument("--snr_gamma", type=amount, help="weigh timesteps by min-SNR (arXiv 2303.09556); 5.0 is usual")
    group.add_argument("--noise_offset", type=amount, default=0.0, help="of each channel's mean, 0.1 for example")
    group.add_argument("--prediction_type", choices=["epsilon", "v_prediction"], help="(default: the pipeline's)")
    group.add_argument("--use_ema", action="store_true", help="validate and export moving averages of the weights")
    group.add_argument("--rank", type=positive, help="train LoRA adapters of this rank on the attention layers instead")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--pipeline_ranks", type=positive, help="ranks of one pipeline (default: all of the run)")


def _add_output(group: Any) -> None:
    group.add_argument("--output_dir", type=Path, default=Path("out/text_to_image"))
    group.add_argument("--checkpointing_steps", type=positive, default=500)
    group.add_argument("--checkpoints_total_limit", type=positive, help="how many stay (default: all)")
    group.add_argument(
        "--resume_from_checkpoint", metavar="NAME", help='"latest", or a checkpoint in the output folder'
    )
    group.add_argument("--validation_prompts", nargs="+", metavar="PROMPT", help="images of these show the progress")
    often = group.add_mutually_exclusive_group()
    often.add_argument("--validation_epochs", type=positive, help="epochs between images (default: only at the end)")
    often.add_argument("--validation_steps", type=positive, help="steps between images")
    group.add_argument("--num_inference_steps", type=positive, default=25, help="denoising steps of these images")
    group.add_argument("--guidance_scale", type=amount, default=5.0)


def _check(args: argparse.Namespace) -> None:
    """What one flag alone cannot know."""
    if args.cache_latents and not args.center_crop:
        refuse("--cache_latents keeps one latent an image: add --center_crop (--random_flip may stay)")
    if (args.validation_epochs or args.validation_steps) and not args.validation_prompts:
        refuse("--validation_epochs and --validation_steps need --validation_prompts")
    if args.proportion_empty_prompts > 1:
        refuse(f"--proportion_empty_prompts: expected a share from 0 to 1, found {args.proportion_empty_prompts}")
    if args.snr_gamma == 0:
        refuse("--snr_gamma: expected a number above 0, found 0: every weight would be zero")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.pipeline_ranks and world % args.pipeline_ranks:
        refuse(f"--pipeline_ranks: expected a divisor of the {world} ranks of this run, found {args.pipeline_ranks}")
    args.resume_from_checkpoint = _checkpoint(args.output_dir, args.resume_from_checkpoint)


def _checkpoint(out: Path, name: str | None) -> str | None:
    """The name of a checkpoint that is there; None to start anew."""
    if name == "latest":
        latest = out / "latest"
        if latest.is_file():
            return latest.read_text(encoding="utf-8").strip()
        if os.environ.get("RANK", "0") == "0":
            print(f"no checkpoint in {out}: starting anew", flush=True)
        return None
    if name is not None and not (out / name).is_dir():
        refuse(f"--resume_from_checkpoint: no folder {name} in {out}")
    return name


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """ds_config with what the flags say about batch sizes and learning rate."""
    path = Path(args.deepspeed_config)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        refuse(f"--deepspeed_config: cannot read {path}: {problem}")
    if args.train_batch_size:
        config["train_micro_batch_size_per_gpu"] = args.train_batch_size
    if args.gradient_accumulation_steps:
        config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if args.learning_rate is not None:
        usual = {"type": "AdamW", "params": {"torch_adam": True}}
        config.setdefault("optimizer", usual).setdefault("params", {})["lr"] = args.learning_rate
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if not isinstance(config.get(key), int):
            refuse(f"{path}: expected a number for {key!r}, found {config.get(key)!r}")
    if config.get("fp16", {}).get("enabled", False):
        refuse(f'{path}: expected float32 or "bf16", found "fp16", whose loss scaling this program knows nothing of')
    config.pop("train_batch_size", None)  # follows from the two, for any number of ranks
    return config
