"""What a policy of a user's own sees, and what each kind of it must have.

A class whose constructor has a parameter `context` gets a `Context` (docs/plugins.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emu.policy.books import Rates
    from emu.policy.context import Context
    from emu.policy.views import Ended, ReplicaView, RequestView, TransferView

__all__ = ["Context", "Ended", "Rates", "ReplicaView", "RequestView", "TransferView"]


def __getattr__(name: str) -> object:
    """What users import from here, loaded when they do: a plain run has no such class."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from emu.policy import books, context, views

    found: dict[str, object] = {**vars(books), **vars(context), **vars(views)}
    return found[name]
