"""Meta tensors in the sizes of a model's config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_pulse.errors import ConfigError


class Shapes:
    """Makes meta tensors of a microbatch size and dtype, with a look at the model's config."""

    def __init__(self, model: Any, microbatch_size: int, dtype: torch.dtype) -> None:
        self.model, self.config = model, model.config
        self.samples, self._dtype = microbatch_size, dtype

    def numbers(self, *shape: int, rows: int = 1) -> Tensor:
        """``rows`` for each sample."""
        return torch.empty(rows * self.samples, *shape, dtype=self._dtype, device="meta")

    def integers(self, *shape: int) -> Tensor:
        return torch.empty(self.samples, *shape, dtype=torch.long, device="meta")

    def table(self, *shape: int) -> Tensor:
        """Numbers that all samples share."""
        return torch.empty(*shape, dtype=self._dtype, device="meta")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a sample."""
        size = self.config.sample_size
        if size is None:
            raise ConfigError(
                f"config of {type(self.model).__name__}: sample_size is null, so the size of an example is unknown; "
                "set it in config.json"
            )
        return (size, size) if isinstance(size, int) else tuple(size)
