"""Clipping of several backbones, each by its own norm: each trains as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_pulse.engine.replaced import own_clipping
from deepspeed_pulse.errors import ConfigError

Part = tuple[torch.Tensor, torch.Tensor]
"""A gradient, or a piece of one, as the optimizer will read it; and its parameter."""


class OwnNorms:
    """Scales the gradients of each backbone before the optimizer reads them; the optimizer itself clips no more.

    Args:
        engine: its optimizer is made.
        backbone_of: index of a parameter's backbone; None for a placeholder.

    Raises:
        ConfigError: the optimizer has scaled gradients, which it unscales and clips in one, or has them on the host; or
            :meth:`problem` has one.
    """

    def __init__(self, engine: Any, backbone_of: Callable[[torch.Tensor], int | None], count: int) -> None:
        self._engine, self._backbone_of, self._count = engine, backbone_of, count
        self._max_norm = float(engine.gradient_clipping())
        if engine.fp16_enabled() and self._max_norm > 0:
            raise ConfigError(
                "gradient_clipping with fp16 and several backbones: expected 0, found "
                f"{self._max_norm:g}: gradients are unscaled and clipped in one, by one norm; use bf16, or no clipping"
            )
        if engine.zero_use_cpu_optimizer() and self._max_norm > 0:
            raise ConfigError(
                "gradient_clipping with zero_optimization.offload_optimizer and several backbones: expected 0, found "
                f"{self._max_norm:g}: gradients on the host are clipped by one norm; do without the offload, or without"
            )
        problem = self.problem()
        if problem is not None:
            raise problem

    def problem(self) -> ConfigError | None:
        """A program's own clipping, which upstream would call for all parameters in one; None without it. Local."""
        engine = self._engine
        if self._max_norm <= 0 or engine.bfloat16_enabled() or engine.zero_optimization():
            return None  # upstream calls none either
        found = own_clipping(engine)
        if found is None:
            return None
        return ConfigError(
            "clip_fp32_gradients: expected DeepSpeed's own with several backbones, each of which is clipped by its own "
            f'norm, found {found}, which would clip all in one; leave it out, or set "gradient_clipping": 0'
        )

    def clip(self, only: int | None = None) -> torch.Tensor | None:
        """Scale gradients so that the norm of each backbone is at most ``gradient_clipping``; collective.

        Called after the reduction over replicas. ``only``: of that one, where those of others are not whole. Returns
        the square of each backbone's norm before, float32, on the device, 0 of others than ``only``; None without
        clipping.
        """
        if self._max_norm <= 0:
            return None
        if isinstance(self._engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
            self._engine.optimizer.clip_grad = 0.0  # here, as a checkpoint may bring another
        parts = [(gradient, p, self._backbone_of(p)) for gradient, p in self._parts()]
        parts = parts if only is None else [part for part in parts if part[2] == only]
        squares = torch.zeros(self._count, dtype=torch.float32, device=self._engine.device)
        for gradient, parameter, index in parts:
            if index is not None and not getattr(parameter, "ds_pipe_replicated", False):
                squares[index] += gradient.detach().float().square().sum()
        dist.all_reduce(squares, group=self._engine.grid.get_pipe_parallel_group())
        if isinstance(self._engine.optimizer, DeepSpeedZeroOptimizer):  # each replica has a part of the gradients
            dist.all_reduce(squares, group=self._engine.mpu.get_data_parallel_group())
        scales = (self._max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient, _, index in parts:
            if index is not None:
                gradient.mul_(scales[index])
        return squares

    def _parts(self) -> Iterator[Part]:
        optimizer = self._engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            for index, parameters in enumerate(optimizer.params_in_partition):
                gradients = optimizer.averaged_gradients.get(index) or ()
                yield from zip(
                    (g for g in gradients if not getattr(g, "_zero_padding", False)), parameters, strict=False
                )
        elif isinstance(optimizer, BF16_Optimizer):
            for gradients, parameters in zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True):
                yield from zip(gradients, parameters, strict=True)
        else:
            yield from ((p.grad, p) for p in self._engine.module.parameters() if p.grad is not None)
