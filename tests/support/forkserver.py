"""A process that has imported what all ranks need, and forks a parent of ranks whenever a test asks for one.

Importing torch, DeepSpeed and diffusers takes five seconds of a processor, a fork a hundredth of one.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.children import answer, forked

WITHOUT_US = "PULSE_TESTS_WITHOUT_US"
"""Set: deepspeed_pulse is not imported, for programs of upstream's."""

LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.triton_ops",
    "torch.utils.serialization.config",
    "torch.profiler._cupti_monitor",
    "deepspeed.runtime.zero.muon.original_muon",
)
"""What ``deepspeed.initialize`` and the first step import; not every version has all of it.

The last one, which bf16 and ZeRO load, loads torch's compiler: two seconds.
"""


def imports() -> None:
    import deepspeed.runtime.pipe.engine  # noqa: F401
    from diffusers import HunyuanDiT2DModel, UNet2DConditionModel, UNet2DModel  # noqa: F401
    from transformers import CLIPTextModel  # noqa: F401

    for name in LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    if WITHOUT_US not in os.environ:
        from support import parity, toy  # noqa: F401

        from deepspeed_pulse import PipelineModule  # noqa: F401
        from deepspeed_pulse.engine.relay import engine  # noqa: F401


def status_of(request: dict[str, Any]) -> int:
    """Exit status of a parent of ranks that has run to its end."""
    _, status = os.waitpid(forked(lambda: _run(request), log=Path(request["log"])), 0)
    return os.waitstatus_to_exitcode(status)


def _run(request: dict[str, Any]) -> None:
    from support.launch import launch_ranks

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    launch_ranks(*request["arguments"])


if __name__ == "__main__":
    answer(imports, status_of)
