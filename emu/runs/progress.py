"""How far a run is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from emu.process.interrupts import held
from emu.units import NS_PER_S
from emu.world import World

if TYPE_CHECKING:
    from types import TracebackType


@contextlib.contextmanager
def told_every(seconds: float, line: Callable[[], str]) -> Iterator[None]:
    """In this block a line on stderr every so often (wall time), for those without a terminal."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(seconds):
            print(line(), file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    with held():  # a thread inherits that: signals go to the main one
        teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


class Progress:
    """A bar on stderr that is updated from outside simulated time."""

    def __init__(self, requests: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=requests or None, state="")
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, world: World) -> None:
        """Show where the run stands."""
        cluster = world.cluster
        emulated_s = cluster.kernel.now_ns / NS_PER_S
        spent_s = max(time.monotonic() - self._started_s, 1e-9)
        states: dict[str, int] = {}
        for replica in cluster.replicas:
            states[replica.state.value] = states.get(replica.state.value, 0) + 1
        shown = " ".join(f"{count} {state}" for state, count in states.items())
        gateway = cluster.gateway
        self._bar.update(
            self._task,
            completed=gateway.released - gateway.outstanding,
            state=f"{emulated_s:,.0f} s emulated, {emulated_s / spent_s:,.0f}x, "
            f"{gateway.outstanding} in flight; {shown}",
        )
