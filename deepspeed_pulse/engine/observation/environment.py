"""What a bug report needs: versions, accelerator, backend, hook. A part that is broken says so and hides no other.

Loaded by ``ds_pulse report``; imports the frameworks only inside :func:`environment`, as they may be what is broken.
"""

from __future__ import annotations

import glob
import os
import platform
from collections.abc import Callable, Iterator
from importlib import metadata

PACKAGES = (
    *("torch", "deepspeed", "diffusers", "transformers", "peft", "accelerate"),
    *("huggingface_hub", "safetensors", "highspy", "numpy"),
)
LIBRARIES = ("nvidia-nccl", "torch-npu", "torch_npu", "oneccl")
"""Prefixes of packages that communicate, where they are installed."""

VARIABLES = ("CUDA_", "NCCL_", "HCCL_", "ASCEND_", "GLOO_", "OMP_", "TORCH_", "DS_")
"""Prefixes of environment variables that change how ranks run; none holds a secret."""


def environment() -> Iterator[tuple[str, str]]:
    """(name, what was found) in the order to print."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "cores", str(os.cpu_count())
    installed = {str(found.metadata["Name"]) for found in metadata.distributions()}
    for name in (*PACKAGES, *sorted(name for name in installed if name.startswith(LIBRARIES))):
        yield name, version_of(name) or "not installed"
    yield "accelerator", _found(_accelerator)
    if "ASCEND_HOME_PATH" in os.environ or _cards() or _minor("torch-npu"):
        yield "ascend", _found(_ascend)
    yield "communication", _found(_backend)
    yield "hook", _found(_hook)
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            yield name, value


def local_ranks() -> int:
    """On this host, as the launcher says; 1 where it does not."""
    return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def version_of(name: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _found(look: Callable[[], str]) -> str:
    try:
        return look()
    except Exception as problem:  # whatever a broken installation raises
        return f"broken: {type(problem).__name__}: {problem}"


def _accelerator() -> str:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name, count = accelerator.device_name(), accelerator.device_count()
    if name == "cpu":
        return "cpu"
    memory = ", ".join(f"{accelerator.total_memory(index) / 1e9:.1f} GB" for index in range(count))
    return f"{name}, {count} here ({memory}); bf16 {'' if accelerator.is_bf16_supported() else 'not '}supported"


def _ascend() -> str:
    """What torch-npu needs and does not find."""
    home, torch, torch_npu = os.environ.get("ASCEND_HOME_PATH"), _minor("torch"), _minor("torch-npu")
    missing = []
    if torch_npu is None:
        missing.append(f"torch-npu is not installed: pip install torch-npu=={torch or 'the minor version of torch'}.*")
    elif torch_npu != torch:
        missing.append(f"torch-npu {torch_npu} beside torch {torch}: expected the same minor version")
    if home is None:
        missing.append("ASCEND_HOME_PATH is not set: source set_env.sh of CANN's toolkit")
    elif not os.path.isdir(home):
        missing.append(f"ASCEND_HOME_PATH: there is no folder {home}: install CANN's toolkit, source its set_env.sh")
    if not _cards():
        missing.append("there is no card (/dev/davinci0): install the driver")
    return "; ".join(missing) or f"CANN in {home}, {len(_cards())} cards"


def _cards() -> list[str]:
    return glob.glob("/dev/davinci[0-9]*")


def _minor(package: str) -> str | None:
    """Of its version, as "2.13"; None where it is not installed."""
    found = version_of(package)
    return None if found is None else ".".join(found.split(".")[:2])


def _backend() -> str:
    import torch
    from deepspeed.accelerator import get_accelerator

    name = str(get_accelerator().communication_backend_name())
    there = torch.distributed.is_available() and torch.distributed.is_backend_available(name)
    return name if there else f"{name}, which this torch does not have"


def _hook() -> str:
    from deepspeed_pulse.engine import hook
    from deepspeed_pulse.engine.waist.check import check_names

    check_names()
    if not hook.needed():
        return "not needed: this DeepSpeed asks the module for its engine"
    hook.install()
    return "in place" if hook.installed() else "cannot be put in place"
