"""U-Nets of packages from PyPI as their authors wrote them, small, with batches of three sizes.

They are no part of the development environment. ``make test-packages`` puts what ``tests/support/packages.txt`` names
into a folder of its own, without what these packages depend on: their torch would be another one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from support.zoo import Batch, filled
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """Where a class is, how it is made, and a batch from samples and side; ``sizes`` of three batches."""

    module: str
    kind: str
    arguments: dict[str, Any]
    batch: Callable[[int, int], Batch]
    sizes: tuple[tuple[int, int], ...] = ((2, 16), (3, 24), (1, 20))
    positional: tuple[Any, ...] = ()

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def is_here(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def model(self) -> Any:
        _operators_of_torchvision()
        kind = getattr(importlib.import_module(self.module), self.kind)
        torch.manual_seed(0)
        return filled(kind(*self.positional, **self.arguments))

    def batches(self) -> list[Batch]:
        torch.manual_seed(1)
        return [self.batch(*size) for size in self.sizes]


@cache
def _operators_of_torchvision() -> Any:
    """torchvision's wheel is built for GPUs; where it cannot load its operators, it asks for these two on import.

    No model here calls them.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def picture(channels: int, name: str = "x") -> Callable[[int, int], Batch]:
    return lambda samples, side: {name: torch.randn(samples, channels, side, side)}


def noised(samples: int, side: int) -> Batch:
    return {"x": torch.randn(samples, 3, side, side), "time": torch.randint(0, 1000, (samples,))}


def noised_1d(samples: int, side: int) -> Batch:
    return {"x": torch.randn(samples, 3, side), "time": torch.randint(0, 1000, (samples,))}


def noised_gray(samples: int, side: int) -> Batch:
    return {"x": torch.randn(samples, 1, side, side), "timesteps": torch.randint(0, 1000, (samples,))}


_DDPM = "denoising_diffusion_pytorch.denoising_diffusion_pytorch"
_SMP = {"encoder_name": "resnet18", "encoder_weights": None, "in_channels": 3, "classes": 2}

PACKAGED = {
    "denoising-diffusion-pytorch Unet": Packaged(
        module=_DDPM, kind="Unet", arguments={"dim": 16, "dim_mults": (1, 2), "flash_attn": False}, batch=noised
    ),
    "denoising-diffusion-pytorch Unet1D": Packaged(
        module=f"{_DDPM}_1d",
        kind="Unet1D",
        arguments={"dim": 16, "dim_mults": (1, 2), "channels": 3},
        batch=noised_1d,
    ),
    "segmentation-models-pytorch Unet": Packaged(
        module="segmentation_models_pytorch",
        kind="Unet",
        arguments=_SMP,
        batch=picture(3),
        sizes=((2, 64), (3, 96), (1, 128)),
    ),
    "segmentation-models-pytorch UnetPlusPlus": Packaged(
        module="segmentation_models_pytorch",
        kind="UnetPlusPlus",
        arguments=_SMP,
        batch=picture(3),
        sizes=((2, 64), (3, 96), (1, 128)),
    ),
    "monai UNet": Packaged(
        module="monai.networks.nets",
        kind="UNet",
        arguments={
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": (8, 16, 32),
            "strides": (2, 2),
            "num_res_units": 2,
        },
        batch=picture(1),
    ),
    "monai BasicUNet": Packaged(
        module="monai.networks.nets",
        kind="BasicUNet",
        arguments={"spatial_dims": 2, "features": (8, 8, 16, 16, 32, 8)},
        batch=picture(1),
        sizes=((2, 32), (3, 48), (1, 64)),
    ),
    "monai DiffusionModelUNet": Packaged(
        module="monai.networks.nets",
        kind="DiffusionModelUNet",
        arguments={
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "channels": (8, 16),
            "attention_levels": (False, True),
            "norm_num_groups": 4,
            "num_res_blocks": 1,
            "num_head_channels": 8,
        },
        batch=noised_gray,
    ),
    "monai SegResNet": Packaged(
        module="monai.networks.nets",
        kind="SegResNet",
        arguments={"spatial_dims": 2, "init_filters": 8},
        batch=picture(1),
        sizes=((2, 32), (3, 48), (1, 64)),
    ),
    "monai UNETR": Packaged(
        module="monai.networks.nets",
        kind="UNETR",
        arguments={
            "in_channels": 1,
            "out_channels": 2,
            "img_size": (32, 32),
            "feature_size": 8,
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_heads": 4,
            "spatial_dims": 2,
        },
        batch=picture(1, "x_in"),
        sizes=((2, 32), (3, 32)),
    ),
    "dynamic-network-architectures PlainConvUNet": Packaged(
        module="dynamic_network_architectures.architectures.unet",
        kind="PlainConvUNet",
        positional=(1, 3, (8, 16, 32), nn.Conv2d, 3, (1, 2, 2), 1, 2, 1),
        arguments={
            "conv_bias": True,
            "norm_op": nn.InstanceNorm2d,
            "norm_op_kwargs": {"affine": True},
            "nonlin": nn.LeakyReLU,
            "nonlin_kwargs": {"inplace": True},
        },
        batch=picture(1),
    ),
}
"""Package and class to how it is made."""
