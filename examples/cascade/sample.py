"""Sample a trained cascade in one process: ``python examples/cascade/sample.py out/cascade``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from diffusers import DDIMScheduler, UNet2DModel
from pairs import SIZE, Photographs, noise_scheduler, read_by_upscaler, shrunk
from runs import check_run
from torch import Tensor

MODELS = ("base", "upscaler")
"""Folders of the two models inside the output folder."""


class Cascade:
    """The base model and the super-resolution model that ``train.py`` left in its output folder."""

    def __init__(self, out: Path) -> None:
        for name in MODELS:
            if not (out / name / "config.json").is_file():
                raise SystemExit(f"no trained model in {out / name}; train one with train.py --out {out}")
        self.base, self.upscaler = (
            UNet2DModel.from_pretrained(out / name, low_cpu_mem_usage=False).eval() for name in MODELS
        )
        self.scheduler = DDIMScheduler.from_config(noise_scheduler().config, timestep_spacing="trailing")

    @torch.no_grad()
    def sample(self, class_labels: Sequence[int], *, steps: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Small pictures (count, 3, 16, 16), and the same enlarged (count, 3, 32, 32), in [-1, 1]."""
        generator = torch.Generator().manual_seed(seed)
        labels = torch.tensor(class_labels)
        small = self._denoised(
            lambda images, timestep: self.base(images, timestep, labels).sample,
            torch.randn((len(labels), 3, SIZE // 2, SIZE // 2), generator=generator),
            steps,
        )
        noise = torch.randn(small.shape, generator=generator)
        large = self._denoised(
            lambda images, timestep: self.upscaler(read_by_upscaler(images, small, noise), timestep, labels).sample,
            torch.randn((len(labels), 3, SIZE, SIZE), generator=generator),
            steps,
        )
        return small, large

    def _denoised(self, predict: Callable[[Tensor, Tensor], Tensor], images: Tensor, steps: int) -> Tensor:
        self.scheduler.set_timesteps(steps)
        for timestep in self.scheduler.timesteps:
            images = self.scheduler.step(predict(images, timestep), timestep, images).prev_sample
        return images.clamp(-1, 1)


def draw(cascade: Cascade, photographs: Photographs, picture: Path, *, count: int = 4, steps: int = 50) -> None:
    """A row a class: real crops, what the base made, and the same behind the super-resolution model."""
    names = photographs.names
    labels = [label for label in range(len(names)) for _ in range(count)]
    small, large = cascade.sample(labels, steps=steps)
    generator = torch.Generator().manual_seed(0)
    real = torch.stack([photographs.crop(label, generator) for label in labels])
    columns = {
        "crops of the photograph": real,
        "the same at 16 px": shrunk(real),
        "sampled at 16 px": small,
        "and enlarged to 32 px": large,
    }
    width = len(columns) * count
    figure, grid = plt.subplots(
        len(names), width, figsize=(0.9 * width, len(names) + 0.5), squeeze=False, layout="constrained"
    )
    for label, row in enumerate(grid):
        shown = [image for images in columns.values() for image in images[label * count : (label + 1) * count]]
        for axes, image in zip(row, shown, strict=True):
            axes.axis("off")
            axes.imshow(((image + 1) / 2).permute(1, 2, 0).numpy())
        row[0].text(-0.15, 0.5, names[label], transform=row[0].transAxes, rotation=90, ha="right", va="center")
    for index, title in enumerate(columns):
        grid[0][index * count + count // 2].set_title(title, fontsize=10, loc="right")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("out/cascade"), help="output folder of train.py")
    parser.add_argument("--data", help="folder of images that it was trained on (default: photographs of scikit-image)")
    parser.add_argument("--count", type=int, default=4, help="images a class")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps of each model")
    parser.add_argument("--image", type=Path, default=Path("cascade.png"), help="where to write the picture")
    args = parser.parse_args()
    photographs = Photographs(args.data, size=SIZE)
    check_run(args.out, classes=photographs.names, size=SIZE)
    draw(Cascade(args.out), photographs, args.image, count=args.count, steps=args.steps)
    print(f"wrote {args.image}")


if __name__ == "__main__":
    main()
