"""A fleet of endpoints: each replica answers on a port of its own, over one cluster.

A port listens while its replica is in service or on its way to it; the port of a replica that is
inactive or has crashed refuses connections, as a pod that is not there does.
"""

from __future__ import annotations

from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.handoffs import Handoffs
from emu.apps.serve.kv_events import KvEvents
from emu.apps.serve.service import Service
from emu.config.schema import FcfsTable
from emu.config.tables import tag_of
from emu.errors import InputError


class Fleet:
    """All endpoints of a server."""

    def __init__(self, service: Service, ports: list[int], *, face: str, lease_s: float) -> None:
        cluster = service.cluster
        plans = service.plan.replicas
        self.face = face
        self.endpoints = [
            Endpoint(service, replica, plan, port)
            for replica, plan, port in zip(cluster.replicas, plans, ports, strict=True)
        ]
        tells_source = face == "sglang"
        self.handoffs = Handoffs(service, lease_s, self.endpoints, tells_source=tells_source)

        self.events: KvEvents | None = None

    def event_source(self, endpoint: Endpoint) -> dict[str, object] | None:
        """Where the endpoint's KV events are published, as vLLM says it; None = nowhere."""
        if self.events is None:
            return None
        publisher = self.events.publishers[endpoint.replica.replica_id]
        return {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
            "publisher": "zmq",
            "encoding": "msgpack",
            "schema_version": 1,
        }


def check_fleet(plan_replicas: int, policy: str, base_port: int, source: str) -> None:
    """Raises InputError for what a fleet cannot be made of."""
    if policy == tag_of(FcfsTable):
        problem = "a fleet's requests have a replica each; fcfs has one queue for all"
        raise InputError(source, None, "scheduler.policy", problem)
    if base_port and base_port + plan_replicas > 65_536:
        problem = f"{plan_replicas} replicas need ports up to {base_port + plan_replicas - 1}"
        raise InputError("serve", None, "--ports", problem)
