"""llm-d: values for its chart llm-d-modelservice.

The chart names the model, the port and the tensor-parallel degree itself; a colocated cluster has
decode replicas alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.plan.manifests.roles import PORT, Role, scaling_note, short_name
from emu.apps.plan.manifests.text import yaml_lines
from emu.documents import Document

_LLM_D_IMAGE: Final = "ghcr.io/llm-d/llm-d-cuda:latest"
_PROXIED_PORT: Final = 8200
"""Of vLLM behind llm-d's routing sidecar."""
_SIDE_CHANNEL_PORT: Final = 5600
"""Of the NIXL connector."""


def llm_d(roles: Sequence[Role], model: str) -> str:
    """Values for the chart llm-d-modelservice."""
    by_role = {one.role: one for one in roles}
    decode = by_role.get("decode") or by_role.get("colocated")
    prefill = by_role.get("prefill")
    name = roles[0].flags[2]
    served = _option(roles[0].flags, "--served-model-name") or name
    values = {
        "multinode": False,
        "modelArtifacts": {
            "name": served,
            "uri": f"hf://{name}",
            "labels": {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": short_name(model)},
        },
        "routing": {
            "servicePort": PORT,
            "proxy": {"enabled": prefill is not None, "targetPort": _PROXIED_PORT},
        },
        "decode": _pods(decode, PORT if prefill is None else _PROXIED_PORT),
        "prefill": _pods(prefill, PORT),
    }
    note = ""
    if name.startswith(("/", ".")):
        note = (
            f"# modelArtifacts.uri: the checkpoint lies in {name}; put it where the chart reads.\n"
        )
        values["modelArtifacts"]["uri"] = f"pvc://model/{name.rpartition('/')[2]}"  # type: ignore[index]
    return scaling_note(roles) + note + "\n".join(yaml_lines(values, 0)) + "\n"


def _pods(one: Role | None, port: int) -> Document:
    """A role of the chart."""
    if one is None:
        return {"create": False, "replicas": 0}
    ports = [{"containerPort": port, "protocol": "TCP"}]
    environment = []
    if one.role != "colocated":
        ports.append({"containerPort": _SIDE_CHANNEL_PORT, "protocol": "TCP"})
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        environment = [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(_SIDE_CHANNEL_PORT)},
        ]
    degree = _option(one.flags, "--tensor-parallel-size")
    return {
        "create": True,
        "replicas": one.count,
        "parallelism": {"tensor": int(degree or 1)},
        "containers": [
            {
                "name": "vllm",
                "image": _LLM_D_IMAGE,
                "modelCommand": "vllmServe",
                "args": _without(one.flags[3:], "--tensor-parallel-size", "--served-model-name"),
                **({"env": environment} if environment else {}),
                "ports": ports,
                "resources": {"limits": {"nvidia.com/gpu": str(one.gpus)}},
                "mountModelVolume": True,
            }
        ],
    }


def _option(flags: Sequence[str], name: str) -> str:
    """The value of an option; empty if it is not there."""
    return flags[flags.index(name) + 1] if name in flags else ""


def _without(flags: Sequence[str], *names: str) -> list[str]:
    """Flags without some options and their values."""
    left: list[str] = []
    for before, flag in zip(("", *flags), flags, strict=False):
        if flag not in names and before not in names:
            left.append(flag)
    return left
