"""One layer with experts in parts, in the order in which they are computed."""

from __future__ import annotations

from typing import NamedTuple


class LayerParts(NamedTuple):
    """One layer with experts, for some tokens, without its core attention; in seconds."""

    before_s: float
    """From its start to core attention."""
    after_s: float
    """From core attention to the choice of experts."""
    shared_s: float
    experts_s: float
    dispatch_s: float
    combine_s: float
    processors: int
    """Held by the exchange while it runs."""
