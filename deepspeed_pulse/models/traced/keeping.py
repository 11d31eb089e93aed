"""What leaves gave in a trace, kept in a ``plan_cache`` folder by content.

Running the leaves without numbers is most of a trace's time. The next start runs only the model's code between leaves,
and reads the shapes of the leaves' results here. A file is named by a hash of all that they depend on, so nothing in
the folder ever goes stale (:mod:`.content`). It is plain JSON: sizes are expressions of the batch's sizes, by number.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch

from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.models.traced.alike import Result, given
from deepspeed_pulse.models.traced.expressions import Untellable, expression, plain
from deepspeed_pulse.models.traced.names import pytree

FORMAT = "pulse-leaves/1"

WORTH_KEEPING_SECONDS = 1.0
"""What was traced faster is traced again."""

LONGEST_WAIT_SECONDS = 60.0
"""After that a process traces by itself, though the one that it waits for has not finished."""


class Leaves:
    """Results of leaves, by path and by what they are given. ``added``: those of this trace that were not kept yet."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._kept = dict(kept or {})
        self.added: dict[str, Any] = {}
        self._places: dict[Any, int] = {}
        self._env: Any = None

    def begin(self, symbols: Sequence[Any], env: Any) -> None:
        """For a trace with these symbols as the batch's sizes, in order."""
        self._places, self._env = {symbol: at for at, symbol in enumerate(symbols)}, env
        self._numbered = {symbol: sympy.Symbol(f"size{at}") for symbol, at in self._places.items()}

    def name(self, path: str, leaves: Sequence[Any], spec: Any) -> str:
        """Of a call of the leaf at a path."""
        return json.dumps([path, given(leaves, lambda expr: str(expr.xreplace(self._numbered))), str(spec)])

    def find(self, name: str) -> Result | None:
        """What was kept for a call; the guards that it met hold from now on."""
        if name not in self._kept:
            return None
        forms, spec, once, guards = self._kept[name]
        symbols = [*self._places]
        for guard in guards:
            self._env.evaluate_expr(expression(guard, symbols))
        made = tuple(None if form is None else self._form(form, symbols) for form in forms)
        return Result(forms=made, spec=pytree.treespec_loads(spec), once=once)

    def add(self, name: str, result: Result, guards: Sequence[Any]) -> None:
        """Keep a result, and the guards that its leaf met, if they can be told."""
        try:
            forms = [None if form is None else self._plain_form(form) for form in result.forms]
            met = [plain(guard.expr, self._places) for guard in guards]
            self.added[name] = [forms, pytree.treespec_dumps(result.spec), result.once, met]
        except (Untellable, NotImplementedError):  # the latter of a structure that torch cannot write
            pass

    def _plain_form(self, form: tuple[Any, ...]) -> list[Any]:
        shape, stride, dtype, device = form
        return [*([self._plain_size(size) for size in sizes] for sizes in (shape, stride)), str(dtype), str(device)]

    def _plain_size(self, size: Any) -> Any:
        return plain(size.node.expr, self._places) if isinstance(size, torch.SymInt) else size

    def _form(self, told: Sequence[Any], symbols: Sequence[Any]) -> tuple[Any, ...]:
        shape, stride = (tuple(self._size(size, symbols) for size in sizes) for sizes in told[:2])
        return shape, stride, getattr(torch, told[2].removeprefix("torch.")), torch.device(told[3])

    def _size(self, told: Any, symbols: Sequence[Any]) -> Any:
        found = self._env.replace(expression(told, symbols))
        return int(found) if found.is_number else self._env.create_symintnode(found, hint=None)

    def to_json(self) -> str:
        leaves = {**self._kept, **self.added}
        return json.dumps({"format": FORMAT, "sha256": _digest(leaves), "leaves": leaves})

    @classmethod
    def read(cls, path: Path) -> Leaves:
        """What a file has; nothing where there is none, or one that was cut short or edited, which is said."""
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"expected the format {FORMAT}, found {content['format']}")
            if content["sha256"] != _digest(content["leaves"]):
                raise ValueError("it was edited or damaged")
            return cls(content["leaves"])
        except (OSError, ValueError, TypeError, KeyError) as problem:
            print(f"pulse: the kept trace {path} is made anew: {type(problem).__name__}: {problem}", flush=True)
            return cls()


def _digest(leaves: Any) -> str:
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()


@contextmanager
def kept_leaves(path: Path | None) -> Iterator[Leaves | None]:
    """Leaves to trace with, kept in a file when the trace is done if it took time; None where nothing is to be kept.

    One process of a machine traces, the others wait for it and read. Raises :class:`FileError` for a folder that cannot
    be written to.
    """
    if path is None:
        yield None
        return
    with _first_alone(path):
        leaves, began = Leaves.read(path), time.monotonic()
        yield leaves
        if leaves.added and time.monotonic() - began >= WORTH_KEEPING_SECONDS:
            write_whole(path, leaves.to_json())


@contextmanager
def _first_alone(path: Path) -> Iterator[None]:
    """Where the file is not there yet, one process at a time; the system frees the lock of one that dies."""
    if path.exists():
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    write_whole(lock.with_suffix(".probe"), "")
    lock.with_suffix(".probe").unlink(missing_ok=True)
    with lock.open("w") as file:
        _wait(file, path)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _wait(file: Any, path: Path) -> None:
    """Until this process has the lock, or the file is there, or it took too long."""
    try:
        import fcntl
    except ImportError:  # a system without such locks: each process traces
        return
    end = time.monotonic() + LONGEST_WAIT_SECONDS
    while not path.exists() and time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return
