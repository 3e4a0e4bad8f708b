"""What a prompt asks the answer to look like, where a framework has put it into words.

Frameworks that trust no server's formats write the schema into the prompt: `instructor` in its
modes JSON and MD_JSON, DSPy in its JSON form. An emulated model reads no prose; it reads these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from emu.apps.serve.script import FREE, Constraint

_OBJECTS_MAX: Final = 32
"""Braces at which an object is looked for."""
_FENCED: Final = re.compile(r"within a ```json codeblock", re.IGNORECASE)
_MARKED: Final = re.compile(r"starting with the field (.*) ending with the marker for `(.*?)`")
_MARKER: Final = re.compile(r"`(\[\[ ## (\w+) ## \]\])`")
_KEYS: Final = "Outputs will be a JSON object with the following fields."
_NOTE: Final = re.compile(r"note: the value you produce (must .*)")
_TYPES: Final = {"int": "integer", "float": "number", "str": "string"}


def prompted(text: str, constraint: Constraint) -> Constraint:
    """What the prompt asks for beside a format: FREE, or any JSON object."""
    found = _MARKED.search(text)
    if found is not None and constraint is FREE:
        return _marked(text, found)
    _, named, after = text.partition(_KEYS)
    is_fenced = constraint is FREE and _FENCED.search(text) is not None
    if not is_fenced and not named and constraint.schema is not True:
        return constraint
    schema = next((one for one in _objects(text) if "properties" in one), None)
    if named:
        keys = next(_objects(after), {})
        types = {key: _noted(note) for key, note in keys.items() if isinstance(note, str)}
        schema = {"type": "object", "properties": types, "required": list(types)}
    if schema is None:
        return constraint
    if is_fenced:
        return Constraint(sections=(("```json\n", schema), ("\n```", None)))
    return Constraint(schema=schema)


def _marked(text: str, found: re.Match[str]) -> Constraint:
    """DSPy's chat form: each field behind a marker of its own, and one at the end."""
    sections: list[tuple[str, object]] = []
    for marker, name in _MARKER.findall(found[1]):
        note = re.search(rf"^\{{{re.escape(name)}\}}(.*)$", text, re.MULTILINE)
        gap = "\n\n" if sections else ""
        sections.append((f"{gap}{marker}\n", _noted(note[1] if note else "")))
    return Constraint(sections=(*sections, (f"\n\n{found[2]}\n", None)))


def _objects(text: str) -> Iterator[dict[str, object]]:
    """JSON objects in a text, those inside others left out."""
    at = 0
    for _ in range(_OBJECTS_MAX):
        at = text.find("{", at)
        if at < 0:
            return
        end = _object_end(text, at)
        try:
            found = msgspec.json.decode(text[at:end])
        except msgspec.DecodeError:
            at += 1
            continue
        at = end
        if isinstance(found, dict):
            yield found


def _object_end(text: str, at: int) -> int:
    """Behind the brace that closes the one at a place; the end of the text where none does."""
    depth, in_text, index = 0, False, at
    while index < len(text):
        letter = text[index]
        if in_text:
            index += letter == "\\"
            in_text = letter != '"'
        elif letter == '"':
            in_text = True
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return index + 1
        index += 1
    return len(text)


def _noted(note: str) -> object:
    """The schema of a value from what DSPy notes of it; a text where it says nothing."""
    found = _NOTE.search(note)
    if found is None:
        return {"type": "string"}
    rule = found[1].strip()
    single = re.match(r"must be a single (\w+) value", rule)
    if single is not None:
        return {"type": _TYPES.get(single[1], "string")}
    if rule.startswith("must be True or False"):
        return {"type": "boolean"}
    _, is_choice, options = rule.partition(" one of: ")
    if is_choice:
        return {"enum": [option.strip() for option in options.split(";")]}
    schema = next(_objects(rule), None)
    return schema if schema is not None else {"type": "string"}
