"""What every reader of a file and every generator of lines is to an opened workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from emu.workload.items import Block, Ints, Notes

_FEW_LINES: Final = 1_000
"""So few are read without numpy, whose import would cost more than the emulation."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A file to open, and what its readers may need to know."""

    path: Path
    source: str
    """The path as the user wrote it."""
    seed: int = 0
    """Of what a model draws."""
    tokenizer: Path | None = None
    """A `tokenizer.json` for texts."""
    tokenizer_source: str = ""
    """The same as the user wrote it."""
    sessions: bool = False
    """ShareGPT: whole conversations."""
    think_s: float = 0.0
    """ShareGPT: the mean pause before a question."""
    columns: Mapping[str, str] = MappingProxyType({})
    """CSV: meanings of columns by name (`workload.columns`)."""
    limit: int = 0
    """Lines that are used (0 = all): a hint of how much to read at once."""

    @property
    def is_few(self) -> bool:
        """So few lines are used that they are read without numpy."""
        return 0 < self.limit <= _FEW_LINES


class Source:
    """Where lines come from: a file or a generator. Two passes give the same blocks."""

    name: str
    """The format, as `workload.format` has it."""
    prompt_field: str
    """How the format calls the prompt's length, for messages."""
    is_absolute: bool = False
    """Arrivals are dates; the first becomes 0."""
    has_arrivals: bool = True
    has_conversations: bool = False
    """A line may be a whole conversation (`workload.turns`)."""
    is_small: bool = False
    """One block may be kept between the passes."""

    def read_models(self) -> None:
        """Requests may name one of several models: from here on lines say which."""

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All lines, in order; what is left out is counted in `notes`."""
        raise NotImplementedError

    def rows_at(self, offsets: Ints) -> Iterator[Block]:
        """The lines at these offsets, in this order; asked of sources that may be out of order."""
        raise AssertionError(f"lines of {self.name} are in order of arrival")
