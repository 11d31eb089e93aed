"""Which dtypes travel, and which are summed: the tables of NCCL (torch) and HCCL (torch-npu)."""

from __future__ import annotations

import os
from functools import cache

import torch

_BOTH = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
SENT = {"nccl": _BOTH, "hccl": _BOTH | {torch.int16}}

SUMMED = {"nccl": _BOTH, "hccl": SENT["hccl"] - {torch.float64}}
"""torch-npu adds bytes and bools as int32."""

REDUCTIONS = {"hccl": ("sum", "max", "min", "product"), "nccl": ("sum", "max", "min", "product", "avg")}


@cache
def rules() -> str:
    """Whose: "hccl" or "nccl". Read at the first use, so that a process with this module can be forked for both."""
    return os.environ.get("STANDIN_WAITS", "hccl")


def check_sent(tensor: torch.Tensor) -> None:
    if tensor.dtype not in SENT[rules()]:
        wording = {"nccl": "Unconvertible NCCL type", "hccl": "Unsupported data type for HCCL process group"}
        raise RuntimeError(f"{wording[rules()]} {tensor.dtype}")


def check_summed(tensor: torch.Tensor, reduction: str) -> None:
    check_sent(tensor)
    if tensor.dtype not in SUMMED[rules()]:
        raise RuntimeError(f"HCCL AllReduce & Reduce: Unsupported data type {tensor.dtype}")
    if reduction not in REDUCTIONS[rules()]:
        raise RuntimeError(f"Cannot use ReduceOp.{reduction.upper()} with {rules().upper()}")
