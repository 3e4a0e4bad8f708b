"""The best cluster as files: a runnable configuration, vLLM's flags, a Kubernetes manifest.

    cluster.toml        `emu run cluster.toml` repeats the run that the plan rests on
    vllm.txt            one `vllm serve` command for each role
    kubernetes.yaml     a Deployment and a Service for each role
    plan.json           the answer

Flags are those of `vllm serve`. They can only say what the emulated engine did: a configuration
with another scheduler than vLLM's gets no flags and no manifest.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.chaos.tomltext import toml_text
from emu.config.load import config_from_dict
from emu.config.schema import Config, VllmTable
from emu.report.atomic import write_text
from emu.sizing.answer import Answer

_IMAGE: Final = "vllm/vllm-openai:latest"
_PORT: Final = 8000
_QUANTIZED: Final = {"fp8": "fp8"}
"""Types of weights that vLLM quantizes to while loading; others are the checkpoint's business."""
_PLAIN: Final = ("float32", "float16", "bfloat16")
_CONNECTOR: Final = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


def write_answer(answer: Answer, directory: Path) -> list[Path]:
    """Write all files; their paths."""
    files = {
        "cluster.toml": f"# {answer.rows[0].label}; found by emu plan.\n{toml_text(answer.config)}",
        "plan.json": msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n",
    }
    config = config_from_dict(answer.config)
    if config.scheduler.policy == "vllm":
        roles = _roles(config)
        lines = [
            f"# {role}, {count} of them\n{shlex.join(flags)}\n" for role, count, flags in roles
        ]
        files["vllm.txt"] = "\n".join(lines)
        files["kubernetes.yaml"] = manifests(config, answer.model)
    for name, text in files.items():
        write_text(directory / name, text)
    return [directory / name for name in files]


def vllm_flags(config: Config, group: int) -> list[str]:
    """`vllm serve MODEL --flags` of a group of replicas."""
    table, scheduler, model = config.replicas[group], config.scheduler, config.model
    flags = ["vllm", "serve", model.name]
    if model.hf_config:  # the checkpoint lies beside its config.json
        flags = ["vllm", "serve", str(Path(model.hf_config).parent)]
        flags += ["--served-model-name", model.name]
    flags += ["--tensor-parallel-size", str(table.tensor_parallel)]
    if table.pipeline_parallel > 1:
        flags += ["--pipeline-parallel-size", str(table.pipeline_parallel)]
    flags += ["--gpu-memory-utilization", f"{scheduler.gpu_memory_utilization:g}"]
    flags += ["--max-num-seqs", str(scheduler.requests_max)]
    flags += ["--max-num-batched-tokens", str(scheduler.tokens_max)]
    flags += ["--block-size", str(scheduler.block_size)]
    flags.append(f"--{'' if scheduler.caches_prefixes else 'no-'}enable-prefix-caching")
    if isinstance(scheduler, VllmTable):
        flags.append(f"--{'' if scheduler.chunked_prefill else 'no-'}enable-chunked-prefill")
    if model.max_model_tokens:
        flags += ["--max-model-len", str(model.max_model_tokens)]
    if model.dtype in _PLAIN:
        flags += ["--dtype", model.dtype]
    elif model.dtype in _QUANTIZED:
        flags += ["--quantization", _QUANTIZED[model.dtype]]
    if model.kv_cache_dtype == "fp8":
        flags += ["--kv-cache-dtype", "fp8"]
    if table.role in ("prefill", "decode"):
        flags += ["--kv-transfer-config", _CONNECTOR]
    return flags


def _roles(config: Config) -> list[tuple[str, int, list[str]]]:
    return [
        (table.role, table.count, vllm_flags(config, group))
        for group, table in enumerate(config.replicas)
    ]


def manifests(config: Config, model: str) -> str:
    """Documents of YAML: a Deployment and a Service for each role."""
    short = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")[:40].strip("-")
    documents: list[dict[str, Any]] = []
    for group, (role, count, flags) in enumerate(_roles(config)):
        name = f"{short}-{role}"
        table = config.replicas[group]
        gpus = table.tensor_parallel * table.pipeline_parallel
        labels = {"app": name, "role": role}
        documents.append(_deployment(name, labels, count, flags[2:], gpus))
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "selector": labels,
                    "ports": [{"name": "http", "port": _PORT, "targetPort": _PORT}],
                },
            }
        )
    return "".join("---\n" + "\n".join(_yaml(document, 0)) + "\n" for document in documents)


def _deployment(
    name: str, labels: dict[str, str], count: int, arguments: list[str], gpus: int
) -> dict[str, Any]:
    model, *flags = arguments
    container = {
        "name": "vllm",
        "image": _IMAGE,
        "args": ["--model", model, *flags],
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}},
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": count,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _yaml(value: Any, depth: int) -> Iterator[str]:
    """Lines of a mapping or a list in block style; scalars as JSON, which is YAML."""
    indent = "  " * depth
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, (dict, list)):
                yield f"{indent}{_key(key)}:"
                yield from _yaml(inner, depth + 1)
            else:
                yield f"{indent}{_key(key)}: {json.dumps(inner)}"
        return
    for item in value:
        if isinstance(item, dict):
            first, *rest = _yaml(item, depth + 1)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {json.dumps(item)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z]+", key) else json.dumps(key)
