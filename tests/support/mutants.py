"""Mutants of the package, drawn at random: one small change of one line each, made by cosmic-ray's operators."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

SAME = ("_Eq_Is", "_NotEq_IsNot", "_Is_Eq", "_IsNot_NotEq", "_Eq_IsNot", "_NotEq_Is", "NoOp")
"""Operators that leave the meaning of nearly all code as it is."""


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
    """So many mutants, no two of one place and kind of change."""
    chance = random.Random(seed)
    places = [place for path in sorted(paths) for place in _places(path)]
    chance.shuffle(places)
    drawn = (chance.choice(place) for place in places)
    return list(islice((mutant for mutant in drawn if mutant.is_python), count))


def _places(path: Path) -> list[list[Mutant]]:
    """The mutants of a file, those of one place and kind together: `+` may become many things."""
    text = path.read_text()
    hidden = _annotations(text)
    tree = get_ast(text)
    found: dict[tuple[str, tuple[int, int]], list[Mutant]] = defaultdict(list)
    for name in sorted(operator_names()):
        operator_class = get_operator(name)
        if name.endswith(SAME) or operator_class.arguments():
            continue
        operator = operator_class()
        positions = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(begin <= start < end for begin, end in hidden):
                mutant = Mutant(path=path, operator=name, occurrence=occurrence, line=start[0])
                found[name.rsplit("_", 1)[0], start].append(mutant)
    return list(found.values())


def _annotations(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end: nothing reads most of them when the program runs."""
    nodes = [node for parent in ast.walk(ast.parse(text)) for node in _annotated(parent)]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)) for node in nodes
    ]


def _annotated(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns
