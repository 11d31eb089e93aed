"""What ranks run in the test of examples/text_to_image: whole runs of its train.py, one after the other."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_image"


def run_all(runs: dict[str, Any]) -> None:
    """Entry point of a rank: script to its runs, each the words of a command line; ``out`` gets losses."""
    sys.path.insert(0, str(EXAMPLE))
    import train
    import train_sd3_lora
    from support.parity import share_groups

    from deepspeed_pulse.engine.checkpoints import removal

    share_groups()
    train.save_row = keep_images(train.save_row)
    for words in runs["train"]:
        train.main(words).engine.destroy()
        print("DONE", flush=True)
    refused(partial(train.main, runs["broken"]), "cat.png is no image that can be read")
    refused(partial(train_sd3_lora.main, runs["no_pipeline"]), "expected the folder of a StableDiffusion3Pipeline")
    losses = [train_sd3_lora.main(words) for words in runs["train_sd3_lora"]]
    removal.wait()  # ranks of tests end without what is done at a process's end
    Path(runs["out"], "sd3_losses.json").write_text(json.dumps(losses))


def refused(run: Callable[[], object], why: str) -> None:
    """A mistake ends every rank with status 2, and is one line of the first one."""
    with redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    lines = [line for line in told.getvalue().splitlines() if why in line]
    assert len(lines) == (os.environ["RANK"] == "0"), told.getvalue()


def keep_images(save_row: Any) -> Any:
    """``save_row`` that leaves each image as a file too, beside the folder of rows."""

    def saved(images: Any, prompts: Any, picture: Path, **title: str) -> None:
        save_row(images, prompts, picture, **title)
        for index, image in enumerate(images):
            image.save(picture.parents[1] / f"{index}.png")

    return saved
