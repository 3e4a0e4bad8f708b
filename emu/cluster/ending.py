"""How a run ends. Not compiled: a wait beside handlers of errors is one that mypyc builds wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from emu.plugins import blamed


class Outcome(msgspec.Struct):
    """How a run ended."""

    error: BaseException | None
    end_ns: int
    events: int
    digest: str


async def ended(
    running: Awaitable[None], aclose: Callable[[], Awaitable[BaseException | None]]
) -> BaseException | None:
    """Wait for the end of a run and close what it has opened; the error that it ended with."""
    error: BaseException | None = None
    try:
        await running
    except (Exception, SystemExit) as raised:  # the rim decides what to do with it
        error = blamed(raised)
        if isinstance(error, SystemExit):
            raise
    except KeyboardInterrupt as raised:
        error = raised
    finally:
        unclosed = await aclose()
    return error or unclosed
