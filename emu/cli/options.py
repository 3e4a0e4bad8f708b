"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number


def settings(help_text: str) -> Parameter:
    """The option --set, which takes several values."""
    return Parameter(
        name="--set", consume_multiple=True, negative=(), show_default=False, help=help_text
    )


Overrides = Annotated[tuple[str, ...], settings("KEY=VALUE, dotted keys.")]

_NOT_NEGATIVE = Parameter(validator=Number(gte=0))
Count = Annotated[int, _NOT_NEGATIVE]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, _NOT_NEGATIVE]
Seed = Annotated[int, _NOT_NEGATIVE]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))]
