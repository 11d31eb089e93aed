"""Reading JSON so that every malformation is an error naming file, field, found and expected."""

from __future__ import annotations

import enum
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_pulse.errors import FileError, did_you_mean

E = TypeVar("E", bound=enum.Enum)
T = TypeVar("T")

MAX_INTEGER = 2**62
"""Largest count or size accepted: larger ones are typing errors and overflow int64 downstream."""

MAX_NUMBER = 1e15
"""Largest time or speed accepted: sums of larger ones lose their digits, or overflow."""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """One JSON object being read: typed access, and :meth:`check_keys` complains about unknown keys.

    ``where`` is the file and the path inside it, for messages.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise FileError(f"{where}: expected an object, found {_show(data)}")
        self._data: Mapping[str, Any] = data
        self.where = where

    def error(self, name: str, expected: str) -> FileError:
        found = _show(self._data[name]) if name in self._data else "nothing"
        return FileError(f"{self.where}: field {name!r}: expected {expected}, found {found}")

    def has(self, name: str, *, null: bool = False) -> bool:
        """True when the field is there; ``null``: also when it is null."""
        return name in self._data and (null or self._data[name] is not None)

    def raw(self, name: str) -> Any:
        return self._data.get(name)

    def _of_type(self, name: str, kind: type[T], expected: str) -> T:
        value = self.raw(name)
        if not isinstance(value, kind):
            raise self.error(name, expected)
        return value

    def text(self, name: str) -> str:
        return self._of_type(name, str, "a text")

    def flag(self, name: str) -> bool:
        return self._of_type(name, bool, "true or false")

    def items(self, name: str) -> list[Any]:
        return self._of_type(name, list, "a list")

    def member(self, name: str, kind: type[E]) -> E:
        """The member of an enum of texts."""
        text = self.text(name)
        try:
            return kind(text)
        except ValueError:
            raise self.error(name, " or ".join(repr(member.value) for member in kind)) from None

    def integer(self, name: str, *, minimum: int = 0) -> int:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_INTEGER:
            raise self.error(name, f"an integer >= {minimum}")
        return value

    def number(self, name: str, *, minimum: float = 0.0, above: float | None = None) -> float:
        value = self.raw(name)
        expected = f"a finite number > {above:g}" if above is not None else f"a finite number >= {minimum:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, expected)
        if abs(value) > MAX_NUMBER:
            raise self.error(name, f"{expected} and at most {MAX_NUMBER:g}")
        if not math.isfinite(value) or (value <= above if above is not None else value < minimum):
            raise self.error(name, expected)
        return float(value)

    def objects(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        return tuple(read(Fields(item, f"{self.where}: {name}[{i}]")) for i, item in enumerate(self.items(name)))

    def object(self, name: str) -> Fields:
        return Fields(self.raw(name), f"{self.where}: {name}")

    def check_format(self, formats: Sequence[str]) -> None:
        """Raise unless ``format`` is one of these, the one written today first."""
        if self.raw("format") not in formats:
            raise self.error("format", f"{formats[0]!r}")

    def check_keys(self, known: Sequence[str]) -> None:
        """Raise if the object has a key that is not in ``known``."""
        for name in self._data:
            if name not in known:
                raise FileError(
                    f"{self.where}: unknown field {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
                )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"field {name!r} occurs twice")
        found[name] = value
    return found


def read_format(text: str, where: str, expected: Sequence[str]) -> str:
    """Which of the expected formats ``text`` has."""
    fields = parse_json(text, where)
    found = fields.raw("format")
    if found not in expected:
        raise fields.error("format", " or ".join(map(repr, expected)))
    return str(found)


def parse_json(text: str, where: str) -> Fields:
    """The object that ``text`` is, none of it read yet."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise FileError(f"{where}: not a JSON file: {problem}") from None
    return Fields(data, where)


def read_file(path: str | Path) -> str:
    """Text of a UTF-8 file, or a :class:`FileError` that names it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:  # a path with a zero byte, a file that is no text
        raise FileError(f"{path}: cannot be read: {problem}") from None


def write_json(data: Mapping[str, Any]) -> str:
    """Stable text of a JSON object: same data, same bytes."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file of a ``plan_cache`` all at once, so that a reader at the same time finds a whole file or none.

    Raises FileError when the folder cannot be written to.
    """
    # processes of several hosts may have one number
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except (OSError, ValueError) as problem:
        with suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)
        told = f"cannot keep {path.name} in {path.parent}: {getattr(problem, 'strerror', None) or problem}"
        raise FileError(f"plan_cache: {told}; name another folder") from None
