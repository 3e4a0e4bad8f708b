"""A second, slow model of what a run should have been: reads the history, shares no engine code.

Owns: the judgment of costs, choices, faults and figures from the records of `events.jsonl`, the
configuration and the placement of replicas; here are the records, sorted by what they are about,
and the facts of the cluster. Each module restates one part of the rules in the plainest way that
there is: which requests a scheduler takes and what an iteration costs (`iterations`), over which
links bytes go and when they arrive (`transfers`), how strong and long a fault is (`windows`), what
routers, rejecters, clients and planners may do (`policies`), and what the summary must say
(`figures`). None imports a scheduler, a latency backend, the network, a planner or the report: a
rule that the engine has wrong is not wrong here in the same way.

Does not do: run anything. What a restated rule does not cover (another backend, a policy of a
user's own) is passed over, never guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from emu.config.schema import Config

Record = Mapping[str, Any]
FOREVER_NS: Final = 1 << 62
MAX_PROBLEMS: Final = 12


class Seat(msgspec.Struct, frozen=True):
    """One replica, as it was placed."""

    replica: int
    role: str
    gpus: tuple[int, ...]
    machine: int
    tensor_parallel: int
    stages: int
    blocks: int
    layers: int
    kv_token_bytes: int
    rank_bytes: int
    """Weights of one rank by the model's shape; 0 = not restated."""
    layer_bytes: int
    """The part of them that every token passes, at two bytes a weight; 0 = not restated."""
    place: tuple[str, int, int]
    """GPU, table of `[[nodes]]`, and over how many machines it spreads."""
    memory_rate: float
    """Of one GPU, bytes per nanosecond."""
    flop_rate: float
    """Of one GPU at sixteen bits, operations per nanosecond."""
    max_tokens: int
    latency: Any
    """Its `[latency]` table."""
    scheduler: Any
    """Its `[scheduler]` table."""
    group: str
    """Its data-parallel group, or none."""
    served: str
    """The name of its model."""
    is_plain: bool
    """Iterations have no adapters, drafter, images or weights elsewhere, which cost besides."""
    is_hybrid: bool
    """Some layers keep states, or a window: hits and pieces end where those do."""
    is_ahead: bool
    """Its engine forms each batch while the one before it runs."""
    is_offloaded: bool
    """Weights or attention are in the memory of the machine."""
    token_flops: tuple[int, int, int]
    """Operations for a token, a pair of tokens, a token that comes out; 0 = not restated."""


class Span(msgspec.Struct):
    """Something that lasts."""

    since_ns: int
    until_ns: int = FOREVER_NS

    def holds(self, at_ns: int) -> bool:
        """Whether it is in force at an instant (its end is no part of it)."""
        return self.since_ns <= at_ns < self.until_ns

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """How long it holds between two instants."""
        return max(0, min(self.until_ns, end_ns) - max(self.since_ns, start_ns))


class Tape:
    """All records of a run by event, with their places."""

    def __init__(self, config: Config, seats: Sequence[Seat], records: Sequence[Record]) -> None:
        self.config = config
        self.seats = seats
        self.records = records
        self.problems: list[str] = []
        self.by_event: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_event[record["event"]].append(record)
        self.end_ns = max((record["at_ns"] for record in records), default=0)
        self.arrived = {record["row"]: record for record in self.by_event["arrived"]}
        self.states = self._states()

    def say(self, problem: str) -> None:
        """Something is not as it should be (the first ones are enough)."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def of(self, *events: str) -> Iterable[Record]:
        """Records of these events, in order."""
        if len(events) == 1:
            return self.by_event[events[0]]
        return [record for record in self.records if record["event"] in events]

    def _states(self) -> dict[int, list[tuple[int, str]]]:
        """(since when, state) of each replica, as far as they changed."""
        found: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for record in self.by_event["state"]:
            changes = found[record["replica"]]
            if not changes:
                changes.append((0, record["from"]))
            changes.append((record["at_ns"], record["to"]))
        return found

    def failures(self, replica: int) -> list[int]:
        """When a replica failed."""
        return [at_ns for at_ns, state in self.states.get(replica, ()) if state == "failed"]


def to_ns(seconds: float) -> int:
    """Seconds of a configuration as the clock has them."""
    return round(seconds * 1e9)
