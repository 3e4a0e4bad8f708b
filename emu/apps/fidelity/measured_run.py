"""The directory of a measured run of vLLM as a configuration of ours and its workload.

    case = read_case(directory)
    text, workload = case_config(case, profiles)

Such a directory is what LLMServingSim's recorder leaves (`bench/examples`), flat or with its
folders `vllm/` and `outputs/`:

* requests.jsonl    what was measured (needed);
* meta.json         the engine's settings, where known its KV cache, GPU and complete configuration;
* config.json       the machine as a cluster file. Without it the machine comes from meta.json's
                    `hardware`, or from the caller.

The workload is made of the measured requests' lengths and arrivals, in the order of their ids.
Their token ids come from the dataset that meta.json names, if it is found below the directory or
one of its parents (with the recorded sha256); its arrivals are plans, kept to some ms.

Owns the mapping of vLLM's keys to ours, not the cluster file's (`llmservingsim.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.backends.llmservingsim.convert import import_cluster
from emu.catalogue.checkpoints import weights_under
from emu.catalogue.lookup import gpu_of_device, lookup_gpu, lookup_model
from emu.config.load import load_config
from emu.config.names import engine_words, json_object, read_input
from emu.engines.registry import nearest_version
from emu.errors import InputError
from emu.latency.profile.bundle import variant_name
from emu.process.exits import open_console
from emu.report.compare import (
    compare_with,
    number_of,
    print_measured,
    read_measurement,
    records,
    request_ids,
)
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute

_FOLDERS: Final = ("", "vllm")
_USED: Final = (
    "dtype",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "block_size",
    "gpu_memory_utilization",
    "async_scheduling",
)
"""Keys of `engine_kwargs` that the configuration has, of the cluster file or from here."""
_WITHOUT_EFFECT: Final = (
    *("model", "tokenizer", "seed", "max_model_len", "trust_remote_code", "download_dir"),
    *("load_format", "disable_log_stats", "disable_log_requests", "served_model_name"),
)
"""What does not change how long a request takes that has been measured."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the directory."""

    directory: Path
    requests: Path
    meta: dict[str, Any]
    meta_path: Path | None
    cluster: Path | None
    dataset: Path | None


def read_case(directory: Path, dataset: Path | None = None) -> Case:
    """Find and read the files. Raises InputError for what is needed and lacking.

    `dataset` is the file that meta.json's `dataset_path` names, where it is not found from the
    directory; its sha256 must be the recorded one.
    """
    if not directory.is_dir():
        raise InputError(str(directory), None, "", "not a directory")
    requests = _find(directory, "requests.jsonl")
    if requests is None:
        raise InputError(
            str(directory), None, "", "has no requests.jsonl (nor vllm/requests.jsonl)"
        )
    meta_path = _find(directory, "meta.json")
    meta = {} if meta_path is None else json_object(meta_path, None, read_input(meta_path))
    return Case(
        directory=directory,
        requests=requests,
        meta=meta,
        meta_path=meta_path,
        cluster=_find(directory, "config.json"),
        dataset=_dataset(directory, meta) if dataset is None else _given_dataset(dataset, meta),
    )


def _given_dataset(path: Path, meta: dict[str, Any]) -> Path:
    if not path.is_file():
        raise InputError("reproduce", None, "--dataset", f"{path} is not a file")
    wanted = meta.get("dataset_hash")
    if wanted and _sha256(path) != wanted:
        problem = f"{path} is not the dataset of the run: its sha256 is not meta.json's"
        raise InputError("reproduce", None, "--dataset", problem)
    return path


def unknown_tokens(case: Case, workload: str) -> str:
    """Why the emulated run cannot have the measured one's prefix hits; empty if it can.

    `workload`: as `case_config` made it.
    """
    if _scheduler(case).get("prefix_caching") is False:
        return ""
    lines = workload.splitlines()
    unknown = sum('"input_tok_ids"' not in line for line in lines)
    if not unknown:
        return ""
    stated = case.meta.get("dataset_path")
    if case.dataset is not None:
        return f"{case.dataset} lacks the tokens of {unknown} of {len(lines)} prompts"
    if isinstance(stated, str) and stated:
        return f"{stated} (or one with its sha256) is not in {case.directory} nor above it"
    return "the record names no dataset"


def _find(directory: Path, name: str) -> Path | None:
    paths = (directory / folder / name for folder in _FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def _dataset(directory: Path, meta: dict[str, Any]) -> Path | None:
    stated = meta.get("dataset_path")
    if not isinstance(stated, str) or not stated:
        return None
    here = directory.resolve()
    wanted = meta.get("dataset_hash")
    for folder in (here, *here.parents):
        path = folder / stated
        if path.is_file() and (not wanted or _sha256(path) == wanted):
            return path
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the configuration ---------------------------------------------------------------------------
def case_config(
    case: Case, profiles: Path | None, *, gpu: str = "", workload: str = "workload.jsonl"
) -> tuple[str, str]:
    """(TOML text, the workload as text, which the configuration expects under that name).

    `gpu` says the GPU where neither a cluster file nor meta.json does.
    """
    made = _workload(case)
    if case.cluster is not None:
        engine = _table(case.meta, "engine_kwargs")
        types = {key: str(engine[key]) for key in ("dtype", "kv_cache_dtype") if engine.get(key)}
        lines = import_cluster(case.cluster, profiles, types=types).splitlines()
        kept = "\n".join(line for line in lines if not line.startswith("# It has no workload"))
        text = _with_scheduler(kept, _scheduler(case), _left_behind(case))
    else:
        text = _described(case, profiles, gpu)
    text = _without_front_end(text)
    dataset = case.dataset if '_tok_ids"' in made else None
    tokens = f"tokens of {dataset.name}" if dataset is not None else "no tokens"
    lines = [f"# A measured run: {case.directory.name}", text.rstrip(), "", *_engine(case)]
    lines.append("[workload]")
    lines.append(f"path = {json.dumps(workload)}  # lengths and arrivals as measured, {tokens}")
    return "\n".join(lines) + "\n", made


def _engine(case: Case) -> list[str]:
    """The version that was measured, or the newest older one that is modeled, as a table."""
    _, version = engine_words(str(case.meta.get("vllm_version", "")))
    if not version:
        return []
    modeled = nearest_version("vllm", version)
    return ["[engine]", 'name = "vllm"', f"version = {json.dumps(modeled)}", ""]


def _without_front_end(text: str) -> str:
    """The record's times are the engine's own: `queued_ts` to the last token in the engine."""
    line = "front_end = false  # the record's times are the engine's"
    head, table, tail = text.partition("[latency]\n")
    if not table:
        return f"{text.rstrip()}\n\n[latency]\n{line}\n"
    return f"{head}{table}{line}\n{tail}"


def _with_scheduler(text: str, keys: dict[str, Any], comments: list[str]) -> str:
    """The converted cluster file with the engine's settings in its [scheduler] table."""
    head, table, tail = text.partition("[scheduler]")
    body, _, rest = tail.partition("\n\n")
    kept = [line for line in body.splitlines()[1:] if line.partition(" = ")[0] not in keys]
    added = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    title = f"{head}{table}  # engine settings of meta.json"
    return "\n".join([title, *kept, *added, *comments, "", rest])


def _left_behind(case: Case) -> list[str]:
    """Comments that name settings of the engine which are not emulated."""
    engine = _table(case.meta, "engine_kwargs")
    left = {
        key: value
        for key, value in engine.items()
        if value and key not in _USED and key not in _WITHOUT_EFFECT
    }
    resolved = _table(case.meta, "resolved_config")
    policy = _table(resolved, "scheduler_config").get("policy")
    if policy not in (None, "fcfs"):
        left["policy"] = policy
    if _table(resolved, "model_config").get("enforce_eager"):
        left["enforce_eager"] = True
    if resolved.get("speculative_config"):
        left["speculative_config"] = resolved["speculative_config"]
    return [f"# not carried over: {key} = {json.dumps(value)}" for key, value in left.items()]


def _scheduler(case: Case) -> dict[str, Any]:
    """Our scheduler's keys, from the most to the least complete record of the engine."""
    meta = case.meta
    engine, cache = _table(meta, "engine_kwargs"), _table(meta, "kv_cache")
    resolved = _table(_table(meta, "resolved_config"), "scheduler_config")
    cached = _table(_table(meta, "resolved_config"), "cache_config")
    found = {
        "max_num_seqs": _first("max_num_seqs", resolved, engine),
        "max_num_batched_tokens": _first("max_num_batched_tokens", resolved, engine),
        "long_prefill_token_threshold": _first("long_prefill_token_threshold", resolved, engine),
        "chunked_prefill": _first("enable_chunked_prefill", resolved, engine),
        "reserve_full_sequence": _first("scheduler_reserve_full_isl", resolved),
        "block_size": _first("block_size", cache, cached, engine),
        "prefix_caching": _first("enable_prefix_caching", cache, cached, engine),
        "num_blocks": _first("num_gpu_blocks", cache, cached),
    }
    if isinstance(found["num_blocks"], int):
        found["num_blocks"] = usable_blocks(found["num_blocks"])
    is_async = _first("async_scheduling", resolved, engine)
    if is_async is not None and not is_async:
        found["async_scheduling"] = "off"
    if found["num_blocks"] is None and case.cluster is None:
        found["gpu_memory_utilization"] = _first("gpu_memory_utilization", cache, cached, engine)
    return {key: value for key, value in found.items() if value is not None}


def usable_blocks(recorded: int) -> int:
    """Blocks that requests can have of vLLM's `num_gpu_blocks`: its pool keeps one back, which
    stands for blocks that are never read (its "null block").
    `recorded` is that number.
    """
    return max(1, recorded - 1)


def _table(outer: dict[str, Any], key: str) -> dict[str, Any]:
    value = outer.get(key)
    return value if isinstance(value, dict) else {}


def _first(key: str, *tables: dict[str, Any]) -> Any:
    return next((table[key] for table in tables if table.get(key) is not None), None)


# --- without a cluster file ----------------------------------------------------------------------
def _described(case: Case, profiles: Path | None, gpu: str) -> str:
    """The machine and its replicas from the engine's own record."""
    source = str(case.meta_path or case.directory)
    engine = _table(case.meta, "engine_kwargs")
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
    lines += [f"{key} = {json.dumps(value)}" for key, value in _scheduler(case).items()]
    lines += [*_left_behind(case), "", "[latency]"]
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


def _count(source: str, engine: dict[str, Any], key: str) -> int:
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
    device = _table(case.meta, "hardware").get("device_name")
    if not isinstance(device, str):
        problem = "missing, and there is no config.json: say --gpu NAME"
        raise InputError(source, None, "hardware.device_name", problem)
    spec = gpu_of_device(device)
    return (spec or lookup_gpu(device, source, "hardware.device_name")).name


# --- the workload --------------------------------------------------------------------------------
def _workload(case: Case) -> str:
    """The measured requests as JSON Lines of ours, in the order of their ids.

    A measured id is `bench-<n>`, n the line of the dataset.
    """
    found = list(records(case.requests, read_input(case.requests)))
    if not found:
        raise InputError(str(case.requests), None, "", "no measured request")
    sent = [] if case.dataset is None else _planned(case.dataset)
    ids = request_ids([record for _, record in found])
    has_arrivals = all(record.get("arrival_time") is not None for _, record in found)
    clock = "arrival_time" if has_arrivals else "queued_ts"
    rows = sorted(
        (number, *_measured_request(case.requests, line, record, clock))
        for number, (line, record) in zip(ids, found, strict=True)
    )
    first = min(arrival for _, arrival, _, _ in rows)
    lines = []
    for number, arrival, prompt, output in rows:
        row = {
            "arrival_time_ns": round((arrival - first) * 1e9),
            "input_toks": prompt,
            "output_toks": output,
        }
        planned = sent[number] if number < len(sent) else {}
        for length, tokens in (("input_toks", "input_tok_ids"), ("output_toks", "output_tok_ids")):
            if tokens in planned and len(planned[tokens]) == row[length]:
                row[tokens] = planned[tokens]
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def _planned(dataset: Path) -> list[dict[str, Any]]:
    """Lines of the dataset; none if it is of another format (its tokens are not known then)."""
    try:
        lines = [msgspec.json.decode(line) for line in dataset.read_bytes().splitlines()]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return lines if all(isinstance(line, dict) for line in lines) else []


def _measured_request(
    source: Path, line: int, record: dict[str, Any], clock: str
) -> tuple[float, int, int]:
    """(arrival in s, prompt tokens, output tokens) of a line."""
    arrival, prompt, output = (
        number_of(source, line, record, key) for key in (clock, "input_toks", "output_toks")
    )
    return arrival, int(prompt), int(output)


# --------------------------------------------------------------------------------------------------
# `emu reproduce DIR`: a measured run of vLLM emulated from its own record, and compared with it.
#
# Writes a configuration and a workload that can be changed and run again, runs them, and prints the
# comparison (`report/compare.py`).


def reproduce_command(
    directory: Path,
    *,
    profiles: Path | None,
    gpu: str,
    output: Path | None,
    overrides: Sequence[str],
    only_config: bool,
    dataset: Path | None = None,
    no_tokens: bool = False,
) -> int:
    """Write, run, compare. Raises InputError for what the directory lacks.

    A run that names its dataset cached the prefixes of its prompts; without their tokens it is
    refused, unless `no_tokens` says that a run without prefix hits will do.
    """
    if profiles is not None and not profiles.is_dir():
        raise InputError("reproduce", None, "--profiles", f"{profiles} is not a directory")
    case = read_case(directory, dataset)
    place = output if output is not None else Path("runs") / directory.resolve().name
    text, workload = case_config(
        case, profiles.absolute() if profiles is not None else None, gpu=gpu
    )
    lacking = unknown_tokens(case, workload)
    if lacking and case.meta.get("dataset_path") and not no_tokens:
        problem = f"{lacking}: without its tokens there are no prefix hits; say --dataset FILE, "
        problem += "or --no-tokens to go on without"
        raise InputError(str(case.meta_path), None, "dataset_path", problem)
    note = f"no prefix hits where tokens are unknown: {lacking}" if lacking else ""
    if note:
        text = f"# {note}\n{text}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        config_path = place / "cluster.toml"
        config_path.write_text(text, encoding="utf-8")
        (place / "workload.jsonl").write_text(workload, encoding="utf-8")
    except OSError as error:
        raise InputError(str(place), None, "", f"cannot be written: {error.strerror}") from None
    console = open_console()
    console.print(f"configuration: {config_path}", soft_wrap=True)
    if note:
        console.print(note, soft_wrap=True)
    config = load_config(config_path, overrides=overrides)
    if only_config:
        return 0
    execute(adjust(config, seed=None, output=place / "run"), str(config_path))
    console.print(f"run: {place / 'run'}\n", soft_wrap=True)
    measurement = read_measurement(case.requests)
    # Its lines are the measured requests in the order of their ids.
    measurement.request_ids = measurement.request_ids.argsort().argsort()
    print_measured(compare_with(read_run(place / "run"), measurement), console)
    return 0
