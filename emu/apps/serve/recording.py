"""The recording of live mode: a run's files, and the traffic as a workload that can be replayed.

Beside what every run writes, the directory of a live run holds

    workload.jsonl   every request that reached the gateway, in order of arrival, with its arrival
                     time, lengths, token ids (if prefix caching is on) and when its client left
    replay.toml      the configuration with that workload, and every command and fault as it came

`python -m emu replay.toml` repeats the schedule to the nanosecond. Lines are written when a
request has ended; a line that is ready early waits for the ones before it, so the buffer holds at
most what arrived after the oldest request in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.serve.pace import AnswerPace
from emu.apps.serve.toml import scalars_text, to_toml
from emu.config.load import effective_dict
from emu.config.schema import CommandTable, Config, FaultTable
from emu.documents import Document
from emu.report.atomic import write_text
from emu.request import Request
from emu.units import NS_PER_S
from emu.workload.items import Line
from emu.world import Observer, StateChange

TABLES_MAX: Final = 100_000
"""Commands and faults of one recording."""
_FLUSH_LINES: Final = 256
_PATHS: Final = (("model", "hf_config"), ("latency", "path"), ("latency", "replay"))


class TrafficLog:
    """workload.jsonl, in order of `request.row`, of a bounded size."""

    def __init__(self, path: Path, bytes_max: int = 2**30, *, models: Sequence[str] = ()) -> None:
        """`models`: names by index, where requests name theirs."""
        self._models = models
        self.lines = 0
        self.bytes = 0
        """Of all lines, also of those that wait for earlier ones."""
        self._bytes_max = bytes_max
        self._file = path.open("wb")
        self._json = msgspec.json.Encoder()
        self._early: dict[int, bytes] = {}
        self._next_row = 0

    def ended(self, request: Request) -> None:
        """A request has ended: its line is known."""
        line = Line(
            arrival_time_ns=request.arrival_ns,
            input_toks=request.prompt_tokens,
            output_toks=request.output_tokens,
            cancel_after_ns=request.cancel_after_ns,
            session_id=request.session_id,
            tenant=request.tenant,
            priority=request.priority,
            replica=request.pin,
            decode_replica=request.decode_pin,
            handoff_ns=request.handoff_after_ns,
        )
        line.adapter = request.adapter
        if request.images:
            line.images = list(request.images)
        if self._models:
            line.model = self._models[request.model]
        if request.max_output_tokens != request.output_tokens:
            line.max_output_toks = request.max_output_tokens
        if request.prefix is not None and request.prefix.token_ids is not None:
            ids: list[int] = request.prefix.token_ids.tolist()
            line.input_tok_ids = ids[: request.prompt_tokens]
            line.output_tok_ids = ids[request.prompt_tokens :]
        text = self._json.encode(line) + b"\n"
        self.bytes += len(text)
        self._early[request.row] = text
        while self._next_row in self._early:
            self._file.write(self._early.pop(self._next_row))
            self._next_row += 1
            self.lines += 1
            if self.lines % _FLUSH_LINES == 0:
                self._file.flush()

    @property
    def is_full(self) -> bool:
        """No more requests can be recorded: the server takes none."""
        return self.bytes >= self._bytes_max

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """Write the rest."""
        for row in sorted(self._early):
            self._file.write(self._early.pop(row))
        self._file.close()


class LatenessFile:
    """lateness.csv: how late this server sent each answer. No part of what a replay repeats."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._file.write("request_id,first_token_late_ns,last_token_late_ns,verdict\n")

    def add(self, request_id: int, pace: AnswerPace) -> None:
        """One answer; emulated ns."""
        late = f"{pace.first_late_ns},{pace.last_late_ns}"
        self._file.write(f"{request_id},{late},{pace.verdict}\n")

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """Write the rest."""
        self._file.close()


class ReplayFile:
    """replay.toml; grows by what the control interface does, up to `TABLES_MAX` tables."""

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self._config = config
        self._done: list[CommandTable | FaultTable] = []
        path.write_text(self._text(), encoding="utf-8")

    def add(self, table: CommandTable | FaultTable) -> None:
        """Append a `[[commands]]` or `[[faults]]` table."""
        self._done.append(table)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_table_text(table))

    def amend(self, before: FaultTable, after: FaultTable) -> None:
        """A fault has become another one: it was ended before its time."""
        faults = [after if fault is before else fault for fault in self._config.faults]
        self._config = msgspec.structs.replace(self._config, faults=faults)
        self._done = [after if table is before else table for table in self._done]
        write_text(self._path, self._text())

    def _text(self) -> str:
        head = _REPLAY_HEAD + to_toml(_replayable(self._config))
        return head + "".join(map(_table_text, self._done))

    def scenario(self) -> str:
        """The configuration, with its own workload, and everything that was done so far."""
        head = _SCENARIO_HEAD + to_toml(_open_ended(effective_dict(self._config)))
        return head + "".join(map(_table_text, self._done))

    @property
    def is_full(self) -> bool:
        """Nothing more can be done to the cluster that a replay would know of."""
        return len(self._done) >= TABLES_MAX


def _table_text(table: CommandTable | FaultTable) -> str:
    kind = "commands" if isinstance(table, CommandTable) else "faults"
    given = {k: v for k, v in msgspec.to_builtins(table).items() if v is not None}
    return f"\n[[{kind}]]\n" + scalars_text(given)


_REPLAY_HEAD: Final = (
    "# Recorded by `emu serve`. `python -m emu replay.toml` repeats it on the simulated clock.\n\n"
)


_SCENARIO_HEAD: Final = (
    "# Saved from a live session: its configuration with every command and fault so far.\n"
    "# `emu scenario.toml` runs it on the simulated clock, `emu serve scenario.toml` live.\n\n"
)


Table = Document
"""A configuration as plain values."""
Event = dict[str, object]
"""What the live page is told."""


class Tape(Observer):
    """Keeps the traffic of a live world, and tells the page what happens."""

    def __init__(self, traffic: TrafficLog, replay: ReplayFile, lateness: LatenessFile) -> None:
        self.traffic = traffic
        self.lateness = lateness
        self.replay = replay
        self.transition_counts: dict[tuple[str, str], int] = {}
        self.lost_counts: dict[str, int] = {}
        """Requests whose KV is gone, by reason."""
        self.on_event: Callable[[Event], None] = _nobody_listens

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended: write its line."""
        self.traffic.ended(request)

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""
        self.lost_counts[reason] = self.lost_counts.get(reason, 0) + 1

    def moved(self, change: StateChange) -> None:
        """A replica has changed its state."""
        replica = change.replica
        pair = (change.before.value, replica.state.value)
        self.transition_counts[pair] = self.transition_counts.get(pair, 0) + 1
        self.on_event(
            {
                "event": "transition",
                "at_s": change.at_ns / NS_PER_S,
                "replica": replica.replica_id,
                "from": pair[0],
                "to": pair[1],
                "writer": change.writer,
                "cause": change.cause,
            }
        )

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        self.on_event({"event": "fault", "at_s": at_ns / NS_PER_S, "kind": kind, "target": target})

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""
        at_s = at_ns / NS_PER_S
        self.on_event({"event": "fault_over", "at_s": at_s, "kind": kind, "target": target})

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a command, a load that is complete."""
        if kind != "fault over":  # `fault_over` has said so
            at_s = at_ns / NS_PER_S
            self.on_event(
                {"event": "note", "at_s": at_s, "kind": kind, "target": target, "text": text}
            )

    def close(self) -> None:
        """Write what is still in buffers."""
        self.traffic.close()
        self.lateness.close()


def _nobody_listens(event: Event) -> None:
    """No page is open yet."""


def _replayable(config: Config) -> Table:
    raw = effective_dict(config)
    raw["workload"] = {"path": "workload.jsonl", "format": "jsonl", "oversized": "reject"}
    raw["output"]["dir"] = "replay"
    raw["recovery"]["client_retries"] = 0  # clients that tried again are in the workload
    return _open_ended(raw)


def _open_ended(raw: Table) -> Table:
    """A configuration to which commands and faults may be appended; paths are absolute."""
    if raw["models"]:
        del raw["replicas"]  # they follow from the models
    for key in ("commands", "faults"):  # more may be appended, which an empty list would forbid
        if not raw[key]:
            del raw[key]
    for table, key in _PATHS:
        if raw[table].get(key):
            raw[table][key] = str(Path(raw[table][key]).resolve())
    return raw
