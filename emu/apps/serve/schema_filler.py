"""Filler that a JSON schema accepts: what a constrained model would write.

`value_for(schema, seed)` gives one value, always the same. A keyword that this module does not
know, and that could make its value invalid, is refused with `CannotFill` and its name: an answer
that breaks the contract is worse than none.

Recursive schemas: optional properties and items are left out from a certain depth on, and of
alternatives the one that needs the least depth is taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.apps.serve.regex_filler import TEXT_MAX, CannotFill, text_for

Schema = Mapping[str, object]

WORDS: Final = (
    "alpha", "bravo", "cluster", "delta", "engine", "flow", "gate", "harbor", "index", "jetty",
    "kernel", "layer", "model", "node", "order", "prefix", "queue", "replica", "shard", "token",
)  # fmt: skip
DEPTH_MAX: Final = 24
_OPTIONAL_DEPTH: Final = 4
"""Optional properties are written above this depth only."""
_ITEMS_MAX: Final = 10_000
_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "date-time": "2024-05-17T12:30:{n:02d}Z",
        "date": "2024-05-{d:02d}",
        "time": "12:30:{n:02d}Z",
        "duration": "PT{n}S",
        "email": "{w}@example.com",
        "idn-email": "{w}@example.com",
        "hostname": "{w}.example.com",
        "ipv4": "192.0.2.{n}",
        "ipv6": "2001:db8::{n:x}",
        "uri": "https://example.com/{w}",
        "uri-reference": "/{w}",
        "iri": "https://example.com/{w}",
        "uuid": "3f2b8c1e-5a4d-4e6f-8b7a-0000000000{n:02x}",
        "json-pointer": "/{w}",
        "regex": "{w}",
    }
)
_IGNORED: Final = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
        "examples", "deprecated", "readOnly", "writeOnly", "strict", "discriminator", "nullable",
        "additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems",
        "contentEncoding", "contentMediaType", "$anchor", "propertyOrdering",
    }
)  # fmt: skip
"""They do not constrain what is written here: no property is written that is not listed."""
_KNOWN: Final = frozenset(
    {
        "type", "properties", "required", "items", "prefixItems", "enum", "const", "anyOf",
        "oneOf", "allOf", "$ref", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength",
        "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf", "minProperties", "maxProperties",
    }
)  # fmt: skip
_ANNOTATED_TYPES: Final = ("object", "array", "string", "integer", "number", "boolean", "null")


def value_for(schema: object, seed: int) -> object:
    """A value that the schema accepts. Raises CannotFill."""
    return _Filler(schema, seed).value(schema, 0)


def json_for(schema: object, seed: int) -> str:
    """The same as JSON text."""
    return json.dumps(value_for(schema, seed), ensure_ascii=False)


class _Filler:
    def __init__(self, root: object, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._count = 0

    def value(self, schema: object, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise CannotFill(f"the schema nests more than {DEPTH_MAX} levels")
        if schema is True or schema == {}:
            return self._word()
        if not isinstance(schema, Mapping):
            raise CannotFill(
                "a schema is an object" if schema is not False else "false fits nothing"
            )
        schema = self._resolved(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._of_enum(schema)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._alternative(schema, key, depth)
        kind = self._kind(schema)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        return None if kind == "null" else self._next() % 2 == 0

    def _resolved(self, schema: Schema, depth: int) -> Schema:
        """References followed, `allOf` merged, unknown keywords refused."""
        merged: dict[str, object] = dict(schema)
        for _ in range(DEPTH_MAX):
            reference = merged.pop("$ref", None)
            parts = _list(merged, "allOf")
            merged.pop("allOf", None)
            if reference is None and not parts:
                break
            if reference is not None:
                parts = [self._target(reference), *parts]
            for part in parts:
                merged = _merged(merged, part)
        else:
            raise CannotFill("references go in a circle")
        for key in merged:
            if key not in _KNOWN and key not in _IGNORED and not key.startswith("x-"):
                raise CannotFill(f"the keyword {key!r} is not supported")
        return merged

    def _target(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise CannotFill(f"only references inside the schema are supported, not {reference!r}")
        place = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                if isinstance(place, list):
                    place = place[int(name)]
                elif isinstance(place, Mapping):
                    place = place[name]
                else:
                    raise CannotFill(f"the reference {reference!r} leads nowhere")
            except (KeyError, IndexError, ValueError):
                raise CannotFill(f"the reference {reference!r} leads nowhere") from None
        return place

    def _alternative(self, schema: Schema, key: str, depth: int) -> object:
        rest = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}
        branches = schema[key]
        if not isinstance(branches, list) or not branches:
            raise CannotFill(f"{key} is a list that is not empty")
        others = {k: v for k, v in schema.items() if k in ("anyOf", "oneOf") and k != key}
        if others:
            raise CannotFill("anyOf beside oneOf is not supported")
        order = list(range(len(branches)))
        if depth < _OPTIONAL_DEPTH:
            order = [i for i in order if not self._is_null(branches[i])] or order
        else:
            order.sort(key=lambda i: self._weight(branches[i], 0))
        problem: CannotFill | None = None
        for index in order:
            try:
                branch = branches[index]
                both = _merged(rest, branch) if isinstance(branch, Mapping) and rest else branch
                return self.value(both, depth + 1)
            except CannotFill as error:
                problem = error
        assert problem is not None
        raise problem

    def _is_null(self, schema: object) -> bool:
        return isinstance(schema, Mapping) and schema.get("type") == "null"

    def _weight(self, schema: object, level: int) -> int:
        """How deep a value must be at least (bounded look)."""
        if not isinstance(schema, Mapping) or level > 6:
            return 6 if level > 6 else 0
        own: dict[str, object] = {**schema}
        if "$ref" in own:
            target = self._target(own.pop("$ref"))
            if isinstance(target, Mapping):
                own = {**target, **own}
        properties = _object(own, "properties")
        needed = [properties.get(name) for name in _names(own, "required")]
        if _count(own, "minItems", 0) > 0:
            needed.append(own.get("items"))
        below = [self._weight(part, level + 1) for part in needed if part is not None]
        branches = [parts for key in ("anyOf", "oneOf") if (parts := _list(own, key))]
        below += [min(self._weight(part, level + 1) for part in parts) for parts in branches]
        return 1 + max(below, default=0) if below or needed else 0

    def _kind(self, schema: Schema) -> str:
        given = schema.get("type")
        if isinstance(given, list):
            kinds = [kind for kind in given if kind != "null"] or given
            given = kinds[0] if kinds else None
        if given is None:
            for kind, keys in (
                ("object", ("properties", "required", "minProperties")),
                ("array", ("items", "prefixItems", "minItems")),
                ("number", ("minimum", "maximum", "multipleOf", "exclusiveMinimum")),
            ):
                if any(key in schema for key in keys):
                    return kind
            return "string"
        if given not in _ANNOTATED_TYPES:
            raise CannotFill(f"there is no type {given!r}")
        return str(given)

    def _of_enum(self, schema: Schema) -> object:
        options = schema["enum"]
        if not isinstance(options, list) or not options:
            raise CannotFill("enum is a list that is not empty")
        kinds = schema.get("type")
        if kinds is not None:
            allowed = kinds if isinstance(kinds, list) else [kinds]
            options = [option for option in options if _type_of(option) & set(allowed)]
            if not options:
                raise CannotFill("no value of enum has the type")
        return options[self._next() % len(options)]

    def _object(self, schema: Schema, depth: int) -> dict[str, object]:
        properties, required = _object(schema, "properties"), _names(schema, "required")
        least, most = (
            _count(schema, "minProperties", 0),
            _count(schema, "maxProperties", _ITEMS_MAX),
        )
        if schema.get("additionalProperties") is False and any(
            n not in properties for n in required
        ):
            raise CannotFill("a property is required that is not allowed")
        found: dict[str, object] = {}
        names = [*properties, *(name for name in required if name not in properties)]
        for name in names:
            is_required = name in required
            if not is_required and (
                depth >= _OPTIONAL_DEPTH or len(found) + _missing(required, found) >= most
            ):
                continue
            try:
                found[name] = self.value(properties.get(name, self._extra(schema)), depth + 1)
            except CannotFill:
                if is_required:
                    raise
        while len(found) < least:
            if schema.get("additionalProperties") is False:
                raise CannotFill("minProperties asks for more properties than there are")
            found[f"{self._word()}_{len(found)}"] = self.value(self._extra(schema), depth + 1)
        if len(found) > most:
            raise CannotFill("maxProperties is less than what is required")
        if not names and least == 0 and schema.get("additionalProperties", True) not in (False,):
            extra = self._extra(schema)
            if depth < _OPTIONAL_DEPTH and most > 0:
                found[self._word()] = self.value(extra, depth + 1)
        return found

    def _extra(self, schema: Schema) -> object:
        extra = schema.get("additionalProperties", True)
        return extra if isinstance(extra, Mapping) else {"type": "string"}

    def _array(self, schema: Schema, depth: int) -> list[object]:
        heads, items = _list(schema, "prefixItems"), schema.get("items", True)
        if isinstance(items, list):  # the older form of prefixItems
            heads, items = items, schema.get("additionalItems", True)
        least, most = _count(schema, "minItems", 0), _count(schema, "maxItems", _ITEMS_MAX)
        if least > min(most, _ITEMS_MAX):
            raise CannotFill(f"an array of {least} items is not written here")
        wanted = max(least, min(len(heads), most))
        if not heads and items is not False and depth < _OPTIONAL_DEPTH:
            wanted = max(wanted, min(2, most))
        if items is False and wanted > len(heads):
            raise CannotFill("minItems asks for more items than there are")
        found: list[object] = []
        for index in range(wanted):
            part = heads[index] if index < len(heads) else items
            for _ in range(64):
                item = self.value(part, depth + 1)
                if not schema.get("uniqueItems") or item not in found:
                    found.append(item)
                    break
            else:
                if len(found) >= least:
                    break
                raise CannotFill("uniqueItems: no further item was found")
        return found

    def _string(self, schema: Schema) -> str:
        least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", TEXT_MAX)
        if least > min(most, TEXT_MAX):
            raise CannotFill(f"a string of {least} characters is not written here")
        if "pattern" in schema:
            # JSON schema searches: what is not anchored may stand anywhere; here it stands alone.
            text = text_for(str(schema["pattern"]), self._next())
        elif (form := _FORMATS.get(str(schema.get("format")))) is not None:
            self._count += 1
            number = (self._seed + self._count) % 28
            text = form.format(n=number, d=number + 1, w=self._word())
        else:
            text = self._word()
            while len(text) < least:
                text += " " + self._word()
            text = text[:most]
            text += "x" * (least - len(text))
        if not least <= len(text) <= most:
            raise CannotFill("the length does not go with the pattern or format")
        return text

    def _number(self, schema: Schema, kind: str) -> int | float:
        low, high = _bound(schema, "minimum", -math.inf), _bound(schema, "maximum", math.inf)
        above = _bound(schema, "exclusiveMinimum", -math.inf)
        below = _bound(schema, "exclusiveMaximum", math.inf)
        first, last = max(low, above), min(high, below)
        step = schema.get("multipleOf", 1 if kind == "integer" else None)
        if step is None:
            value = _between(first, last)
            if value is None:
                return self._next() % 1000 / 10
            if low <= value <= high and above < value < below:
                return value
            raise CannotFill("no number is between the bounds")
        if not isinstance(step, (int, float)) or step <= 0:
            raise CannotFill("multipleOf is a number above 0")
        if math.isinf(first):
            first = min(0.0, last) if not math.isinf(last) else 0.0
        for offset in (self._next() % 10, 0, 1, 2):
            multiple = (math.ceil(first / step) + offset) * step
            if kind == "integer" and float(multiple).is_integer():
                multiple = int(multiple)
            is_inside = low <= multiple <= high and above < multiple < below
            if is_inside and (kind == "number" or float(multiple).is_integer()):
                return multiple
        raise CannotFill("no number is between the bounds")

    def _next(self) -> int:
        self._count += 1
        mixed = (self._seed * 2_654_435_761 + self._count * 2_246_822_519) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFFFFFF
        return mixed ^ (mixed >> 13)

    def _word(self) -> str:
        return WORDS[self._next() % len(WORDS)]


def _merged(left: Schema, right: object) -> dict[str, object]:
    """Both constraints at once. Raises CannotFill where that is not simply their union."""
    if right is True:
        return dict(left)
    if not isinstance(right, Mapping):
        raise CannotFill("false fits nothing")
    both: dict[str, object] = _without_strangers(left, right)
    right = _without_strangers(right, left)
    for key, value in right.items():
        if key not in both or both[key] == value:
            both[key] = value
        elif key not in _IGNORED:
            both[key] = _both(key, both, right)
        elif key != "additionalProperties":
            both[key] = value
    return both


def _both(key: str, left: Schema, right: Schema) -> object:
    """What a keyword says that two schemas have, differently. Raises CannotFill."""
    if key == "properties":
        names = dict(_object(left, key))
        for name, schema in _object(right, key).items():
            names[name] = {"allOf": [names[name], schema]} if name in names else schema
        return names
    if key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
        return max(_bound(left, key, -math.inf), _bound(right, key, -math.inf))
    if key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        return min(_bound(left, key, math.inf), _bound(right, key, math.inf))
    before, after = left[key], right[key]
    if isinstance(before, list) and isinstance(after, list):
        if key == "required":
            return [*before, *(name for name in after if name not in before)]
        if key == "enum":
            return [option for option in before if option in after]
        if key == "allOf":
            return [*before, *after]
    if key == "type" and {str(before), str(after)} == {"integer", "number"}:
        return "integer"
    raise CannotFill(f"two different {key!r} at one place are not supported")


def _between(first: float, last: float) -> float | None:
    """A number in the middle of two bounds, or near the one that there is; None = no bound."""
    if math.isinf(first):
        return None if math.isinf(last) else (last - 1 + last) / 2
    return (first + (first + 1 if math.isinf(last) else last)) / 2


def _without_strangers(schema: Schema, other: Schema) -> dict[str, object]:
    """The schema without the properties that the other one forbids."""
    kept = dict(schema)
    if other.get("additionalProperties") is False and "properties" in kept:
        allowed = _object(other, "properties")
        own = _object(schema, "properties")
        kept["properties"] = {k: v for k, v in own.items() if k in allowed}
        kept["additionalProperties"] = False
    return kept


def _type_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if value is None:
        return {"null"}
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {kinds[type(value)]}


def _count(schema: Schema, key: str, default: int) -> int:
    value = schema.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise CannotFill(f"{key} is a number of at least 0")
    return int(value)


def _bound(schema: Schema, key: str, default: float) -> float:
    value = schema.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CannotFill(f"{key} is a number")
    return value


def _object(schema: Schema, key: str) -> Schema:
    value = schema.get(key, {})
    if not isinstance(value, Mapping):
        raise CannotFill(f"{key} is an object")
    return value


def _list(schema: Schema, key: str) -> list[object]:
    value = schema.get(key, [])
    if not isinstance(value, list):
        raise CannotFill(f"{key} is a list")
    return value


def _names(schema: Schema, key: str) -> list[str]:
    found = [name for name in _list(schema, key) if isinstance(name, str)]
    if len(found) != len(_list(schema, key)):
        raise CannotFill(f"{key} is a list of names")
    return found


def _missing(required: list[str], found: Schema) -> int:
    return sum(name not in found for name in required)
