"""A Stable Diffusion pipeline folder: what its configs say, and the folder that training leaves."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model_index.json"
UNET, SCHEDULER = "unet", "scheduler"
SCHEDULER_CONFIG = "scheduler_config.json"
KIND = "StableDiffusionPipeline"


class FolderError(Exception):
    """The folder holds no pipeline that this example can train; the message says why."""


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """The sizes that follow from the configs of a pipeline's parts; no weights are read.

    ``factor``: side of an image over side of its latents; ``unet_factor``: that over the U-Net's smallest side;
    ``tokens`` and ``width`` of the text states; ``resolution`` the pipeline was made for, in pixels.
    """

    path: Path
    factor: int
    unet_factor: int
    latent_channels: int
    resolution: int
    tokens: int
    width: int
    scaling_factor: float
    scheduler: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, prediction_type: str | None = None) -> PipelineFolder:
        """Read ``path``; ``prediction_type`` replaces what the scheduler's config says.

        Raises:
            FolderError: something is missing or of another kind.
        """
        index = _json(path / INDEX, f"expected a local folder of a {KIND}")
        if index.get("_class_name") != KIND:
            raise FolderError(f"{path}: expected a {KIND}, found a {index.get('_class_name')}")
        vae, unet, text = (_json(path / part / "config.json") for part in ("vae", UNET, "text_encoder"))
        scheduler = _json(path / SCHEDULER / SCHEDULER_CONFIG)
        if prediction_type is not None:
            scheduler["prediction_type"] = prediction_type
        if unet["in_channels"] != vae["latent_channels"]:
            raise FolderError(
                f"{path}: expected a U-Net that takes the {vae['latent_channels']} channels of the latents, found one "
                f"for {unet['in_channels']} (inpainting and the like have training scripts of their own)"
            )
        if scheduler.get("rescale_betas_zero_snr") and scheduler.get("prediction_type", "epsilon") == "epsilon":
            raise FolderError(
                f"{path}: the schedule ends in pure noise (rescale_betas_zero_snr), from which no image can be told by "
                "its noise: use --prediction_type v_prediction"
            )
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        return cls(
            path=path,
            factor=factor,
            unet_factor=2 ** (len(unet["block_out_channels"]) - 1),
            latent_channels=vae["latent_channels"],
            resolution=unet["sample_size"] * factor,
            tokens=text["max_position_embeddings"],
            width=text["hidden_size"],
            scaling_factor=vae.get("scaling_factor", 0.18215),
            scheduler=scheduler,
        )

    def latents(self, resolution: int) -> tuple[int, int, int]:
        """Shape of the latents of one image."""
        if resolution % self.factor:
            raise FolderError(f"--resolution: expected a multiple of {self.factor}, found {resolution}")
        return self.latent_channels, resolution // self.factor, resolution // self.factor

    def copy_frozen(self, target: Path) -> None:
        """Everything but the U-Net into ``target``, whose U-Net was written before; the index comes last."""
        if target.resolve() != self.path.resolve():
            for part in self._frozen_parts():
                shutil.copytree(self.path / part, target / part, dirs_exist_ok=True)
            (target / SCHEDULER).mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.path / INDEX, target / INDEX)
        (target / SCHEDULER / SCHEDULER_CONFIG).write_text(json.dumps(self.scheduler, indent=2) + "\n")

    def _frozen_parts(self) -> list[str]:
        """Folders that the index names: a component is a library and a class, an absent one has none."""
        index = _json(self.path / INDEX)
        parts = [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]
        return [part for part in parts if part not in (UNET, SCHEDULER)]


def _json(path: Path, wanted: str = "expected this file of a pipeline folder") -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as problem:
        raise FolderError(f"{path}: {wanted}; {problem}") from None
