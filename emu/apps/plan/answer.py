"""The answer of a plan: the ranked clusters, how sure they are, headroom, survivors, costs."""

from __future__ import annotations

import msgspec

from emu.apps.plan.beside import Opinion
from emu.apps.plan.costs import Costs
from emu.apps.plan.day import Day
from emu.apps.plan.doubt import Doubt
from emu.apps.plan.survive import Fate
from emu.documents import Document
from emu.report.grid import html_table


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a cluster: over seeds with the engine as it is, and over draws."""

    label: str
    limit_ms: float
    mean_ms: float
    """Mean over seeds."""
    low_ms: float | None = None
    high_ms: float | None = None
    """95 % interval of it; of a trace from a bootstrap over blocks of requests, of the best cluster
    alone. None: one seed."""
    drawn_low_ms: float | None = None
    drawn_high_ms: float | None = None
    """90 % of the draws lie between; None: not drawn."""
    drawn_ms: list[float] = []
    """Of each draw, ascending."""


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that meets the objectives. `prefill` and `decode` count replicas."""

    label: str
    gpu: str
    """Kind, or `prefill + decode` of two kinds."""
    gpus: int
    cost_per_h: float
    """Number of GPUs where they have no price."""
    mode: str
    tensor_parallel: int
    pipeline_parallel: int
    dtype: str
    limits: dict[str, int]
    """Keys of [scheduler] that were tried and chosen."""
    prefill: int
    decode: int
    replicas: int
    """With autoscaling: at most."""
    system: str
    """Preset of [autoscale]; empty: the cluster does not scale."""
    bounds: dict[str, int]
    """Keys of [autoscale]."""
    gpus_mean: float
    """GPU time divided by the time of the run; `gpus` where the cluster does not scale."""
    worst: float
    """Figure / limit of the objective nearest to its limit, in the hardest world that must be met;
    1 = at the limit."""
    met: int
    """Draws that meet all objectives ..."""
    of: int
    """... of so many; 0: none was drawn, the engine is as emu has it."""
    is_missed: bool = False
    """It was drawn, and fewer draws meet than must: they end as soon as that is certain."""
    readings: list[Reading]
    costs: Costs


class Headroom(msgspec.Struct, frozen=True):
    """How much more traffic the best cluster takes, with the engine as emu has it."""

    factor: float
    """Of the rate; objectives are met up to it."""
    breaks_at: float | None
    """The nearest factor tried that does not meet; None: none up to the largest tried."""
    breaks: list[str]
    """Which objectives fail there."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What arithmetic says of a kind of GPU, before any run."""

    gpu: str
    label: str
    """Its cheapest layout."""
    low: int
    high: int
    """GPUs, from all busy all the time to as busy as clusters that meet usually are."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `rows` has the cheapest cluster first, then the best of each other layout."""

    model: str
    weights: str
    """Types of its weights and KV cache, in words."""
    engine: str
    """Name and version in one word."""
    rate_per_s: float
    objectives: list[str]
    has_prices: bool
    confidence: float
    """Part of the draws in which `rows` meet; 1 without draws."""
    run_s: float
    """Arrivals of the runs that the answer rests on; 0: the workload's own length."""
    bounds: list[Bound]
    rows: list[Ranked]
    median: Ranked | None
    """The cheapest that meets in half of the draws; None without draws."""
    others: list[Ranked]
    """The best of each layout that costs more, with the engine as it is."""
    headroom: Headroom
    doubt: Doubt | None
    day: Day | None
    """Over a day's curve; None: not asked."""
    rests_on: str
    """What is known of the engine and the kernels of the best cluster: runs and tables, named."""
    unmeasured: list[str]
    """GPUs that were looked at and have no measured kernel behind their times."""
    survivor: Ranked | None
    """The cheapest that survives the loss that was asked about; None: not asked, or none."""
    survive: str
    """The loss."""
    fates: list[Fate]
    """Of the survivor after each loss."""
    fates_of_best: list[Fate]
    """Of the best cluster."""
    beside: list[Opinion]
    """What another tool answers."""
    refused: dict[str, str]
    """Layout -> why it cannot run, or that nothing as cheap as the best meets."""
    runs: int
    config: Document
    """The best cluster as a configuration: the survivor if one was asked for."""

    def _repr_html_(self) -> str:
        """What a notebook shows: the clusters that meet the objectives, the cheapest first."""
        price = "cost/h" if self.has_prices else "GPUs"
        cells = [
            [row.label, str(row.gpus), f"{row.cost_per_h:g}", f"{row.worst:.2f}"]
            for row in [*self.rows, *self.others]
        ]
        title = f"{self.model}, {self.rate_per_s:g} requests/s: {'; '.join(self.objectives)}"
        note = f"headroom: {100 * (self.headroom.factor - 1):.0f} % more traffic"
        return html_table(title, ["cluster", "GPUs", price, "worst figure / limit"], cells, [note])
