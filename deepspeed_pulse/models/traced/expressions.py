"""Expressions over sizes as plain data and back: numbers, ``["size", 3]`` and ``["sympy.Mul", ...]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from deepspeed_pulse.models.traced.names import functions


class Untellable(Exception):
    """An expression that is not made of the batch's sizes alone, or comes back as another."""


def plain(expr: Any, places: Mapping[Any, int]) -> Any:
    """``places``: number of each symbol. Raises :class:`Untellable`."""
    found = _plain(sympy.sympify(expr), places)
    if expression(found, [*places]) != expr:
        raise Untellable
    return found


def _plain(expr: Any, places: Mapping[Any, int]) -> Any:
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return ["sympy.Rational", int(expr.p), int(expr.q)]
    if isinstance(expr, sympy.Float):
        return float(expr)
    if expr in places:
        return ["size", places[expr]]
    if not expr.args:
        raise Untellable
    home = "torch" if type(expr).__module__ == functions.__name__ else "sympy"
    return [f"{home}.{type(expr).__name__}", *(_plain(one, places) for one in expr.args)]


def expression(told: Any, symbols: Sequence[Any]) -> Any:
    """The expression; raises :class:`Untellable` for what :func:`plain` did not make."""
    if not isinstance(told, list):
        return sympy.sympify(told) if isinstance(told, (bool, int, float)) else _refuse()
    kind, *parts = told
    if kind == "size":
        return symbols[parts[0]]
    home, _, name = str(kind).partition(".")
    found: Any = getattr(functions if home == "torch" else sympy, name, None)
    if not (isinstance(found, type) and issubclass(found, sympy.Basic)):
        _refuse()
    return found(*(expression(one, symbols) for one in parts))


def _refuse() -> Any:
    raise Untellable
