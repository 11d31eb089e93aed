"""What ranks run in the test of examples/text_to_image: whole runs of its train.py, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_image"


def run_all(runs: list[list[str]]) -> None:
    """Entry point of a rank: each run is the words of a command line."""
    sys.path.insert(0, str(EXAMPLE))
    import train
    from support.parity import share_groups

    share_groups()
    train.save_row = keep_images(train.save_row)
    for words in runs:
        train.main(words).engine.destroy()
        print("DONE", flush=True)


def keep_images(save_row: Any) -> Any:
    """``save_row`` that leaves each image as a file too, beside the folder of rows."""

    def saved(images: Any, prompts: Any, picture: Path, **title: str) -> None:
        save_row(images, prompts, picture, **title)
        for index, image in enumerate(images):
            image.save(picture.parents[1] / f"{index}.png")

    return saved
