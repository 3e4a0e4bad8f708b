"""`faster_transformer`: static batches.

Requests are admitted together, with their longest length reserved, and stay together: the next
admission comes when every member has ended. Members that end early drop out of the iterations
(no padding is charged), but their reservation is given back only when the batch ends. With S
pipeline stages up to S static batches take turns.

Faithful name `ft_leak`: the reservations of early finishers are never given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from emu.config.schema import (
    FasterTransformerTable,
)
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.simple import Plan
from emu.scheduling.vidur.orca import MaxReservation


@final
class StaticBatch:
    """Requests that were admitted together."""

    members: list[Request]
    """Those that have not ended."""
    blocks_held: int
    """Reservations of those that have."""

    __slots__ = ("blocks_held", "members")

    def __init__(self, members: list[Request]) -> None:
        self.members = members
        self.blocks_held = 0


class FasterTransformerScheduler(MaxReservation):
    """Request-level batching: no request joins a batch under way."""

    def __init__(self, table: FasterTransformerTable, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self._leaks = "ft_leak" in table.faithful
        self._blocks_leaked = 0
        self._ready: deque[StaticBatch] = deque()
        self._static: dict[int, StaticBatch] = {}
        """Every unfinished static batch by the id of each of its members."""

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """The next iteration of a static batch that waits for one, or a new static batch."""
        if self._ready:
            group = self._ready.popleft()
            for request in group.members:
                if request.request_id in self._prefilling:
                    plan.read(request, request.reached_tokens - request.computed_tokens)
                else:
                    plan.decodes.append(request)
            return
        self.admit_whole_prompts(plan)
        group = StaticBatch([chunk.request for chunk in plan.chunks])
        for request in group.members:
            self._static[request.request_id] = group

    def leap_limit(self, plan: Plan) -> int:
        """The static batch goes on alone until a member ends, unless others take turns."""
        return 1 if self._ready else super().leap_limit(plan)

    def would_admit(self, batch: Batch) -> bool:
        """No request joins a static batch under way."""
        return False

    def evacuate(self) -> list[Request]:
        """See `Scheduler.evacuate`."""
        self._ready.clear()
        self._static.clear()
        self._blocks_leaked = 0
        return super().evacuate()

    def _return(self, members: list[Request]) -> None:
        # All members of a batch belong to one static batch.
        self._ready.append(self._static[members[0].request_id])

    def _retire(self, finished: list[Request]) -> None:
        group = self._static[finished[0].request_id]
        for request in finished:
            self._leave(group, request)
            group.blocks_held += request.kv_blocks
            request.kv_blocks = 0
        if group.members and self._leaks:
            self._blocks_leaked += group.blocks_held
            group.blocks_held = 0
        self._dissolve_if_over(group)

    def _welcome(self, requests: Sequence[Request]) -> None:
        group = StaticBatch(list(requests))
        for request in requests:
            self._static[request.request_id] = group
        self._ready.append(group)

    def _drop_idle(self, request: Request) -> bool:
        group = self._static[request.request_id]
        idle = group in self._ready
        self._leave(group, request)
        self._dissolve_if_over(group)
        return idle

    def _idle_ids(self) -> list[int]:
        return [request.request_id for group in self._ready for request in group.members]

    def _other_blocks(self) -> int:
        groups = dict.fromkeys(self._static.values())
        return sum(group.blocks_held for group in groups) + self._blocks_leaked

    def _leave(self, group: StaticBatch, request: Request) -> None:
        del self._static[request.request_id]
        group.members.remove(request)

    def _dissolve_if_over(self, group: StaticBatch) -> None:
        if group.members:
            return
        self.pool.put_back(group.blocks_held, [])
        group.blocks_held = 0
        if group in self._ready:
            self._ready.remove(group)
