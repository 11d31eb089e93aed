"""Docstrings name things as ``:class:`Plan```; on a page that is code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Makes code of every role."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value)
            obj.docstring.value = text.replace("``", "`")
