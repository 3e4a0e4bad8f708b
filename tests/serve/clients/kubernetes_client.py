"""The `kubernetes` package, unmodified, against a live server: run by `make clients`.

CLIENT_VENV/bin/python tests/serve/clients/kubernetes_client.py BASE_URL
"""

from __future__ import annotations

import sys

from kubernetes import client, watch

DEFAULT = "default"


def main(url: str) -> None:
    settings = client.Configuration()
    settings.host = url.removesuffix("/v1")
    client.Configuration.set_default(settings)
    core, apps = client.CoreV1Api(), client.AppsV1Api()
    groups = {group.name for group in client.ApisApi().get_api_versions().groups}
    assert {"apps", "autoscaling", "metrics.k8s.io", "inference.networking.k8s.io"} <= groups
    (node,) = core.list_node().items
    assert node.status.capacity["nvidia.com/gpu"] == "8"
    pods = core.list_namespaced_pod(DEFAULT, label_selector="app=colocated")
    assert len(pods.items) == 8
    assert {pod.status.phase for pod in pods.items} == {"Running"}

    apps.patch_namespaced_deployment_scale("colocated", DEFAULT, {"spec": {"replicas": 6}})
    gone = set()
    version = pods.metadata.resource_version
    for event in watch.Watch().stream(
        core.list_namespaced_pod, DEFAULT, resource_version=version, timeout_seconds=30
    ):
        if event["type"] == "DELETED":
            gone.add(event["object"].metadata.name)
        if len(gone) == 2:
            break
    assert len(core.list_namespaced_pod(DEFAULT).items) == 6

    scale = apps.read_namespaced_deployment_scale("colocated", DEFAULT)
    scale.metadata.resource_version = version
    try:
        apps.replace_namespaced_deployment_scale("colocated", DEFAULT, scale)
    except client.ApiException as refused:
        assert refused.status == 409, refused
    else:
        raise AssertionError("a stale version was taken")
    scale = apps.read_namespaced_deployment_scale("colocated", DEFAULT)
    scale.spec.replicas = 8
    apps.replace_namespaced_deployment_scale("colocated", DEFAULT, scale)

    name = core.list_namespaced_pod(DEFAULT).items[0].metadata.name
    metadata = client.V1ObjectMeta(name=name, namespace=DEFAULT)
    core.create_namespaced_pod_eviction(name, DEFAULT, client.V1Eviction(metadata=metadata))
    core.patch_node("node-0", {"spec": {"unschedulable": True}})
    assert core.read_node("node-0").spec.taints[0].effect == "NoSchedule"
    core.patch_node("node-0", {"spec": {"unschedulable": None}})

    custom = client.CustomObjectsApi()
    place = ("metrics.k8s.io", "v1beta1", DEFAULT, "pods")
    assert custom.list_namespaced_custom_object(*place)["items"]
    place = ("inference.networking.k8s.io", "v1", DEFAULT, "inferencepools")
    assert custom.list_namespaced_custom_object(*place)["items"][0]["spec"]["targetPorts"] == []
    print("kubernetes: lists, watches, scale, conflicts, eviction, metrics")


if __name__ == "__main__":
    main(sys.argv[1])
