"""A stand-in for torch_npu: an asynchronous device "npu" in the host's memory, with a backend "hccl".

Upstream's own ``NPU_Accelerator`` runs on it unmodified. Own code, for tests: ``csrc/`` has the device, ``hccl`` the
messages, ``counters`` what the host waited for. Environment: ``STANDIN_KERNEL_DELAY_US``, ``STANDIN_MESSAGE_DELAY_US``,
``STANDIN_MEMORY_MB``, ``STANDIN_PLAIN_OUT_OF_MEMORY``, ``STANDIN_WAITS`` ("hccl" or "nccl"), ``STANDIN_DEVICES``;
torch-npu's own ``HCCL_BUFFSIZE`` and ``P2P_HCCL_BUFFSIZE``.
"""

import sys
import types
from typing import Any

import torch
from standin.build import load

library = load()
library.set_up()
torch.utils.rename_privateuse1_backend("npu")

from torch_npu import counters, devices, generators, memory, streams  # noqa: E402
from torch_npu.kinds import TYPES  # noqa: E402

npu: Any = types.ModuleType("torch.npu")
for _names in (devices.NAMES, streams.NAMES, memory.NAMES, generators.names(), TYPES):
    vars(npu).update(_names)
npu.set_sync_debug_mode = counters.set_sync_debug_mode
torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

from torch_npu import hccl  # noqa: E402

hccl.register()
_C = types.SimpleNamespace(_distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=hccl.Group))


def npu_geglu(x: torch.Tensor, dim: int = -1, approximate: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch-npu's, which diffusers calls where torch_npu can be imported."""
    hidden, gate = x.chunk(2, dim)
    return hidden * torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none"), gate


def npu_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, None]:
    """As torch-npu's, without the second result."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None


def npu_fusion_attention(*_: Any, **__: Any) -> Any:
    """Named by diffusers; not here."""
    raise NotImplementedError("the stand-in has no fused attention")


npu_rotary_mul = npu_fusion_attention
