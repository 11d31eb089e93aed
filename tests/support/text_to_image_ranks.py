"""What ranks run in the test of examples/text_to_image: whole runs of its train.py, one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_image"


def run_all(runs: dict[str, Any]) -> None:
    """Entry point of a rank: script to its runs, each the words of a command line; ``out`` gets losses."""
    sys.path.insert(0, str(EXAMPLE))
    import train
    import train_sd3_lora
    from support.parity import share_groups

    share_groups()
    train.save_row = keep_images(train.save_row)
    for words in runs["train"]:
        train.main(words).engine.destroy()
        print("DONE", flush=True)
    losses = [train_sd3_lora.main(words) for words in runs["train_sd3_lora"]]
    Path(runs["out"], "sd3_losses.json").write_text(json.dumps(losses))


def keep_images(save_row: Any) -> Any:
    """``save_row`` that leaves each image as a file too, beside the folder of rows."""

    def saved(images: Any, prompts: Any, picture: Path, **title: str) -> None:
        save_row(images, prompts, picture, **title)
        for index, image in enumerate(images):
            image.save(picture.parents[1] / f"{index}.png")

    return saved
