"""How much of its model a replica has.

While weights arrive they are counted in segments: the embedding, each layer, the head. What is
counted belongs to one load: it is forgotten when that is over or given up, and with the process.
"""

from __future__ import annotations

from typing import final


@final
class Weights:
    """The weights of one replica."""

    are_loaded: bool
    """All of them are there."""
    segments_ready: int
    """Of a load under way, what has arrived, from the embedding on; 0 = no load, or nothing yet."""

    __slots__ = ("are_loaded", "segments_ready")

    def __init__(self, *, are_loaded: bool) -> None:
        self.are_loaded = are_loaded
        self.segments_ready = 0

    def begin(self) -> None:
        """A load begins, or there will be none: what an earlier one has brought does not count."""
        self.segments_ready = 0

    def arrive(self, segments: int) -> None:
        """So many segments are there now."""
        self.segments_ready = segments

    def complete(self) -> None:
        """All of them have arrived."""
        self.are_loaded = True

    def drop(self) -> None:
        """They are gone, with all that a load has brought."""
        self.are_loaded = False
        self.segments_ready = 0

    def ready(self, layers: int) -> int:
        """Segments that can be used, of a model with so many layers."""
        return layers + 2 if self.are_loaded else self.segments_ready
