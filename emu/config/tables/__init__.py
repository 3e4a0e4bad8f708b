"""The tables of a configuration file, by family; here is what all of them share.

`emu/config/schema.py` puts them together. Annotations are evaluated in all of these modules, not
kept as text: msgspec would compile each of them at every start.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from msgspec import Meta, Struct

from emu.process.annotated import Annotated

Path = tuple[str | int, ...]
"""Keys and indices that lead to a place in a file."""
Problem = tuple[Path, str]
"""A key of the file, and what is wrong with it."""
OVERRIDE = "--set"
"""Source of problems that a key of the command line has."""
PARTS_MAX = 64
"""Of a dotted key: ten times what the schema has. The time to read one grows with their square."""

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Count0 = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Tokens0 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0, le=1e15)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dtype = Literal[
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_block",
    "int8",
    "int8_wo",
    "int4",
    "int4_g32",
    "mxfp4",
    "nvfp4",
    "nvfp4_wo",
]
"""Types of weights: those that the catalogue can size and the kernels can price."""
KvDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "int8", "int4"]


OWN = "Keys of the class: its `Options` say which (docs/plugins.md)."


def doc(
    text: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> Meta:
    """The description of a key, and its bounds where no type above has them: `ge` and `gt` from
    below, `le` from above.

        limit: Annotated[int, doc("First N lines; 0 = all.", ge=0)] = 0

    At most one of `ge` and `gt`. Bounds of an integer key are whole numbers.
    """
    if gt is not None:
        return Meta(description=text, gt=gt, le=le)
    return Meta(description=text, ge=ge, le=le)


class Only(Struct, frozen=True):
    """When a key is read: while another key of its table has one of these values."""

    key: str
    values: tuple[object, ...] = ()
    """None: any but the default."""


OnlyThen = Mapping[str, Only]
"""When keys of a table are read, by key."""


class Table(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all tables."""

    only: ClassVar[OnlyThen] = MappingProxyType({})
    """Keys that are read under a condition: elsewhere another value than the default is refused."""


def tag_of(kind: type[Struct]) -> str:
    """The name of a kind of a table: what stands at the key that chooses the kind."""
    return str(kind.__struct_config__.tag)
