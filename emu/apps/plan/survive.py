"""Clusters that live through the loss of a replica, a machine, a GPU or a zone.

Replicas of a role are dealt over the machines, so a loss takes as few of them as it must. A cluster
survives if

- what is left of it meets the objectives with the confidence that was asked for, and
- a run of it in which the loss strikes after a third of the arrivals serves every request, and
  those that arrive from then on meet the objectives.

Both are looked at for every kind of single loss: machines and zones that hold as many replicas of
each role are alike. Clusters are tried in the order of their cost, the spare included. They lie on
two machines at least (in as many as there are zones), even where one would hold all replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from emu.api import override_texts
from emu.apps.plan.layouts import Candidate
from emu.apps.plan.search import Asked
from emu.apps.plan.traffic import SOURCE
from emu.apps.shared.points import Driver, Point, meets
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.documents import Document

if TYPE_CHECKING:
    from emu.apps.plan.question import Question
    from emu.apps.plan.trials import Judge, Trials

LOSSES: Final = ("replica", "machine", "rank", "zone")
STRIKE: Final = 1 / 3
"""Of the run's arrivals."""
_COST_SPAN: Final = 3.0
"""Clusters that cost more than so many times the one without a spare are not tried."""


class Loss(msgspec.Struct, frozen=True):
    """What is lost at once."""

    label: str
    """`machine 0 (2P+1D)`."""
    prefill: int
    """Replicas that prefill or do both."""
    decode: int
    """Replicas that decode."""
    targets: tuple[Document, ...]
    """Of [[faults]], without the time."""


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a cluster in a run with a loss."""

    loss: str
    is_met: bool
    figures_ms: dict[str, float]
    """Objective (TTFT p95) -> of the requests that arrive after the loss."""
    unserved: int
    """Requests."""


def losses_of(candidate: Candidate, question: Question, plain: Document) -> list[Loss]:
    """The single losses of a cluster that are not alike."""
    values = candidate.values(question.gpus_per_node, question.settings)
    texts = override_texts({**question.settings, **values})
    plan = make_plan(config_from_dict(plain, texts, SOURCE), SOURCE)
    found: dict[tuple[int, int], Loss] = {}
    if question.survive in ("replica", "rank"):
        for replica in plan.replicas:
            is_decode = replica.role == "decode"
            name = f"replica {replica.replica_id}"
            target: Document = {"kind": "replica_crash", "replica": replica.replica_id}
            if question.survive == "rank":
                name = f"GPU {replica.gpus[0]}"
                target = {"kind": "gpu_crash", "gpu": replica.gpus[0]}
            label = f"{name} ({replica.role})"
            lost = (int(not is_decode), int(is_decode))
            found.setdefault(lost, Loss(label, *lost, (target,)))
        return list(found.values())
    machines = range(len(plan.topology.machines))
    groups = [[machine] for machine in machines]
    if question.survive == "zone":
        groups = [list(machines[zone :: question.zones]) for zone in range(question.zones)]
    for number, group in enumerate(groups):
        roles = Counter(one.role for one in plan.replicas if one.machine in group)
        prefill = roles["prefill"] + roles["colocated"]
        lost = (prefill, roles["decode"])
        if not sum(lost):
            continue
        split = f"{prefill}P+{lost[1]}D" if candidate.decode else f"{prefill} colocated"
        targets = tuple({"kind": "node_crash", "node": machine} for machine in group)
        found.setdefault(lost, Loss(f"{question.survive} {number} ({split})", *lost, targets))
    return list(found.values())


class Survival:
    """Which clusters survive."""

    def __init__(
        self,
        trials: Trials,
        driver: Driver,
        question: Question,
        plain: Document,
        judge: Judge,
    ) -> None:
        """`trials` of the objectives after the loss."""
        self._trials = trials
        self._driver = driver
        self._question = question
        self._plain = plain
        self._judge = judge
        self._losses: dict[Candidate, list[Loss]] = {}

    def cheapest(self, bests: Sequence[Candidate]) -> tuple[Candidate | None, list[Fate]]:
        """The cheapest of the layouts' clusters that survives, from the best of each layout."""
        best: Candidate | None = None
        fates: list[Fate] = []
        for start in bests:
            for one in self._upwards(start):
                if best is not None and one.cost >= best.cost:
                    break
                if not self._trials.is_allowed(one) or not self._is_left_enough(one):
                    continue
                told = self.fates(one)
                if all(fate.is_met for fate in told):
                    best, fates = one, told
                    break
        return best, fates

    def fates(self, candidate: Candidate) -> list[Fate]:
        """Runs of a cluster with each of its losses."""
        losses = self._of(candidate)
        points = [self.point(candidate, loss) for loss in losses]
        found = []
        for loss, row in zip(losses, self._driver.rows(points), strict=True):
            figures = row.result.figures
            objectives = self._question.during
            values = {
                one.label: float(figures.get(f"since.{one.figure}", float("inf")))
                for one in objectives
            }
            unserved = int(figures["rejected"] + figures["failed"]) if figures else 0
            is_met = meets(row.result, [], 0.0) and all(
                values[one.label] <= one.limit_ms for one in objectives
            )
            found.append(Fate(loss=loss.label, is_met=is_met, figures_ms=values, unserved=unserved))
        return found

    def point(self, candidate: Candidate, loss: Loss) -> Point:
        """The run in which a loss strikes."""
        worlds = self._trials.worlds
        at_s = round(STRIKE * (worlds.spans.long_s or worlds.span_s), 3)
        away_s = self._question.away_s
        length = {"duration_s": away_s} if away_s else {}
        more: Document = {
            "faults": [{"at_s": at_s, **target, **length} for target in loss.targets],
            "recovery.replace": bool(away_s),
        }
        point = worlds.point(candidate, worlds.plain[0], more)
        return msgspec.structs.replace(point, since_s=at_s)

    def _of(self, candidate: Candidate) -> list[Loss]:
        if candidate not in self._losses:
            self._losses[candidate] = losses_of(candidate, self._question, self._plain)
        return self._losses[candidate]

    def _is_left_enough(self, candidate: Candidate) -> bool:
        """Whether what is left after each loss meets the objectives."""
        left = []
        for loss in self._of(candidate):
            prefill, decode = candidate.prefill - loss.prefill, candidate.decode - loss.decode
            if prefill < 1 or (candidate.decode and decode < 1):
                return False
            left.append(Candidate(candidate.layout, prefill, decode))
        if self._question.away_s:  # it is back before long: the run with the loss judges
            left = [candidate]
        return all(self._holds(one) for one in dict.fromkeys(left))

    def _holds(self, left: Candidate) -> bool:
        """Whether it meets; without a run if one of its layout with as few of each role, or fewer,
        does (the search assumes the same: `docs/lab/plan-search.md`)."""
        is_more = any(left.has_as_much_as(one) for one in self._trials.good(self._judge))
        return is_more or self._trials.answer([Asked((left,))], self._judge)[0][0]

    def _apart(self, candidate: Candidate) -> Candidate:
        """The same on so many machines that one loss cannot take all."""
        question = self._question
        needed = {"machine": 2, "zone": question.zones}.get(question.survive, 1)
        if min(candidate.machines(question.gpus_per_node)) >= needed:
            return candidate
        return msgspec.structs.replace(candidate, machines_min=needed)

    def _upwards(self, start: Candidate) -> Iterator[Candidate]:
        """Clusters of a layout by their cost, from the best one without a spare."""
        most = int(_COST_SPAN * start.replicas) + self._question.gpus_per_node
        found = [
            self._apart(Candidate(start.layout, prefill, decode))
            for prefill in range(start.prefill, most + 1)
            for decode in (range(start.decode, most + 1) if start.decode else (0,))
            if prefill + decode <= most
        ]
        return iter(sorted(found, key=lambda one: (one.cost, -min(one.prefill, one.decode))))
