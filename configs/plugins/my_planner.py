"""Steps on queue and memory, as an example of a user's own planner.

    [autoscale]
    planner = "./plugins/my_planner.py:Steps"      # relative to the configuration

One more prefill replica while more than half a second of prompts waits for each, one fewer when
nothing waits; one more decode replica while more than 70 % of the KV blocks are in use, one fewer
below 20 %. Nothing changes while a replica is still loading.
"""

from emu.autoscale.planner import Demand, Rates, scan
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import OwnPlannerTable


class Steps:
    """Up and down by one."""

    needs_ticks = False  # asked when something has changed, which is enough here

    def __init__(self, table: OwnPlannerTable, rates: Rates) -> None:
        self._table = table
        self._rates = rates

    def decide(self, snapshot: Snapshot) -> Demand:
        """How many replicas to add or remove now."""
        table, counts = self._table, scan(snapshot)
        if any(view.state.value.startswith("loading") for view in snapshot.replicas):
            return Demand()
        rate = max(1, counts.prefill) * self._rates.prefill_tokens_per_s
        queue_s = counts.queued_tokens / rate
        use = counts.blocks_used / (counts.blocks_per_replica * max(1, counts.decode))
        prefill = decode = 0
        if queue_s > 0.5 and counts.prefill < table.max_prefill:
            prefill = 1
        elif not counts.queued_tokens and counts.prefill > table.min_prefill:
            prefill = -1
        if use > 0.7 and counts.decode < table.max_decode:
            decode = 1
        elif use < 0.2 and counts.decode > table.min_decode:
            decode = -1
        return Demand(prefill, decode, figures={"queue_s": queue_s, "use": use})

    def wake_ns(self, snapshot: Snapshot) -> int:
        """No need to be asked again before something changes."""
        return -1
