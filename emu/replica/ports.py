"""What a replica calls while it handles an event, so that it need not know the packages above.

Others know a replica by its id here. What its actor calls when it applies actions is `World`
(`effects.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from emu.latency.base import BatchShape
from emu.replica.split_batch import SplitBatch
from emu.request import Request
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan

if TYPE_CHECKING:
    from emu.latency.ends import Ends
    from emu.replica.events import Event


class GapSink(Protocol):
    """Statistics of gaps between tokens."""

    def add_run(
        self,
        cumulative_ends: Ends,
        count: int,
        start_ns: int = -1,
        first_count: int = -1,
    ) -> None:
        """`count` requests got a token at each of these instants (relative to `start_ns`).

        At the first of them `first_count` had a gap that counts here, if it is given.
        """
        ...

    def add_gap(self, ns: int, count: int = 1, at_ns: int = -1) -> None:
        """`count` gaps of this length that ended at `at_ns`."""
        ...

    def add_each(self, gaps_ns: Sequence[int], counts: Sequence[int], at_ns: Sequence[int]) -> None:
        """So many gaps of each of these lengths, which ended at these instants."""
        ...

    def add_gaps(self, gaps_ns: Iterable[int], at_ns: int = -1) -> None:
        """Single gaps that ended at `at_ns`."""
        ...


class BatchSink(Protocol):
    """What draws batches (the trace)."""

    def batch(
        self,
        replica_id: int,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: list[StageSpan] | None = None,
    ) -> None:
        """A batch, or a leap of `steps` equal decode iterations, has ended.

        `spans`: where it was on each pipeline stage, if there are several.
        """
        ...


class TokenSink(Protocol):
    """What keeps the history of the run."""

    def tokens(
        self,
        replica: int,
        receivers: Sequence[Request],
        start_ns: int,
        ends: Ends | None,
        now_ns: int,
    ) -> None:
        """These requests received a token at each of `start_ns + ends`, or just one now."""
        ...


class StepSink(TokenSink, Protocol):
    """What keeps the history of the run, iteration by iteration."""

    @property
    def follows_steps(self) -> bool:
        """Whether it is told of iterations at all."""
        ...

    def add(self, at_ns: int, event: str, **what: Any) -> None:
        """Something happened now."""
        ...

    def formed(
        self,
        at_ns: int,
        replica: int,
        batch: Batch,
        members: Iterable[tuple[Request, int, int]],
        first_layer: int,
    ) -> None:
        """A replica has formed a batch of these (request, tokens before, new tokens).

        `first_layer`: another replica has run the layers before.
        """
        ...

    def began(self, at_ns: int, replica: int, batch: Batch, wave_wait_ns: int) -> None:
        """What the batch waited for is there: it runs from now on."""
        ...

    def ran(
        self,
        at_ns: int,
        replica: int,
        batch: Batch,
        start_ns: int,
        spans: Sequence[StageSpan] | None,
    ) -> None:
        """A batch, or the layers of it that run here, has ended now."""
        ...

    def layer(self, at_ns: int, replica: int, batch: Batch, layer: int, start_ns: int) -> None:
        """One layer of a batch has ended now (live scaling)."""
        ...


class Observers(Protocol):
    """Those that count and draw what replicas do, and decide nothing."""

    streams: bool
    """Whether `on_tokens` is told of every token (live mode)."""

    @property
    def gaps(self) -> GapSink:
        """Where gaps between tokens go."""
        ...

    @property
    def batches(self) -> BatchSink | None:
        """Where batches are drawn, if anywhere."""
        ...

    @property
    def history(self) -> StepSink | None:
        """Where every token is written down, if anywhere."""
        ...

    @property
    def on_formed(self) -> Callable[[int, Batch], None] | None:
        """Told of each batch when a replica (its id) has formed it, if anything wants to know."""
        ...

    def on_tokens(self, replica_id: int, receivers: list[Request]) -> None:
        """These requests received a token now; those whose last it is end after this."""
        ...


class Outbox(Protocol):
    """Where a prefill replica puts the requests whose prompts it has finished."""

    @property
    def unfinished(self) -> int:
        """Batches whose KV waits at the replica or leaves from there."""
        ...

    def append(self, requests: list[Request], prefill_ns: int) -> None:
        """These requests have their first token; their KV waits here for a decode replica.

        `prefill_ns` is the time that their last iteration took (layer-wise transfers overlap it).
        """
        ...

    def append_first(self, split: SplitBatch) -> None:
        """KV of the first layers of a batch that another replica goes on with (it is held here)."""
        ...

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        """KV of the other layers; `survivors` have their first token and go on."""
        ...

    def flush(self) -> list[list[Request]]:
        """Take back all batches that are queued and not on their way: a question."""
        ...


class GroupWave(Protocol):
    """The data-parallel group of a replica."""

    shares_experts: bool
    holds_experts: bool
    """A member that is gone takes experts with it."""

    def spare(self, members: frozenset[int]) -> None:
        """The others have all experts without these members, and only without these."""
        ...

    def lacks_experts(self) -> bool:
        """A member is gone whose experts the others do not have."""
        ...

    def wants(self, replica_id: int) -> bool:
        """A wave is forming, and this member is not in it."""
        ...

    def dummy(self, now_ns: int) -> Batch:
        """A batch of one token that only keeps pace."""
        ...

    def enter(
        self, replica_id: int, shape: BatchShape, go: Callable[[int], None], steps: int = 1
    ) -> None:
        """A member's batch is formed; `go(wait_ns)` is called when all members are there.

        `steps`: for so many waves its batches are certain.
        """
        ...

    def cut(self) -> None:
        """No wave after the one under way is certain any more."""
        ...

    def withdraw(self, replica_id: int) -> None:
        """A member no longer serves, or lost the batch that it had brought."""
        ...


class ReplicaActorPort(Protocol):
    """Where messages for a replica go."""

    def tell(self, event: Event) -> None:
        """Handle it now, before the sender's next line."""
        ...

    def post(self, message: object) -> None:
        """Apply it at the next boundary."""
        ...

    def look(self) -> None:
        """Something that the replica looks at has changed."""
        ...

    def arm(self, at_ns: int) -> None:
        """Its next step is at that time, unless it is in one."""
        ...

    def reserve(self, requests: list[Request]) -> bool:
        """Reserve blocks for inbound KV, all or nothing: a question, answered now."""
        ...

    def take_over(self, requests: Sequence[Request], first_layer: int) -> Batch:
        """Take a batch of which another replica has run the layers before `first_layer`.

        A question: the answer is the batch as this replica's scheduler knows it.
        """
        ...

    def abandon(self) -> list[Request]:
        """Forget the batch that it was given: a question, the answer is what was still in it."""
        ...
