"""What each kind of fault does: a table from the kind to its handler.

A handler finds its target, notes the strike, acts through the owner of the thing, and schedules
the end of the fault if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.faults.client_faults import leave, overload
from emu.faults.control_faults import (
    blur_metrics,
    expire_drain,
    lose_cache,
    lose_cxl,
    restart_planner,
    stale_cache,
)
from emu.faults.injector import Handler
from emu.faults.network_faults import (
    delay_links,
    expire_lease,
    partition,
    slow_links,
    swizzle,
    window,
)
from emu.faults.replica_faults import crash, crash_gpus, freeze, shrink_kv, straggle

HANDLERS: Final[Mapping[str, Handler]] = MappingProxyType(
    {
        "replica_crash": crash,
        "replica_restart": crash,
        "gpu_crash": crash_gpus,
        "node_crash": crash_gpus,
        "straggler": straggle,
        "freeze": freeze,
        "pause": freeze,
        "kv_shrink": shrink_kv,
        "link_down": slow_links,
        "link_degrade": slow_links,
        "link_latency": delay_links,
        "partition": partition,
        "swizzle": swizzle,
        "transfer_refused": window,
        "transfer_broken": window,
        "transfer_hang": window,
        "completion_late": window,
        "completion_twice": window,
        "lease_expired": expire_lease,
        "handshake_lost": window,
        "destination_refuses": window,
        "host_cache_lost": lose_cache,
        "cxl_lost": lose_cxl,
        "host_cache_stale": stale_cache,
        "load_stuck": window,
        "drain_expired": expire_drain,
        "metrics_delayed": blur_metrics,
        "metrics_frozen": blur_metrics,
        "metrics_lost": blur_metrics,
        "planner_restart": restart_planner,
        "client_leaves": leave,
        "overload": overload,
    }
)
