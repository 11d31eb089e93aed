"""Which dtypes travel, and which are summed: the tables of NCCL (torch) and HCCL (torch-npu)."""

from __future__ import annotations

import os

import torch

WAITS = os.environ.get("STANDIN_WAITS", "hccl")
"""Whose rules: "hccl" or "nccl"."""

_BOTH = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
SENT = {"nccl": _BOTH, "hccl": _BOTH | {torch.int16}}[WAITS]

SUMMED = {"nccl": _BOTH, "hccl": SENT - {torch.float64}}[WAITS]
"""torch-npu adds bytes and bools as int32."""

REDUCTIONS = {"hccl": ("sum", "max", "min", "product"), "nccl": ("sum", "max", "min", "product", "avg")}[WAITS]


def check_sent(tensor: torch.Tensor) -> None:
    if tensor.dtype not in SENT:
        wording = {"nccl": "Unconvertible NCCL type", "hccl": "Unsupported data type for HCCL process group"}
        raise RuntimeError(f"{wording[WAITS]} {tensor.dtype}")


def check_summed(tensor: torch.Tensor, reduction: str) -> None:
    check_sent(tensor)
    if tensor.dtype not in SUMMED:
        raise RuntimeError(f"HCCL AllReduce & Reduce: Unsupported data type {tensor.dtype}")
    if reduction not in REDUCTIONS:
        raise RuntimeError(f"Cannot use ReduceOp.{reduction.upper()} with {WAITS.upper()}")
