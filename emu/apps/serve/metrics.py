"""`/metrics`: vLLM's names under `vllm:`, and the emulator's own under `emu:`.

Gauges and token counters of engines carry `engine` = replica id. On the page of the whole cluster
the histograms and counters of requests cover all replicas (`engine="all"`), so that a scrape of a
hundred replicas stays short; the page of one replica of a fleet has its own. Times are emulated
seconds: at `--speed 10` a TTFT of 0.5 s took 0.05 s on the wall. Everything is read at the time of
the scrape; nothing is paid between scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from emu.apps.serve.fleet import Endpoint, Fleet
from emu.apps.serve.house import ADAPTERS_MAX, House
from emu.apps.serve.world import Histogram, Statistics, awaiting_kv
from emu.cluster.plan import ReplicaPlan
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S

# --------------------------------------------------------------------------------------------------
# Prometheus' text format (0.0.4), written straight into lines.
#
# A scrape of a hundred replicas has thousands of samples, and a router asks many times a second;
# the objects that a client library makes of each cost more than the emulation itself. The text of a
# histogram is kept until it has a new observation.

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels_text(labels: Mapping[str, str]) -> str:
    """`a="x",b="y"`, sorted by name."""
    return ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items())
    )


def number_text(value: float) -> str:
    """The number as Prometheus' own library writes it."""
    return repr(float(value))


class Page:
    """Lines of one answer, and the histograms' texts that outlive it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._histograms: dict[tuple[str, str], tuple[int, str]] = {}

    def take(self) -> bytes:
        """The page so far; the next one begins empty."""
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()
        return text.encode()

    def head(self, name: str, text: str, kind: str) -> None:
        """The lines before the samples of a family."""
        self._lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")

    def samples(self, name: str, rows: Iterable[tuple[str, float]]) -> None:
        """(labels as text, value) of each."""
        self._lines += [
            f"{name}{{{labels}}} {number_text(value)}" if labels else f"{name} {number_text(value)}"
            for labels, value in rows
        ]

    def gauge(self, name: str, text: str, rows: Iterable[tuple[str, float]]) -> None:
        """A family of gauges."""
        self.head(name, text, "gauge")
        self.samples(name, rows)

    def counter(self, name: str, text: str, rows: Iterable[tuple[str, float]]) -> None:
        """A family of counters; `_total` is added to the name."""
        self.head(f"{name}_total", text, "counter")
        self.samples(f"{name}_total", rows)

    def histogram(self, name: str, text: str, rows: Iterable[tuple[str, Histogram]]) -> None:
        """A family of histograms."""
        self.head(name, text, "histogram")
        for labels, histogram in rows:
            known = self._histograms.get((name, labels))
            if known is None or known[0] != histogram.observed:
                lines = "\n".join(_histogram_lines(name, labels, histogram))
                known = self._histograms[name, labels] = (histogram.observed, lines)
            self._lines.append(known[1])


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> Sequence[str]:
    lines = []
    reached = 0
    bounds = [f"{b:g}" if b != int(b) else f"{b:.1f}" for b in histogram.bounds]
    before, after = _around_le(labels)
    for bound, count in zip([*bounds, "+Inf"], histogram.counts, strict=True):
        reached += count
        lines.append(f'{name}_bucket{{{before}le="{bound}"{after}}} {number_text(reached)}')
    lines.append(f"{name}_count{{{labels}}} {number_text(reached)}")
    lines.append(f"{name}_sum{{{labels}}} {number_text(histogram.total)}")
    return lines


def _around_le(labels: str) -> tuple[str, str]:
    """What comes before and after `le` where labels are sorted by name."""
    given = labels.split(",") if labels else []
    before = [item for item in given if item < "le="]
    after = [item for item in given if item >= "le="]
    return ",".join(before) + "," * bool(before), "," * bool(after) + ",".join(after)


# --- `/metrics` -----------------------------------------------------------------------------------

_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...]] = (
    ("time_to_first_token_seconds", "Time to first token.", lambda s: s.ttft),
    ("inter_token_latency_seconds", "Gap between tokens.", lambda s: s.inter_token),
    ("request_time_per_output_token_seconds", "TPOT.", lambda s: s.per_output_token),
    ("e2e_request_latency_seconds", "Arrival to last token.", lambda s: s.e2e),
    ("request_queue_time_seconds", "Arrival to first scheduled.", lambda s: s.queue),
    ("request_prefill_time_seconds", "First scheduled to first token.", lambda s: s.prefill),
    ("request_decode_time_seconds", "First to last token.", lambda s: s.decode),
    ("request_inference_time_seconds", "First scheduled to last token.", lambda s: s.inference),
    ("request_prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens),
    ("request_generation_tokens", "Output tokens.", lambda s: s.generation_tokens),
    ("request_max_num_generation_tokens", "Output tokens.", lambda s: s.generation_tokens),
    ("request_num_preemptions", "Preemptions of a request.", lambda s: s.request_preemptions),
    ("request_prefill_kv_computed_tokens", "Prompt minus hits.", lambda s: s.kv_computed_tokens),
    ("request_params_max_tokens", "Limit on output tokens.", lambda s: s.max_tokens),
    ("iteration_tokens_total", "Tokens of an iteration.", lambda s: s.iteration_tokens),
)

_TRANSFERS: Final[tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...]] = (
    ("xfer_time_seconds", "Start of a KV transfer to its last byte.", lambda s: s.transfer),
    ("post_time_seconds", "Handing a KV transfer to the network.", lambda s: s.transfer_post),
    ("bytes_transferred", "Bytes of a KV transfer.", lambda s: s.transfer_bytes),
    ("num_descriptors", "Pieces of a KV transfer.", lambda s: s.transfer_descriptors),
)


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
) -> None:
    """What vLLM says of each engine; `models`: names, by the index that replicas have.

    `name`: what it is called, if not by its replica's id. `scripted`: gauges that show a given
    figure instead of their own (`SCRIPTED`).
    """
    rows = []
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


_TOKENS: Final[tuple[tuple[str, Callable[[Statistics], int]], ...]] = (
    ("prompt_tokens", lambda s: s.prompt_sum),
    ("generation_tokens", lambda s: s.generated_sum),
)


def adapter_family(page: Page, house: House, replica_id: int = -1) -> None:
    """Adapters of the requests of a replica (-1 = of all); absent where there are none."""
    plans = house.plan.replicas if replica_id < 0 else [house.plan.replicas[replica_id]]
    slots = [plan.slots("adapter") for plan in plans]
    has_slots = all(slots)
    if not has_slots and not house.adapters:
        return
    running: set[str] = set()
    waiting: set[str] = set()
    for adapter, request in house.cluster.adapters_in_use():
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


def request_families(page: Page, rows: Sequence[tuple[str, Statistics]]) -> None:
    """What vLLM says of requests: of one engine, or of all of each model; (labels, figures)."""
    for name, text, count in _COUNTERS:
        page.counter(f"vllm:{name}", text, [(label, count(stats)) for label, stats in rows])
    page.counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by origin.",
        [
            (f'{label},source="{source}"', count)
            for label, stats in rows
            for source, count in _sources(stats).items()
        ],
    )
    ended = []
    for label, stats in rows:
        engine, _, model = label.partition(",")
        ended += [
            (f'{engine},finished_reason="{reason}",{model}', count)
            for reason, count in stats.success.items()
        ]
    page.counter("vllm:request_success", "Ended requests.", ended)
    for name, text, pick in _HISTOGRAMS:
        page.histogram(f"vllm:{name}", text, [(label, pick(stats)) for label, stats in rows])


def _sources(stats: Statistics) -> dict[str, int]:
    """Prompt tokens by origin, as vLLM counts them.

    The sum is `prompt_tokens` plus `prompt_tokens_recomputed`: the last token of a prompt that was
    cached is both found and computed.
    """
    external = stats.from_tiers_sum + stats.transferred_sum
    cached = _cached_tokens(stats)
    return {
        "local_compute": stats.prompt_sum - cached,
        "local_cache_hit": cached + stats.recomputed - external,
        "external_kv_transfer": external,
    }


def _cached_tokens(stats: Statistics) -> int:
    """Prompt tokens that were not computed here."""
    return stats.cached_sum + stats.transferred_sum - stats.fetched


_COUNTERS: Final[tuple[tuple[str, str, Callable[[Statistics], int]], ...]] = (
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.queried_sum),
    ("prefix_cache_hits", "Prompt tokens found.", lambda s: s.hit_sum),
    ("external_prefix_cache_queries", "Not on the GPU.", lambda s: s.external_queried_sum),
    (
        "external_prefix_cache_hits",
        "Found in lower tiers, or had from another engine.",
        lambda s: s.external_hit_sum,
    ),
    ("prompt_tokens_cached", "Prompt tokens that were not computed.", _cached_tokens),
    ("prompt_tokens_recomputed", "Prompts computed for one token.", lambda s: s.recomputed),
    ("num_preemptions", "Preemptions.", lambda s: s.preemptions),
)


class MetricsPage:
    """The page of the whole cluster; reads it when it is scraped."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._page = Page()

    def render(self) -> bytes:
        """All families."""
        house, page = self._house, self._page
        cluster = house.cluster
        engines = list(zip(cluster.replicas, house.plan.replicas, cluster.engines, strict=True))
        engine_families(page, house.models, engines, scripted=house.scripted)
        rows = [
            (labels_text({"model_name": name, "engine": "all"}), stats)
            for name, stats in zip(house.models, cluster.of_models, strict=True)
        ]
        request_families(page, rows)
        adapter_family(page, house)
        if cluster.watchers:
            everywhere = labels_text({"model_name": house.model, "engine": "all"})
            transfer_families(page, everywhere, cluster.stats, house)
        self._cluster_families()
        self._server_families()
        self._control_families()
        return page.take()

    def _cluster_families(self) -> None:
        page, cluster = self._page, self._house.cluster
        counts = dict.fromkeys(ReplicaState, 0)
        for replica in cluster.replicas:
            counts[replica.state] += 1
        states = [(f'state="{state.value}"', float(n)) for state, n in counts.items()]
        page.gauge("emu:replicas", "Replicas in each state.", states)
        gateway, network = cluster.gateway, cluster.network
        held = len(gateway.held) + sum(map(len, gateway.queues))
        page.gauge("emu:gateway_queue", "Requests that no replica holds yet.", [("", held)])
        page.gauge("emu:outstanding_requests", "In the system.", [("", gateway.outstanding)])
        flows = [(f'kind="{kind}"', float(n)) for kind, n in network.active.items()]
        page.gauge("emu:network_flows", "Transfers under way.", flows)
        moved = [(f'kind="{kind}"', float(n)) for kind, n in network.moved_bytes.items()]
        page.counter("emu:network_bytes", "Bytes of transfers.", moved)
        stats = cluster.stats
        page.counter("emu:migrations", "Moves of ended requests.", [("", stats.migrations)])
        ended = [(f'status="{status}"', float(n)) for status, n in stats.by_status.items()]
        page.counter("emu:requests", "Ended requests.", ended)
        moves = [
            (f'from="{before}",to="{after}"', float(n))
            for (before, after), n in cluster.tape.transition_counts.items()
        ]
        page.counter("emu:transitions", "Changes of replicas' states.", moves)

    def _server_families(self) -> None:
        page, house = self._page, self._house
        kernel, pace = house.cluster.kernel, house.cluster.pace
        gauges = (
            ("time_seconds", "Emulated time since the start.", kernel.wall_ns() / NS_PER_S),
            ("speed", "Emulated seconds per second.", house.speed),
            ("ready", "1 after the start-up.", float(house.is_ready)),
            ("open_streams", "Answers under way.", float(house.cluster.open_choices)),
            ("timer_lag_seconds", "Lateness of the last timer.", kernel.lag_ns / NS_PER_S),
            ("timer_lag_max_seconds", "Largest so far.", kernel.lag_max_ns / NS_PER_S),
            ("drift_seconds", "Emulation behind the wall clock.", house.drift_s),
            ("drift_max_seconds", "Largest so far.", house.drift_max_s),
            ("event_loop_lag_seconds", "Wall time: last wake-up too late by.", house.loop_lag_s),
            ("event_loop_lag_max_seconds", "Largest so far.", house.loop_lag_max_s),
            ("pace_late", "1 if the machine does not keep up.", float(pace.is_late)),
            ("pace_lateness_seconds", "Lateness of the last answer.", pace.last_s),
            ("pace_lateness_max_seconds", "Largest so far.", pace.worst_s),
            ("pace_first_late_seconds", "Time of the first, -1 = none.", pace.first_late_s),
        )
        for name, text, value in gauges:
            page.gauge(f"emu:{name}", text, [("", value)])
        page.counter("emu:pace_requests", "Answers whose pace is known.", [("", pace.requests)])
        page.counter("emu:pace_late_requests", "Answers that were late.", [("", pace.late)])

    def _control_families(self) -> None:
        page, house = self._page, self._house
        refused = [(f'status="{status}"', float(n)) for status, n in house.http_refused.items()]
        page.counter("emu:http_errors", "Answers with an error status.", refused)
        returned = [("", float(house.failures_returned))]
        page.counter("emu:failures_returned", "Scheduled failures.", returned)
        injected = [(f'kind="{kind}"', float(n)) for kind, n in house.faults_injected.items()]
        page.counter("emu:faults_injected", "Faults from the control interface.", injected)
        struck = [(f'kind="{kind}"', float(n)) for kind, n in house.cluster.faults.struck.items()]
        page.counter("emu:faults", "Faults that struck.", struck)
        commands = [
            (f'command="{command}",outcome="{outcome}"', float(n))
            for (command, outcome), n in house.commands_given.items()
        ]
        page.counter("emu:commands", "Commands to replicas.", commands)


def transfer_families(page: Page, label: str, stats: Statistics, house: House) -> None:
    """vLLM's connector between prefill and decode (NIXL)."""
    cluster = house.cluster
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


# --------------------------------------------------------------------------------------------------
# `/metrics` of one endpoint: an engine's own page, under vLLM's or SGLang's names.
#
# Routers scrape each endpoint many times a second, so the page holds this replica's series and
# nothing of the cluster; the label `engine` is "0" on every page, as of an engine that is alone.
# SGLang's histograms have vLLM's bounds here.


class EndpointPage:
    """Reads one replica when it is scraped."""

    def __init__(self, house: House, fleet: Fleet, endpoint: Endpoint) -> None:
        self._house = house
        self._fleet = fleet
        self._endpoint = endpoint
        self._page = Page()

    def render(self) -> bytes:
        """All families of the face."""
        if self._fleet.face == "sglang":
            self._sglang()
        else:
            self._vllm()
        return self._page.take()

    def _vllm(self) -> None:
        house, endpoint, page = self._house, self._endpoint, self._page
        stats = house.cluster.engines[endpoint.replica.replica_id]
        one = [(endpoint.replica, endpoint.plan, stats)]
        engine_families(page, house.models, one, name="0", scripted=house.scripted)
        label = labels_text({"model_name": house.model, "engine": "0"})
        request_families(page, [(label, stats)])
        adapter_family(page, house, endpoint.replica.replica_id)
        if house.cluster.watchers:
            transfer_families(page, label, stats, house)

    def _sglang(self) -> None:
        house, endpoint, page = self._house, self._endpoint, self._page
        replica, plan = endpoint.replica, endpoint.plan
        view = replica.view()
        stats = house.cluster.engines[replica.replica_id]
        role = endpoint.role
        label = labels_text(
            {
                "model_name": house.model,
                "engine_type": role if role in ("prefill", "decode") else "unified",
                "tp_rank": "0",
                "pp_rank": "0",
            }
        )
        size = plan.scheduler.block_size
        watcher = house.cluster.watchers.get(replica.replica_id)
        inflight = view.unfinished_migrations if watcher is not None else 0
        gauges = (
            ("num_running_reqs", "Running requests.", view.running_count),
            ("num_queue_reqs", "Waiting requests.", view.waiting_count),
            ("num_used_tokens", "Tokens with KV.", view.blocks_used * size),
            ("token_usage", "Part of the KV in use.", kv_use(replica)),
            ("max_total_num_tokens", "Room for KV.", plan.num_blocks * size),
            ("cache_hit_rate", "Found part of the last prompts.", stats.prefill_hit_share),
            ("num_prefill_prealloc_queue_reqs", "Not begun.", 0),
            ("num_prefill_inflight_queue_reqs", "KV on its way.", inflight),
            ("num_decode_prealloc_queue_reqs", "Not begun.", 0),
            ("num_decode_transfer_queue_reqs", "KV on its way.", awaiting_kv(replica, stats)),
        )
        for name, text, value in gauges:
            page.gauge(f"sglang:{name}", text, [(label, float(value))])
        info = f'page_size="{size}",num_pages="{plan.num_blocks}"'
        page.gauge("sglang:cache_config_info", "KV cache.", [(f"{label},{info}", 1.0)])
        counters = (
            ("prompt_tokens", "Prompt tokens.", stats.prompt_sum),
            ("generation_tokens", "Output tokens.", stats.generated_sum),
            ("cached_tokens", "Prompt tokens from the cache.", stats.cached_sum),
            ("num_requests", "Requests.", sum(stats.by_status.values())),
            ("num_aborted_requests", "Aborted requests.", stats.success["abort"]),
        )
        for name, text, count in counters:
            page.counter(f"sglang:{name}", text, [(label, float(count))])
        for name, text, histogram in (
            ("time_to_first_token_seconds", "TTFT.", stats.ttft),
            ("inter_token_latency_seconds", "ITL.", stats.inter_token),
            ("e2e_request_latency_seconds", "E2E.", stats.e2e),
            ("queue_time_seconds", "Waiting.", stats.queue),
        ):
            page.histogram(f"sglang:{name}", text, [(label, histogram)])
