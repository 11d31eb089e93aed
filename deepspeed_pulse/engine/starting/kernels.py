"""What DeepSpeed compiles on a CPU: an optimizer's kernel is said before it starts and when it fails, one is skipped.

A compiler takes minutes, in which ranks wait for a lock and nothing is printed; without one its error names no knob.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.builder import OpBuilder

from deepspeed_pulse.engine.collectives import everywhere
from deepspeed_pulse.errors import ConfigError, in_words

TORCH_ADAM = "torch_adam"
"""Key of an optimizer's ``params`` with which upstream takes torch's Adam."""

_ADAM = frozenset({"adam", "adamw", "muon"})

_FUSED = {**dict.fromkeys(_ADAM, "FusedAdamBuilder"), "lamb": "FusedLambBuilder", "lion": "FusedLionBuilder"}

_ON_HOST = {**dict.fromkeys(_ADAM, "CPUAdamBuilder"), "adagrad": "CPUAdagradBuilder", "lion": "CPULionBuilder"}
"""With the optimizer's state on the host (``offload_optimizer``)."""


def kernel_of(name: str, params: Mapping[str, Any], *, offloads: bool) -> str | None:
    """Upstream's builder of the kernel that an optimizer of the config needs on a CPU; None where it needs none.

    ``offloads``: ZeRO keeps the optimizer's state on the host.
    """
    kind = name.lower()
    if kind in _ADAM and params.get(TORCH_ADAM, False):
        return None
    return _ON_HOST.get(kind, _FUSED.get(kind)) if offloads else _FUSED.get(kind)


def compile_kernel(name: str | None, params: Mapping[str, Any] | None, *, offloads: bool, is_first: bool) -> None:
    """Load the kernel that upstream's optimizer will ask for, compiled if need be; all ranks of the world call it.

    On a CPU only: a kernel of an accelerator is a matter of its installation. ``name`` is None without an optimizer in
    the config; the first rank prints. Where a rank has no such kernel and cannot compile it, all raise the ConfigError.
    """
    if name is None or get_accelerator().device_name() != "cpu":
        return
    kernel = kernel_of(name, params or {}, offloads=offloads)
    if kernel is None:
        return
    builder = get_accelerator().create_op_builder(kernel)
    switch = f'write "{TORCH_ADAM}": true in the optimizer\'s "params", or ' if name.lower() in _ADAM else ""
    way_out = f"to do without, {switch}pass a torch optimizer to deepspeed.initialize"
    if is_first and builder.name not in OpBuilder._loaded_ops and not installed_ops.get(builder.name, False):
        print(
            f'pulse: "optimizer" {name!r}: DeepSpeed compiles its CPU kernel {builder.name} now, which takes minutes '
            f"where it has not been compiled before; {way_out}",
            flush=True,
        )

    def load() -> None:
        try:
            builder.load()
        except Exception as problem:  # the compiler's, ninja's, or there is no such kernel for a CPU
            raise ConfigError(
                f'"optimizer" {name!r}: DeepSpeed has no CPU kernel for it here and cannot compile one '
                f"({in_words(problem)}); {way_out}",
                more="kernel",
            ) from problem

    everywhere(load, "deepspeed.initialize: loading the optimizer's kernel")


def skip_inference_kernel() -> None:
    """Keep upstream from compiling its CPU kernel for inference all-reduce, which training never uses.

    ``deepspeed.init_distributed`` does it, which a script may call before it makes a module: called on import. It needs
    a compiler and minutes, a process killed meanwhile leaves a lock file behind that every later start waits for, for
    ever, and every rank of every run leaves 69 MB in shared memory.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
