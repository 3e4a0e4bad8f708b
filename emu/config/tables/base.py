"""What all tables share: bounded numbers, descriptions, and the base of tables.

Annotations are evaluated here, not kept as text: msgspec would compile each of them at every start.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Count0 = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Tokens0 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0, le=1e15)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "int8", "int4"]


def doc(text: str) -> Meta:
    """The description of a key."""
    return Meta(description=text)


class Table(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all tables."""
