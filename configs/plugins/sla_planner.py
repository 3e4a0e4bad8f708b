"""NVIDIA Dynamo's SLA planner: replicas of each role from a forecast, a profile and corrections.

    [autoscale]
    planner = "./sla_planner.py:SlaPlanner"
    tick_ms = 10000                  # the adjustment interval
    [autoscale.own]
    forecast = "linear"              # or "holt", "last"
    kv_use = 0.95                    # part of the KV blocks that is planned with
    [slo]
    ttft_ms = 500
    tpot_ms = 50

Once an interval: how far TTFT and ITL were from what the profile promises for the load of the
interval (the correction factors; queues and prefix hits are in them); the load of the next
interval; prefill replicas for its prompt tokens, fewer if prompts were faster than promised; decode
replicas for its output tokens at the largest batch whose corrected ITL still meets the objective.
"""

import math
from typing import Literal

import msgspec

from emu.autoscale.planner import Demand, Rates, scan
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import OwnPlannerTable
from emu.policy import Context

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


class Options(msgspec.Struct):
    """Keys of `[autoscale.own]`."""

    forecast: Literal["last", "linear", "holt"] = "linear"
    kv_use: float = 0.95


class SlaPlanner:
    """Decides once an interval, for prefill and decode replicas."""

    needs_ticks = True
    Options = Options

    def __init__(
        self, table: OwnPlannerTable, rates: Rates, context: Context, options: Options
    ) -> None:
        self._table, self._context, self._options = table, context, options
        self._interval_s = table.tick_ms / 1000
        self._ttft_ms, self._itl_ms, _ = context.objectives_ms

    def decide(self, snapshot: Snapshot) -> Demand:
        """The change to the numbers that the next interval needs."""
        context, table, interval_s = self._context, self._table, self._interval_s
        seen = context.rates(interval_s)
        if not seen.arrivals_per_s:
            return Demand()  # no data: hold
        expected = context.forecast(
            interval_s, window_s=interval_s, buckets=4, method=self._options.forecast
        )
        prompt, output = max(1, round(seen.mean_prompt_tokens)), expected.mean_output_tokens or 1.0
        counts = scan(snapshot)
        ttft_ms = context.ttft_ms(50, interval_s)
        promised_ms = context.iteration_ms(prompt_tokens=prompt)
        prefill_factor = ttft_ms / promised_ms if ttft_ms else 1.0
        per_replica = prompt / promised_ms * 1000
        prefill = expected.prompt_tokens_per_s * min(1.0, prefill_factor) / per_replica
        held_tokens = round(prompt + output / 2)
        running = sum(v.running for v in context.replicas if v.state == "decode")
        batch = max(1, round(running / max(1, counts.decode)))
        itl_ms = context.itl_ms(50, interval_s)
        decode_factor = itl_ms / self._promised_itl_ms(batch, held_tokens) if itl_ms else 1.0
        room = self._options.kv_use * self._kv_tokens(snapshot)
        tokens_per_s = 1000 / self._promised_itl_ms(1, held_tokens)
        for batch in BATCHES:
            promised_ms = self._promised_itl_ms(batch, held_tokens)
            if promised_ms * decode_factor <= self._itl_ms and batch * held_tokens <= room:
                tokens_per_s = max(tokens_per_s, batch / promised_ms * 1000)
        decode = expected.arrivals_per_s * output / tokens_per_s
        wanted_prefill = min(max(math.ceil(prefill), table.min_prefill), table.max_prefill)
        wanted_decode = min(max(math.ceil(decode), table.min_decode), table.max_decode)
        figures = {
            "expected_per_s": expected.arrivals_per_s,
            "prefill_factor": prefill_factor,
            "decode_factor": decode_factor,
        }
        return Demand(wanted_prefill - counts.prefill, wanted_decode - counts.decode, 0, figures)

    def _promised_itl_ms(self, batch: int, held_tokens: int) -> float:
        """The profile: a decode iteration of so many requests that hold so many tokens each."""
        return self._context.iteration_ms(decodes=batch, context_tokens=batch * held_tokens)

    @staticmethod
    def _kv_tokens(snapshot: Snapshot) -> int:
        return snapshot.block_tokens * max(view.blocks_total for view in snapshot.replicas)

    def wake_ns(self, snapshot: Snapshot) -> int:
        """The end of the next interval."""
        return snapshot.now_ns + 1
