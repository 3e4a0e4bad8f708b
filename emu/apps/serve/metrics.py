"""`/metrics`: vLLM's names under `vllm:`, and the emulator's own under `emu:`.

Gauges and token counters of engines carry `engine` = replica id. On the page of the whole cluster
the histograms and counters of requests cover all replicas (`engine="all"`), so that a scrape of a
hundred replicas stays short; the page of one replica of a fleet has its own. Times are emulated
seconds: at `--speed 10` a TTFT of 0.5 s took 0.05 s on the wall. Everything is read at the time of
the scrape; nothing is paid between scrapes.
"""

from __future__ import annotations

import time

from emu.apps.serve.engine_metrics import adapter_family, engine_families, transfer_families
from emu.apps.serve.prometheus import Page, labels_text
from emu.apps.serve.request_metrics import request_families
from emu.apps.serve.service import Service
from emu.replica.states import ReplicaState
from emu.units import NS_PER_S


class MetricsPage:
    """The page of the whole cluster; reads it when it is scraped."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._page = Page()

    def render(self) -> bytes:
        """All families."""
        service, page = self._service, self._page
        cluster = service.cluster
        engines = list(zip(cluster.replicas, service.plan.replicas, cluster.engines, strict=True))
        engine_families(page, service.models, engines, scripted=service.scripted, wire=service.wire)
        rows = [
            (labels_text({"model_name": name, "engine": "all"}), stats)
            for name, stats in zip(service.models, cluster.of_models, strict=True)
        ]
        request_families(page, rows, service.wire)
        adapter_family(page, service)
        if cluster.watchers:
            everywhere = labels_text({"model_name": service.model, "engine": "all"})
            transfer_families(page, everywhere, cluster.stats, service)
        self._cluster_families()
        self._server_families()
        self._control_families()
        return page.take()

    def _cluster_families(self) -> None:
        page, cluster = self._page, self._service.cluster
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
        page, service, lateness = self._page, self._service, self._service.lateness
        kernel, pace = service.cluster.kernel, service.cluster.pace
        recent = pace.recent(kernel.wall_ns())
        gauges = (
            ("time_seconds", "Emulated time since the start.", kernel.wall_ns() / NS_PER_S),
            ("speed", "Emulated seconds per second.", service.speed),
            ("ready", "1 after the start-up.", float(service.is_ready)),
            ("open_streams", "Answers under way.", float(service.cluster.open_choices)),
            ("timer_lag_seconds", "Lateness of the last timer.", kernel.lag_ns / NS_PER_S),
            ("timer_lag_max_seconds", "Largest so far.", kernel.lag_max_ns / NS_PER_S),
            ("drift_seconds", "Emulation behind the wall clock.", lateness.drift_s),
            ("drift_max_seconds", "Largest so far.", lateness.drift_max_s),
            (
                "event_loop_lag_seconds",
                "Wall time: last wake-up too late by.",
                lateness.loop_lag_s,
            ),
            ("event_loop_lag_max_seconds", "Largest so far.", lateness.loop_lag_max_s),
            ("pace_late", "1 if the machine does not keep up.", float(pace.is_late)),
            ("pace_lateness_seconds", "Lateness of the last answer.", pace.last_s),
            (
                "pace_recent_late_share",
                "Part of the answers of the last half minute that were late.",
                recent.late / recent.requests if recent.requests else 0.0,
            ),
            ("pace_lateness_max_seconds", "Largest so far.", pace.worst_s),
            ("pace_first_late_seconds", "Time of the first, -1 = none.", pace.first_late_s),
            (
                "token_late_p99_seconds",
                "Wall time by which 99 % of the tokens of the last five minutes were late at most.",
                pace.of_tokens.recent_ms(0.99, time.monotonic()) / 1e3,
            ),
            ("token_late_max_seconds", "Largest so far.", pace.of_tokens.worst_ns / NS_PER_S),
        )
        for name, text, value in gauges:
            page.gauge(f"emu:{name}", text, [("", value)])
        page.counter("emu:pace_requests", "Answers whose pace is known.", [("", pace.requests)])
        page.counter("emu:pace_late_requests", "Answers that were late.", [("", pace.late)])

    def _control_families(self) -> None:
        page, service = self._page, self._service
        counts = service.counts
        refused = [(f'status="{status}"', float(n)) for status, n in counts.http_refused.items()]
        page.counter("emu:http_errors", "Answers with an error status.", refused)
        returned = [("", float(counts.failures_returned))]
        page.counter("emu:failures_returned", "Scheduled failures.", returned)
        shed = [("", float(counts.calls_shed))]
        page.counter("emu:calls_shed", "Calls refused: this machine is behind.", shed)
        injected = [(f'kind="{kind}"', float(n)) for kind, n in counts.faults_injected.items()]
        page.counter("emu:faults_injected", "Faults from the control interface.", injected)
        struck = [(f'kind="{kind}"', float(n)) for kind, n in service.cluster.faults.struck.items()]
        page.counter("emu:faults", "Faults that struck.", struck)
        commands = [
            (f'command="{command}",outcome="{outcome}"', float(n))
            for (command, outcome), n in counts.commands_given.items()
        ]
        page.counter("emu:commands", "Commands to replicas.", commands)
