"""Published speed-ups by multi-token prediction beside emu's, at three loads.

    python -m benchmarks.mtp

A step of plain decodes beside a step that verifies drafts and makes the next ones, in time for a
token. The 96 ranks run two batches, as the recipes of such groups do (SGLang issue 6017).
Acceptance is the published one of the model (`emu/features/speculation/published.py`); the texts of
EP 96 are not known.
Sources: SGLang, docs/basic_usage/deepseek_v3.md at 0f4513c2 (TP 8, three drafts by default); LMSYS,
2025-07-17 (EP 16: 2 sequences of a GPU at 65,536 tokens and 4,096 out; EP 96: 128 of 2,000 and 100,
12 of 16 machines decode; neither side schedules ahead of the GPU).
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from benchmarks.wide_ep import MEASURED, MODEL, Site, context, decodes, deepep
from emu.catalogue.lookup import lookup_model
from emu.cluster.backends import make_latency
from emu.features.speculation.acceptance import conditional_rates, expected_tokens
from emu.features.speculation.drafters import DraftPart, draft_of
from emu.features.speculation.keys import SpeculativeTable
from emu.latency.base import BatchShape, Verify
from emu.latency.context import LatencyContext


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A published speed-up."""

    what: str
    tp: int
    ranks: int
    """Of the experts' group; 1 = none."""
    sequences: int
    """Of a replica."""
    context_tokens: int
    drafts: int
    published: float
    overlap: str = "none"
    schedules_ahead: bool = True
    """The host prepares a step while the one before it runs."""

    def speed_up(self) -> float:
        """Tokens a second with drafts over those without."""
        plain, model = self._context(), lookup_model(MODEL)
        table = SpeculativeTable(method="mtp", num_speculative_tokens=self.drafts)
        draft = draft_of(table, model, self.tp, "benchmark")
        assert draft is not None
        if self.ranks > 1:
            draft = msgspec.structs.replace(draft, expert_parallel=self.ranks)
        drafting = msgspec.structs.replace(plain, parts=(DraftPart(table, draft),))
        each, count = 1 + self.drafts, self.sequences
        shape = BatchShape(sequences=count)
        shape.verify = Verify(count, count * each, count * self.context_tokens, count)
        once_ns = make_latency(plain).iteration_ns(decodes(count, self.context_tokens))
        drafted_ns = make_latency(drafting).iteration_ns(shape)
        tokens = expected_tokens(conditional_rates(table, model.model_type))
        return tokens * once_ns / drafted_ns

    def _context(self) -> LatencyContext:
        setting = deepep(self.overlap, MEASURED, 32) if self.ranks > 1 else None
        found = context("decode", self.ranks, setting, Site(gpu="H200"))
        ranks = self.ranks if self.ranks > 1 else 0  # each expert is split over all ranks
        return msgspec.structs.replace(
            found,
            tensor_parallel=self.tp,
            expert_parallel=ranks,
            overlapped=self.schedules_ahead,
        )


CASES: Final = (
    Case(
        what="SGLang, 8 H200, TP 8, 1 sequence",
        tp=8,
        ranks=1,
        sequences=1,
        context_tokens=1000,
        drafts=3,
        published=1.8,
    ),
    Case(
        what="SGLang, 8 H200, TP 8, 32 sequences",
        tp=8,
        ranks=1,
        sequences=32,
        context_tokens=1000,
        drafts=3,
        published=1.5,
    ),
    Case(
        what="SGLang, 96 H200, EP 96, 128 sequences a GPU",
        tp=1,
        ranks=96,
        sequences=128,
        context_tokens=2050,
        drafts=1,
        published=1.142,
        overlap="two_batch",
        schedules_ahead=False,
    ),
    *(
        Case(
            what="SGLang, 16 H200, EP 16, 2 sequences a GPU",
            tp=1,
            ranks=16,
            sequences=2,
            context_tokens=67_584,
            drafts=drafts,
            published=published,
            schedules_ahead=False,
        )
        for drafts, published in ((2, 81.5 / 51.0), (3, 82.0 / 51.0))
    ),
)


def main() -> int:
    """Print the table."""
    print("| deployment | drafts | published | emu | off |\n|---|--:|--:|--:|--:|")
    for case in CASES:
        found = case.speed_up()
        off = found / case.published - 1
        print(f"| {case.what} | {case.drafts} | {case.published:.3g} | {found:.2f} | {off:+.0%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
