"""Sample images from a trained folder: ``python examples/unet/sample.py out/unet --classes coffee --count 8``."""

# No postponed annotations here: diffusers 0.35 reads those of a pipeline's parameters as they stand.

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, ImagePipelineOutput, UNet2DModel
from PIL import Image

MODEL = "model"  # folder inside the output folder: a diffusers pipeline


class ClassConditionalPipeline(DiffusionPipeline):
    """Noise to images of given classes with a class-conditional ``UNet2DModel``."""

    def __init__(self, unet: UNet2DModel, scheduler: DDIMScheduler, class_names=None) -> None:  # names, or None
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(class_names=class_names or [])

    @torch.no_grad()
    def __call__(
        self, class_labels: Sequence[int], *, num_inference_steps: int = 50, seed: int = 0
    ) -> ImagePipelineOutput:
        """One image a label; the same seed gives the same images."""
        config = self.unet.config
        shape = (len(class_labels), config.in_channels, config.sample_size, config.sample_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        labels = torch.tensor(class_labels, device=self.device)
        self.scheduler.set_timesteps(num_inference_steps, device=self.device)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            predicted = self.unet(images, timestep, labels).sample
            images = self.scheduler.step(predicted, timestep, images).prev_sample
        pixels = (images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().float().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(pixels))


def complete_pipeline(folder: Path, training_scheduler_config: dict, class_names: Sequence[str]) -> None:
    """Turn a folder with an exported ``unet/`` into one that a pipeline reads with ``from_pretrained``."""
    scheduler = DDIMScheduler.from_config(training_scheduler_config, timestep_spacing="trailing")
    unet = UNet2DModel.from_pretrained(folder / "unet", low_cpu_mem_usage=False)
    scheduler.save_pretrained(folder / "scheduler")
    ClassConditionalPipeline(unet, scheduler, list(class_names)).save_config(folder)


def load_pipeline(out: Path) -> ClassConditionalPipeline:
    """The pipeline that ``train.py`` left in its output folder."""
    if not (out / MODEL / "model_index.json").is_file():
        raise SystemExit(f"no trained model in {out / MODEL}; train one with train.py --out {out}")
    pipeline = ClassConditionalPipeline.from_pretrained(out / MODEL, low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sheet(rows: Sequence[Sequence[Image.Image]], *, zoom: int = 3, gap: int = 6) -> Image.Image:
    """Images in a grid, enlarged without smoothing."""
    side = rows[0][0].width * zoom
    width, height = (count * (side + gap) + gap for count in (max(map(len, rows)), len(rows)))
    paper = Image.new("RGB", (width, height), "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            enlarged = image.resize((side, side), Image.Resampling.NEAREST)
            paper.paste(enlarged, (gap + x * (side + gap), gap + y * (side + gap)))
    return paper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("out/unet"), help="output folder of train.py")
    parser.add_argument("--classes", nargs="*", help="class names (default: all)")
    parser.add_argument("--count", type=int, default=8, help="images a class")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image", type=Path, default=Path("images.png"), help="where to write the sheet of images")
    args = parser.parse_args()
    pipeline = load_pipeline(args.out)
    names = pipeline.config.class_names
    unknown = sorted(set(args.classes or ()) - set(names))
    if unknown:
        raise SystemExit(f"unknown class {', '.join(unknown)}; the model knows {', '.join(names)}")
    labels = [names.index(name) for name in args.classes or names]
    images = pipeline(
        [label for label in labels for _ in range(args.count)], num_inference_steps=args.steps, seed=args.seed
    ).images
    rows = [images[start : start + args.count] for start in range(0, len(images), args.count)]
    sheet(rows).save(args.image)
    print(f"{args.image}: one row a class: {', '.join(names[label] for label in labels)}")


if __name__ == "__main__":
    main()
