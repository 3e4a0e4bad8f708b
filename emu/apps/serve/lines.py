"""The short way of a plain stream's tokens: from the count of a token to its socket.

A `Line` writes the next token of one answer, as a chunk of HTTP/1.1, each time it is asked. The
library would frame it in the same way, and take ten times as long: it has no state between two
chunks, so that it can send those before and after. Whatever is not so simple (a client that does
not read, an answer that is not filler, the last word of an answer) is the business of the task that
holds the answer: a line says False and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from emu.apps.serve.stencils import Stencil

_CRLF: Final = b"\r\n"


class Outlet:
    """Where the chunks of an answer go: a connection's transport, while it takes them at once."""

    __slots__ = ("is_lost", "is_open", "on_lost", "send")

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self.send = send
        """The transport's, past everything that frames."""
        self.is_open = True
        """The client reads as fast as it is written to, and is there."""
        self.is_lost = False
        """There is no connection any more: the client has left."""
        self.on_lost: Callable[[], None] | None = None
        """Called when that happens."""

    def lose(self) -> None:
        """The connection has ended."""
        self.is_open, self.is_lost = False, True
        if self.on_lost is not None:
            self.on_lost()

    def write(self, data: bytes) -> None:
        """A chunk."""
        if data:
            self.send(b"%x\r\n%b\r\n" % (len(data), data))


class Line:
    """Passes on the tokens of one answer, one after the other."""

    __slots__ = ("leaves", "sent")

    def __init__(self, sent: int, *, leaves: bool) -> None:
        """`sent`: tokens that have gone already."""
        self.sent = sent
        """Tokens that have been passed on."""
        self.leaves = leaves
        """A token that was passed on has left this process for its client."""

    def write(self, due_ns: int) -> bool:
        """The next token is there, and was due then: whether it has been passed on."""
        raise NotImplementedError


class SocketLine(Line):
    """Writes them to the client."""

    __slots__ = (
        "_count", "_end", "_head", "_last", "_outlet", "_pieces", "_size", "_start", "_stencil",
    )  # fmt: skip

    def __init__(self, stencil: Stencil, sent: int, outlet: Outlet, pieces: list[bytes]) -> None:
        """`sent`: tokens that have been written already. `pieces`: texts of the filler's tokens, as
        they stand in JSON."""
        super().__init__(sent, leaves=True)
        self._outlet = outlet
        self._stencil = stencil
        self._end = stencil.end + _CRLF
        self._start = stencil.start
        self._last = stencil.tokens - 1
        self._pieces = pieces
        self._count = len(pieces)
        self._size = -1
        """Of the text that `_head` is for, most of which are as long as each other."""
        self._head = b""
        """What comes before the text of a chunk, beginning with the chunk's size."""

    def write(self, due_ns: int) -> bool:
        """The next token is there: whether it has been written."""
        outlet, position = self._outlet, self.sent
        if not outlet.is_open:
            return False
        self.sent = position + 1
        if 0 < position < self._last:
            text = self._pieces[(self._start + position) % self._count]
            if len(text) != self._size:
                self._measure(len(text))
            outlet.send(b"".join((self._head, text, self._end)))
        else:
            outlet.write(self._stencil.chunk(position, self._pieces))
        return True

    def _measure(self, size: int) -> None:
        """Texts have so many bytes from now on."""
        further = self._stencil.further
        size_bytes = len(further) + size + len(self._end) - len(_CRLF)
        self._size, self._head = size, b"%x\r\n%b" % (size_bytes, further)


class Batch:
    """Answers that have a token at one instant, for the process that holds their clients."""

    __slots__ = ("_on_begin", "due_ns", "numbers")

    def __init__(self, on_begin: Callable[[int], None]) -> None:
        """`on_begin` hears of the first token of an instant: it sends what is here, and sees to it
        that what comes is sent soon."""
        self._on_begin = on_begin
        self.due_ns = -1
        self.numbers: list[int] = []

    def add(self, number: int, due_ns: int) -> None:
        """One more."""
        if self.due_ns != due_ns:
            self._on_begin(due_ns)
            self.due_ns = due_ns
        self.numbers.append(number)

    def take(self) -> list[int]:
        """What is here, for the last time."""
        numbers, self.numbers, self.due_ns = self.numbers, [], -1
        return numbers


class FrontLine(Line):
    """Counts them for a front, which writes them."""

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: Batch, number: int, sent: int) -> None:
        """`number`: by which the front knows the call. `sent`: tokens that have gone already."""
        super().__init__(sent, leaves=False)
        self._batch = batch
        self._number = number

    def write(self, due_ns: int) -> bool:
        """The front will hear of it."""
        self._batch.add(self._number, due_ns)
        self.sent += 1
        return True


class Counted:
    """Tokens of a plain answer that a front is told of by their number."""

    __slots__ = ("line", "produced", "sent", "stencil", "wake")

    def __init__(self, stencil: Stencil, sent: int, wake: Callable[[], None]) -> None:
        """`sent`: tokens that have gone already. `wake` is called where something else has to write
        what is there."""
        self.stencil = stencil
        self.sent = self.produced = sent
        self.line: Line | None = None
        """Writes them, where all before them has been written."""
        self.wake = wake

    def unsent(self, pieces: Sequence[bytes]) -> bytes:
        """The chunks of tokens that have come and were not written; they count as written."""
        begin, self.sent = self.sent, self.produced
        return b"".join([self.stencil.chunk(at, pieces) for at in range(begin, self.sent)])


def count_up(numbers: Iterable[int], answers: dict[int, Counted], due_ns: int) -> int:
    """Return how many of these answers, each of which has one more token, are still there."""
    count = 0
    for number in numbers:
        answer = answers.get(number)
        if answer is None:
            continue
        count += 1
        answer.produced += 1
        line = answer.line
        if line is not None and line.write(due_ns):
            answer.sent = line.sent
        else:
            answer.line = None
            answer.wake()
    return count
