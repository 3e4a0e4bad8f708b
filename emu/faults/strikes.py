"""What each kind of fault does: a table from the kind to its handler.

A handler finds its target, notes the strike, acts through the owner of the thing, and schedules
the end of the fault if it has one. The handlers stand by what they strike, in `on*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from emu.config.schema import FaultTable
from emu.faults import onclients, oncontrol, onlinks, onreplicas

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector

Strike = Callable[["Injector", FaultTable, "np.random.Generator"], None]

STRIKES: Final[Mapping[str, Strike]] = MappingProxyType(
    {
        "replica_crash": onreplicas.crash,
        "replica_restart": onreplicas.crash,
        "gpu_crash": onreplicas.crash_gpus,
        "node_crash": onreplicas.crash_gpus,
        "straggler": onreplicas.straggle,
        "freeze": onreplicas.freeze,
        "pause": onreplicas.freeze,
        "kv_shrink": onreplicas.shrink_kv,
        "link_down": onlinks.slow_links,
        "link_degrade": onlinks.slow_links,
        "link_latency": onlinks.delay_links,
        "partition": onlinks.partition,
        "swizzle": onlinks.swizzle,
        "transfer_refused": onlinks.window,
        "transfer_broken": onlinks.window,
        "transfer_hang": onlinks.window,
        "completion_late": onlinks.window,
        "completion_twice": onlinks.window,
        "lease_expired": onlinks.expire_lease,
        "handshake_lost": onlinks.window,
        "destination_refuses": onlinks.window,
        "host_cache_lost": oncontrol.lose_cache,
        "cxl_lost": oncontrol.lose_cxl,
        "host_cache_stale": oncontrol.stale_cache,
        "load_stuck": onlinks.window,
        "drain_expired": oncontrol.expire_drain,
        "metrics_delayed": oncontrol.blur_metrics,
        "metrics_frozen": oncontrol.blur_metrics,
        "metrics_lost": oncontrol.blur_metrics,
        "planner_restart": oncontrol.restart_planner,
        "client_leaves": onclients.leave,
        "overload": onclients.overload,
    }
)
