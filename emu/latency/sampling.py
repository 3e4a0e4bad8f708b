"""What choosing tokens costs: the sampler's GPU time, and what penalties make the host wait.

`latency.sampling` and `latency.penalties` decide; requests without sampling parameters get those
of the model's published generation config. Nucleus sampling (`top_p`) needs the logits in order:
vLLM up to 0.15 sorts the whole vocabulary of every sequence at every step, later versions cut it
with one kernel from 8 rows on.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Final, Literal, NamedTuple

from emu import catalogue
from emu.latency.engine import REFERENCE_GBYTES_PER_S, EngineModel

Method = Literal["greedy", "random", "top_p"]
_BYTES_PER_LOGIT: Final = {"greedy": 10, "random": 26, "top_p": 26}
"""Traffic: widened to 32 bits and searched; softmax, noise and search besides."""
_KERNELS: Final = {"greedy": 4, "random": 10, "top_p": 10}
_KERNEL_NS: Final = 2_000
_TRITON_ROWS_MIN: Final = 8
_REACHED: Final = 0.82
"""Part of the memory bandwidth that element-wise kernels reach."""
_TABLE: Final = Path(catalogue.__path__[0]) / "sampling.toml"


class Sampling(NamedTuple):
    """How tokens are chosen."""

    method: Method
    penalties: bool


@functools.cache
def _published() -> dict[str, dict[str, object]]:
    return tomllib.loads(_TABLE.read_text("utf-8"))


def published_sampling(model: str) -> Sampling:
    """What the generation config of a model (catalogue name) implies; else the table's default."""
    table = _published()
    entry = table.get(model, table["default"])
    method = str(entry["method"])
    assert method in _KERNELS
    return Sampling(method, bool(entry.get("penalties", False)))  # type: ignore[arg-type]


def resolve_sampling(sampling: str, penalties: str, model: str) -> Sampling:
    """The configuration's words ("auto" = the model's), resolved."""
    published = published_sampling(model)
    method = published.method if sampling == "auto" else sampling
    if penalties == "auto":
        has_penalties = published.penalties and sampling == "auto"
    else:
        has_penalties = penalties == "on"
    return Sampling(method, has_penalties)  # type: ignore[arg-type]


class SamplerCost:
    """Cost of choosing tokens on one GPU for one vocabulary."""

    def __init__(
        self, engine: EngineModel, sampling: Sampling, vocab: int, gbytes_per_s: float
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._vocab = vocab
        self._gbytes_per_s = gbytes_per_s
        has_penalties = bool(sampling.penalties)
        self.penalty_ns = engine.penalty_ns if has_penalties else 0
        """What the GPU waits for the host in a step: penalties need the ids of the last one."""
        self.penalty_sequence_ns = engine.penalty_sequence_ns if has_penalties else 0
        """The same for each row."""

    def gpu_ns(self, rows: int) -> int:
        """GPU time for so many rows of logits."""
        engine, method = self._engine, self._sampling.method
        logits = rows * self._vocab
        traffic = _BYTES_PER_LOGIT[method] * logits
        total = float(_KERNELS[method] * _KERNEL_NS)
        if method == "top_p":
            rate = engine.sort_ns_per_million
            if engine.sampler == "triton" and rows >= _TRITON_ROWS_MIN:
                rate = engine.triton_ns_per_million
            # The stated rate is that of all kernels of the path together.
            total = engine.sampler_ns + (
                rate * logits / 1e6 * REFERENCE_GBYTES_PER_S / self._gbytes_per_s
            )
            traffic = 0
        if self._sampling.penalties:
            traffic += engine.penalty_logit_bytes * logits
        return round(total + traffic / (self._gbytes_per_s * _REACHED))
