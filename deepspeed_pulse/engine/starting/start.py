"""What happens before a module exists: the config is found and the process group started."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from deepspeed_pulse.engine.groups import group_timeout
from deepspeed_pulse.engine.starting.joining import all_join
from deepspeed_pulse.errors import ConfigError

Config = str | os.PathLike[str] | Mapping[str, Any]


def load_config(config: Config | None) -> dict[str, Any] | None:
    """The DeepSpeed config as a dict: given, or named on the command line, or None."""
    if config is None:
        config = _config_on_command_line()
    if config is None or isinstance(config, dict):
        return config
    if isinstance(config, Mapping):
        return dict(config)
    is_path = isinstance(config, (str, os.PathLike))
    if not is_path or not Path(config).is_file():
        found = f"no file {str(config)!r}" if is_path else repr(config)
        raise ConfigError(f"config: expected a DeepSpeed configuration (a dict or a file), found {found}")
    try:
        text = Path(config).read_text(encoding="utf-8")
        found = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"config: {str(config)!r} is no JSON file: {problem}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"config: expected an object in {str(config)!r}, found a {type(found).__name__}")
    return dict(found)


def _config_on_command_line() -> str | None:
    for position, word in enumerate(sys.argv):
        if word == "--deepspeed_config" and position + 1 < len(sys.argv):
            return sys.argv[position + 1]
        if word.startswith("--deepspeed_config="):
            return word.split("=", 1)[1]
    return None


def init_distributed(timeout_seconds: float | None) -> None:
    """Start the process group when nobody has; alone on a machine no launcher is needed.

    ``timeout_seconds``: of the ``"pulse"`` block; None without one.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if "LOCAL_RANK" not in os.environ:
        if not alone or (dist.is_initialized() and dist.get_world_size() > 1):
            how = "start the script with the deepspeed launcher (deepspeed train.py) or set LOCAL_RANK"
            raise ConfigError(f"LOCAL_RANK is not set: {how}")
        os.environ["LOCAL_RANK"] = "0"
    check_device()
    warning = "" if dist.is_initialized() and torch.distributed.get_backend() == "gloo" else _unreachable()
    if warning and os.environ["LOCAL_RANK"] == "0":
        print(f"pulse: warning: {warning}", flush=True)
    if dist.is_initialized():
        return
    if alone and "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    # Ranks start and plan at different times: a short timeout is for the steps.
    options: dict[str, Any] = {}
    if timeout_seconds is not None:
        options["timeout"] = group_timeout(timeout_seconds, get_accelerator().communication_backend_name())
    try:
        with all_join(warning) if warning else nullcontext():
            deepspeed.init_distributed(**options)
    except RuntimeError as problem:
        if warning and "gloo" in str(problem).lower():
            raise ConfigError(f"joining the process group: {warning} ({problem})") from problem
        raise
    atexit.register(_end_distributed)


def check_device() -> None:
    """Raise a ConfigError where this host has fewer devices than ranks; processes of the CPU need none."""
    accelerator, place = get_accelerator(), int(os.environ["LOCAL_RANK"])
    kind, count = accelerator.device_name(), accelerator.device_count()
    if kind != "cpu" and place >= count:
        raise ConfigError(
            f"LOCAL_RANK is {place}: expected one of the {count} devices ({kind}) of this host; start as many "
            "ranks on it, or set DS_ACCELERATOR=cpu, then ranks are processes of the CPU"
        )


def _unreachable() -> str:
    """Why ranks of other hosts cannot connect to this one over gloo; empty where no reason is known."""
    here = os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", ""))
    several = here not in ("", os.environ.get("WORLD_SIZE", "1"))
    if not several or "GLOO_SOCKET_IFNAME" in os.environ or os.environ.get("MASTER_ADDR") in _THIS_MACHINE:
        return ""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        address = "no address"
    if address != "no address" and not ipaddress.ip_address(address.split("%")[0]).is_loopback:
        return ""
    return (
        f"the name of this host, {name}, stands for {address} here, which gloo gives to the ranks of other hosts: they "
        "cannot connect to it; set GLOO_SOCKET_IFNAME to the network interface that they reach (a line "
        "GLOO_SOCKET_IFNAME=eth0 in .deepspeed_env), or write the host's own address in /etc/hosts"
    )


_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")


def failure() -> BaseException | None:
    """The error after which the interpreter goes down."""
    problem: BaseException | None = getattr(sys, "last_value", None)
    return problem


def has_failed() -> bool:
    """True while the interpreter goes down after an error."""
    return failure() is not None


def _end_distributed() -> None:
    # Threads of a group that is still there while the interpreter goes down can abort the process; after a failure
    # peers are gone and waiting for them would hang.
    if torch.distributed.is_initialized() and not has_failed():
        torch.distributed.destroy_process_group()


def check_world(num_stages: Any, topology: Any) -> None:
    """The ranks of this job must make whole pipelines."""
    world = dist.get_world_size()
    if topology is not None:
        if topology.world_size() != world:
            raise ConfigError(
                f"topology: expected {world} ranks as this job has, found {topology.world_size()}; change the "
                "topology or start as many ranks"
            )
    elif num_stages is None:
        raise ConfigError("num_stages: expected the number of pipeline ranks (or topology=), found neither")
    elif isinstance(num_stages, int) and num_stages > 0:
        check_divides(world, num_stages)


def check_divides(world: int, num_stages: int) -> None:
    """Refuse a number of pipeline ranks that does not divide the job's."""
    if world % num_stages:
        divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ConfigError(
            f"num_stages: expected a divisor of the world size {world} ({divisors}), found {num_stages}; change "
            f"num_stages or start a multiple of {num_stages} ranks"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
