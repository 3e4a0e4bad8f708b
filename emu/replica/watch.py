"""What is told of a replica's iterations and queues, and where. None of it changes what happens.

Owns the listeners: observers of batches and tokens, the history of the run, a router that keeps an
order of loads, one whose signals are late, a model of power. What they ask for is asked of them
once, here, so that an iteration that nothing watches does not ask.
"""

from __future__ import annotations

from collections import deque
from typing import final

from emu.kernel.clock import Kernel
from emu.replica.ports import Observers, StepSink
from emu.replica.view import NO_SIGNALS, ReplicaHandle, Signals
from emu.scheduling.base import Batch, Scheduler


@final
class Watch:
    """The watchers of one replica."""

    replica_id: int
    observers: Observers
    tells: bool
    """Some observer follows single tokens."""
    steps_history: StepSink | None
    """Where every iteration is written down, if anywhere."""
    notes_formed: bool
    """An observer is told of every batch that is formed."""
    is_metered: bool
    """Figures of work are asked for (a model of power), and counted."""
    is_watched: bool
    """Something but the plain counters looks at iterations."""
    signals: deque[Signals] | None
    """What was known of it lately, where it is seen late."""
    signals_ns: int
    """For how long that is kept, at least."""
    signals_blocks: bool
    """Blocks in use are part of it: each step of a leap is."""
    is_touched: bool
    """A change of the queues has been told and not been seen, or it is told to no router."""
    _touch_log: list[ReplicaHandle] | None
    """Where to say that the queues have changed, if a router keeps an order of loads."""
    _owner: ReplicaHandle | None
    _clock: Kernel
    _scheduler: Scheduler

    __slots__ = (
        "_clock",
        "_owner",
        "_scheduler",
        "_touch_log",
        "is_metered",
        "is_touched",
        "is_watched",
        "notes_formed",
        "observers",
        "replica_id",
        "signals",
        "signals_blocks",
        "signals_ns",
        "steps_history",
        "tells",
    )

    def __init__(
        self, replica_id: int, clock: Kernel, scheduler: Scheduler, observers: Observers
    ) -> None:
        self.replica_id = replica_id
        self.observers = observers
        self._clock = clock
        self._scheduler = scheduler
        history = observers.history
        self.tells = observers.streams or history is not None
        self.steps_history = None
        if history is not None and history.follows_steps:
            self.steps_history = history
        self.notes_formed = self.steps_history is not None or observers.on_formed is not None
        self.is_metered = False
        self.signals = None
        self.signals_ns = 0
        self.signals_blocks = False
        self.is_touched = True
        self._touch_log = None
        self._owner = None
        self._note()

    def _note(self) -> None:
        self.is_watched = (
            self.tells
            or self.is_metered
            or self.steps_history is not None
            or self.signals is not None
            or self.observers.batches is not None
        )

    @property
    def is_drawn(self) -> bool:
        """Some observer follows batches or tokens one by one, so that each is told as it ends."""
        return self.observers.streams or self.observers.batches is not None

    def meter(self) -> None:
        """From now on, count what a model of power asks for."""
        self.is_metered = True
        self._note()

    def keep_signals(self, delay_ns: int, *, with_blocks: bool) -> None:
        """From now on keep what was known of it for so long; `with_blocks`: their use, too."""
        if self.signals is None:
            self.signals = deque([NO_SIGNALS])
            self._note()
        self.signals_ns = max(self.signals_ns, delay_ns)
        self.signals_blocks = self.signals_blocks or with_blocks

    def tell_touches(self, log: list[ReplicaHandle], owner: ReplicaHandle) -> None:
        """From now on a change of the queues puts the owner into `log`, once until it is seen."""
        self._touch_log, self._owner = log, owner
        self.is_touched = False

    def touch(self) -> None:
        """The numbers of waiting and running requests may have changed: a router looks again."""
        if not self.is_touched and self._touch_log is not None and self._owner is not None:
            self.is_touched = True
            self._touch_log.append(self._owner)

    def note_signal(self, at_ns: int = -1) -> None:
        """Write down what a reader with late signals will see; `at_ns`: since then, -1 = now."""
        signals, scheduler = self.signals, self._scheduler
        if signals is None:
            return
        if at_ns < 0:
            at_ns = self._clock.now_ns
        signals.append(
            (
                at_ns,
                scheduler.waiting_count,
                scheduler.running_count,
                scheduler.waiting_tokens,
                scheduler.blocks_used,
            )
        )
        since_ns = at_ns - self.signals_ns
        while len(signals) > 1 and signals[1][0] <= since_ns:
            signals.popleft()

    def formed(self, batch: Batch, first_layer: int = 0) -> None:
        """Tell of a batch that is formed; others have run the layers before."""
        history, on_formed = self.steps_history, self.observers.on_formed
        if on_formed is not None:
            on_formed(self.replica_id, batch)
        if history is not None:
            members = self._scheduler.members(batch)
            history.formed(self._clock.now_ns, self.replica_id, batch, members, first_layer)

    def began(self, batch: Batch, wave_wait_ns: int) -> None:
        """Tell that what the batch waited for is there: it runs from now on."""
        history = self.steps_history
        if history is not None:
            history.began(self._clock.now_ns, self.replica_id, batch, wave_wait_ns)
