"""How much a world costs to check, and the first lines of a workload that fit a first verdict.

A seed's world runs twice, is recounted every so many events and is judged by a second model, which
takes far longer than a run. `quick_form` says how many lines of a workload fit `SECONDS` of CPU
time. It estimates and never measures: the same configuration is clipped alike on any machine, so
that a seed of the quick form is the same world everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import msgspec

from emu.cluster.prepare import prepare
from emu.config.schema import Config
from emu.units import NS_PER_S
from emu.workload.opened import Workload

SECONDS: Final = 2.0
"""CPU time of one seed in the quick form, about."""
LINES_MAX: Final = 1_000

# What checking a world takes, in seconds of one core at 3 GHz; within a factor of two.
_REQUEST_S: Final = 2.5e-3
_OUTPUT_TOKEN_S: Final = 11e-6
_PROMPT_TOKEN_S: Final = 0.3e-6
_RECOUNT_S: Final = 20e-6
"""Of one replica, for each request: it brings half a recount with it."""
_SECOND_S: Final = 1e-3
"""Of simulated time: samples, looks of planners."""
_SECOND_OF_REPLICA_S: Final = 10e-6
_SECOND_OF_RANK_S: Final = 20e-3
"""Of a rank of a data-parallel group besides: it takes part in all steps of the others."""


class QuickForm(msgspec.Struct, frozen=True):
    """How much of a workload the quick form takes."""

    lines: int
    """First lines that fit (a session is one)."""
    of_lines: int
    whole_s: float
    """CPU time of one seed of the whole workload, about."""

    @property
    def is_whole(self) -> bool:
        """The whole workload fits."""
        return self.lines >= self.of_lines

    def told(self) -> str:
        """One line for the user."""
        if self.is_whole:
            return f"quick form: all {self.of_lines:,} lines of the workload fit"
        return (
            f"quick form: the first {self.lines:,} of {self.of_lines:,} lines of the workload, "
            "the same for every seed; faults strike while they arrive"
        )


def quick_form(config: Config, source: str, workload: Workload) -> QuickForm:
    """The quick form of a configuration, whose whole workload is open already."""
    limit = min(config.workload.limit or LINES_MAX, LINES_MAX)
    table = msgspec.structs.replace(config.workload, limit=limit)
    plan, first = prepare(msgspec.structs.replace(config, workload=table), source)
    ranks = sum(bool(replica.data_parallel_group) for replica in plan.replicas)
    second_s = _SECOND_S + _SECOND_OF_REPLICA_S * len(plan.replicas) + _SECOND_OF_RANK_S * ranks
    costs = list(accumulate(_costs(first, len(plan.replicas), second_s)))
    fitting = sum(cost <= SECONDS for cost in costs)
    of_lines = max(workload.facts.lines, len(costs))
    whole_s = costs[-1] * of_lines / len(costs)
    return QuickForm(max(1, fitting), of_lines, whole_s)


def _costs(workload: Workload, replicas: int, second_s: float) -> Iterator[float]:
    """CPU time that each line adds, in the order of the file (which `workload.limit` clips).

    `second_s` is that of a second of simulated time.
    """
    lines: list[tuple[int, int, int, int, int]] = []
    for block, _ in workload.blocks():
        requests, prompts = block.requests_each().tolist(), block.prompt_tokens.tolist()
        outputs = block.output_tokens.tolist()
        for place, line in enumerate(block.details or ()):
            if line.sub_requests is not None:
                prompts[place] = sum(turn.input_toks for turn in line.sub_requests)
                outputs[place] = sum(turn.output_toks for turn in line.sub_requests)
        numbers, times_ns = block.line_numbers.tolist(), block.arrival_ns.tolist()
        lines += zip(numbers, times_ns, requests, prompts, outputs, strict=True)
    lines.sort(key=lambda line: line[0])
    last_ns = 0
    for _, at_ns, requests, prompt, output in lines:
        later_s = max(0, at_ns - last_ns) / NS_PER_S
        last_ns = max(last_ns, at_ns)
        yield (
            requests * (_REQUEST_S + _RECOUNT_S * replicas)
            + output * _OUTPUT_TOKEN_S
            + prompt * _PROMPT_TOKEN_S
            + later_s * second_s
        )
