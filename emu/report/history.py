"""The history of a run: what happened to every request, in order, as an independent record.

Written to events.jsonl when `output.events` is set, kept in memory by chaos runs. It is told by the
same calls that change the world and never asked by it, so that a checker that reads only this
(`emu/chaos/checker.py`) can find the world's books wrong.

One record is one JSON object with `at_ns` and `event`:

    arrived    row, request, prompt, output     a request reached the gateway; row = its line
    tokens     replica, rows, ends              each of these got a token at each of these times
    migrated   source, destination, rows        KV (or a half of it) has arrived elsewhere
    routed     row                              it starts anew somewhere else (nothing was lost)
    lost       row, reason                      its KV is gone
    ended      row, status, reason, first_out,  its one terminal event; how much later than the
               last_out                         engine its client had first and last token, ns
    state      replica, from, to, writer        a replica changed its state
    fault      kind, target                     a fault struck
    fault_over kind, target                     one that lasted is over
    plan       text                             what a planner decided, with its figures
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.request import Request

Record = dict[str, Any]


class History:
    """Collects records, in memory or in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.records: list[Record] = []
        self._encoder = msgspec.json.Encoder()
        self._file: TextIO | None = None if path is None else path.open("w", encoding="utf-8")

    def add(self, at_ns: int, event: str, **what: Any) -> None:
        """Something happened now."""
        record: Record = {"at_ns": at_ns, "event": event, **what}
        if self._file is None:
            self.records.append(record)
        else:
            self._file.write(self._encoder.encode(record).decode() + "\n")

    def tokens(
        self,
        replica: int,
        receivers: Sequence[Request],
        start_ns: int,
        ends: NDArray[np.int64] | None,
        now_ns: int,
    ) -> None:
        """These requests received a token at each of the ends (relative to the start), or now."""
        times = [now_ns] if ends is None else (ends + start_ns).tolist()
        rows = [request.row for request in receivers]
        self.add(times[-1], "tokens", replica=replica, rows=rows, ends=times)

    def close(self) -> None:
        """Write the rest."""
        if self._file is not None:
            self._file.close()
