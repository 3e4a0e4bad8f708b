"""A log of a real server as a source of requests: arrivals, lengths, limits, tenants, priorities.

Latencies of the log are not used here: `emu whatif` and `emu compare --measured` read them.
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.workload.formats.text_file import CHUNK_BYTES, TextFile
from emu.workload.items import Block, Notes
from emu.workload.logs.log_reader import read_log
from emu.workload.logs.log_record import Log, block_of
from emu.workload.source import Source


class LogSource(Source):
    """The requests of a log, in order of arrival."""

    is_absolute = True
    prompt_field = "prompt tokens"

    def __init__(self, file: TextFile, format: str) -> None:
        self._file = file
        self.name = format
        self.is_small = file.size_bytes <= CHUNK_BYTES
        self._log: Log | None = None

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All requests; what is left out is counted."""
        if self._log is None:
            self._log = read_log(self._file.path, self._file.source, self.name)
        for reason, count in self._log.skipped.items():
            notes.skip(f"requests {reason}", count)
        yield block_of(self._log.records)
