"""``torch.npu.FloatTensor`` and its like: made from numbers or sizes, and classes of the tensors of that kind."""

from __future__ import annotations

from typing import Any

import torch


class _Kind(type):
    """A tensor is of a kind by its device and dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "npu" and value.dtype is cls.dtype

    def __call__(cls, *arguments: Any) -> torch.Tensor:
        if len(arguments) == 1 and not isinstance(arguments[0], int):
            return torch.tensor(arguments[0], dtype=cls.dtype, device="npu")
        return torch.empty(*arguments, dtype=cls.dtype, device="npu")


_DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
}

TYPES = {
    f"{name}Tensor": _Kind(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.npu"})
    for name, dtype in _DTYPES.items()
}
