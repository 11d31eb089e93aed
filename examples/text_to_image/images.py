"""Images with captions: a folder with metadata.jsonl, or the photographs inside scikit-image."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from PIL import Image

METADATA = "metadata.jsonl"
MADE_OF = "made_of.json"
BUNDLED = Path(__file__).with_name("captions.jsonl")
KEPT_IN_MEMORY = 256  # scaled images


class DataError(Exception):
    """The images or their captions cannot be used; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """One image file and the captions it has."""

    path: Path
    captions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class View:
    """How an image is seen once: ``down`` and ``right`` place the crop, from 0 to 1."""

    index: int
    caption: str
    down: float = 0.5
    right: float = 0.5
    mirrored: bool = False


def read_captions(folder: Path | None, *, column: str = "text") -> list[Captioned]:
    """The images of ``folder`` as its metadata.jsonl lists them; without a folder those of scikit-image.

    Each line is an object with ``file_name``, relative to the folder, and under ``column`` a caption or
    a list of captions, of which each step takes one at random.

    Raises:
        DataError: a file is missing or a line is not of this form.
    """
    table = BUNDLED if folder is None else folder / METADATA
    if not table.is_file():
        raise DataError(
            f"{folder}: expected a folder with images and a {METADATA}, one line an image, "
            f'for example {{"file_name": "cat.png", "{column}": "a ginger cat"}}'
        )
    root = Path(str(resources.files("skimage"))) / "data" if folder is None else folder
    found = list(_rows(table, root, column))
    if not found:
        raise DataError(f"{table}: expected at least one line, found none")
    return found


def _rows(table: Path, root: Path, column: str) -> Iterator[Captioned]:
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            captions = row[column]
            captions = (captions,) if isinstance(captions, str) else tuple(captions)
            path = root / row["file_name"]
        except (ValueError, KeyError, TypeError):
            captions, path = (), root
        if not captions or not all(isinstance(caption, str) for caption in captions):
            raise DataError(
                f"{table}, line {number}: expected an object with file_name and {column!r} (a caption or a list of "
                f"them; --caption_column names another key), found {line[:80]}"
            )
        if not path.is_file():
            raise DataError(f"{table}, line {number}: no file {path}")
        yield Captioned(path=path, captions=captions)


def keep_captions(folder: Path, entries: Sequence[Captioned]) -> None:
    """Write down which images a small pipeline in ``folder`` was made of."""
    (folder / MADE_OF).write_text(json.dumps(_told(entries)), encoding="utf-8")


def check_captions(folder: Path, entries: Sequence[Captioned]) -> None:
    """Raise a DataError where the small pipeline in ``folder`` was made of other images or captions."""
    path = folder / MADE_OF
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != _told(entries):
        raise DataError(
            f"{folder} was made of other images or captions, which its tokenizer and autoencoder know: "
            "give another --output_dir (OUT= of make), or remove that folder"
        )


def _told(entries: Sequence[Captioned]) -> list[list[str]]:
    return [[entry.path.name, *entry.captions] for entry in entries]


class Images:
    """Crops of ``resolution`` pixels from images whose shorter side was scaled to it."""

    def __init__(self, entries: Sequence[Captioned], *, resolution: int) -> None:
        self.entries = tuple(entries)
        self.resolution = resolution
        self._scaled = lru_cache(KEPT_IN_MEMORY)(self._load)

    def pixels(self, view: View, side: int | None = None) -> torch.Tensor:
        """Float (3, side, side) in [-1, 1]; the side is the resolution if not given."""
        image = self._scaled(view.index)
        side = side or self.resolution
        top, left = (
            min(int(place * (size - side + 1)), size - side)
            for place, size in zip((view.down, view.right), image.shape[1:], strict=True)
        )
        crop = image[:, top : top + side, left : left + side].float() / 127.5 - 1
        return crop.flip(-1) if view.mirrored else crop

    def _load(self, index: int) -> torch.Tensor:
        path = self.entries[index].path
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except OSError as problem:
            raise DataError(f"{path} is no image that can be read: {problem}") from None
        scale = self.resolution / min(image.size)
        size = [max(self.resolution, round(side * scale)) for side in image.size]
        image = image.resize(size, Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
