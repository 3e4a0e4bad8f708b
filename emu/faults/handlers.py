"""What each kind of fault does: a table from the kind to its handler.

A handler finds its target, notes the strike, acts through the owner of the thing, and schedules
the end of the fault if it has one. The handlers stand by what they strike, in `clients.py`,
`control_plane.py`, `links.py` and `replicas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.faults import clients, control_plane, links, replicas
from emu.faults.injector import Handler

HANDLERS: Final[Mapping[str, Handler]] = MappingProxyType(
    {
        "replica_crash": replicas.crash,
        "replica_restart": replicas.crash,
        "gpu_crash": replicas.crash_gpus,
        "node_crash": replicas.crash_gpus,
        "straggler": replicas.straggle,
        "freeze": replicas.freeze,
        "pause": replicas.freeze,
        "kv_shrink": replicas.shrink_kv,
        "link_down": links.slow_links,
        "link_degrade": links.slow_links,
        "link_latency": links.delay_links,
        "partition": links.partition,
        "swizzle": links.swizzle,
        "transfer_refused": links.window,
        "transfer_broken": links.window,
        "transfer_hang": links.window,
        "completion_late": links.window,
        "completion_twice": links.window,
        "lease_expired": links.expire_lease,
        "handshake_lost": links.window,
        "destination_refuses": links.window,
        "host_cache_lost": control_plane.lose_cache,
        "cxl_lost": control_plane.lose_cxl,
        "host_cache_stale": control_plane.stale_cache,
        "load_stuck": links.window,
        "drain_expired": control_plane.expire_drain,
        "metrics_delayed": control_plane.blur_metrics,
        "metrics_frozen": control_plane.blur_metrics,
        "metrics_lost": control_plane.blur_metrics,
        "planner_restart": control_plane.restart_planner,
        "client_leaves": clients.leave,
        "overload": clients.overload,
    }
)
