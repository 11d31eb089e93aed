"""A diffusers model folder: its config, and which file holds which tensor. Nothing is loaded here.

File names are those of diffusers: ``diffusion_pytorch_model[.VARIANT].safetensors``, or shards and an
index. Pickle files are never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspeed_pulse.errors import FileError, first_of

WEIGHTS = "diffusion_pytorch_model.safetensors"
PLAIN_WEIGHTS = "model.safetensors"
"""Of a model that is none of diffusers', as ``huggingface_hub`` names it."""
CONFIG = "config.json"
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
SHOWN = 5
"""Names shown of each kind of mistake."""


def varied(name: str, variant: str | None) -> str:
    """A file name with the variant before its extension, as diffusers writes it."""
    stem, _, extension = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{extension}"


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``; a :class:`FileError` when there is no such folder or file, or no config in it."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise FileError(
            f"{folder}: expected a folder with {CONFIG} and weights, found none; a model of the Hugging Face Hub is "
            "downloaded with huggingface_hub.snapshot_download(), which returns its folder"
        )
    if not path.is_file():
        parts = sorted(one.parent.name for one in folder.glob(f"*/{CONFIG}"))
        hint = f"; it has models in {', '.join(parts)}: pass subfolder=" if parts else ""
        raise FileError(f"{folder}: expected a {CONFIG}, found none{hint}")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a :class:`FileError` when it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise FileError(f"{path}: not a JSON file: {problem}") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies: name of the file, key in it, shape."""

    file: str
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Where each tensor of a model lies."""

    folder: Path
    places: Mapping[str, TensorEntry]

    @classmethod
    def find(cls, folder: Path, variant: str | None, rename: Callable[[dict[str, TensorEntry]], Any]) -> WeightFiles:
        """Read the headers of the weights in a folder; an index goes before a single file, as in diffusers.

        ``rename`` gives places of a single file other keys, in place: in diffusers renamed weights are older than
        shards. Raises :class:`FileError`: no safetensors weights, an index that does not fit its shards, or damage.
        """
        for index in (varied(f"{WEIGHTS}.index.json", variant), f"{WEIGHTS}.{variant}.index.json"):
            if (folder / index).is_file():
                return cls(folder=folder, places=_sharded(folder, index))
        single = varied(WEIGHTS, variant)
        if not (folder / single).is_file():
            raise FileError(_nothing_found(folder, single))
        places = _header(folder / single)
        rename(places)
        return cls(folder=folder, places=places)

    def check(self, expected: Mapping[str, Tensor], *, ignored: Iterable[str], what: str) -> None:
        """Raise a :class:`FileError` that lists what is missing, what is too much and what has another shape.

        ``expected``: key to a tensor of the right shape. ``ignored``: regular expressions; keys of the files that match
        one may be too much. ``what``: names the model.
        """
        patterns = [re.compile(pattern) for pattern in ignored]
        extra = [key for key in self.places if key not in expected and not any(p.search(key) for p in patterns)]
        shared = [(key, self.places[key].shape, tensor.shape) for key, tensor in expected.items() if key in self.places]
        problems = {
            "missing from the weights": [key for key in expected if key not in self.places],
            "in the weights but not in the model": extra,
            "of another shape": [f"{key} is {list(a)}, expected {list(b)}" for key, a, b in shared if a != tuple(b)],
        }
        if found := [f"{len(names)} {kind}: {first_of(names, SHOWN)}" for kind, names in problems.items() if names]:
            raise FileError(
                f"{self.folder}: expected the {len(expected)} tensors of the {what} that {CONFIG} describes, found "
                "others:\n  " + "\n  ".join(found)
            )

    def read(self, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Some tensors, in memory of their own, in the dtypes that are wanted; one file is open at a time."""
        found: dict[str, Tensor] = {}
        for file in sorted({self.places[key].file for key in wanted}):
            with _opened(self.folder / file) as opened:
                for key, dtype in wanted.items():
                    if self.places[key].file == file:
                        found[key] = opened.get_tensor(self.places[key].key).to(dtype, copy=True)
        return found


def _sharded(folder: Path, index: str) -> dict[str, TensorEntry]:
    files = _weight_map(folder / index)
    shards = sorted(set(files.values()))
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise FileError(f"{folder / index}: names {len(missing)} files that are not there: {first_of(missing, SHOWN)}")
    found = {name: _header(folder / name) for name in shards}
    problems = [f"{key} is not in {name}" for key, name in files.items() if key not in found[name]]
    problems += [f"{key} of {name} is not in the index" for name in shards for key in found[name] if key not in files]
    if problems:
        raise FileError(f"{folder / index}: does not fit its shards: {first_of(problems, SHOWN)}")
    return {key: found[name][key] for key, name in files.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """Key to file name, from an index."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise FileError(f'{path}: field "weight_map": expected an object of tensor names to file names')
    for name in files.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FileError(
                f'{path}: field "weight_map": expected names of safetensors files in the same folder, found {name!r}'
            )
    return files


def _header(path: Path) -> dict[str, TensorEntry]:
    with _opened(path) as opened:
        return {
            key: TensorEntry(file=path.name, key=key, shape=tuple(opened.get_slice(key).get_shape()))
            for key in opened.keys()  # noqa: SIM118 - no mapping
        }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; opening checks the header and that the file is as long as it says."""
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as problem:
        raise FileError(f"{path}: {_what_it_is(path)}: {problem}") from None


def _what_it_is(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError:
        return "cannot be read"
    if start.startswith(b"version https://git-lfs"):
        return "is the placeholder that git leaves for a large file; fetch the file itself with git lfs pull"
    if start.startswith((b"PK", b"\x80")):
        return "is a pickle file under another name; pickle can run code, so it is not read"
    return "is damaged or incomplete; copy or download it again"


def _nothing_found(folder: Path, name: str) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [one for one in names if one.endswith(PICKLES)]
    middle = re.compile(re.escape(Path(WEIGHTS).stem) + r"\.(\w+)(-\d{5}-of-\d{5})?\.safetensors")
    variants = sorted({found[1] for found in map(middle.fullmatch, names) if found})
    message = f"{folder}: expected {name} or an index of its shards, found "
    if variants:
        return message + f"the variants {', '.join(variants)}; pass variant="
    if pickles:
        return (
            message + f"pickle files ({first_of(pickles, SHOWN)}). Pickle can run code, so it is not read. If you "
            "trust the file, convert it once: let diffusers load the model with from_pretrained(folder, "
            "use_safetensors=False) and write it with save_pretrained(folder)"
        )
    return message + (f"only {first_of(names, SHOWN)}" if names else "an empty folder")
