"""Nouns as JSON: a frozen dataclass is written and read by the annotations of its fields.

A field's name is its key and its type says what may stand there: texts, flags, integers and numbers >= 0, members of an
enum, other nouns, tuples of all these (lists in a file). A field with a default may be left out of a file, or be null.
What a type does not say, a :class:`Form` does: ``gap: Annotated[float, Form(minimum=-1.0)]``.

What several fields say together is for the noun's own ``check_form(fields)``, which raises
``fields.error(name, expected)``. A noun that is a whole file is a :class:`File`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from deepspeed_pulse.ir.fields import MAX_INTEGER, Fields, parse_json, read_file, write_json

T = TypeVar("T")
F = TypeVar("F", bound="File")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a field stands in a file.

    Attributes:
        minimum, above: of a number.
        some: what at least one of must be there, in a list: "layer".
        expected: what is said of a list with other things in it.
        key: in the file; None: the field's name.
        after: a property that stands before the field in a file; ``check_form`` compares it.
        required: the field's default does not stand for what is missing.
        left_out: is not written while it has its default.
        place: fields are written in the order of their places, those of one place in the order of the class.
        read: what to do instead of what the type says.
        write: makes of a value what is written in its place.
        schema: what a JSON Schema says of a field with ``read`` or ``write``; one with a default may be left out.
    """

    minimum: float = 0
    above: float | None = None
    some: str | None = None
    expected: str | None = None
    key: str | None = None
    after: str | None = None
    required: bool = False
    left_out: bool = False
    place: int = 0
    read: Callable[[Fields, str], Any] | None = None
    write: Callable[[Any], Any] | None = None
    schema: Mapping[str, Any] | None = None


Count = Annotated[int, Form(minimum=1)]


class File:
    """A dataclass that is all that a file holds. ``FORMATS``: those that are read, the one that is written first."""

    FORMATS: ClassVar[tuple[str, ...]]
    WHAT: ClassVar[str]
    """Stands for a path in errors where there is none."""

    def to_dict(self) -> dict[str, Any]:
        return dict(to_data(self))

    def to_json(self) -> str:
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls: type[F], text: str, where: str | None = None) -> F:
        """Read a file's text; a :class:`FileError` names ``where`` and the field that is wrong."""
        return cls.from_fields(parse_json(text, where or cls.WHAT))

    @classmethod
    def from_fields(cls: type[F], fields: Fields) -> F:
        return read(cls, fields)

    @classmethod
    def load(cls: type[F], path: str | Path) -> F:
        return cls.from_json(read_file(path), str(path))


def to_data(value: Any) -> Any:
    """A noun, or what stands in one, as ``json`` takes it."""
    if is_noun(value):
        found: dict[str, Any] = {"format": value.FORMATS[0]} if isinstance(value, File) else {}
        for slot in sorted(slots_of(type(value)), key=lambda slot: slot.form.place):
            slot.write(value, found)
        return found
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_data(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def read(noun: type[T], fields: Fields, **given: Any) -> T:
    """The noun that ``fields`` hold, except for what is ``given`` of it.

    Raises FileError when a field is missing, unknown, or holds what it may not.
    """
    check_keys(noun, fields)
    slots = slots_of(noun)
    found = noun(**{slot.name: given[slot.name] if slot.name in given else slot.read(fields) for slot in slots})
    if hasattr(found, "check_form"):
        found.check_form(fields)
    return found


def check_keys(noun: type[Any], fields: Fields) -> None:
    """Raise for a format that the noun does not have, and for a key that is none of its fields."""
    slots = slots_of(noun)
    known = [slot.key for slot in slots] + [slot.form.after for slot in slots if slot.form.after]
    if issubclass(noun, File):
        fields.check_format(noun.FORMATS)
        known.insert(0, "format")
    fields.check_keys(known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A field. ``hint``: its type without None. ``default``: MISSING where it must be in a file."""

    name: str
    hint: Any
    form: Form
    default: Any

    @property
    def key(self) -> str:
        return self.form.key or self.name

    @property
    def may_be_left_out(self) -> bool:
        return self.default is not dataclasses.MISSING

    @property
    def may_be_null(self) -> bool:
        """Null stands for a default, flags apart."""
        return self.may_be_left_out and self.hint is not bool

    def write(self, noun: Any, data: dict[str, Any]) -> None:
        value = getattr(noun, self.name)
        if self.form.after:
            data[self.form.after] = getattr(noun, self.form.after)
        if not (self.form.left_out and value == self.default):
            data[self.key] = to_data(value if value is None or self.form.write is None else self.form.write(value))

    def read(self, fields: Fields) -> Any:
        if self.may_be_left_out and not fields.has(self.key, null=self.hint is bool):
            return self.default
        if self.form.read is not None:
            return self.form.read(fields, self.key)
        if get_origin(self.hint) is tuple:
            return self._read_tuple(fields, self.hint)
        if is_noun(self.hint):
            return read(self.hint, fields.object(self.key))
        if issubclass(self.hint, tuple):
            return self.hint(self._read_tuple(fields, self.hint.__orig_bases__[0]))
        if self.hint is int:
            return fields.integer(self.key, minimum=int(self.form.minimum))
        if self.hint is float:
            return fields.number(self.key, minimum=self.form.minimum, above=self.form.above)
        if issubclass(self.hint, enum.Enum):
            return fields.member(self.key, self.hint)
        return {str: fields.text, bool: fields.flag}[self.hint](self.key)

    def _read_tuple(self, fields: Fields, hint: Any) -> tuple[Any, ...]:
        kind = get_args(hint)[0]
        found: tuple[Any, ...]
        if is_noun(kind):
            found = fields.objects(self.key, functools.partial(read, kind))
        else:
            try:
                found = plain(fields.items(self.key), hint)
            except TypeError:
                raise fields.error(self.key, self.form.expected or _LISTS[kind]) from None
        if self.form.some and not found:
            raise fields.error(self.key, f"at least one {self.form.some}")
        return found


_LISTS = {int: "a list of integers >= 0", str: "a list of texts"}


def plain(value: Any, hint: Any) -> Any:
    """Lists in lists as tuples; a TypeError where they hold anything but what the type says."""
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if not isinstance(value, list) or (kinds[-1] is not ... and len(kinds) != len(value)):
            raise TypeError
        return tuple(plain(item, kinds[0] if kinds[-1] is ... else kinds[i]) for i, item in enumerate(value))
    if not isinstance(value, hint) or isinstance(value, bool) or (hint is int and not 0 <= value <= MAX_INTEGER):
        raise TypeError
    return value


def is_noun(thing: Any) -> bool:
    """True for a dataclass: what is an object in a file."""
    return dataclasses.is_dataclass(thing)


_SLOTS: dict[type[Any], tuple[Slot, ...]] = {}
"""Of the classes that were met."""


def slots_of(noun: type[Any]) -> tuple[Slot, ...]:
    """The fields of a noun, in the order of its class."""
    if noun not in _SLOTS:
        hints = get_type_hints(noun, include_extras=True)
        _SLOTS[noun] = tuple(_slot(field, hints[field.name]) for field in dataclasses.fields(noun))
    return _SLOTS[noun]


def _slot(field: dataclasses.Field[Any], hint: Any) -> Slot:
    form = Form()
    if get_origin(hint) is Annotated:
        hint, form = get_args(hint)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
        default = None if default is dataclasses.MISSING else default
    return Slot(name=field.name, hint=hint, form=form, default=dataclasses.MISSING if form.required else default)
