"""What annotations say of a noun's file; the nouns' own files are tested in ``test_files``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.codec import Count, File, Form, read, to_data
from deepspeed_pulse.ir.fields import Fields


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Count
    share: Annotated[float, Form(above=0.0)] = 1.0


@dataclass(frozen=True, kw_only=True)
class Thing(File):
    FORMATS = ("thing/2", "thing/1")
    WHAT = "thing"

    parts: Annotated[tuple[Part, ...], Form(some="part")]
    pairs: Annotated[tuple[tuple[int, str], ...], Form(expected="pairs")] = ()
    colour: Annotated[Colour, Form(left_out=True)] = Colour.RED
    ready: bool = False
    text: Annotated[str | None, Form(key="said", place=-1)] = None
    numbers: Annotated[tuple[int, ...], Form(required=True)] = ()
    backwards: Annotated[str, Form(read=lambda fields, key: fields.text(key)[::-1], write=lambda text: text[::-1])]

    def check_form(self, fields: Fields) -> None:
        if len(self.pairs) > len(self.parts):
            raise fields.error("pairs", f"at most {len(self.parts)}")


SMALL = {"format": "thing/2", "parts": [{"size": 1}], "numbers": [], "backwards": "ab"}


def reading(change: dict[str, Any]) -> Thing:
    return read(Thing, Fields({key: value for key, value in (SMALL | change).items() if value != "gone"}, "x"))


def test_what_is_left_out_has_its_default() -> None:
    thing = reading({"colour": None, "said": None})
    assert thing == Thing(parts=(Part(size=1),), backwards="ba")
    assert Thing.from_json(thing.to_json()) == thing


def test_keys_are_written_in_the_order_of_their_places() -> None:
    thing = Thing(parts=(Part(size=2),), pairs=((3, "a"),), colour=Colour.BLUE, backwards="xy")
    assert list(thing.to_dict().items()) == [
        ("format", "thing/2"),
        ("said", None),
        ("parts", [{"size": 2, "share": 1.0}]),
        ("pairs", [[3, "a"]]),
        ("colour", "blue"),
        ("ready", False),
        ("numbers", []),
        ("backwards", "yx"),
    ]
    assert "colour" not in to_data(reading({}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "thing/3"}, "x: field 'format': expected 'thing/2', found 'thing/3'"),
        ({"part": 1}, "x: unknown field 'part' (did you mean \"parts\"?); known: format, parts, pairs, "),
        ({"parts": []}, "x: field 'parts': expected at least one part, found []"),
        ({"parts": [{"size": 0}]}, "x: parts[0]: field 'size': expected an integer >= 1, found 0"),
        ({"parts": [{"size": 1, "share": 0}]}, "field 'share': expected a finite number > 0, found 0"),
        ({"pairs": [[1, "a"], [2, "b"]]}, "field 'pairs': expected at most 1, found [[1, 'a'], [2, 'b']]"),
        ({"pairs": [[1]]}, "field 'pairs': expected pairs, found [[1]]"),
        ({"pairs": [[True, "a"]]}, "field 'pairs': expected pairs, found"),
        ({"pairs": [1]}, "field 'pairs': expected pairs, found"),
        ({"pairs": 1}, "field 'pairs': expected a list, found 1"),
        ({"colour": "green"}, "field 'colour': expected 'red' or 'blue', found 'green'"),
        ({"ready": None}, "field 'ready': expected true or false, found None"),
        ({"said": 3}, "field 'said': expected a text, found 3"),
        ({"numbers": "gone"}, "field 'numbers': expected a list, found nothing"),
        ({"numbers": [1, -1]}, "field 'numbers': expected a list of integers >= 0, found [1, -1]"),
        ({"backwards": "gone"}, "field 'backwards': expected a text, found nothing"),
    ],
)
def test_what_may_not_stand_there_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(FileError) as caught:
        reading(change)
    assert problem in str(caught.value)


def test_the_first_format_is_read_too() -> None:
    assert reading({"format": "thing/1"}).to_dict()["format"] == "thing/2"
