"""Batches that are computed layer by layer while weights arrive (live scaling, the new side).

A pass has four moments. A layer ends, or something is to be looked at. Then the instant ends, so
that all that happens now is known. Then posted events are applied, and batches that are done get
their first tokens. Then helpers are served, batches admitted, and the next layer is started. The
decisions are those of `live_scaling.py`; here is how far the pass has come.
"""

from __future__ import annotations

from typing import Final, final

from emu.kernel.clock import AT_DUE, NOW, PARK
from emu.replica.books import Books
from emu.replica.flight.base import APPLY, IDLE, Flight, Sort, until, words_of
from emu.replica.layer_scheduler import LayerScheduler, LayerTask

UNTIL_END_OF_INSTANT: Final = -6
"""`Flight.due_ns`: the next step comes when all else of this instant has happened."""

LOOK: Final = 0
"""The replica looks at what has ended."""
INSTANT: Final = 1
"""It waits for the end of the instant."""
ENDED: Final = 2
"""The instant has ended: which weights are there is seen now."""
FINISH: Final = 3
"""Batches that are done get their first tokens."""
GIVE: Final = 4
"""Helpers are served, batches admitted, a layer started."""
LAYER: Final = 5
"""A layer runs, or nothing can."""


@final
class Layered(Flight):
    """The batches of a new replica."""

    books: Books
    layers: LayerScheduler
    phase: int
    """How far the pass has come: one of the names above."""
    is_over: bool
    """The replica has left live scaling."""

    __slots__ = ("books", "is_over", "layers", "phase")

    def __init__(self, books: Books, layers: LayerScheduler) -> None:
        self.is_open = True
        self.is_joint = self.is_leap = self.is_cut = self.is_over = False
        self.due_ns = PARK
        self.books = books
        self.layers = layers
        self.phase = LOOK

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.LAYERED

    def end(self) -> Flight:
        """The instant has ended, a layer has, or there is something to look at while it runs."""
        if self.is_over:
            return IDLE
        self.is_open = True
        if self.phase == INSTANT:
            self.phase, self.due_ns = ENDED, APPLY
        else:
            self.phase, self.due_ns = LOOK, PARK
        return self

    def end_layer(self) -> None:
        """The layer under way has ended, if its time has come; then the instant is to end."""
        books, layers, task = self.books, self.layers, self.layers.running
        now_ns = books.clock.now_ns
        history = books.watch.steps_history
        if layers.end_layer(now_ns) and history is not None:
            assert task is not None
            layer, begun_ns = task.layers_done - 1, layers.run_start_ns
            history.layer(now_ns, books.replica_id, task.batch, layer, begun_ns)
        self.is_open = False
        self.phase, self.due_ns = INSTANT, UNTIL_END_OF_INSTANT

    def see_weights(self, segments: int) -> None:
        """So many segments of the weights are there: what is done of them can run."""
        self.layers.segments_ready = segments
        self.phase = FINISH

    def finish(self) -> None:
        """Batches that are done have their first tokens: helpers are served next."""
        self.phase = GIVE

    def give(self) -> None:
        """Helpers are served now; the pass ends with a layer, or with nothing that can run."""
        self.phase = LOOK

    def start_layer(self, task: LayerTask, cost_ns: int) -> None:
        """The next layer of a batch runs."""
        self.books.counters.busy_ns += cost_ns
        self.layers.start(task, self.books.clock.now_ns, cost_ns)

    def wait(self) -> Flight:
        """The pass is over: the next one comes when the layer has run, or something happens."""
        self.is_open = False
        self.phase = LAYER
        self.due_ns = PARK if self.layers.running is None else self.layers.run_end_ns
        return self

    def dismiss(self) -> None:
        """The replica leaves live scaling."""
        self.is_over = True

    def align(self, now_ns: int) -> int:
        """At once, but for the end of an instant, which is waited for."""
        return AT_DUE if self.phase == INSTANT else NOW

    def holds_batch(self) -> bool:
        """Its batches are those of the global queue: none is the replica's alone."""
        return False

    def tells(self, now_ns: int) -> str:
        """Which layer of which batch runs, and how many batches there are."""
        layers, task = self.layers, self.layers.running
        there = f"layers there: {layers.layers_ready} of {layers.layers}"
        begun = f"batches begun: {len(layers.pending)}, {there}"
        if task is None:
            return f"layer by layer: no layer runs, {begun}"
        layer = f"layer {task.layers_done + 1}, {until(layers.run_end_ns, now_ns)}"
        return f"{words_of(task.batch)}: {layer}; {begun}"

    def resume(self, since_ns: int) -> None:
        """The layer under way ends so much later."""
        self.layers.delay(self.books.clock.now_ns - since_ns)
