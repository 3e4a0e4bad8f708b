"""How a collective is cut into chunks, and how chunks pass through the dimensions' queues.

Source: ASTRA-Sim as LLMServingSim drives it; derived from the table of cycle counts and confirmed
against the program.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from emu.network.rounds import Kind
from emu.units import ceil_div


def chunk_sizes(kind: Kind, size_bytes: int, splits: int, npus_total: int) -> list[int]:
    """Sizes of the chunks that a collective is cut into.

    A chunk smaller than the number of ranks of the whole system is padded to it (not for
    all-gather, whose size is already one rank's share). What division leaves over is sent as one
    more chunk of the full size.
    """
    chunk = size_bytes // splits
    if kind != "all-gather" and chunk < npus_total:
        return [npus_total] * splits
    if chunk == 0:
        return [size_bytes]
    return [chunk] * ceil_div(size_bytes, chunk)


def pipeline_ns(plans: Sequence[Sequence[tuple[int, int]]], queues: int, running_max: int) -> int:
    """End of the last of several chunks, each a list of (queue, duration) passed in order.

    A queue serves `running_max` chunks at a time in order of arrival; a chunk's next phase joins
    its queue when the last one ends.
    """
    waiting: list[deque[int]] = [deque() for _ in range(queues)]
    running = [0] * queues
    step = [0] * len(plans)
    events: list[tuple[int, int, int]] = []
    order = 0
    now = 0

    def start_next(queue: int) -> None:
        nonlocal order
        while waiting[queue] and running[queue] < running_max:
            chunk = waiting[queue].popleft()
            running[queue] += 1
            heapq.heappush(events, (now + plans[chunk][step[chunk]][1], order, chunk))
            order += 1

    for chunk, plan in enumerate(plans):
        waiting[plan[0][0]].append(chunk)
    for queue in range(queues):
        start_next(queue)
    while events:
        now, _, chunk = heapq.heappop(events)
        left = plans[chunk][step[chunk]][0]
        step[chunk] += 1
        running[left] -= 1
        if step[chunk] < len(plans[chunk]):
            joined = plans[chunk][step[chunk]][0]
            waiting[joined].append(chunk)
            start_next(joined)
        start_next(left)
    return now
