"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", consume_multiple=True, negative=(), help="KEY=VALUE, dotted keys"),
]
