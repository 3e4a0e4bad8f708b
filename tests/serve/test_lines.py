"""The short way of tokens: what it writes, when it stops, and what a front is told."""

from __future__ import annotations

from emu.apps.serve.lines import Batch, Counted, FrontLine, Outlet, SocketLine, count_up
from emu.apps.serve.stencils import Stencil

PIECES = [b"a", b" b", b"cc", b"\\n"]
STENCIL = Stencil(first=b"<1 ", further=b"< ", end=b">", last=b"!>", start=3, tokens=5)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_line_writes_the_chunks_of_its_stencil() -> None:
    written: list[bytes] = []
    line = SocketLine(STENCIL, 0, Outlet(written.append), PIECES)
    assert all(line.write(7) for _ in range(5))
    assert line.sent == 5
    assert written == [framed(STENCIL.chunk(at, PIECES)) for at in range(5)]


def test_a_line_writes_nothing_to_a_client_that_does_not_read() -> None:
    written: list[bytes] = []
    outlet = Outlet(written.append)
    line = SocketLine(STENCIL, 1, outlet, PIECES)
    outlet.is_open = False
    assert not line.write(7)
    outlet.is_open = True
    assert line.write(8)
    assert (line.sent, written) == (2, [framed(STENCIL.chunk(1, PIECES))])


def test_who_holds_an_answer_hears_that_its_client_has_left() -> None:
    heard: list[str] = []
    outlet = Outlet(lambda data: None)
    outlet.on_lost = lambda: heard.append("left")
    outlet.lose()
    assert (heard, outlet.is_open, outlet.is_lost) == (["left"], False, True)


def test_tokens_of_one_instant_are_one_batch() -> None:
    sent: list[list[int]] = []
    batch = Batch(lambda due_ns: sent.append(batch.take()))
    lines = [FrontLine(batch, number, 1) for number in (4, 5)]
    assert all(line.write(10) for line in lines)
    assert lines[0].write(20)
    assert [line.sent for line in lines] == [3, 2]
    assert (sent, batch.take()) == ([[], [4, 5]], [4])


def test_a_front_wakes_what_writes_where_the_line_cannot() -> None:
    written: list[bytes] = []
    woken: list[int] = []
    outlet = Outlet(written.append)
    answers = {n: Counted(STENCIL, 1, lambda n=n: woken.append(n)) for n in (1, 2)}  # type: ignore[misc]
    answers[1].line = SocketLine(STENCIL, 1, outlet, PIECES)
    assert count_up([1, 2, 3], answers, 10) == 2
    assert (answers[1].sent, answers[2].sent, woken) == (2, 1, [2])
    outlet.is_open = False
    assert count_up([1], answers, 20) == 1
    assert [one.line for one in answers.values()] == [None, None]
    assert (answers[1].sent, woken) == (2, [2, 1])
    assert answers[1].unsent(PIECES) == STENCIL.chunk(2, PIECES)
    assert answers[2].unsent(PIECES) == STENCIL.chunk(1, PIECES)
    assert (answers[1].sent, answers[2].sent) == (3, 2)
