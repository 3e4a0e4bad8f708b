"""The record of a measured run of vLLM: which files, and fields of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.input_files import json_object, read_input
from emu.documents import Document
from emu.errors import InputError

_FOLDERS: Final = ("", "vllm")
USED: Final = (
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
WITHOUT_EFFECT: Final = (
    *("model", "tokenizer", "seed", "max_model_len", "trust_remote_code", "download_dir"),
    *("load_format", "disable_log_stats", "disable_log_requests", "served_model_name"),
)
"""What does not change how long a request takes that has been measured."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the directory."""

    directory: Path
    requests: Path
    meta: Document
    cluster: Path | None
    dataset: Path | None

    @property
    def meta_path(self) -> Path | None:
        """Where `meta` was read."""
        return _find(self.directory, "meta.json")


def _requests(directory: Path) -> Path:
    found = _find(directory, "requests.jsonl")
    if found is None:
        problem = "has no requests.jsonl (nor vllm/requests.jsonl)"
        raise InputError(str(directory), None, "", problem)
    return found


def read_case(directory: Path, dataset: Path | None = None) -> Case:
    """Find and read the files. Raises InputError for what is needed and lacking.

    `dataset` is the file that meta.json's `dataset_path` names, where it is not found from the
    directory; its sha256 must be the recorded one.
    """
    if not directory.is_dir():
        raise InputError(str(directory), None, "", "not a directory")
    meta_path = _find(directory, "meta.json")
    meta = {} if meta_path is None else json_object(meta_path, None, read_input(meta_path))
    return Case(
        directory=directory,
        requests=_requests(directory),
        meta=meta,
        cluster=_find(directory, "config.json"),
        dataset=_dataset(directory, meta) if dataset is None else _given_dataset(dataset, meta),
    )


def _given_dataset(path: Path, meta: Document) -> Path:
    if not path.is_file():
        raise InputError("reproduce", None, "--dataset", f"{path} is not a file")
    wanted = meta.get("dataset_hash")
    if wanted and _sha256(path) != wanted:
        problem = f"{path} is not the dataset of the run: its sha256 is not meta.json's"
        raise InputError("reproduce", None, "--dataset", problem)
    return path


def _find(directory: Path, name: str) -> Path | None:
    paths = (directory / folder / name for folder in _FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def _dataset(directory: Path, meta: Document) -> Path | None:
    stated = meta.get("dataset_path")
    if not isinstance(stated, str) or not stated:
        return None
    here = directory.resolve()
    wanted = meta.get("dataset_hash")
    for folder in (here, *here.parents):
        path = folder / stated
        if os.path.isfile(path) and (not wanted or _sha256(path) == wanted):
            return path
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table_of(outer: Document, key: str) -> Document:
    value = outer.get(key)
    return value if isinstance(value, dict) else {}


def first_of(key: str, *tables: Document) -> Any:
    return next((table[key] for table in tables if table.get(key) is not None), None)
