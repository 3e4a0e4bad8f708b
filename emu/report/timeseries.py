"""The cluster at regular instants, and each replica where it changed.

    series = TimeseriesWriter(directory / "timeseries.csv", states=("colocated", ...),
                              flow_kinds=("kv", "weights"))
    series.add(Sample(time_ns=..., replicas={"colocated": 4}, waiting=3, ...))
    series.close()

    per_replica = ReplicaSeries(directory / "replicas.csv")
    per_replica.add(time_ns, replica, state, running, waiting, used_blocks, total_blocks)
    per_replica.close()

Counters in a `Sample` (tokens, bytes, preemptions, completed) are totals since the start; the
writer turns them into what happened in the interval. A sample at the same instant as the one
before replaces nothing and is left out, so that a final sample may be added without a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from emu.report.csvtext import CsvFile
from emu.units import NS_PER_S

GAUGES: Final = ("waiting", "waiting_prefill_tokens", "running", "used_blocks", "total_blocks")
REPLICA_COLUMNS: Final = (
    "time_ns",
    "replica",
    "state",
    "running",
    "waiting",
    "used_blocks",
    "total_blocks",
)


@final
class Sample:
    """One look at the cluster."""

    time_ns: int
    replicas: Mapping[str, int]
    """Replicas in each state; states that are left out count 0."""
    waiting: int
    """Requests in queues."""
    waiting_prefill_tokens: int
    running: int
    """Sequences admitted by schedulers."""
    migrating: int
    """Requests between two replicas."""
    used_blocks: int
    total_blocks: int
    """Of replicas that can serve."""
    prefill_tokens: int
    """Total since the start, recomputed ones included."""
    decode_tokens: int
    """Total since the start."""
    completed: int
    """Total since the start."""
    preemptions: int
    """Total since the start."""
    flows: Mapping[str, int]
    """Network flows under way, by kind."""
    flow_bytes: Mapping[str, int]
    """Bytes delivered since the start, by kind."""

    __slots__ = (
        "completed",
        "decode_tokens",
        "flow_bytes",
        "flows",
        "migrating",
        "preemptions",
        "prefill_tokens",
        "replicas",
        "running",
        "time_ns",
        "total_blocks",
        "used_blocks",
        "waiting",
        "waiting_prefill_tokens",
    )

    def __init__(
        self,
        *,
        time_ns: int,
        replicas: Mapping[str, int],
        waiting: int = 0,
        waiting_prefill_tokens: int = 0,
        running: int = 0,
        migrating: int = 0,
        used_blocks: int = 0,
        total_blocks: int = 0,
        prefill_tokens: int = 0,
        decode_tokens: int = 0,
        completed: int = 0,
        preemptions: int = 0,
        flows: Mapping[str, int] | None = None,
        flow_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.time_ns = time_ns
        self.replicas = replicas
        self.waiting = waiting
        self.waiting_prefill_tokens = waiting_prefill_tokens
        self.running = running
        self.migrating = migrating
        self.used_blocks = used_blocks
        self.total_blocks = total_blocks
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.completed = completed
        self.preemptions = preemptions
        self.flows = {} if flows is None else flows
        self.flow_bytes = {} if flow_bytes is None else flow_bytes


class TimeseriesWriter:
    """Writer of timeseries.csv."""

    def __init__(
        self, path: Path, states: Sequence[str], flow_kinds: Sequence[str] = ("kv", "weights")
    ) -> None:
        self._states = tuple(states)
        self._kinds = tuple(flow_kinds)
        self.file = CsvFile(
            path,
            (
                "time_ns",
                *(f"replicas_{state}" for state in self._states),
                *GAUGES,
                "migrating",
                "prefill_tokens_per_s",
                "decode_tokens_per_s",
                "completed",
                "preemptions",
                *(f"flows_{kind}" for kind in self._kinds),
                *(f"{kind}_bytes_per_s" for kind in self._kinds),
            ),
        )
        self._before = Sample(time_ns=0, replicas={})
        self._is_first = True
        self._states_text = ""
        self._no_flows = ["0"] * (2 * len(self._kinds))

    def add(self, sample: Sample) -> None:
        """The next row; rates and counts are those since the row before."""
        before = self._before
        span_ns = sample.time_ns - before.time_ns
        if span_ns <= 0 and not self._is_first:
            return
        self._is_first = False
        self._before = sample
        if sample.replicas != before.replicas or not self._states_text:
            counts = [str(sample.replicas.get(state, 0)) for state in self._states]
            self._states_text = ",".join(counts)
        cells = [
            f"{sample.time_ns},{self._states_text},{sample.waiting},"
            f"{sample.waiting_prefill_tokens},{sample.running},{sample.used_blocks},"
            f"{sample.total_blocks},{sample.migrating}",
            _rate(sample.prefill_tokens - before.prefill_tokens, span_ns),
            _rate(sample.decode_tokens - before.decode_tokens, span_ns),
            f"{sample.completed - before.completed},{sample.preemptions - before.preemptions}",
        ]
        now_bytes, bytes_before = sample.flow_bytes, before.flow_bytes
        if sample.flows or now_bytes != bytes_before:
            cells += [str(sample.flows.get(kind, 0)) for kind in self._kinds]
            for kind in self._kinds:
                cells.append(_rate(now_bytes.get(kind, 0) - bytes_before.get(kind, 0), span_ns))
        else:
            cells += self._no_flows
        self.file.line(",".join(cells) + "\n")

    def close(self) -> None:
        """Write the rest."""
        self.file.close()


class ReplicaSeries:
    """Writer of replicas.csv: one row where a replica differs from its last row."""

    def __init__(self, path: Path) -> None:
        self.file = CsvFile(path, REPLICA_COLUMNS)
        self._last: dict[int, tuple[str, int, int, int, int]] = {}

    def add(
        self,
        time_ns: int,
        replica: int,
        state: str,
        running: int,
        waiting: int,
        used_blocks: int,
        total_blocks: int = 0,
    ) -> None:
        """What a replica looks like now; nothing is written if it looks as before."""
        now = (state, running, waiting, used_blocks, total_blocks)
        if self._last.get(replica) != now:
            self._last[replica] = now
            self.file.line(
                f"{time_ns},{replica},{state},{running},{waiting},{used_blocks},{total_blocks}\n"
            )

    def close(self) -> None:
        """Write the rest."""
        self.file.close()


def _rate(amount: int, span_ns: int) -> str:
    """Per second, rounded to whole units: a rate of tokens or bytes needs no fraction."""
    if not amount or span_ns <= 0:
        return "0"
    return str((amount * NS_PER_S + span_ns // 2) // span_ns)
