"""Families of `/metrics` that vLLM has of its engines: gauges, caches, adapters, transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from emu.apps.serve.prometheus import Page, labels_text
from emu.apps.serve.service import ADAPTERS_MAX, Service
from emu.apps.serve.statistics import Histogram, Statistics, awaiting_kv
from emu.apps.serve.wire import Wire
from emu.cluster.plan import ReplicaPlan
from emu.replica.view import ReplicaHandle

_TRANSFERS: Final[tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...]] = (
    ("xfer_time_seconds", "Start of a KV transfer to its last byte.", lambda s: s.transfer),
    ("post_time_seconds", "Handing a KV transfer to the network.", lambda s: s.transfer_post),
    ("bytes_transferred", "Bytes of a KV transfer.", lambda s: s.transfer_bytes),
    ("num_descriptors", "Pieces of a KV transfer.", lambda s: s.transfer_descriptors),
)


Row = tuple[str, ReplicaHandle, ReplicaPlan, Statistics]
"""An engine: its labels as text, and what its figures are read from."""


def kv_use(replica: ReplicaHandle) -> float:
    """Part of the KV blocks in use, 0 to 1."""
    view = replica.view()
    return view.blocks_used / view.blocks_total if view.blocks_total else 0.0


def engine_families(
    page: Page,
    models: Sequence[str],
    engines: Sequence[tuple[ReplicaHandle, ReplicaPlan, Statistics]],
    name: str = "",
    scripted: Mapping[str, float] | None = None,
    *,
    wire: Wire,
) -> None:
    """What vLLM says of each engine; `models`: names, by the index that replicas have.

    `name`: what it is called, if not by its replica's id. `scripted`: gauges that show a given
    figure instead of their own (`SCRIPTED`).
    """
    rows: list[Row] = []
    for replica, plan, stats in engines:
        names = {"model_name": models[replica.model], "engine": name or str(replica.replica_id)}
        label = labels_text(names)
        rows.append((label, replica, plan, stats))
    gauges: tuple[tuple[str, str, Callable[[ReplicaHandle, Statistics], float]], ...] = (
        ("num_requests_running", "Running requests.", lambda r, _: r.view().running_count),
        (
            "num_requests_waiting",
            "Waiting requests, those for KV of another engine too.",
            lambda r, stats: r.view().waiting_count + awaiting_kv(r, stats),
        ),
        ("kv_cache_usage_perc", "Part of KV blocks in use.", lambda r, _: kv_use(r)),
    )
    for family, text, read in gauges:
        given = scripted.get(family) if scripted else None
        values = [(label, read(r, s) if given is None else given) for label, r, _, s in rows]
        page.gauge(f"vllm:{family}", text if given is None else f"{text} (scripted)", values)
    if wire.says_why_waiting:
        _waiting_by_reason(page, rows)
    states = ("awake", "weights_offloaded", "discard_all")
    page.gauge(
        "vllm:engine_sleep_state",
        "1 for the state it is in.",
        [
            (f'{label},sleep_state="{state}"', float(state == _sleep_state(r)))
            for label, r, _, _ in rows
            for state in states
        ],
    )
    info = []
    for label, _, plan, _ in rows:
        size = plan.scheduler.block_size
        info.append((f'block_size="{size}",{label},num_gpu_blocks="{plan.num_blocks}"', 1.0))
    page.gauge("vllm:cache_config_info", "KV cache.", info)
    for family, pick in _TOKENS:
        page.counter(f"vllm:{family}", "Tokens.", [(label, pick(s)) for label, _, _, s in rows])


def _waiting_by_reason(page: Page, rows: Sequence[Row]) -> None:
    """Requests that wait: for room, or for KV of another engine."""
    page.gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests by reason.",
        [
            (f'{label},reason="{reason}"', count)
            for label, r, _, stats in rows
            for reason, count in (
                ("capacity", r.view().waiting_count),
                ("deferred", awaiting_kv(r, stats)),
            )
        ],
    )


_TOKENS: Final[tuple[tuple[str, Callable[[Statistics], int]], ...]] = (
    ("prompt_tokens", lambda s: s.prompt_sum),
    ("generation_tokens", lambda s: s.generated_sum),
)


def adapter_family(page: Page, service: Service, replica_id: int = -1) -> None:
    """Adapters of the requests of a replica (-1 = of all); absent where there are none."""
    plans = service.plan.replicas if replica_id < 0 else [service.plan.replicas[replica_id]]
    slots = [plan.slots("adapter") for plan in plans]
    has_slots = all(slots)
    if not has_slots and not service.adapters.everywhere:
        return
    running: set[str] = set()
    waiting: set[str] = set()
    for adapter, request in service.cluster.adapters_in_use():
        if replica_id in (-1, request.holder_id):
            (running if request.first_scheduled_ns >= 0 else waiting).add(adapter)
    label = labels_text(
        {
            "max_lora": str(max(slots) if has_slots else ADAPTERS_MAX),
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
    )
    page.gauge("vllm:lora_requests_info", "Adapters in use.", [(label, time.time())])


def _sleep_state(replica: ReplicaHandle) -> str:
    return "awake" if replica.model_loaded else "discard_all"


def transfer_families(page: Page, label: str, stats: Statistics, service: Service) -> None:
    """vLLM's connector between prefill and decode (NIXL)."""
    cluster = service.cluster
    for name, text, pick in _TRANSFERS:
        page.histogram(f"vllm:nixl_{name}", text, [(label, pick(stats))])
    counters = (
        ("failed_transfers", "Failed KV transfers.", sum(cluster.network.failures.values())),
        ("failed_notifications", "Ends that a source never heard of.", 0),
        (
            "kv_expired_reqs",
            "Requests whose KV was given up before it was fetched.",
            stats.kv_expired + cluster.tape.lost_counts.get("lease_expired", 0),
        ),
        ("notifications_after_expiry", "Ends of transfers whose KV was given up.", 0),
    )
    for name, text, value in counters:
        page.counter(f"vllm:nixl_num_{name}", text, [(label, value)])
