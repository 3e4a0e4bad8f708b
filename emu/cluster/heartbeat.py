"""A line at an interval of simulated time: what the cluster did in it (`output.heartbeat_s`).

    10 s: 412 prompt tokens/s, 1,930 output tokens/s, 24 running, 3 waiting, KV 41.2 %, prefix hits
    12.0 %, 310 completed

It goes to standard error, or into the log where there is one (`cluster.beat`), and changes no
result.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from emu.cluster.ports import Observer
from emu.units import NS_PER_S, s_to_ns

if TYPE_CHECKING:
    from emu.log import Log
    from emu.report.timeseries import Sample
    from emu.request import Request


class Heartbeat(Observer):
    """Follows the samples of the time series."""

    def __init__(self, interval_s: float, log: Log | None) -> None:
        """`interval_s`: a multiple of the interval of samples."""
        self._interval_ns = s_to_ns(interval_s)
        self._log = log
        self._next_ns = self._interval_ns
        self._last_ns = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._prompt_tokens = 0
        """Of requests that ended since the last line; of which `_hit_tokens` were in a cache."""
        self._hit_tokens = 0

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended."""
        self._prompt_tokens += request.prompt_tokens
        self._hit_tokens += request.prefix_hit_tokens

    def sampled(self, sample: Sample) -> None:
        """A line, if it is time for one."""
        if sample.time_ns < self._next_ns:
            return
        span_s = (sample.time_ns - self._last_ns) / NS_PER_S
        prompt_per_s = (sample.prefill_tokens - self._prefill_tokens) / span_s
        output_per_s = (sample.decode_tokens - self._decode_tokens) / span_s
        kv_share = sample.used_blocks / sample.total_blocks if sample.total_blocks else 0.0
        hit_share = self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
        if self._log is not None:
            self._log.event(
                "cluster.beat",
                prompt_tokens_per_s=round(prompt_per_s, 1),
                output_tokens_per_s=round(output_per_s, 1),
                running=sample.running,
                waiting=sample.waiting,
                kv_share=round(kv_share, 4),
                prefix_hit_share=round(hit_share, 4),
                completed=sample.completed,
            )
        else:
            parts = (
                f"{prompt_per_s:,.0f} prompt tokens/s",
                f"{output_per_s:,.0f} output tokens/s",
                f"{sample.running:,} running",
                f"{sample.waiting:,} waiting",
                f"KV {kv_share:.1%}",
                f"prefix hits {hit_share:.1%}",
                f"{sample.completed:,} completed",
            )
            print(f"{sample.time_ns / NS_PER_S:g} s: {', '.join(parts)}", file=sys.stderr)
        self._next_ns += self._interval_ns
        self._last_ns = sample.time_ns
        self._prefill_tokens, self._decode_tokens = sample.prefill_tokens, sample.decode_tokens
        self._prompt_tokens = self._hit_tokens = 0
