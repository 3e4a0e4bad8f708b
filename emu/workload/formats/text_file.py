"""A text file in pieces that end at line ends, and its lines by byte offset.

Owns: the file's faults (absent, a folder, empty, changed, endless line) as one-line errors.
Memory is one piece; a line longer than a piece makes that piece longer, up to `LINE_MAX_BYTES`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from emu.config.input_files import no_file
from emu.errors import InputError
from emu.workload.items import Ints

CHUNK_BYTES: Final = 1 << 20
LINE_MAX_BYTES: Final = 1 << 28
_BOM: Final = b"\xef\xbb\xbf"
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
"""First bytes of files that are not text."""


class Chunk(msgspec.Struct, frozen=True):
    """Whole lines: the bytes, the number of the first line, and where it starts in the file."""

    data: bytes
    first_line: int
    offset: int

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset in the file, bytes) of every line that is not blank."""
        offset = self.offset
        for number, raw in enumerate(self.data.split(b"\n"), self.first_line):
            if raw.strip():
                yield number, offset, raw
            offset += len(raw) + 1


class TextFile:
    """A file that is read twice and must not change in between."""

    def __init__(self, path: Path, source: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.source = source
        self.chunk_bytes = chunk_bytes
        with self._open() as file:
            self.stamp = self._read_stamp(file)
        """Size in bytes, and when it was changed in ns."""
        self.size_bytes = self.stamp[0]

    def _open(self) -> BinaryIO:
        try:
            problem = no_file(self.path)
            if problem:
                raise InputError(self.source, None, "", f"{problem}: a workload is read twice")
            return self.path.open("rb")
        except OSError as error:
            problem = (error.strerror or "cannot be read").lower()
            raise InputError(self.source, None, "", problem) from None

    @staticmethod
    def _read_stamp(file: BinaryIO) -> tuple[int, int]:
        facts = os.fstat(file.fileno())
        return facts.st_size, facts.st_mtime_ns

    def _reopen(self) -> BinaryIO:
        file = self._open()
        if self._read_stamp(file) != self.stamp:
            file.close()
            raise InputError(self.source, None, "", "the file changed while it was being read")
        return file

    def head(self, size_bytes: int = 1 << 16) -> bytes:
        """The beginning of the file, without a byte order mark."""
        with self._reopen() as file:
            head = file.read(size_bytes).removeprefix(_BOM)
        for magic, program in _COMPRESSED.items():
            if head.startswith(magic):
                raise InputError(self.source, None, "", f"is compressed ({program}); unpack it")
        return head

    def chunks(self) -> Iterator[Chunk]:
        """The whole file, in order."""
        line, offset, rest = 1, 0, b""
        with self._reopen() as file:
            if file.read(len(_BOM)) == _BOM:
                offset = len(_BOM)
            else:
                file.seek(0)
            while piece := file.read(self.chunk_bytes):
                end = piece.rfind(b"\n") + 1
                if not end:
                    rest += piece
                    if len(rest) > LINE_MAX_BYTES:
                        raise InputError(
                            self.source, line, "$", f"line longer than {LINE_MAX_BYTES} bytes"
                        )
                    continue
                data = rest + piece[:end]
                yield Chunk(data, line, offset)
                line += data.count(b"\n")
                offset += len(data)
                rest = piece[end:]
            if rest:
                yield Chunk(rest, line, offset)

    def lines_at(self, offsets: Ints, window: int = 4096) -> Iterator[bytes]:
        """The lines that start at these offsets, in this order, `window` of them at a time."""
        with (
            self._reopen() as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ):
            for begin in range(0, len(offsets), window):
                lines = []
                for start in offsets[begin : begin + window].tolist():
                    end = view.find(b"\n", start)
                    lines.append(view[start : end if end >= 0 else len(view)])
                yield b"\n".join(lines) + b"\n"
