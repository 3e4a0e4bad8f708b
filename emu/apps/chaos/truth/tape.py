"""All records of a run by event, which every judge reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth.seats import Seat
from emu.config.schema import Config
from emu.documents import DocumentView

Record = DocumentView
FOREVER_NS: Final = 1 << 62
MAX_PROBLEMS: Final = 24


def keys_of(table: msgspec.Struct) -> DocumentView:
    """The keys of a table. Not every policy, fault or feature has every one, so ask with `get`."""
    return msgspec.structs.asdict(table)


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
        self.faults = [{**keys_of(fault), "kind": fault.kind} for fault in config.faults]
        """Their tables: `kind`, `at_s` and what else the kind takes."""
        self.judged: Counter[str] = Counter()
        """How often each rule (`rules`) had something to judge."""
        self.problems: list[str] = []
        self.by_event: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_event[record["event"]].append(record)
        self.end_ns = max((record["at_ns"] for record in records), default=0)
        self.arrived = {record["row"]: record for record in self.by_event["arrived"]}
        self.cut_ns = {
            record["row"]: record["at_ns"]
            for record in self.by_event["ended"]
            if record["status"] != "completed"
        }
        """When rows ended that were not complete: what else happens at that instant may be told
        before it, or after."""
        self.states = self._states()

    def say(self, problem: str) -> None:
        """Something is not as it should be (the first ones are enough)."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def count(self, rule: str) -> None:
        """A rule has something to judge here."""
        self.judged[rule] += 1

    def of(self, *events: str) -> Iterable[Record]:
        """Records of these events, in order."""
        if len(events) == 1:
            return self.by_event[events[0]]
        return [record for record in self.records if record["event"] in events]

    def link_rates(self) -> dict[str, list[tuple[int, int]]]:
        """(ns, bytes per second) of each link: at the start, then each change in order."""
        told: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for record in self.by_event["link"]:
            if "bytes_per_s" in record:
                told[record["link"]].append((record["at_ns"], record["bytes_per_s"]))
        return told

    def replay(self, handlers: Mapping[str, Callable[[Record], None]]) -> None:
        """Give each record, in order, to the handler of its event, if there is one."""
        for record in self.records:
            handler = handlers.get(record["event"])
            if handler is not None:
                handler(record)

    def completed(self, record: Record, got: dict[int, int]) -> Iterator[int]:
        """Rows that get their last token with a record of tokens, which `got` counts by row."""
        for row in record["rows"]:
            got[row] += len(record["ends"])
            if got[row] >= self.arrived[row]["output"]:
                yield row

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
