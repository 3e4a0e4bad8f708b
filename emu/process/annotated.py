"""`Annotated` at a fraction of its cost, for the hundreds of keys that a configuration may have.

    from emu.process.annotated import Annotated

What it makes is what `typing.Annotated` makes. That one checks, caches and sets each attribute in
Python, which was a twentieth of the start of a run. For types without variables, which stand where
no type checker has to be told at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Annotated as Annotated

if not TYPE_CHECKING:
    _SAMPLE = Annotated[int, 0]
    _ALIAS = type(_SAMPLE)
    _ATTRIBUTES = dict(_SAMPLE.__dict__)

    class Annotated:
        """`Annotated[kind, fact, ...]`, as `typing` makes it."""

        def __class_getitem__(cls, given: tuple[object, ...]) -> object:
            kind, *facts = given
            if type(kind) is _ALIAS:
                facts = [*kind.__metadata__, *facts]
                kind = kind.__origin__
            made = object.__new__(_ALIAS)
            made.__dict__.update(
                _ATTRIBUTES, __origin__=kind, __args__=(kind,), __metadata__=tuple(facts)
            )
            return made
