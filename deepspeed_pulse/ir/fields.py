"""Reading JSON so that every malformation is an error naming file, field, found and expected."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_pulse.errors import FileError, did_you_mean

T = TypeVar("T")

MAX_INTEGER = 2**62
"""Largest count or size accepted: larger ones are typing errors and overflow int64 downstream."""

MAX_NUMBER = 1e15
"""Largest time or speed accepted: sums of larger ones lose their digits, or overflow."""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """One JSON object being read: typed access, and :meth:`done` complains about unknown keys.

    ``where`` is the file and the path inside it, for messages.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise FileError(f"{where}: expected an object, found {_show(data)}")
        self._data: Mapping[str, Any] = data
        self._where = where
        self._seen: set[str] = set()

    def error(self, name: str, expected: str) -> FileError:
        found = _show(self._data[name]) if name in self._data else "nothing"
        return FileError(f"{self._where}: field {name!r}: expected {expected}, found {found}")

    def has(self, name: str) -> bool:
        """True when the field is there and not null."""
        self._seen.add(name)
        return self._data.get(name) is not None

    def raw(self, name: str) -> Any:
        self._seen.add(name)
        return self._data.get(name)

    def text(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        self._seen.add(name)
        if name not in self._data:
            return default
        value = self._data[name]
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

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

    def items(self, name: str) -> list[Any]:
        value = self.raw(name)
        if not isinstance(value, list):
            raise self.error(name, "a list")
        return value

    def integers(self, name: str, *, minimum: int = 0) -> tuple[int, ...]:
        values = self.items(name)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_INTEGER:
                raise self.error(name, f"a list of integers >= {minimum}")
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self.items(name)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise self.error(name, "a list of finite numbers")
        return tuple(float(value) for value in values)

    def objects(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        return tuple(read(Fields(item, f"{self._where}: {name}[{i}]")) for i, item in enumerate(self.items(name)))

    def object(self, name: str) -> Fields:
        return Fields(self.raw(name), f"{self._where}: {name}")

    def done(self, known: Iterable[str]) -> None:
        """Raise if the object has a key that is not in ``known``."""
        names = list(known)
        for name in self._data:
            if name not in names:
                raise FileError(
                    f"{self._where}: unknown field {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}"
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


def read_json(text: str, where: str, *formats: str) -> Fields:
    """Parse ``text`` as an object whose ``format`` is one of these, the one written today first."""
    fields = _parse(text, where)
    if fields.raw("format") not in formats:
        raise fields.error("format", f"{formats[0]!r}")
    return fields


def read_format(text: str, where: str, expected: Sequence[str]) -> str:
    """Which of the expected formats ``text`` has."""
    fields = _parse(text, where)
    found = fields.raw("format")
    if found not in expected:
        raise fields.error("format", " or ".join(map(repr, expected)))
    return str(found)


def _parse(text: str, where: str) -> Fields:
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
