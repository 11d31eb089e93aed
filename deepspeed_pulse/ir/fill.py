"""Frozen work in a pipeline's idle time: what a plan says of it (DiffusionPipe, arXiv 2405.01248, section 5).

While a step trains on one batch, frozen parts (a VAE's encoder, text encoders) encode the batch of the next step. A
part is a list of layers that runs once for each microbatch; its layers may run on different ranks, in order. A rank's
row says, between which of its actions it runs which layers and starts to send which result.

Two texts, the same in plans, errors, logs and pictures:

* ``latents[0:5]@3``: layers 0 to 4 of the part ``latents`` for microbatch 3;
* ``latents[5]@3>2``: the result of the first 5 layers goes to rank 2.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.codec import Form, plain
from deepspeed_pulse.ir.fields import Fields

P = TypeVar("P", bound="Part")

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_RUN = re.compile(rf"(.+)\[{_NUMBER}:{_NUMBER}\]@{_NUMBER}")
_HAND_OVER = re.compile(rf"(.+)\[{_NUMBER}\]@{_NUMBER}>{_NUMBER}")


@dataclass(frozen=True, kw_only=True)
class FrozenLayer:
    """Cost of a frozen layer for one microbatch: ms, and bytes of its weights, its result and what it needs to run."""

    name: str
    forward_ms: float
    param_bytes: int
    output_bytes: int
    activation_bytes: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What frozen layers are to a model: their last result is read like a batch entry called ``name``.

    ``needs``: parts whose results it reads. ``targets``: layers of the model that read its result. ``ranks``: those
    that may run it, None for all.
    """

    name: str
    needs: Annotated[tuple[str, ...], Form(expected="a list of names of parts")] = ()
    targets: tuple[int, ...] = ()
    ranks: Annotated[tuple[int, ...] | None, Form(left_out=True)] = None


@dataclass(frozen=True, kw_only=True)
class FrozenPart(Part):
    """Layers without gradient, and what they cost."""

    layers: Annotated[tuple[FrozenLayer, ...], Form(some="layer")]

    @property
    def forward_ms(self) -> float:
        """Of all its layers for one microbatch."""
        return sum(layer.forward_ms for layer in self.layers)

    @property
    def param_bytes(self) -> int:
        return sum(layer.param_bytes for layer in self.layers)

    @property
    def output_bytes(self) -> int:
        """Of its result for one microbatch."""
        return self.layers[-1].output_bytes


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """Layers ``first`` to ``end - 1`` of a part for one microbatch."""

    part: str
    first: int
    end: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part}[{self.first}:{self.end}]@{self.microbatch}"


@dataclass(frozen=True, slots=True)
class HandOver:
    """The result of a part's first ``done`` layers for one microbatch starts on its way to a pipeline rank."""

    part: str
    done: int
    microbatch: int
    target_rank: int

    def __str__(self) -> str:
        return f"{self.part}[{self.done}]@{self.microbatch}>{self.target_rank}"


FrozenWork = FrozenRun | HandOver


def parse_work(text: str) -> FrozenWork:
    """Inverse of ``str`` of a :class:`FrozenRun` or :class:`HandOver`."""
    for kind, form in ((FrozenRun, _RUN), (HandOver, _HAND_OVER)):
        found = form.fullmatch(text)
        if found is not None:
            part, *numbers = found.groups()
            return kind(part, *map(int, numbers))
    raise FileError(
        f"expected frozen work such as 'latents[0:5]@3' (layers 0 to 4 for microbatch 3) or 'latents[5]@3>2' (what "
        f"5 layers gave goes to rank 2), found {text!r}"
    )


@dataclass(frozen=True, slots=True)
class Filling:
    """Frozen work of a rank: it comes before the rank's action number ``position``, or after the last one."""

    position: int
    work: FrozenWork


def _read_rows(fields: Fields, name: str) -> tuple[tuple[Filling, ...], ...]:
    wrong = fields.error(name, 'lists of [position, work] like [3, "latents[0:5]@0"], positions ascending')
    try:
        rows = plain(fields.items(name), tuple[tuple[tuple[int, str], ...], ...])
    except TypeError:
        raise wrong from None
    if any(after < before for row in rows for (before, _), (after, _) in itertools.pairwise(row)):
        raise wrong
    try:
        return tuple(tuple(Filling(position, parse_work(text)) for position, text in row) for row in rows)
    except FileError as problem:
        raise fields.error(name, str(problem)) from None


def _write_rows(rows: tuple[tuple[Filling, ...], ...]) -> Any:
    return tuple(tuple((filling.position, str(filling.work)) for filling in row) for row in rows)


_ROWS = {
    "description": 'per rank, [position, work] like [3, "latents[0:5]@0"], positions ascending',
    "type": "array",
    "items": {
        "type": "array",
        "items": {
            "type": "array",
            "prefixItems": [{"type": "integer", "minimum": 0}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
    },
}

Rows = Annotated[tuple[tuple[Filling, ...], ...], Form(read=_read_rows, write=_write_rows, schema=_ROWS)]
"""In a file ``[position, work]``."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Per rank, frozen work for the next step's batch, in order. ``solver``: who made it."""

    parts: tuple[FrozenPart, ...]
    rows: Rows
    solver: str | None = None

    def part(self, name: str) -> FrozenPart:
        """The part of that name; a ``KeyError`` where there is none."""
        return {part.name: part for part in self.parts}[name]

    def duration_ms(self, run: FrozenRun) -> float:
        return sum(layer.forward_ms for layer in self.part(run.part).layers[run.first : run.end])

    def num_bytes(self, hand_over: HandOver) -> int:
        return self.part(hand_over.part).layers[hand_over.done - 1].output_bytes

    def work_ms(self, microbatches: int) -> float:
        """Of all parts in one step of a pipeline."""
        return microbatches * sum(part.forward_ms for part in self.parts)

    def param_bytes(self, rank: int) -> int:
        """Weights on a rank: of all layers of the parts that it runs any layer of."""
        return sum(self.part(name).param_bytes for name in self.held_on(rank))

    def held_on(self, rank: int) -> tuple[str, ...]:
        """Parts whose weights a rank holds."""
        run = {work.part for work in self.runs_of(rank)}
        return tuple(part.name for part in self.parts if part.name in run)

    def runs_of(self, rank: int) -> tuple[FrozenRun, ...]:
        return tuple(filling.work for filling in self.rows[rank] if isinstance(filling.work, FrozenRun))

    def check_form(self, fields: Fields) -> None:
        check_parts(self.parts, fields)


def up_front(fill: Fill, microbatches: int, readers: Mapping[str, Sequence[int]]) -> Fill:
    """The same parts, each microbatch in one piece, before the first action: what a step without the one before needs.

    ``fill`` says which ranks hold a part's weights. ``readers``: per part, the ranks that read its result.
    """
    ranks = range(len(fill.rows))
    parts = in_order(fill.parts)
    holders = {part.name: [rank for rank in ranks if part.name in fill.held_on(rank)] for part in parts}
    rows: list[list[Filling]] = [[] for _ in ranks]
    for m in range(microbatches):
        place = {part.name: holders[part.name][m % len(holders[part.name])] for part in parts}
        for part in parts:
            here, done = place[part.name], len(part.layers)
            targets = {place[other.name] for other in parts if part.name in other.needs} | set(readers[part.name])
            rows[here].append(Filling(0, FrozenRun(part.name, 0, done, m)))
            rows[here] += [Filling(0, HandOver(part.name, done, m, to)) for to in sorted(targets - {here})]
    return Fill(parts=parts, rows=tuple(map(tuple, rows)))


def in_order(parts: Sequence[P]) -> tuple[P, ...]:
    """Parts so that what one needs comes before it.

    Raises FileError when a part needs one that is not there, or parts need each other.
    """
    known, done, found = {part.name: part for part in parts}, set[str](), list[P]()
    for part in parts:
        for name in part.needs:
            if name not in known:
                raise FileError(f"part {part.name!r} needs {name!r}; the frozen parts are {', '.join(known)}")
    while len(found) < len(parts):
        ready = [part for part in parts if part.name not in done and set(part.needs) <= done]
        if not ready:
            left = ", ".join(repr(part.name) for part in parts if part.name not in done)
            raise FileError(f"the frozen parts {left} need each other's results; none of them could run first")
        found += ready
        done |= {part.name for part in ready}
    return tuple(found)


def is_read(part: Part, parts: Sequence[Part]) -> bool:
    """By a layer of the model, or by another part."""
    return bool(part.targets) or any(part.name in other.needs for other in parts)


def check_parts(parts: Sequence[Part], fields: Fields) -> None:
    """Raise a :class:`FileError` unless the parts have names of their own and can run one after another."""
    names = [part.name for part in parts]
    if not names or len(set(names)) != len(names):
        raise fields.error("parts", "at least one part, each with a name of its own")
    if not all(name and len(name.splitlines()) == 1 for name in names):
        raise fields.error("parts", "names of one line, none of them empty")
    if any(part.ranks is not None and len(set(part.ranks)) != len(part.ranks) for part in parts):
        raise fields.error("parts", "ranks that name each once")
    if any(part.ranks == () for part in parts):
        raise fields.error("parts", "ranks that name at least one, or none in a part that all may run")
    try:
        in_order(parts)
    except FileError as problem:
        raise fields.error("parts", f"parts that can run one after another ({problem})") from None
