"""The models: published ones, their times and bytes scaled down to layers that sleep for milliseconds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from slow_network.layers import FLOAT_BYTES, Layer, Sleeper, relaying
from sources import kept

HIDDEN_BYTES = 64 * 1024
"""Mean size of the hidden state of a microbatch after scaling."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model by name.

    Attributes:
        samples: that a microbatch stands for (what fits a 32 GB device).
        changes: of its config.
    """

    source: str
    samples: int
    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "uvit": Model(source="uvit-2.7b", samples=8, title="U-ViT 2.7 B (258 x 2048, 48 blocks)"),
    "hunyuan": Model(
        source="hunyuan-dit-1.1",
        samples=2,
        title="Hunyuan-DiT 3 B (1024 x 1408, 80 blocks)",
        changes={"num_layers": 80, "sample_size": 64},
    ),
    "uvit-1b": Model(source="uvit-1b", samples=1, title="U-ViT 1 B (258 x 1152)"),
    "sd2": Model(source="sd21", samples=4, title="Stable Diffusion 2.1 (768 px)"),
    "sdxl": Model(source="sdxl", samples=1, title="SDXL (1024 px)"),
    "sdv2": Model(
        source="sd21",
        samples=4,
        title="Stable Diffusion 2, 2.3 times as wide, 4.5 B (32 x 32 latents)",
        changes={
            "sample_size": 32,
            "block_out_channels": [736, 1472, 2944, 2944],
            "attention_head_dim": [23, 46, 92, 92],
        },
    ),
}
TIMED = ("uvit", "hunyuan", "sd2", "sdxl")
"""Those that run on ranks with limited links; the others are counted or simulated."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model for so many ranks.

    Attributes:
        microbatches: of a step of a pipeline, 2P: the global batch in microbatches.
        samples: that a microbatch stands for.
        time_scale, byte_scale: of the model's own times (at the estimate's operations per second) and bytes.
    """

    name: str
    title: str
    ranks: int
    samples: int
    layers: tuple[Layer, ...]
    time_scale: float
    byte_scale: float

    @property
    def microbatches(self) -> int:
        return 2 * self.ranks

    def relaying(self) -> list[tuple[Any, ...]]:
        """Class and arguments of every layer, for sides that hand on tuples."""
        return relaying(self.layers)

    whole = relaying
    """The same for sides that hold all layers."""

    def named(self) -> list[tuple[Any, ...]]:
        """Class, arguments, names stashed and popped of every layer, for sides that know names."""
        return [(Sleeper, (layer,), tuple(name for name, _ in layer.stashes), layer.pops) for layer in self.layers]

    def batch(self, samples: int = 1) -> Any:
        """Input and label; the input is as large as the last layer's output."""
        size = self.layers[-1].output_bytes // FLOAT_BYTES
        return torch.zeros(samples, size), torch.zeros(samples, size)

    named_batch = batch

    @property
    def work_ms(self) -> float:
        """Of one microbatch, all layers, forward and backward."""
        return sum(layer.work_ms for layer in self.layers)


def make_case(name: str, ranks: int, stage_ms: float, folder: Path) -> Case:
    """Scaled so that the mean forward of 2P stages takes ``stage_ms``, the mean hidden state ``HIDDEN_BYTES``."""
    found, samples = profile(name, folder), MODELS[name].samples
    inner = [layer["output_bytes"] for layer in found["layers"][:-1]]
    time_scale = 2 * ranks * stage_ms / sum(layer["forward_ms"] for layer in found["layers"])
    return _case(name, ranks, samples, time_scale, HIDDEN_BYTES / (samples * sum(inner) / len(inner)), found)


def sized_case(name: str, ranks: int, byte_scale: float, folder: Path) -> Case:
    """Microbatches of one sample with a share of the published bytes; times as estimated."""
    return _case(name, ranks, 1, 1.0, byte_scale, profile(name, folder))


def _case(name: str, ranks: int, samples: int, time_scale: float, byte_scale: float, found: dict[str, Any]) -> Case:
    return Case(
        name=name,
        title=MODELS[name].title,
        ranks=ranks,
        samples=samples,
        layers=tuple(_layers(found, time_scale, byte_scale, samples)),
        time_scale=time_scale / samples,
        byte_scale=byte_scale,
    )


def profile(name: str, folder: Path) -> dict[str, Any]:
    """Estimated from operation counts on the meta device, and kept for the sources there are."""
    text = kept(folder / f"slow_network_{name}.json", lambda: _estimated(name), Path(__file__))
    found: dict[str, Any] = json.loads(text)
    return found


def _estimated(name: str) -> str:
    """By a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        source = _source(MODELS[name], Path(folder) / f"slow_network_{name}")
        command = [sys.executable, "-m", "deepspeed_pulse", "profile", source, "--estimate", "--out", str(path)]
        command += ["--granularity", "fine"] if name == "sdxl" else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        return path.read_text()


def _source(model: Model, folder: Path) -> str:
    """What ``ds_pulse profile`` takes: a name, or a changed config in a folder."""
    if not model.changes:
        return model.source
    from deepspeed_pulse.models.catalogue.published import PUBLISHED

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**PUBLISHED[model.source], **model.changes}))
    return str(folder)


def _layers(found: dict[str, Any], time_scale: float, byte_scale: float, samples: int) -> list[Layer]:
    """A value with several readers is one stash. Values without gradient, a few bytes of shapes, are left out."""

    def size(count: int, samples: int = samples) -> int:
        count *= samples
        return max(FLOAT_BYTES, round(count * byte_scale / FLOAT_BYTES) * FLOAT_BYTES)

    stashes: list[dict[str, int]] = [{} for _ in found["layers"]]
    pops: list[list[str]] = [[] for _ in found["layers"]]
    for skip in (skip for skip in found["skips"] if skip["gradient"]):
        stashes[skip["source"]][skip["name"]] = size(skip["bytes"])
        pops[skip["target"]].append(skip["name"])
    return [
        Layer(
            name=layer["name"],
            forward_ms=layer["forward_ms"] * time_scale,
            input_ms=(layer["backward_ms"] - layer["weight_grad_ms"]) * time_scale,
            weight_ms=layer["weight_grad_ms"] * time_scale,
            param_bytes=size(layer["param_bytes"], 1),
            activation_bytes=size(layer["activation_bytes"]),
            output_bytes=size(layer["output_bytes"]),
            stashes=tuple(stashes[index].items()),
            pops=tuple(pops[index]),
        )
        for index, layer in enumerate(found["layers"])
    ]
