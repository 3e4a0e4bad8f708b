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

import json
from pathlib import Path

from emu.apps.fidelity.described import described_config
from emu.apps.fidelity.enginesettings import left_behind, scheduler_keys
from emu.apps.fidelity.record import Case, table_of
from emu.apps.fidelity.sent import workload_text
from emu.backends.llmservingsim.convert import import_cluster
from emu.config.engine_words import engine_words
from emu.documents import Document
from emu.engines.registry import nearest_version


def case_config(
    case: Case, profiles: Path | None, *, gpu: str = "", workload: str = "workload.jsonl"
) -> tuple[str, str]:
    """(TOML text, the workload as text, which the configuration expects under that name).

    `gpu` says the GPU where neither a cluster file nor meta.json does.
    """
    made = workload_text(case)
    if case.cluster is not None:
        engine = table_of(case.meta, "engine_kwargs")
        types = {key: str(engine[key]) for key in ("dtype", "kv_cache_dtype") if engine.get(key)}
        lines = import_cluster(case.cluster, profiles, types=types).splitlines()
        kept = "\n".join(line for line in lines if not line.startswith("# It has no workload"))
        text = _with_scheduler(kept, scheduler_keys(case), left_behind(case))
    else:
        text = described_config(case, profiles, gpu)
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


def _with_scheduler(text: str, keys: Document, comments: list[str]) -> str:
    """The converted cluster file with the engine's settings in its [scheduler] table."""
    head, table, tail = text.partition("[scheduler]")
    body, _, rest = tail.partition("\n\n")
    kept = [line for line in body.splitlines()[1:] if line.partition(" = ")[0] not in keys]
    added = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    title = f"{head}{table}  # engine settings of meta.json"
    return "\n".join([title, *kept, *added, *comments, "", rest])
