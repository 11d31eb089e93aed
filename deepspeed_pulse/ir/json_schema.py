"""A JSON Schema (draft 2020-12) of a file, from the annotations of its nouns.

It says what each field may hold. What fields say together (``check_form``) is more than a schema can say.
Usage: ``python -m deepspeed_pulse.ir.json_schema`` writes those that the package ships.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any, get_args, get_origin

from deepspeed_pulse.ir.choice import Decision
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.codec import File, Slot, is_noun, slots_of
from deepspeed_pulse.ir.fields import MAX_INTEGER, MAX_NUMBER
from deepspeed_pulse.ir.frozen import FrozenParts
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.run import Run

FILES: tuple[type[File], ...] = (Profile, Cluster, FrozenParts, Plan, Run, Decision)
"""What ``ds_pulse`` and the engine read and write."""

FOLDER = Path(__file__).parents[1] / "schemas"

Schema = dict[str, Any]


def file_name(file: type[File]) -> str:
    """``pulse-plan-2.json``."""
    return file.FORMATS[0].replace("/", "-") + ".json"


def schema_of(file: type[File]) -> Schema:
    """The schema of a file; nouns inside it are its ``$defs``."""
    nouns: dict[str, Schema] = {}
    whole = _object(file, nouns)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": file.FORMATS[0]}
    return {**head, **whole, **({"$defs": dict(sorted(nouns.items()))} if nouns else {})}


def _object(noun: type[Any], nouns: dict[str, Schema]) -> Schema:
    """A noun; adds the nouns that its fields hold."""
    fields: Schema = {}
    required = []
    if issubclass(noun, File):
        fields["format"], required = {"enum": list(noun.FORMATS)}, ["format"]
    for slot in slots_of(noun):
        if slot.form.after:
            fields[slot.form.after] = {"type": "integer", "minimum": 0}
            required.append(slot.form.after)
        fields[slot.key] = _field(slot, nouns)
        if not slot.may_be_left_out and "default" not in (slot.form.schema or {}):
            required.append(slot.key)
    about = " ".join((noun.__doc__ or "").split("\n\n")[0].split())
    shape = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    return {"description": about, **shape}


def _field(slot: Slot, nouns: dict[str, Schema]) -> Schema:
    found = dict(slot.form.schema) if slot.form.schema is not None else _type(slot.hint, slot, nouns)
    return {"anyOf": [found, {"type": "null"}]} if slot.may_be_null else found


def _type(hint: Any, slot: Slot, nouns: dict[str, Schema]) -> Schema:
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint), slot, nouns)
    if is_noun(hint):
        if hint.__name__ not in nouns:
            nouns[hint.__name__] = {}
            nouns[hint.__name__] = _object(hint, nouns)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if issubclass(hint, tuple):
        return _type(hint.__orig_bases__[0], slot, nouns)
    if issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if hint is int:
        return {"type": "integer", "minimum": int(slot.form.minimum), "maximum": MAX_INTEGER}
    if hint is float:
        above = slot.form.above
        least = {"minimum": slot.form.minimum} if above is None else {"exclusiveMinimum": above}
        return {"type": "number", **least, "maximum": MAX_NUMBER}
    return {"type": {str: "string", bool: "boolean"}[hint]}


def _tuple(kinds: tuple[Any, ...], slot: Slot, nouns: dict[str, Schema]) -> Schema:
    if kinds[-1] is ...:
        least = {"minItems": 1} if slot.form.some else {}
        return {"type": "array", "items": _type(kinds[0], slot, nouns), **least}
    inner = [_type(kind, slot, nouns) for kind in kinds]
    return {"type": "array", "prefixItems": inner, "minItems": len(inner), "maxItems": len(inner)}


def text_of(file: type[File]) -> str:
    """The schema as it is shipped."""
    return json.dumps(schema_of(file), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in FILES:
        (FOLDER / file_name(each)).write_text(text_of(each), encoding="utf-8")
