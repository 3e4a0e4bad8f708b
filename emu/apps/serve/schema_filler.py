"""Filler that a JSON schema or a regular expression accepts: what a constrained model would write.

`value_for(schema, seed)` gives one value, always the same; `text_for(pattern, seed)` one string.
A keyword that this module does not know, and that could make its value invalid, is refused with
`CannotFill` and its name: an answer that breaks the contract is worse than none.

Recursive schemas: optional properties and items are left out from a certain depth on, and of
alternatives the one that needs the least depth is taken.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from re import _parser  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any, Final

WORDS: Final = (
    "alpha", "bravo", "cluster", "delta", "engine", "flow", "gate", "harbor", "index", "jetty",
    "kernel", "layer", "model", "node", "order", "prefix", "queue", "replica", "shard", "token",
)  # fmt: skip
DEPTH_MAX: Final = 24
_OPTIONAL_DEPTH: Final = 4
"""Optional properties are written above this depth only."""
_ITEMS_MAX: Final = 10_000
_TEXT_MAX: Final = 100_000
_PATTERN_MAX: Final = 1000

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


class CannotFill(Exception):
    """The schema asks for what this module cannot write."""


def value_for(schema: Any, seed: int) -> Any:
    """A value that the schema accepts. Raises CannotFill."""
    return _Filler(schema, seed).value(schema, 0)


def json_for(schema: Any, seed: int) -> str:
    """The same as JSON text."""
    return json.dumps(value_for(schema, seed), ensure_ascii=False)


def text_for(pattern: str, seed: int) -> str:
    """A text that the whole of a regular expression matches. Raises CannotFill.

    The text is right by construction and never matched against the pattern: a client's pattern
    could keep Python's matcher busy forever.
    """
    if len(pattern) > _PATTERN_MAX:
        raise CannotFill(f"a pattern has at most {_PATTERN_MAX} characters")
    try:
        return "".join(_from_tree(_parser.parse(pattern), seed, is_first=True, is_last=True))
    except (re.error, RecursionError, OverflowError) as error:
        raise CannotFill(f"the pattern {pattern[:80]!r} is not understood: {error}") from None


class _Filler:
    def __init__(self, root: Any, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._count = 0

    def value(self, schema: Any, depth: int) -> Any:
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

    # --- composition --------------------------------------------------------------------------
    def _resolved(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """References followed, `allOf` merged, unknown keywords refused."""
        merged: dict[str, Any] = dict(schema)
        for _ in range(DEPTH_MAX):
            reference = merged.pop("$ref", None)
            parts = merged.pop("allOf", [])
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

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise CannotFill(f"only references inside the schema are supported, not {reference!r}")
        place = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                place = place[int(name)] if isinstance(place, list) else place[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise CannotFill(f"the reference {reference!r} leads nowhere") from None
        return place

    def _alternative(self, schema: Mapping[str, Any], key: str, depth: int) -> Any:
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

    def _is_null(self, schema: Any) -> bool:
        return isinstance(schema, Mapping) and schema.get("type") == "null"

    def _weight(self, schema: Any, level: int) -> int:
        """How deep a value must be at least (bounded look)."""
        if not isinstance(schema, Mapping) or level > 6:
            return 6 if level > 6 else 0
        schema = {**schema}
        if "$ref" in schema:
            target = self._target(schema.pop("$ref"))
            if isinstance(target, Mapping):
                schema = {**target, **schema}
        needed = [schema.get("properties", {}).get(name) for name in schema.get("required", [])]
        if schema.get("minItems", 0) > 0:
            needed.append(schema.get("items"))
        below = [self._weight(part, level + 1) for part in needed if part is not None]
        branches = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
        below += [min(self._weight(part, level + 1) for part in parts) for parts in branches]
        return 1 + max(below, default=0) if below or needed else 0

    # --- kinds --------------------------------------------------------------------------------
    def _kind(self, schema: Mapping[str, Any]) -> str:
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

    def _of_enum(self, schema: Mapping[str, Any]) -> Any:
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

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise CannotFill("properties is an object and required a list")
        least, most = (
            _count(schema, "minProperties", 0),
            _count(schema, "maxProperties", _ITEMS_MAX),
        )
        if schema.get("additionalProperties") is False and any(
            n not in properties for n in required
        ):
            raise CannotFill("a property is required that is not allowed")
        found: dict[str, Any] = {}
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

    def _extra(self, schema: Mapping[str, Any]) -> Any:
        extra = schema.get("additionalProperties", True)
        return extra if isinstance(extra, Mapping) else {"type": "string"}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        heads = schema.get("prefixItems", [])
        items = schema.get("items", True)
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
        found: list[Any] = []
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

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", _TEXT_MAX)
        if least > min(most, _TEXT_MAX):
            raise CannotFill(f"a string of {least} characters is not written here")
        if "pattern" in schema:
            # JSON schema searches: what is not anchored may stand anywhere; here it stands alone.
            text = text_for(str(schema["pattern"]), self._next())
        elif schema.get("format") in _FORMATS:
            self._count += 1
            number = (self._seed + self._count) % 28
            text = _FORMATS[schema["format"]].format(n=number, d=number + 1, w=self._word())
        else:
            text = self._word()
            while len(text) < least:
                text += " " + self._word()
            text = text[:most]
            text += "x" * (least - len(text))
        if not least <= len(text) <= most:
            raise CannotFill("the length does not go with the pattern or format")
        return text

    def _number(self, schema: Mapping[str, Any], kind: str) -> int | float:
        low, high = _bound(schema, "minimum", -math.inf), _bound(schema, "maximum", math.inf)
        above = schema.get("exclusiveMinimum")
        below = schema.get("exclusiveMaximum")
        if above is True or below is True:  # draft 4
            raise CannotFill("exclusive bounds are numbers")
        step = schema.get("multipleOf", 1 if kind == "integer" else None)
        if step is None:
            return self._real(low, high, above, below)
        if not isinstance(step, (int, float)) or step <= 0:
            raise CannotFill("multipleOf is a number above 0")
        first = max(low, above if above is not None else -math.inf)
        last = min(high, below if below is not None else math.inf)
        if math.isinf(first):
            first = min(0.0, last) if not math.isinf(last) else 0.0
        for offset in (self._next() % 10, 0, 1, 2):
            factor = math.ceil(first / step) + offset
            value = factor * step
            if kind == "integer":
                value = int(value) if float(value).is_integer() else value
            is_inside = low <= value <= high and (above is None or value > above)
            is_inside = is_inside and (below is None or value < below)
            if is_inside and (kind == "number" or float(value).is_integer()):
                return value
        raise CannotFill("no number is between the bounds")

    def _real(self, low: float, high: float, above: Any, below: Any) -> float:
        first = max(low, above if above is not None else -math.inf)
        last = min(high, below if below is not None else math.inf)
        if math.isinf(first) and math.isinf(last):
            return self._next() % 1000 / 10
        if math.isinf(first):
            first = last - 1
        elif math.isinf(last):
            last = first + 1
        value = (first + last) / 2
        if not low <= value <= high or (above is not None and value <= above):
            raise CannotFill("no number is between the bounds")
        if below is not None and value >= below:
            raise CannotFill("no number is between the bounds")
        return value

    # --- choices ------------------------------------------------------------------------------
    def _next(self) -> int:
        self._count += 1
        mixed = (self._seed * 2_654_435_761 + self._count * 2_246_822_519) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFFFFFF
        return mixed ^ (mixed >> 13)

    def _word(self) -> str:
        return WORDS[self._next() % len(WORDS)]


def _merged(left: Mapping[str, Any], right: Any) -> dict[str, Any]:
    """Both constraints at once. Raises CannotFill where that is not simply their union."""
    if right is True:
        return dict(left)
    if not isinstance(right, Mapping):
        raise CannotFill("false fits nothing")
    both: dict[str, Any] = _without_strangers(left, right)
    right = _without_strangers(right, left)
    for key, value in right.items():
        if key not in both or key in _IGNORED or both[key] == value:
            both[key] = value if key != "additionalProperties" or key not in both else both[key]
        elif key == "properties":
            names = {**both[key]}
            for name, schema in value.items():
                names[name] = {"allOf": [names[name], schema]} if name in names else schema
            both[key] = names
        elif key == "required":
            both[key] = [*both[key], *(name for name in value if name not in both[key])]
        elif key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            both[key] = max(both[key], value)
        elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            both[key] = min(both[key], value)
        elif key == "enum":
            both[key] = [option for option in both[key] if option in value]
        elif key == "allOf":
            both[key] = [*both[key], *value]
        elif key == "type" and {both[key], value} == {"integer", "number"}:
            both[key] = "integer"
        else:
            raise CannotFill(f"two different {key!r} at one place are not supported")
    return both


def _without_strangers(schema: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without the properties that the other one forbids."""
    kept = dict(schema)
    if other.get("additionalProperties") is False and "properties" in kept:
        allowed = other.get("properties", {})
        kept["properties"] = {k: v for k, v in kept["properties"].items() if k in allowed}
        kept["additionalProperties"] = False
    return kept


def _type_of(value: Any) -> set[str]:
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


def _count(schema: Mapping[str, Any], key: str, default: int) -> int:
    value = schema.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise CannotFill(f"{key} is a number of at least 0")
    return int(value)


def _bound(schema: Mapping[str, Any], key: str, default: float) -> float:
    value = schema.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CannotFill(f"{key} is a number")
    return value


def _missing(required: list[Any], found: Mapping[str, Any]) -> int:
    return sum(name not in found for name in required)


# --- regular expressions ------------------------------------------------------------------------
def _from_tree(tree: Any, seed: int, *, is_first: bool, is_last: bool) -> list[str]:
    """Parts of a text for a parsed pattern (Python's own parser).

    `is_first`, `is_last`: nothing comes before or after, so anchors hold.
    """
    parts: list[str] = []
    groups: dict[int, str] = {}
    size = 0
    for position, (operation, argument) in enumerate(tree):
        opens = is_first and size == 0
        closes = is_last and all(str(later) == "AT" for later, _ in tree[position + 1 :])
        parts.append(_part(str(operation), argument, seed + position, groups, opens, closes))
        size += len(parts[-1])
        if size > _TEXT_MAX:
            raise CannotFill("the pattern asks for too long a text")
    return parts


def _part(
    operation: str, argument: Any, seed: int, groups: dict[int, str], opens: bool, closes: bool
) -> str:
    if operation == "LITERAL":
        return chr(argument)
    if operation == "NOT_LITERAL":
        return "a" if argument != ord("a") else "b"
    if operation == "ANY":
        return "a"
    if operation == "IN":
        return _of_class(argument, seed)
    if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, inner = argument
        count = max(int(least), min(int(most), 3 if least == 0 else int(least) + 1))
        if count > _TEXT_MAX:
            raise CannotFill("the pattern asks for too long a text")
        pieces, size = [], 0
        for n in range(count):
            pieces += _from_tree(inner, seed + n, is_first=False, is_last=False)
            size += len(pieces[-1]) if pieces else 0
            if size > _TEXT_MAX:
                raise CannotFill("the pattern asks for too long a text")
        return "".join(pieces)
    if operation == "SUBPATTERN":
        text = "".join(_from_tree(argument[3], seed, is_first=opens, is_last=closes))
        if argument[0] is not None:
            groups[argument[0]] = text
        return text
    if operation == "ATOMIC_GROUP":
        return "".join(_from_tree(argument, seed, is_first=opens, is_last=closes))
    if operation == "BRANCH":
        branches = argument[1]
        branch = branches[seed % len(branches)]
        return "".join(_from_tree(branch, seed, is_first=opens, is_last=closes))
    if operation == "AT":
        where = str(argument)
        if (where.startswith("AT_BEGINNING") and opens) or (where.startswith("AT_END") and closes):
            return ""
        raise CannotFill("the pattern has an anchor that is not at an end")
    if operation == "GROUPREF" and argument in groups:
        return groups[argument]
    raise CannotFill(f"the pattern uses {operation.lower()}, which is not supported")


def _of_class(items: Any, seed: int) -> str:
    candidates: list[str] = []
    is_negated = False
    for operation, argument in items:
        name = str(operation)
        if name == "NEGATE":
            is_negated = True
        elif name == "LITERAL":
            candidates.append(chr(argument))
        elif name == "RANGE":
            low, high = argument
            candidates += [chr(low), chr(high), chr(low + seed % (high - low + 1))]
        elif name == "CATEGORY":
            shown = {"DIGIT": "3170", "SPACE": " ", "WORD": "aZ_9"}
            kind = str(argument).removeprefix("CATEGORY_")
            opposite = {"NOT_DIGIT": "a", "NOT_SPACE": "a", "NOT_WORD": "-"}
            candidates += shown.get(kind) or opposite.get(kind) or ""
    if is_negated:
        for character in "aA0 -_.:/xyz~!":
            if not _is_in(character, items):
                return character
        raise CannotFill("the pattern has a class that excludes all plain characters")
    if not candidates:
        raise CannotFill("the pattern has a class that is not supported")
    return candidates[seed % len(candidates)]


def _is_in(character: str, items: Any) -> bool:
    """Whether the class (without its negation) has the character."""
    for operation, argument in items:
        name = str(operation)
        if name == "LITERAL" and ord(character) == argument:
            return True
        if name == "RANGE" and argument[0] <= ord(character) <= argument[1]:
            return True
        if name == "CATEGORY":
            kind = str(argument).removeprefix("CATEGORY_")
            test = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}.get(
                kind.removeprefix("NOT_"), ""
            )
            if test and (re.match(test, character) is not None) != kind.startswith("NOT_"):
                return True
    return False
