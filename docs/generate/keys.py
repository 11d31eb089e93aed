"""The page of the ``"pulse"`` block: every key with its values, default and meaning, from ``config.py``."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from collections.abc import Iterator

from deepspeed_pulse.config import PulseConfig

HEAD = """# The "pulse" block

The block stands in DeepSpeed's config (`ds_config.json`). Every key has a default, so `"pulse": {}` is a whole block.
`"pulse": true` means the same. `"pulse": false` means `{"enabled": false}`. With a config that has no block, training
is DeepSpeed's own. Without any config, a list whose layers stash or pop runs with the block's defaults. An unknown key
is an error.

This page is made from `deepspeed_pulse/config.py`.

| key | values | default |
| --- | --- | --- |
"""


def page() -> str:
    """As Markdown."""
    fields = PulseConfig.model_fields
    rows = [f"| [`{key}`](#{key}) | {_values(key)} | {_default(key)} |" for key in fields]
    parts = [f"## {key} {{ #{key} }}\n\n{_said(key)}\n" for key in fields]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts)


def _values(key: str) -> str:
    """What an error says was expected: of the key, or of its type."""
    field = PulseConfig.model_fields[key]
    return field.description or next(part.description for part in field.metadata if hasattr(part, "description"))


def _default(key: str) -> str:
    return f"`{json.dumps(PulseConfig.model_fields[key].default)}`"


def _said(key: str) -> str:
    text = dict(_docstrings())[key].replace("``", "`")
    return f"{text}\n\nValues: {_values(key)}. Default: {_default(key)}."


def _docstrings() -> Iterator[tuple[str, str]]:
    """A field's name and the text below it."""
    body = ast.parse(inspect.getsource(PulseConfig)).body[0].body  # type: ignore[attr-defined]
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield field.target.id, inspect.cleandoc(after.value.value)  # type: ignore[union-attr]
