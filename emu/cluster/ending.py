"""How a run ends: well, with an error, or because it gets nowhere.

Not compiled: a wait beside handlers of errors is one that mypyc builds wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from emu.cluster.gateway import Gateway
from emu.errors import Stalled
from emu.kernel.clock import Kernel
from emu.network.carrier import Carrier
from emu.plugins.blame import blamed
from emu.replica.view import ReplicaHandle


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


LOOKS: Final = 4
"""So often in the bound is progress looked at."""
EVENTS_MIN: Final = 1_000
"""Fewer events without progress are a wait."""


class StallGuard:
    """Ends a run in which simulated time goes on and no request gets anywhere.

    Asked now and then (`Kernel.watch_every`). Neither of the kernel's guards sees it: time moves
    (no Zeno) and something is always scheduled (no deadlock). Progress is a token, an end, an
    arrival or bytes of weights. Bytes stop counting once a load has been given up: a planner that
    starts the same hopeless load again and again moves bytes for ever. A long wait in which next to
    nothing happens (a machine away for hours) is no stall.
    """

    def __init__(
        self,
        kernel: Kernel,
        gateway: Gateway,
        replicas: Sequence[ReplicaHandle],
        network: Carrier,
        loads_given_up: Callable[[], int],
        bound_ns: int,
        story: Callable[[], list[str]],
    ) -> None:
        """`story` says where everything stands, for the error."""
        self._kernel = kernel
        self._gateway = gateway
        self._replicas = replicas
        self._network = network
        self._loads_given_up = loads_given_up
        self._bound_ns = bound_ns
        self._story = story
        self._seen = self._progress()
        self._weights_bytes = self._loaded_bytes()
        self._given_up = loads_given_up()
        self._since_ns = kernel.now_ns
        self._events = kernel.events

    @property
    def period_ns(self) -> int:
        """How often it is to be asked."""
        return max(1, self._bound_ns // LOOKS)

    def look(self, at_ns: int) -> Stalled | None:
        """The error that ends the run, if it has stalled."""
        kernel = self._kernel
        progress, weights_bytes = self._progress(), self._loaded_bytes()
        given_up = self._loads_given_up()
        loads_on = weights_bytes != self._weights_bytes and given_up == self._given_up
        self._weights_bytes = weights_bytes
        if loads_on or progress != self._seen or self._gateway.outstanding == 0:
            self._seen, self._given_up = progress, given_up
            self._since_ns, self._events = at_ns, kernel.events
            return None
        events = kernel.events - self._events
        if at_ns - self._since_ns < self._bound_ns or events < EVENTS_MIN:
            return None
        lines = [
            f"{self._gateway.outstanding} requests are in the system, and none has got a "
            f"token or ended since {self._since_ns} ns ({events:,} events; limits.stalled_s)"
        ]
        return Stalled("\n  ".join([*lines, *self._story()]))

    def _progress(self) -> tuple[int, int, int]:
        tokens = sum(sum(replica.view().tokens_produced) for replica in self._replicas)
        gateway = self._gateway
        return tokens, gateway.released - gateway.outstanding, gateway.released

    def _loaded_bytes(self) -> int:
        return self._network.moved_bytes.get("weights", 0)
