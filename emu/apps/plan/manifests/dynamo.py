"""NVIDIA Dynamo: a DynamoGraphDeployment (nvidia.com/v1alpha1) with a frontend and workers.

Prefill workers are marked as such, everything else are vLLM's flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.plan.manifests.roles import Role, scaling_note, short_name
from emu.apps.plan.manifests.text import yaml_documents
from emu.documents import Document

_DYNAMO_IMAGE: Final = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:latest"


def dynamo(roles: Sequence[Role], model: str) -> str:
    """A DynamoGraphDeployment."""
    image = {"image": _DYNAMO_IMAGE}
    services: Document = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": image},
        }
    }
    for one in roles:
        name, *flags = one.flags[2:]
        part = {"prefill": "prefill", "decode": "decode"}.get(one.role)
        arguments = ["--model", name, *flags]
        if part is not None:
            arguments.append(f"--is-{part}-worker")
        services[f"Vllm{(part or '').capitalize()}Worker"] = {
            "componentType": "worker",
            **({"subComponentType": part} if part else {}),
            "replicas": one.count,
            "resources": {"limits": {"gpu": str(one.gpus)}},
            "extraPodSpec": {
                "mainContainer": {
                    **image,
                    "command": ["python3", "-m", "dynamo.vllm"],
                    "args": arguments,
                }
            },
        }
    graph = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": short_name(model)},
        "spec": {"services": services},
    }
    return scaling_note(roles) + yaml_documents([graph])
