"""SHA-256 digests of a checkpoint's files: made while they are written, checked while they are read.

``SHA256SUMS`` in the folder has the form of coreutils: ``sha256sum -c SHA256SUMS`` checks a checkpoint without us.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import FileError

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]+)")
_CHUNK = 1 << 20
"""Bytes read at a time."""

_WORTH_A_THREAD = 1 << 16
"""Smaller pieces are hashed before they are written, not beside."""


class HashedFile:
    """A new file that is hashed while it is written; :attr:`problem` is what the operating system refused."""

    def __init__(self, path: Path) -> None:
        self.problem: OSError | None = None
        self._digest = hashlib.sha256()
        self._file = path.open("wb", buffering=0)
        self._beside = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """As of a file; both need the same bytes, which are the caller's only until this returns."""
        data = memoryview(data).cast("B")
        pending = self._beside.submit(self._digest.update, data) if len(data) >= _WORTH_A_THREAD else None
        try:
            if pending is None:
                self._digest.update(data)
            rest = data
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as problem:
            # torch tells of its own bookkeeping when a write fails
            self.problem = self.problem or problem
            raise
        finally:
            if pending is not None:
                pending.result()
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        self._beside.shutdown()
        self._file.close()

    @property
    def digest(self) -> str:
        """Of what was written, in hexadecimal."""
        return self._digest.hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of a folder's files, by name."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str] | None:
    """File name to digest, None when the folder has none; a :class:`FileError` when the file itself is damaged."""
    path = folder / SUMS_FILE
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise FileError(f"{path}: cannot be read: {problem}; resume from another checkpoint by its tag") from None
    lines = text.splitlines()
    found = {match[2]: match[1] for match in map(_LINE.fullmatch, lines) if match}
    if not text.endswith("\n") or len(found) != len(lines):
        raise FileError(
            f"{path}: is damaged: expected a SHA-256 digest and a file name in each line; resume from another "
            "checkpoint by its tag"
        )
    return found


class Verifier:
    """Checks files against ``sums``, digests by file name, in threads, while others read them; None: checks nothing."""

    def __init__(self, sums: Mapping[str, str] | None) -> None:
        self._sums = sums
        self._pool = ThreadPoolExecutor(4)
        self._found: dict[Path, Future[str]] = {}

    def begin(self, path: Path) -> None:
        """Start to hash a file, once."""
        if self._sums is not None and path not in self._found:
            self._found[path] = self._pool.submit(digest_of, path)

    def check(self, path: Path) -> None:
        """Wait for the digest of a file.

        Raises:
            FileError: it is another one than was saved, or none was saved.
            OSError: the file cannot be read.
        """
        if self._sums is None:
            return
        self.begin(path)
        expected = self._sums.get(path.name)
        if expected is None:
            raise FileError(
                f"{path}: is not in {SUMS_FILE}: that file is damaged, or this one belongs to another checkpoint; "
                "resume from another checkpoint by its tag"
            )
        found = self._found[path].result()
        if found != expected:
            raise FileError(
                f"{path}: is damaged: expected SHA-256 {expected[:12]}..., found {found[:12]}...; resume from another "
                f"checkpoint by its tag (if the change is meant: sha256sum *.pt *.json > {SUMS_FILE} in its folder)",
                more="damaged-file",
            )

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(cancel_futures=True)
