"""How long answers are, where clients leave it open."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from emu.apps.serve.calls import Call
from emu.apps.serve.options import ServeOptions
from emu.config.schema import Config, LengthsTable, SyntheticTable
from emu.workload.lengths import length_sampler

_BLOCK: Final = 256


class OutputLengths:
    """How long answers are: (true length, declared limit), in tokens."""

    def __init__(self, config: Config, source: str, options: ServeOptions) -> None:
        table: LengthsTable = (config.workload.synthetic or SyntheticTable()).output
        if options.output_tokens:
            table = LengthsTable(distribution="fixed", value=options.output_tokens)
        self._sampler = length_sampler(
            table, is_prompt=False, base_dir=Path(), seed=config.seed, config_source=source
        )
        self._longest = table.value if table.distribution == "fixed" else table.max
        self._early_stop = options.early_stop
        self._drawn: list[int] = []

    def draw(self, call: Call, room: int) -> tuple[int, int]:
        """Tokens of the next request. A client's limit is reached unless answers may stop early.

        `room` counts the tokens that still fit.
        """
        length = self._next()
        limit = call.max_tokens
        if limit is not None and (call.ignore_eos or not self._early_stop):
            return limit, limit
        limit = min(room, limit if limit is not None else max(self._longest, call.min_tokens))
        return max(min(length, limit), min(call.min_tokens, limit), 1), limit

    def _next(self) -> int:
        if not self._drawn:
            self._drawn = self._sampler.take(_BLOCK).tolist()
            self._drawn.reverse()
        return int(self._drawn.pop())
