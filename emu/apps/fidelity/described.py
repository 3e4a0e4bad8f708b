"""The machine and its replicas from an engine's own record, without a cluster file."""

from __future__ import annotations

import json
from pathlib import Path

from emu.apps.fidelity.enginesettings import left_behind, scheduler_keys
from emu.apps.fidelity.record import Case, table_of
from emu.catalogue.checkpoints import weights_under
from emu.catalogue.lookup import gpu_of_device, lookup_gpu, lookup_model
from emu.documents import Document
from emu.errors import InputError
from emu.latency.profile.bundle import variant_name


def described_config(case: Case, profiles: Path | None, gpu: str) -> str:
    """The machine and its replicas from the engine's own record."""
    source = str(case.meta_path or case.directory)
    engine = table_of(case.meta, "engine_kwargs")
    name = case.meta.get("model") or engine.get("model")
    if not isinstance(name, str):
        raise InputError(source, None, "model", "missing, and there is no config.json")
    model = lookup_model(name, source, "model")
    spec = _gpu(case, source, gpu)
    degrees = {
        key: _count(source, engine, key)
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    }
    tensor, pipeline, members = degrees.values()
    dtype = engine.get("dtype")
    kv_dtype = engine.get("kv_cache_dtype") or "auto"
    if dtype in (None, "auto"):
        dtype = model.dtype
    lines = [
        "[model]",
        f"name = {json.dumps(model.name)}",
        f"dtype = {json.dumps(weights_under(model, str(dtype)))}",
        f"kv_cache_dtype = {json.dumps(kv_dtype)}",
        "",
        "[[nodes]]",
        f"gpu = {json.dumps(spec)}",
        f"gpus = {tensor * pipeline * members}",
        "",
        "[[replicas]]",
        f"count = {members}",
        f"tensor_parallel = {tensor}",
        f"pipeline_parallel = {pipeline}",
    ]
    if model.experts is not None and engine.get("enable_expert_parallel"):
        lines.append(f"expert_parallel = {tensor * members}")
    if members > 1 and model.experts is not None:
        lines.append('data_parallel_group = "A"')
    lines += ["", "[scheduler]", 'policy = "vllm"']
    lines += [f"{key} = {json.dumps(value)}" for key, value in scheduler_keys(case).items()]
    lines += [*left_behind(case), "", "[latency]"]
    bundle = None
    if profiles is not None:
        bundle = profiles / spec / model.name / variant_name(str(dtype), str(kv_dtype))
    if bundle is not None and (bundle / f"tp{tensor}").is_dir():
        lines += ['backend = "profile"', f"path = {json.dumps(str(profiles))}"]
    else:
        if profiles is not None:
            lines.append(f"# no bundle for {model.name} on {spec}, TP {tensor}")
        lines.append('backend = "roofline"')
    return "\n".join(lines)


def _count(source: str, engine: Document, key: str) -> int:
    value = engine.get(key)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(source, None, f"engine_kwargs.{key}", f"expected a count, got {value!r}")
    return value


def _gpu(case: Case, source: str, stated: str) -> str:
    """The catalogue's name of the GPU: as stated, or as CUDA calls the device."""
    if stated:
        return lookup_gpu(stated, "reproduce", "--gpu").name
    device = table_of(case.meta, "hardware").get("device_name")
    if not isinstance(device, str):
        problem = "missing, and there is no config.json: say --gpu NAME"
        raise InputError(source, None, "hardware.device_name", problem)
    spec = gpu_of_device(device)
    return (spec or lookup_gpu(device, source, "hardware.device_name")).name
