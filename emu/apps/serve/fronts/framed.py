"""Messages between two processes over a socket, each behind its length.

They keep their order. Whatever is sent within a turn of the event loop leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from emu.process.prepared import prepared

LENGTH_BYTES: Final = 4
In = TypeVar("In")


class Framed(asyncio.Protocol, Generic[In]):
    """One end of the socket."""

    def __init__(
        self, kinds: object, on_frame: Callable[[In], None], on_end: Callable[[], None]
    ) -> None:
        """`kinds`: the union of what comes in, which is no type to mypy."""
        self._decoder: msgspec.msgpack.Decoder[In]
        self._decoder = msgspec.msgpack.Decoder(prepared(kinds))  # type: ignore[arg-type]
        self._encoder = msgspec.msgpack.Encoder()
        self._on_frame = on_frame
        self._on_end = on_end
        self._in = bytearray()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Both ends are there."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The other process has ended."""
        self._transport = None
        self._on_end()

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        buffer = self._in
        buffer += data
        at = 0
        while len(buffer) >= at + LENGTH_BYTES:
            end = at + LENGTH_BYTES + int.from_bytes(buffer[at : at + LENGTH_BYTES], "little")
            if len(buffer) < end:
                break
            self._on_frame(self._decoder.decode(buffer[at + LENGTH_BYTES : end]))
            at = end
        del buffer[:at]

    def send(self, frame: msgspec.Struct) -> None:
        """Sent at the end of this turn."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        data = self._encoder.encode(frame)
        self._out += (len(data).to_bytes(LENGTH_BYTES, "little"), data)

    def flush(self) -> None:
        """Sent now."""
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.write(b"".join(out))

    def close(self) -> None:
        """This end ends."""
        if self._transport is not None:
            self.flush()
            self._transport.close()
