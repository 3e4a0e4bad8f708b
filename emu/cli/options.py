"""How a command declares its options, and those that several commands share.

    seed: Annotated[int, Parameter(name=["--seed", "-s"], validator=Number(gte=0))] = 42

A parameter before `*` is positional, one behind it an option named like it. Its help stands in the
docstring, under `Parameters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple


class Number(NamedTuple):
    """Bounds of a number."""

    gte: float | None = None
    lte: float | None = None


class Parameter:
    """What a type does not say about an option."""

    __slots__ = ("consume_multiple", "help", "metavar", "names", "negative", "validator")

    def __init__(
        self,
        *,
        name: str | Sequence[str] = (),
        help: str = "",
        negative: str | Sequence[str] | None = None,
        consume_multiple: bool = False,
        validator: Number | None = None,
        metavar: str = "",
    ) -> None:
        self.names = (name,) if isinstance(name, str) else tuple(name)
        self.help = help
        self.negative = negative
        """None: a flag has its `--no-` form; empty: it has none."""
        self.consume_multiple = consume_multiple
        self.validator = validator
        self.metavar = metavar


def settings(help_text: str) -> Parameter:
    """The option --set, which takes several values."""
    return Parameter(name="--set", consume_multiple=True, help=help_text, metavar="KEY=VALUE")


Overrides = Annotated[tuple[str, ...], settings("KEY=VALUE, dotted keys.")]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())]
Json = Annotated[bool, Parameter(name="--json", negative=())]

_NOT_NEGATIVE = Parameter(validator=Number(gte=0))
Count = Annotated[int, _NOT_NEGATIVE]
Jobs = Annotated[int, Parameter(name=["--jobs", "-j"], validator=Number(gte=0))]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, _NOT_NEGATIVE]
Seed = Annotated[int, _NOT_NEGATIVE]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))]
