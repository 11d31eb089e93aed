"""The stand-in's library, built once for these sources and this torch, in a folder outside of what git tracks."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

NAME = "standin_library"
SOURCES = Path(__file__).parent / "torch_npu" / "csrc"
CACHE = Path(os.environ.get("STANDIN_CACHE", Path(__file__).parents[2] / ".cache" / "standin"))


def missing() -> str | None:
    """What this machine lacks to build the library, or None."""
    lacking = [name for name in ("g++", "ninja") if shutil.which(name, path=_path()) is None]
    return f"the stand-in device needs {' and '.join(lacking)} to be built" if lacking else None


def library() -> Path:
    """The built library; one process builds it, others wait for that."""
    target = CACHE / _key() / f"{NAME}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(target)
    return target


def load() -> Any:
    """The library as a module of Python."""
    path = str(library())
    spec = importlib.util.spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _key() -> str:
    import torch

    parts = [torch.__version__.encode(), sys.version.encode(), *(p.read_bytes() for p in sorted(SOURCES.iterdir()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _path() -> str:
    """Where programs are looked for: ninja may be the virtual environment's."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _build(target: Path) -> None:
    """In a process of its own, which loads what it built; under its name only when it is whole."""
    folder = target.parent.with_suffix(".building")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "PATH": _path(), "MAX_JOBS": "2"}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"the stand-in device cannot be built:\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}")
    folder.rename(target.parent)


if __name__ == "__main__":
    from torch.utils.cpp_extension import load as build

    flags = ["-O1", "-g0", "-std=c++20"]
    build(NAME, [str(SOURCES / "standin.cpp")], build_directory=sys.argv[1], extra_cflags=flags, is_python_module=True)
