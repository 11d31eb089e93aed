"""Random crops of photographs, noised; every batch is a pure function of where it belongs.

Ranks of one pipeline read different parts of the same batch (the input on the first, labels on
the last), so crop, flip, noise and timestep are all seeded by step, data-parallel index and
microbatch: any rank that asks for the same batch gets the same bits, also after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler
from PIL import Image

# All of these ship inside the scikit-image wheel; nothing is downloaded.
PHOTOGRAPHS = ("chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png", "retina.jpg", "rocket.jpg")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
SHORT_SIDE_IN_CROPS = 1.75  # a crop shows a bit over half of the height of its photograph


def noise_scheduler() -> DDPMScheduler:
    """The training noise: cosine schedule, velocity as target (stable at both ends of the schedule)."""
    return DDPMScheduler(
        num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", clip_sample=True
    )


class Photographs:
    """Classes of photographs, scaled so that a crop of ``size`` pixels shows colours and texture.

    ``folder`` holds one class per subfolder or, without subfolders, one class per image. Without
    a folder the photographs of scikit-image are the classes.
    """

    def __init__(self, folder: str | None = None, *, size: int = 32) -> None:
        self.size = size
        classes = _files_by_class(Path(folder)) if folder else _shipped_files()
        self.names = tuple(classes)
        self.images = tuple(tuple(_load(path, size) for path in paths) for paths in classes.values())

    def crop(self, label: int, generator: torch.Generator) -> torch.Tensor:
        """One random crop, mirrored half of the time: float (3, size, size) in [-1, 1]."""
        choice = torch.randint(len(self.images[label]), (), generator=generator)
        image = self.images[label][int(choice)]
        top, left = (int(torch.randint(side - self.size + 1, (), generator=generator)) for side in (image.shape[1:]))
        crop = image[:, top : top + self.size, left : left + self.size].float() / 127.5 - 1
        return crop.flip(-1) if torch.rand((), generator=generator) < 0.5 else crop


class Batches:
    """Batches ``({"sample", "timestep", "class_labels"}, target)`` by step, data-parallel index and microbatch."""

    def __init__(self, photographs: Photographs, *, microbatch_size: int, seed: int = 0) -> None:
        self.photographs = photographs
        self.microbatch_size = microbatch_size
        self.seed = seed
        self.scheduler = noise_scheduler()

    def batch(self, step: int, data_index: int, microbatch: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The same arguments give the same bits on every rank."""
        generator = generator_for(self.seed, step, data_index, microbatch)
        labels = torch.randint(len(self.photographs.names), (self.microbatch_size,), generator=generator)
        clean = torch.stack([self.photographs.crop(int(label), generator) for label in labels])
        noise = torch.randn(clean.shape, generator=generator)
        timestep = torch.randint(
            self.scheduler.config.num_train_timesteps, (self.microbatch_size,), generator=generator
        )
        noisy = self.scheduler.add_noise(clean, noise, timestep)
        target = self.scheduler.get_velocity(clean, noise, timestep)
        return {"sample": noisy, "timestep": timestep, "class_labels": labels}, target

    def iterate(
        self, *, first_step: int, microbatches: int, data_index: int
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Endless: the microbatches of ``first_step``, of the step after it, and so on."""
        step = first_step
        while True:
            for microbatch in range(microbatches):
                yield self.batch(step, data_index, microbatch)
            step += 1


def generator_for(*key: int) -> torch.Generator:
    """Random numbers that depend on the key alone."""
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def _shipped_files() -> dict[str, list[Path]]:
    folder = Path(str(resources.files("skimage"))) / "data"
    return {name.rsplit(".", 1)[0].split("_")[0]: [folder / name] for name in PHOTOGRAPHS}


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    if not folder.is_dir():
        raise SystemExit(f"--data takes a folder of images, found {folder}")
    groups = {sub.name: _image_files(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    classes = {name: files for name, files in groups.items() if files}
    if not classes:
        for path in _image_files(folder):
            classes.setdefault(path.stem, []).append(path)
    if not classes:
        raise SystemExit(f"no images ({', '.join(sorted(SUFFIXES))}) in {folder} or its subfolders")
    return classes


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _load(path: Path, size: int) -> torch.Tensor:
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = SHORT_SIDE_IN_CROPS * size / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
