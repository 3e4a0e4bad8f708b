"""One replica as one engine: what a router or an autoscaler outside takes it for.

Calls to it are served by its replica or not at all (`Request.pin`), and health, metrics and load
are the replica's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from emu.apps.serve.service import Service
from emu.apps.serve.statistics import awaiting_kv
from emu.cluster.plan import ReplicaPlan
from emu.latency.front_end import Intake
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle

S = ReplicaState
_ABSENT: Final = frozenset({S.INACTIVE, S.FAILED})
_ROLES: Final[Mapping[ReplicaState, str]] = {
    S.COLOCATED: "colocated",
    S.PREFILL: "prefill",
    S.DECODE: "decode",
}


class Endpoint:
    """One replica as one engine."""

    def __init__(
        self, service: Service, replica: ReplicaHandle, plan: ReplicaPlan, port: int
    ) -> None:
        self.service = service
        self.replica = replica
        self.plan = plan
        self.port = port
        self.engine_id = f"emu-{service.session}-{replica.replica_id}"
        self._adapters: dict[str, str] = {}
        self._adapters_life = replica.incarnation
        self.intake = Intake([plan.front_end]) if plan.front_end else None
        """What calls for KV of another endpoint pass. It is apart from that of calls with a prompt
        to compute: a recording has when the engine got them, not when they came."""

    @property
    def role(self) -> str:
        """What it serves now; empty = nothing."""
        return _ROLES.get(self.replica.state, "")

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters that this engine was told to load, and whence; a new engine has none."""
        if self._adapters_life != self.replica.incarnation:
            self._adapters_life = self.replica.incarnation
            self._adapters.clear()
        return self._adapters

    @property
    def is_present(self) -> bool:
        """There is an engine: it serves, starts or drains."""
        return self.replica.state not in _ABSENT

    @property
    def open_requests(self) -> int:
        """Waiting and running here, those that wait for KV of another endpoint too."""
        replica = self.replica
        awaiting = awaiting_kv(replica, self.service.cluster.engines[replica.replica_id])
        return replica.view().promised_load(1, 1) + awaiting
