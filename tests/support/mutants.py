"""Mutants of the package, drawn at random: one small change of one line each, made by cosmic-ray's operators."""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

SAME = ("_Eq_Is", "_NotEq_IsNot", "_Is_Eq", "_IsNot_NotEq", "_Eq_IsNot", "_NotEq_Is", "NoOp")
"""Operators that leave the meaning of nearly all code as it is."""

Place = tuple[int, int]
"""Line and column."""

Range = tuple[Place, Place]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """The `occurrence`-th place of a file at which an operator of cosmic-ray's applies."""

    path: Path
    operator: str
    occurrence: int
    line: int

    def code(self) -> str:
        """The whole file, changed."""
        return str(mutate_code(self.path.read_text(), get_operator(self.operator)(), self.occurrence))

    @property
    def kind(self) -> str:
        """Of the change: `+` may become many things."""
        return self.operator.rsplit("_", 1)[0]

    @property
    def is_python(self) -> bool:
        """Not so where the star before keyword arguments became another sign."""
        try:
            compile(self.code(), str(self.path), "exec")
        except SyntaxError:
            return False
        return True

    def __str__(self) -> str:
        before, after = self.path.read_text().splitlines(), self.code().splitlines()
        changed = next((new for old, new in zip(before, after, strict=False) if old != new), after[-1])
        return f"{self.path.name}:{self.line} {self.operator.split('/')[-1]}: {changed.strip()[:100]}"


def draw(paths: list[Path], count: int, seed: int) -> list[Mutant]:
    """So many mutants, no two of one place and kind of change.

    A place is drawn by the seed and by what stands there, so a change of other lines leaves it drawn or not as it was.
    """
    drawn: list[tuple[float, Mutant]] = []
    for path in sorted(paths):
        lines, alike = path.read_text().splitlines(), Counter[str]()
        for place in _places(path):
            name = f"{seed} {path.name} {place[0].kind} {lines[place[0].line - 1].strip()}"
            alike[name] += 1
            chance = random.Random(f"{name} {alike[name]}")
            drawn.append((chance.random(), chance.choice(place)))
    drawn.sort(key=lambda entry: entry[0])
    return list(islice((mutant for _, mutant in drawn if mutant.is_python), count))


def _places(path: Path) -> list[list[Mutant]]:
    """The mutants of a file, those of one place and kind together."""
    text = path.read_text()
    hidden = _without_effect(text)
    tree = get_ast(text)
    found: dict[tuple[str, Place], list[Mutant]] = defaultdict(list)
    for name in sorted(operator_names()):
        operator_class = get_operator(name)
        if name.endswith(SAME) or operator_class.arguments():
            continue
        operator = operator_class()
        positions = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(begin <= start < end for begin, end in hidden):
                mutant = Mutant(path=path, operator=name, occurrence=occurrence, line=start[0])
                found[mutant.kind, start].append(mutant)
    return list(found.values())


def _without_effect(text: str) -> list[Range]:
    """Where that begins and ends which no test can notice.

    Annotations: nothing reads most of them when the program runs. Decorators that keep results of pure functions: with
    another size, or without them, the same results are computed again; and those that forbid to make an object of a
    base class. ``strict=True``, which asserts what holds, ``frozen=True``, ``kw_only=True`` and the star before keyword
    arguments, to which mypy holds every line: without them more is allowed, and next to nothing else changes.
    """
    hidden = []
    for parent in ast.walk(ast.parse(text)):
        for node in (*_annotated(parent), *_asserting(parent)):
            hidden.append((_start(node), _end(node)))
        for node in _decorating(parent):
            hidden.append(((node.lineno, node.col_offset - 1), _end(node)))  # it begins with its @
        hidden += _stars(parent)
    return hidden


def _start(node: ast.expr | ast.arg) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.arg) -> Place:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _annotated(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns


def _asserting(node: ast.AST) -> Iterator[ast.expr]:
    names = ("strict", "frozen", "kw_only")
    if isinstance(node, ast.keyword) and node.arg in names and ast.unparse(node.value) == "True":
        yield node.value


def _decorating(node: ast.AST) -> Iterator[ast.expr]:
    for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
        if ast.unparse(decorator).split("(")[0].split(".")[-1] in ("cache", "lru_cache", "abstractmethod"):
            yield decorator


def _stars(node: ast.AST) -> Iterator[Range]:
    if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs and not node.args.vararg:
        positional = [*node.args.posonlyargs, *node.args.args, *node.args.defaults]
        yield max([(node.lineno, node.col_offset), *map(_end, positional)]), _start(node.args.kwonlyargs[0])
