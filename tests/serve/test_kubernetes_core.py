"""Kubernetes' API without sockets: patches, selectors, versions, and what controllers decide."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from emu.apps.serve.kubernetes.api import Answer, Call, KubernetesApi, Watch
from emu.apps.serve.kubernetes.controller import TOLERATION_NS, Controller
from emu.apps.serve.kubernetes.documents import Refused
from emu.apps.serve.kubernetes.kinds import PODS
from emu.apps.serve.kubernetes.metrics import MetricsApi, Reading, quantity
from emu.apps.serve.kubernetes.patches import JSON_PATCH, MERGE, STRATEGIC, patched
from emu.apps.serve.kubernetes.selectors import select
from emu.apps.serve.kubernetes.store import CHANGES_KEPT, Store
from emu.apps.serve.kubernetes.tables import age
from emu.apps.serve.kubernetes.view import (
    Action,
    ClusterView,
    EndDrain,
    Facts,
    LoseNode,
    MachineView,
    ReplicaView,
    Start,
    Stop,
)

LOAD_NS = 1_000_000_000
DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/colocated"
POD_PATH = "/api/v1/namespaces/default/pods"


class World:
    """A cluster of two machines that does as it is told, and the API over it."""

    def __init__(self, serving: int = 2, replicas: int = 4) -> None:
        self.now_ns = 0
        self.phases = ["serving"] * serving + ["inactive"] * (replicas - serving)
        self.lives = [0] * replicas
        self.lost: set[int] = set()
        self.done: list[Action] = []
        self.slow: set[int] = set()
        """Replicas that take their time to drain."""
        facts = Facts(
            model="m", host="127.0.0.1", roles=("colocated",), load_ns=LOAD_NS, version="0"
        )
        self.store = Store("test")
        self.controller = Controller(self.store, facts, self.view())
        reading = Reading(busy_share=0.5, memory_bytes=2**20, gauges={"num_requests_running": 1.5})
        metrics = MetricsApi(self.store, lambda replica: reading)
        self.api = KubernetesApi(self.store, self.controller, metrics, "emu")

    def view(self) -> ClusterView:
        half = len(self.phases) // 2
        return ClusterView(
            now_ns=self.now_ns,
            now_s=1.7e9 + self.now_ns / 1e9,
            machines=tuple(
                MachineView(gpus=half, gpu="A100", host_memory_gib=1.0, is_lost=i in self.lost)
                for i in range(2)
            ),
            replicas=tuple(
                ReplicaView(
                    replica_id=i,
                    machine=i // half,
                    gpus=1,
                    port=9000 + i,
                    role="colocated" if phase in ("serving", "draining") else "",
                    phase=phase,
                    life=self.lives[i],
                )
                for i, phase in enumerate(self.phases)
            ),
        )

    def settle(self, seconds: float = 0.0) -> None:
        """Time passes, and all that the controllers want happens."""
        self.now_ns += round(seconds * 1e9)
        for _ in range(20):
            actions = self.controller.step(self.view())
            for action in actions:
                self.do(action)
            if not actions:
                return
        raise AssertionError("the controllers do not come to rest")

    def do(self, action: Action) -> None:
        self.done.append(action)
        if isinstance(action, Start):
            self.phases[action.replica] = "serving"
        elif isinstance(action, Stop):
            self.phases[action.replica] = "draining" if action.replica in self.slow else "inactive"
        elif isinstance(action, EndDrain):
            self.phases[action.replica] = "inactive"
        elif isinstance(action, LoseNode):
            self.lost.add(action.machine)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "", **query: str) -> Any:
        """The content of an answer, or the watch."""
        data = b"" if body is None else msgspec.json.encode(body)
        call = Call(method=method, path=path, query=query, content_type=kind, body=data)
        answer = self.api.answer(call)
        if isinstance(answer, Watch):
            return answer
        for action in answer.actions:
            self.do(action)
        assert isinstance(answer, Answer)
        return answer.content

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", POD_PATH)["items"]
        return found

    def scale(self, replicas: int) -> Any:
        body = {"spec": {"replicas": replicas}}
        return self.ask("PATCH", f"{DEPLOYMENT}/scale", body, MERGE)


def test_patches_change_documents_as_their_kinds_say() -> None:
    held: dict[str, Any] = {
        "a": {"b": 1, "c": 2},
        "l": [1, 2],
        "containers": [{"name": "x", "i": 1}],
    }
    assert patched(held, {"a": {"b": None, "d": 3}, "l": [9]}, MERGE) == {
        "a": {"c": 2, "d": 3},
        "l": [9],
        "containers": held["containers"],
    }
    more = {"containers": [{"name": "x", "j": 2}, {"name": "y"}], "$setElementOrder/containers": []}
    assert patched(held, more, STRATEGIC)["containers"] == [
        {"name": "x", "i": 1, "j": 2},
        {"name": "y"},
    ]
    gone = {"containers": [{"name": "x", "$patch": "delete"}]}
    assert patched(held, gone, STRATEGIC)["containers"] == []
    steps = [
        {"op": "test", "path": "/l/1", "value": 2},
        {"op": "add", "path": "/l/-", "value": 3},
        {"op": "remove", "path": "/l/0"},
        {"op": "move", "from": "/a/b", "path": "/a~1b"},
    ]
    assert patched(held, steps, JSON_PATCH) == {
        "a": {"c": 2},
        "l": [2, 3],
        "containers": held["containers"],
        "a/b": 1,
    }
    assert held["l"] == [1, 2]
    for wrong in (
        [{"op": "replace", "path": "/z", "value": 1}],
        [{"op": "remove", "path": "/l/9"}],
    ):
        with pytest.raises(Refused):
            patched(held, wrong, JSON_PATCH)


@pytest.mark.parametrize(
    ("labels", "fields", "fits"),
    [
        ("app=x", "", True),
        ("app!=x", "", False),
        ("app in (x, y),!z", "", True),
        ("app notin (x)", "", False),
        ("app,other", "", False),
        ("", "spec.nodeName=node-0,metadata.name!=q", True),
        ("", "spec.unschedulable=false", True),
    ],
)
def test_selectors_choose_as_kubernetes_does(labels: str, fields: str, fits: bool) -> None:
    pod = {"metadata": {"name": "p", "labels": {"app": "x"}}, "spec": {"nodeName": "node-0"}}
    assert select(labels, fields)(pod) is fits
    with pytest.raises(Refused):
        select("a in x)", "")


def test_ages_and_quantities_are_printed_as_kubectl_does() -> None:
    since = "2026-01-01T00:00:00Z"
    begun_s = 1767225600.0
    ages = [age(since, begun_s + s) for s in (5, 119, 125, 3600, 10_860, 90_000, 200_000)]
    assert ages == ["5s", "119s", "2m5s", "60m", "3h1m", "25h", "2d"]
    assert [quantity(v) for v in (5.0, 1.5, 0.0)] == ["5", "1500m", "0"]


def test_a_deployment_follows_the_cluster_until_it_is_written_to() -> None:
    world = World()
    assert world.ask("GET", DEPLOYMENT)["spec"]["replicas"] == 2
    world.phases[2] = "serving"  # the planner, or a page
    world.settle()
    assert world.ask("GET", DEPLOYMENT)["status"]["readyReplicas"] == 3
    world.scale(1)
    world.settle()
    assert world.phases == ["serving", "inactive", "inactive", "inactive"]
    world.phases[3] = "serving"
    world.settle()
    assert world.phases.count("serving") == 1


def test_pods_load_before_they_are_ready_and_conflicts_are_told() -> None:
    world = World()
    old = world.ask("GET", f"{DEPLOYMENT}/scale")
    assert world.scale(4)["spec"]["replicas"] == 4
    assert world.scale(5)["reason"] == "Forbidden"
    assert world.scale(-1)["code"] == 422
    assert world.ask("PUT", f"{DEPLOYMENT}/scale", old)["reason"] == "Conflict"
    world.settle()
    status = world.ask("GET", DEPLOYMENT)["status"]
    assert (status["replicas"], status["readyReplicas"], status["unavailableReplicas"]) == (4, 2, 2)
    world.settle(LOAD_NS / 1e9)
    assert world.ask("GET", DEPLOYMENT)["status"]["readyReplicas"] == 4
    assert world.done == [Start(2, "colocated"), Start(3, "colocated")]


def test_a_watch_tells_each_change_once_and_forgets_the_oldest() -> None:
    world = World()
    watch = world.ask("GET", POD_PATH, watch="1", resourceVersion=str(world.store.version))
    world.scale(3)
    world.settle()
    world.settle(LOAD_NS / 1e9)
    seen = [c.seen(watch.selected.test) for c in world.store.since(PODS, watch.version)]
    kinds = [event[0] for event in seen if event is not None]
    assert kinds[0] == "ADDED"
    assert set(kinds[1:]) == {"MODIFIED"}
    versions = [int(e[1]["metadata"]["resourceVersion"]) for e in seen if e is not None]  # type: ignore[index]
    assert all(a < b for a, b in itertools.pairwise(versions))
    for number in range(CHANGES_KEPT):
        world.ask(
            "POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": f"c{number}"}}
        )
    with pytest.raises(Refused) as refused:
        list(world.store.since(PODS, watch.version))
    assert refused.value.code == 410
    assert world.ask("GET", POD_PATH, resourceVersion="99999999")["code"] == 504


def test_a_drain_moves_pods_and_budgets_hold_it_up() -> None:
    world = World()
    world.slow = {0, 1}
    budget = {
        "metadata": {"name": "b"},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "colocated"}}},
    }
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    world.ask("POST", budgets, budget)
    world.ask("PATCH", "/api/v1/nodes/node-0", {"spec": {"unschedulable": True}}, STRATEGIC)
    name = world.pods()[0]["metadata"]["name"]
    evict = {"deleteOptions": {"gracePeriodSeconds": 7}}
    refused = world.ask("POST", f"{POD_PATH}/{name}/eviction", evict)
    assert (refused["code"], refused["details"]["causes"][0]["reason"]) == (429, "DisruptionBudget")
    world.ask("DELETE", f"{budgets}/b")
    assert world.ask("POST", f"{POD_PATH}/{name}/eviction", evict)["status"] == "Success"
    world.settle()
    going = next(pod for pod in world.pods() if pod["metadata"]["name"] == name)
    assert going["metadata"]["deletionGracePeriodSeconds"] == 7
    world.settle(6)
    assert world.ask("GET", f"{POD_PATH}/{name}")["metadata"]["name"] == name
    world.settle(1.1)
    assert world.ask("GET", f"{POD_PATH}/{name}")["code"] == 404
    assert [one for one in world.done if isinstance(one, EndDrain)] == [
        EndDrain(int(going["metadata"]["labels"]["emu/replica"]))
    ]
    nodes = {pod["spec"].get("nodeName") for pod in world.pods() if pod["metadata"]["name"] != name}
    assert "node-1" in nodes


def test_a_pod_without_gpus_waits_for_a_node_that_opens() -> None:
    world = World(serving=2, replicas=4)
    world.ask("PATCH", "/api/v1/nodes/node-1", {"spec": {"unschedulable": True}}, MERGE)
    assert world.ask("GET", "/api/v1/nodes/node-1")["spec"]["taints"][0]["effect"] == "NoSchedule"
    world.scale(3)
    world.settle()
    phases = [pod["status"]["phase"] for pod in world.pods()]
    assert sorted(phases) == ["Pending", "Running", "Running"]
    world.ask("PATCH", "/api/v1/nodes/node-1", {"spec": {"unschedulable": None}}, MERGE)
    world.settle(5)
    world.settle(5)
    assert world.phases == ["serving", "serving", "serving", "inactive"]


def test_pods_of_a_lost_node_are_replaced_after_their_toleration() -> None:
    world = World()
    world.scale(2)
    world.lost, world.phases[0], world.phases[1] = {0}, "failed", "failed"
    world.lives[0] = world.lives[1] = 1
    world.settle()
    assert (
        world.ask("GET", "/api/v1/nodes/node-0")["status"]["conditions"][0]["status"] == "Unknown"
    )
    pods = world.pods()
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods] == [1, 1]
    assert not any(isinstance(one, Start) for one in world.done)
    world.settle(TOLERATION_NS / 1e9)
    world.settle(LOAD_NS / 1e9)
    assert world.phases == ["failed", "failed", "serving", "serving"]


def test_a_node_that_is_deleted_takes_its_machine_away() -> None:
    world = World()
    assert world.ask("DELETE", "/api/v1/nodes/node-1")["status"] == "Success"
    assert world.done == [LoseNode(1)]
    world.settle()
    assert world.ask("GET", "/api/v1/nodes/node-1")["code"] == 404
    world.scale(3)
    world.settle(9)
    assert [pod["status"]["phase"] for pod in world.pods()].count("Pending") == 1


def test_a_new_template_rolls_out_with_one_pod_of_four_away() -> None:
    world = World(serving=4, replicas=6)
    again = {"spec": {"template": {"metadata": {"annotations": {"restartedAt": "now"}}}}}
    world.ask("PATCH", DEPLOYMENT, again, STRATEGIC)
    fewest = 4
    for _ in range(12):
        world.settle(LOAD_NS / 2e9)
        fewest = min(fewest, world.phases.count("serving"))
    status = world.ask("GET", DEPLOYMENT)["status"]
    assert (status["updatedReplicas"], status["readyReplicas"], fewest) == (4, 4, 3)
    sets = world.ask("GET", "/apis/apps/v1/replicasets")["items"]
    numbers = [one["metadata"]["annotations"]["deployment.kubernetes.io/revision"] for one in sets]
    assert sorted(numbers) == ["1", "2"]


def test_autoscalers_find_their_metrics() -> None:
    world = World()
    pods = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/pods"
    found = world.ask("GET", f"{pods}/*/vllm:num_requests_running", labelSelector="app=colocated")
    assert [item["value"] for item in found["items"]] == ["1500m", "1500m"]
    assert world.ask("GET", f"{pods}/*/nothing")["code"] == 404
    external = "/apis/external.metrics.k8s.io/v1beta1/namespaces/default"
    found = world.ask("GET", f"{external}/vllm:num_requests_running")
    assert found["items"][0]["value"] == "3"
    found = world.ask("GET", "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods")
    assert found["items"][0]["containers"][0]["usage"] == {"cpu": "500000000n", "memory": "1024Ki"}
    nodes = world.ask("GET", "/apis/metrics.k8s.io/v1beta1/nodes")
    assert [item["usage"]["cpu"] for item in nodes["items"]] == ["1000000000n", "0n"]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/apis/nothing/v1/x", 404),
        ("GET", "/api/v1/pods/name", 404),
        ("DELETE", DEPLOYMENT, 405),
        ("POST", POD_PATH, 405),
        ("PATCH", DEPLOYMENT, 415),
        ("PUT", "/api/v1/nodes/none", 404),
    ],
)
def test_what_the_api_has_not_is_refused_in_its_words(method: str, path: str, code: int) -> None:
    answer = World().ask(method, path, {"spec": {}}, "text/yaml")
    assert (answer["kind"], answer["code"]) == ("Status", code)


def test_everything_that_discovery_names_is_there() -> None:
    world = World()
    groups = world.ask("GET", "/apis")["groups"]
    places = ["/api/v1", *(f"/apis/{v['groupVersion']}" for g in groups for v in g["versions"])]
    for place in places:
        for one in world.ask("GET", place)["resources"]:
            if "/" not in one["name"] and "metrics" not in place:
                assert world.ask("GET", f"{place}/{one['name']}")["kind"] == f"{one['kind']}List"
