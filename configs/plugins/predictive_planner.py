"""A predictive planner for colocated replicas: scale for the load when the weights will be there.

    [autoscale]
    planner = "./predictive_planner.py:Predictive"
    executor = "serverless"
    tick_ms = 1000

The arrival rate is forecast (Holt) as far ahead as a replica takes to load; a request costs the
replica time of its prompt and of its tokens at the batch that the objective allows. Up at once,
down only when the highest wish of the last `DOWN_S` seconds is lower (as an HPA does). A backlog
that waits is worked off within `BACKLOG_S`.
"""

import math
from collections import deque

from emu.autoscale.planner import Demand, Rates
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import OwnPlannerTable
from emu.policy import Context

AHEAD_S = 10.0
WINDOW_S = 5.0
DOWN_S = 30.0
BACKLOG_S = 2.0
USE = 0.7
"""Part of a replica's time that is planned with."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Predictive:
    """How many colocated replicas there will have to be."""

    needs_ticks = True

    def __init__(self, table: OwnPlannerTable, rates: Rates, context: Context) -> None:
        self._table, self._context = table, context
        self._tpot_ms = context.objectives_ms[1] or 50.0
        self._wishes: deque[tuple[float, int]] = deque()

    def decide(self, snapshot: Snapshot) -> Demand:
        """The change wanted now."""
        context, table = self._context, self._table
        here = [v for v in context.replicas if v.state in ("colocated", "loading_colocated")]
        expected = context.forecast(AHEAD_S, window_s=WINDOW_S, buckets=8, method="holt")
        seen = context.rates(WINDOW_S)
        prompt = max(expected.mean_prompt_tokens, seen.mean_prompt_tokens)
        if not prompt:
            return Demand()
        busy_s = self._seconds_of(prompt, expected.mean_output_tokens or 100.0)
        wished = max(expected.arrivals_per_s, seen.arrivals_per_s) * busy_s / USE
        prompt_s = self._context.iteration_ms(prompt_tokens=max(1, round(prompt))) / 1000
        wished += snapshot.waiting_tokens / prompt * prompt_s / BACKLOG_S
        wish = min(max(math.ceil(wished), table.min_replicas), table.max_replicas)
        self._wishes.append((context.now_s, wish))
        while self._wishes[0][0] < context.now_s - DOWN_S:
            self._wishes.popleft()
        kept = max(wish, min(len(here), max(w for _, w in self._wishes)))
        return Demand(
            colocated=kept - len(here),
            figures={"expected_per_s": expected.arrivals_per_s, "wish": wish, "here": len(here)},
        )

    def _seconds_of(self, prompt: float, output: float) -> float:
        """Replica time of one request: its prompt, and its share of decode iterations."""
        tokens, best_ms = round(prompt + output / 2), math.inf
        for batch in BATCHES:
            took_ms = self._context.iteration_ms(decodes=batch, context_tokens=batch * tokens)
            if took_ms <= self._tpot_ms:
                best_ms = min(best_ms, took_ms / batch)
        prompt_ms = self._context.iteration_ms(prompt_tokens=max(1, round(prompt)))
        return (prompt_ms + output * min(best_ms, self._tpot_ms)) / 1000

    def wake_ns(self, snapshot: Snapshot) -> int:
        """The next tick."""
        return snapshot.now_ns + 1
