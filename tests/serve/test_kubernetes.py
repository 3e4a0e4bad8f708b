"""Controllers and clients of Kubernetes drive a live fleet: rules of HPA and KEDA, and kubectl."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.serve.live import Live, run, tables
from tests.serve.test_fleet import replayed

SCALE = "/apis/apps/v1/namespaces/default/deployments/colocated/scale"
DEPLOYMENT = SCALE.removesuffix("/scale")
PODS = "/api/v1/namespaces/default/pods"
HPAS = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
MERGE = {"content-type": "application/merge-patch+json"}
SPARE = [{}, {"role": "inactive", "count": 3}]


async def calls(live: Live, count: int, output: int) -> list[asyncio.Task[httpx.Response]]:
    """Calls that are under way."""
    body = {"prompt": "hello there", "max_tokens": output}
    return [
        asyncio.create_task(live.client.post("/v1/completions", json=body)) for _ in range(count)
    ]


class Hpa:
    """`autoscaling/v2` from its rules: a pod metric's average, tolerance 0.1, and a window in
    which the highest wish counts for scaling down. Reads its object as the real one does."""

    def __init__(self, live: Live, name: str) -> None:
        self._live = live
        self._name = name
        self._wishes: list[tuple[float, int]] = []

    async def look(self) -> int:
        """One round; the number of replicas that it asked for."""
        client = self._live.client
        spec = (await client.get(f"{HPAS}/{self._name}")).json()["spec"]
        scale = (await client.get(SCALE)).json()
        metric = spec["metrics"][0]["pods"]
        place = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/pods/*/"
        selector = {"labelSelector": scale["status"]["selector"]}
        found = (await client.get(place + metric["metric"]["name"], params=selector)).json()
        pods = (await client.get(PODS, params=selector)).json()["items"]
        ready = {pod["metadata"]["name"] for pod in pods if _is_ready(pod)}
        values = [
            _number(item["value"])
            for item in found["items"]
            if item["describedObject"]["name"] in ready
        ]
        target = _number(metric["target"]["averageValue"])
        current = scale["spec"]["replicas"]
        ratio = sum(values) / len(values) / target if values else 1.0
        wish = current if abs(ratio - 1) <= 0.1 else math.ceil(ratio * len(values))
        now_s = self._live.cluster.kernel.wall_ns() / 1e9
        window_s = spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
        self._wishes = [(s, w) for s, w in self._wishes if s > now_s - window_s] + [(now_s, wish)]
        wish = max(wish, min(current, max(w for _, w in self._wishes)))
        wish = min(max(wish, spec["minReplicas"]), spec["maxReplicas"])
        if wish != current:
            body = {"spec": {"replicas": wish}}
            answer = await client.patch(SCALE, content=msgspec.json.encode(body), headers=MERGE)
            assert answer.status_code == 200
        return wish


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])


def _number(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def test_a_pod_autoscaler_moves_the_fleet_up_and_down(tmp_path: Path) -> None:
    metric = {"metric": {"name": "vllm:num_requests_running"}}
    target = {"type": "AverageValue", "averageValue": "2"}
    hpa = {
        "metadata": {"name": "engines"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "colocated"},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [{"type": "Pods", "pods": {**metric, "target": target}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        },
    }

    async def check(live: Live) -> None:
        assert (await live.client.post(HPAS, json=hpa)).status_code == 201
        scaler = Hpa(live, "engines")
        assert await scaler.look() == 1
        tasks = await calls(live, 6, 400)
        replica = live.cluster.replicas[0]
        await live.until(lambda: replica.view().running_count == 6)
        assert await scaler.look() == 3  # six at two a pod
        while (await live.client.get(DEPLOYMENT)).json()["status"].get("readyReplicas") != 3:
            await live.clock.sleep(0.05)
        assert await scaler.look() == 3
        await asyncio.gather(*tasks)
        assert await scaler.look() == 3  # the window
        for _ in range(40):
            await live.clock.sleep(0.01)
            wish = await scaler.look()
        assert wish == 1
        states = [replica.state.value for replica in live.cluster.replicas]
        assert states.count("colocated") == 1

    run(tmp_path, tables(replicas=SPARE), check, fleet=True)
    assert len(replayed(tmp_path)) == 6


def test_an_event_driven_scaler_goes_to_zero_and_back(tmp_path: Path) -> None:
    """KEDA's rules: active while the trigger is above its activation; from zero to one when it is;
    above that the average value counts; to zero after the cooldown."""

    async def check(live: Live) -> None:
        client, cooldown_s, target = live.client, 2.0, 4.0
        active_s = live.cluster.kernel.wall_ns() / 1e9
        refused = 0

        async def look() -> int:
            nonlocal active_s, refused
            now_s = live.cluster.kernel.wall_ns() / 1e9
            place = "/apis/external.metrics.k8s.io/v1beta1/namespaces/default"
            found = (await client.get(f"{place}/vllm:num_requests_running")).json()
            turned_away = live.service.counts.http_refused.get(503, 0)
            value = _number(found["items"][0]["value"]) + turned_away - refused
            refused = turned_away
            current: int = (await client.get(SCALE)).json()["spec"]["replicas"]
            if value > 0:
                active_s = now_s
                wish = max(1, math.ceil(value / target))
            else:
                wish = 0 if now_s - active_s > cooldown_s else current
            if wish != current:
                body = {"spec": {"replicas": wish}}
                assert (await client.patch(SCALE, json=body)).status_code == 200
            return wish

        while await look():
            await live.clock.sleep(0.05)
        await live.until(lambda: live.cluster.replicas[0].state.value == "inactive")
        assert (await live.complete(max_tokens=2)).status_code == 503
        assert await look() == 1
        while (await live.complete(max_tokens=2)).status_code == 503:
            await live.clock.sleep(0.05)
        refused = live.service.counts.http_refused[503]  # those of the start are no load
        tasks = await calls(live, 9, 300)
        await live.until(lambda: live.cluster.open_choices == 9)
        await live.clock.sleep(0.01)
        assert await look() == 3
        await asyncio.gather(*tasks)

    run(tmp_path, tables(replicas=SPARE), check, fleet=True)


def test_an_endpoint_picker_finds_every_name_it_asks_for(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        slices = "/apis/discovery.k8s.io/v1/endpointslices"
        found = (await live.client.get(slices)).json()["items"]
        assert len(found) == 2
        for one in found:
            address, port = one["endpoints"][0]["addresses"][0], one["ports"][0]["port"]
            assert one["endpoints"][0]["conditions"]["ready"]
            async with httpx.AsyncClient() as client:
                page = (await client.get(f"http://{address}:{port}/metrics")).text
            for name in (
                "vllm:num_requests_waiting{",
                "vllm:num_requests_running{",
                "vllm:kv_cache_usage_perc{",
                "vllm:cache_config_info{",
                'block_size="16"',
                'num_gpu_blocks="2000"',
            ):
                assert name in page, name
        pools = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools/emu"
        pool = (await live.client.get(pools)).json()["spec"]
        pods = (await live.client.get(PODS)).json()["items"]
        ports = {pod["spec"]["containers"][0]["ports"][0]["containerPort"] for pod in pods}
        assert ports <= {port["number"] for port in pool["targetPorts"]}
        labels = pool["selector"]["matchLabels"].items()
        assert all(labels <= pod["metadata"]["labels"].items() for pod in pods)

    run(tmp_path, tables(replicas=[{"count": 2}]), check, fleet=True)


KUBECTL = shutil.which("kubectl")
Kubectl = Callable[..., Awaitable[str]]


def kubectl(live: Live, directory: Path) -> Kubectl:
    """Runs kubectl against the server; its output."""

    async def call(*words: str) -> str:
        assert KUBECTL is not None
        environment = {**os.environ, "HOME": str(directory), "KUBECONFIG": str(directory / "none")}
        server = f"--server={live.server.url}"
        done = await asyncio.to_thread(
            subprocess.run,
            [KUBECTL, server, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.slow
@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kubectl_works_as_it_is(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        call = kubectl(live, tmp_path)
        assert "node-1   Ready" in await call("get", "nodes")
        watched = asyncio.create_task(
            call("get", "pods", "--watch", "--request-timeout=4s", "--output=name")
        )
        await call("scale", "deployment/colocated", "--replicas=3")
        assert "successfully rolled out" in await call("rollout", "status", "deployment/colocated")
        lines = (await call("get", "pods", "-o", "wide")).splitlines()
        assert [line.split()[1] for line in lines[1:]] == ["1/1"] * 3
        described = await call("describe", "deployment", "colocated")
        assert "3 desired | 3 updated | 3 total | 3 available" in described
        assert "drained" in await call("drain", "node-0")
        lines = (await call("get", "pods", "--field-selector=spec.nodeName=node-0")).splitlines()
        assert lines == []
        assert "SchedulingDisabled" in await call("get", "node", "node-0")
        await call("uncordon", "node-0")
        await call("rollout", "restart", "deployment/colocated")
        await call("rollout", "status", "deployment/colocated")
        assert "2 " in await call("rollout", "history", "deployment/colocated")
        assert "colocated" in await call("describe", "pods")
        assert "CPU" in await call("top", "pods")
        assert len(set((await watched).split())) >= 5

    raw = tables(replicas=SPARE, nodes=[{"count": 2, "gpus": 2}])
    run(tmp_path, raw, check, fleet=True, speed=400.0)
