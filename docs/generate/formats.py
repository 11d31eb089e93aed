"""The page of file formats: every field of every file, from the schemas that the package ships."""

from __future__ import annotations

import inspect
import re
from typing import Any

from deepspeed_pulse.ir.json_schema import FILES, file_name, schema_of

HEAD = """# Files

Every file is one JSON object. Its `format` says what it is. Fields without a default must be there. An unknown field is
an error that names the file and the place. Times are in ms, sizes in bytes.

Each format has a [JSON Schema](https://json-schema.org). The schemas are in the package too:
`importlib.resources.files("deepspeed_pulse") / "schemas"`. A schema says what each field may hold. What fields say
together (a list for each rank, cuts that ascend) is checked when the file is read. `ds_pulse check` checks
a whole plan.

This page is made from the annotations that read and write the files.

| file | who writes it | who reads it | schema |
| --- | --- | --- | --- |
"""

USERS = {
    "pulse-profile/1": ("`ds_pulse profile`, or you", "`ds_pulse plan`, `tune`, `show`; key `profile`"),
    "pulse-cluster/1": ("you", "`--cluster`; key `cluster`"),
    "pulse-frozen/1": ("you", "`ds_pulse plan --frozen`, `tune --frozen`"),
    "pulse-plan/2": (
        "`ds_pulse plan`, `tune`; each checkpoint; you",
        "key `plan`; `ds_pulse simulate`, `check`, `show`",
    ),
    "pulse-run/1": ("each checkpoint and each trace", "`ds_pulse report`"),
    "pulse-choice/1": ("`plan_cache`", "the next start of the same job"),
}


def page() -> str:
    """As Markdown."""
    rows, parts = [], []
    for file in FILES:
        name = file.FORMATS[0]
        link = f"[{file_name(file)}](schemas/{file_name(file)})"
        rows.append(f"| [`{name}`](#{file.WHAT.replace(' ', '-')}) | {USERS[name][0]} | {USERS[name][1]} | {link} |")
        parts.append(_part(file))
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts)


def _part(file: Any) -> str:
    schema = schema_of(file)
    text = inspect.cleandoc(file.__doc__).replace("``", "`")
    lines = [f"## {file.FORMATS[0]} {{ #{file.WHAT.replace(' ', '-')} }}", "", text, "", *_fields(schema)]
    for name, noun in schema.get("$defs", {}).items():
        lines += ["", f"**{name}**: {_plain(noun['description'])}", "", *_fields(noun)]
    return "\n".join(lines) + "\n"


def _fields(noun: dict[str, Any]) -> list[str]:
    lines = ["| field | holds | |", "| --- | --- | --- |"]
    for name, field in noun["properties"].items():
        needed = "" if name in noun["required"] else "may be left out"
        lines.append(f"| `{name}` | {_holds(field)} | {needed} |")
    return lines


def _holds(field: dict[str, Any]) -> str:
    """In words."""
    if "anyOf" in field:
        return " or ".join(_holds(each) for each in field["anyOf"])
    if "$ref" in field:
        return f"**{field['$ref'].rpartition('/')[2]}**"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "description" in field:
        return _plain(field["description"])
    if field["type"] == "array":
        if "prefixItems" in field:
            return f"a list of {len(field['prefixItems'])}: {', '.join(map(_holds, field['prefixItems']))}"
        return f"a list; each: {_holds(field['items'])}"
    return _number(field) if field["type"] in ("integer", "number") else WORDS[field["type"]]


WORDS = {"string": "a text", "boolean": "true or false", "object": "an object", "null": "null"}


def _number(field: dict[str, Any]) -> str:
    kind = "an integer" if field["type"] == "integer" else "a number"
    if "exclusiveMinimum" in field:
        return f"{kind} > {field['exclusiveMinimum']:g}"
    return f"{kind} ≥ {field['minimum']:g}" if abs(field.get("minimum", 1e15)) < 1e15 else kind


def _plain(text: str) -> str:
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")
