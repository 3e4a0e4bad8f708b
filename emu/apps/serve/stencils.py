"""Chunks of a plain answer: what differs between two tokens of it is their text alone.

What a process needs to write such an answer is one `Stencil` and a count of its tokens, so that
whatever wakes for a token makes no object and asks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Stencil(msgspec.Struct, frozen=True, array_like=True):
    """The chunks of one answer whose text is filler."""

    first: bytes
    """What comes before the text of the first token."""
    further: bytes
    """The same, of all others."""
    end: bytes
    """What comes behind a text."""
    last: bytes
    """The same, of the last token: it has the reason of the end."""
    start: int
    """The piece of the tokenizer that the first token is."""
    tokens: int
    """Of the whole answer."""

    def chunk(self, position: int, pieces: Sequence[bytes]) -> bytes:
        """One token's event. `pieces`: texts of the filler's tokens, as they stand in JSON."""
        text = pieces[(self.start + position) % len(pieces)]
        if position:
            return self.further + text + (self.end if position < self.tokens - 1 else self.last)
        return self.first + text + (self.end if self.tokens > 1 else self.last)
