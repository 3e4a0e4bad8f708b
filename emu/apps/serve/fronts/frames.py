"""What a front and the core tell each other.

Instants are nanoseconds of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

from array import array

import msgspec

from emu.apps.serve.stencils import Stencil

Pairs = tuple[tuple[bytes, bytes], ...]


class Settings(msgspec.Struct, frozen=True, array_like=True, tag="settings"):
    """The first frame: what a front has to know."""

    host: str
    tls_cert: str
    tls_key: str
    header_timeout_s: float
    body_bytes_max: int
    pieces: list[bytes]
    """Texts of the filler's tokens, as they stand in JSON."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Listen on a port, and say `Opened`."""

    port: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Listen no longer, and let idle connections go."""

    port: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Nothing more will come: let the last bytes leave, and end."""


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """The head of an answer."""

    number: int
    status: int
    headers: Pairs


class Body(msgspec.Struct, frozen=True, array_like=True, tag="body"):
    """A piece of its body."""

    number: int
    data: bytes
    more: bool


class Plain(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """From here on `Tokens` count the answer's tokens, which the stencil makes."""

    number: int
    stencil: Stencil
    sent: int
    """Tokens that are in the body already."""


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """One token for each of these calls, due at this instant."""

    due_ns: int
    calls: bytes
    """32-bit numbers in the machine's order."""

    def numbers(self) -> array[int]:
        """The calls."""
        found = array("I")
        found.frombytes(self.calls)
        return found


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """Reset the connection of a call."""

    number: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A port is open, or why it is not."""

    port: int
    problem: str


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A call that becomes requests has come, at this instant, and is being read."""

    number: int
    came_ns: int


class Waits(msgspec.Struct, frozen=True, array_like=True, tag="waits"):
    """Its sender pauses before it is whole."""

    number: int


class Called(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    """A whole call."""

    number: int
    method: str
    scheme: str
    version: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Pairs
    server: tuple[str, int] | None
    client: tuple[str, int] | None
    body: bytes


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The client of a call has left."""

    number: int


class Took(msgspec.Struct, frozen=True, array_like=True, tag="took"):
    """So many bytes of an answer's body have been given to its socket."""

    number: int
    size: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A call is over."""

    number: int
    first_ns: int = 0
    """When the first piece of its body was written; 0 = never."""
    last_ns: int = 0
    """When the last one was."""
    is_slow: bool = False
    """Its client did not read as fast as it was written to."""


class Tally(msgspec.Struct, frozen=True, array_like=True, tag="tally"):
    """Tokens that were written since the last tally, by lateness, and the latest."""

    counts: list[int]
    worst_ns: int


ToFront = Settings | Open | Close | Stop | Head | Body | Plain | Tokens | Broken
ToCore = Opened | Begun | Waits | Called | Gone | Took | Done | Tally
