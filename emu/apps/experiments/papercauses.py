"""Causes: what the paper's short figures depend on, the same runs with one thing varied.

8B: when KV waits for decode replicas (traffic, NICs), in which parts of the trace, and of what
BlitzScale's advantage then consists. 72B: density and seed of the synthetic traffic. That of 24B is
in `paperfrontier.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.papercases import (
    BURST,
    CODE,
    SYSTEMS,
    denser,
    other_parts,
    run_case,
    tbt_ms,
    tbt_ms_p99,
)
from emu.apps.experiments.runner import Runner, Shown, Table
from emu.documents import DocumentView

SCALING: Final = SYSTEMS[:3]
_OWN: Final = "a NIC of 100 Gb/s each"
_TWO: Final = "50 Gb/s each (two share a NIC)"
_FOUR: Final = "25 Gb/s each (four share a NIC)"
_PCIE: Final = "100 Gb/s each, 4 share 128 Gb/s to host and NICs"
_LINKS: Final[Mapping[str, DocumentView]] = {
    _OWN: {},
    _TWO: {"nic_gbps": 50},
    _FOUR: {"nic_gbps": 25},
    _PCIE: {"pcie_shared_by": 4, "nic_over_pcie": True},
}
"""How the GPUs of cluster B may reach the network: keys of [[nodes]]."""
_DENSER: Final = (1, 2, 3)
_STRONGEST: Final = (_TWO, 3)
"""The condition that is looked at closely."""
_PARTS: Final = 4
_WITHOUT: Final[Sequence[tuple[str, str, DocumentView]]] = (
    ("BlitzScale without live scaling", "blitzscale", {"autoscale.live": False}),
    ("and without turning prefill into decode", "multicast", {"autoscale.mutate": False}),
    ("ServerlessLLM, every load from memory", "serverlessllm", {"autoscale.loader": "host"}),
)
DENSEST: Final = "3 times denser"
_TRAFFIC: Final[Sequence[tuple[str, float, DocumentView]]] = (
    ("that of the table above", 1.0, {}),
    ("another seed", 1.0, {"seed": 1}),
    ("a third seed", 1.0, {"seed": 2}),
    ("half as dense", 0.5, {}),
    ("1.5 times denser", 1.5, {}),
    ("2 times denser", 2.0, {}),
    (DENSEST, 3.0, {}),
    ("spares kept for 1.5 s", 1.0, {"autoscale.spare_ttl_ms": 1500}),
)


class Waits(msgspec.Struct, frozen=True):
    """BlitzScale, AllCache and ServerlessLLM on 8B under one condition."""

    words: str
    runs: Sequence[Figures]

    def change(self, other: int, *, is_tail: bool = False) -> float:
        """TBT of BlitzScale against that of an `other` system: 1 is AllCache, 2 ServerlessLLM."""
        form = tbt_ms_p99 if is_tail else tbt_ms
        return form(self.runs[0]) / form(self.runs[other]) - 1


def kv_waits(runner: Runner, traffic: DocumentView) -> tuple[Shown, Waits]:
    """TBT over the density of the traffic and the rates of the NICs; the strongest condition."""
    table = [_head("GPUs reach the network by, times denser, SLO met by static")]
    strongest: Waits | None = None
    for words, nodes in _LINKS.items():
        for times in _DENSER:
            tried = denser(traffic, traffic["upscale"] * times)
            runs = [run_case(runner, CODE, tried, system, nodes=nodes) for system in SCALING]
            static = run_case(runner, CODE, tried, "full", nodes=nodes)
            waits = Waits(words, runs)
            table.append([words, f"{times}", f"{static.slo_met:.0%}", *_cells(waits)])
            if (words, times) == _STRONGEST:
                strongest = waits
    assert strongest is not None
    title = "azure_code_8b: when KV waits for decode replicas"
    return Shown(title=title, table=table), strongest


def parts_of_trace(runner: Runner, traffic: DocumentView) -> tuple[Shown, list[Waits]]:
    """The strongest condition in other parts of the trace."""
    words, times = _STRONGEST
    table = [_head("from s")]
    found = []
    for start in other_parts(runner, CODE, _PARTS):
        tried = denser(traffic, traffic["upscale"] * times, start)
        runs = [run_case(runner, CODE, tried, each, nodes=_LINKS[words]) for each in SCALING]
        found.append(Waits(words, runs))
        table.append([f"{start[0]}", *_cells(found[-1])])
    title = f"azure_code_8b, other parts of the trace: {words}, {times} times denser"
    return Shown(title=title, table=table), found


def without(runner: Runner, traffic: DocumentView) -> Shown:
    """The strongest condition with one mechanism taken away after the other."""
    words, times = _STRONGEST
    tried = denser(traffic, traffic["upscale"] * times)
    nodes = _LINKS[words]
    runs = {system: run_case(runner, CODE, tried, system, nodes=nodes) for system in SCALING}
    for label, system, keys in _WITHOUT:
        runs[label] = run_case(runner, CODE, tried, system, nodes=nodes, keys=keys)
    head = "system, TBT mean ms, TBT p99 ms, KV waits p99 ms, TTFT mean ms, GPU s, SSD loads"
    table = [head.split(", ")]
    for label, run in runs.items():
        table.append(
            [
                label,
                f"{tbt_ms(run):.1f}",
                f"{tbt_ms_p99(run):.0f}",
                f"{run.kv_wait_ms_p99:.0f}",
                f"{run.ttft_ms_mean:.0f}",
                f"{run.gpu_s:.0f}",
                f"{run.loads.get('disk', 0)} of {sum(run.loads.values())}",
            ]
        )
    title = f"azure_code_8b, without one mechanism: {words}, {times} times denser"
    return Shown(title=title, table=table)


def _head(first: str) -> list[str]:
    columns = "TBT mean / p99 ms of blitzscale, allcache, serverlessllm, KV waits p99 ms"
    return [*first.split(", "), *columns.split(", "), "against allcache", "against serverlessllm"]


def _cells(waits: Waits) -> list[str]:
    return [
        *(f"{tbt_ms(run):.1f} / {tbt_ms_p99(run):.0f}" for run in waits.runs),
        ", ".join(f"{run.kv_wait_ms_p99:.0f}" for run in waits.runs),
        *(
            f"{waits.change(other):+.0%} / {waits.change(other, is_tail=True):+.0%}"
            for other in (1, 2)
        ),
    ]


class Change(NamedTuple):
    """How much less or more BlitzScale's figures are on 72B, as parts."""

    ttft_allcache: float
    """Mean TTFT against AllCache's."""
    ttft_serverlessllm: float
    """Mean TTFT against ServerlessLLM's."""
    tbt_allcache: float
    """Mean TBT against AllCache's."""
    tbt_serverlessllm: float
    """Mean TBT against ServerlessLLM's."""


Bursts = Mapping[str, Change]
"""By kind of synthetic traffic."""


def bursts(runner: Runner) -> tuple[Shown, Bursts]:
    """Other seeds, densities and spares on 72B."""
    head = "traffic, SLO met by static, TTFT against allcache, TTFT against serverlessllm"
    table: Table = [[*head.split(", "), "TBT against allcache", "TBT against serverlessllm"]]
    found: dict[str, Change] = {}
    for words, times, keys in _TRAFFIC:
        runs = [run_case(runner, BURST, None, each, keys=keys, times=times) for each in SCALING]
        static = run_case(runner, BURST, None, "full", keys=keys, times=times)
        blitz, *others = runs
        change = Change(
            *(blitz.ttft_ms_mean / run.ttft_ms_mean - 1 for run in others),
            *(tbt_ms(blitz) / tbt_ms(run) - 1 for run in others),
        )
        found[words] = change
        table.append([words, f"{static.slo_met:.0%}", *(f"{each:+.1%}" for each in change)])
    return Shown(title="burstgpt_72b: other synthetic traffic", table=table), found
