"""A directory of a measured run as a configuration, and `emu reproduce` on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from emu.apps.fidelity.measured_run import case_config
from emu.apps.fidelity.record import read_case
from emu.cli import main
from emu.config.load import config_from_text, load_config
from emu.config.schema import Config
from emu.errors import InputError
from tests.shared_data import SHARED, needs_shared

ENGINE = {
    "model": "meta-llama/Llama-3.1-8B",
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "max_num_seqs": 96,
    "max_num_batched_tokens": 1024,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
}
META: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "engine_kwargs": ENGINE,
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16, "enable_prefix_caching": False},
}


def write_case(directory: Path, meta: dict[str, Any], requests: int = 6, first_id: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "meta.json").write_text(json.dumps(meta))
    rows = [
        {
            "request_id": f"bench-{i + first_id}",
            "input_toks": 100 + i,
            "output_toks": 5 + i,
            "arrival_time": 1.7e9 + 0.1 * i,
            "queued_ts": 400.0 + 0.1 * i,
            "first_token_ts": 400.05 + 0.1 * i,
            "last_token_ts": 400.2 + 0.1 * i,
        }
        for i in range(requests)
    ]
    # The order of the file is that of completion; the ids are those of the dataset.
    text = "".join(json.dumps(row) + "\n" for row in reversed(rows))
    (directory / "requests.jsonl").write_text(text)
    return directory


def config_of(directory: Path, gpu: str = "") -> tuple[Config, str]:
    text, workload = case_config(read_case(directory), None, gpu=gpu)
    (directory / "workload.jsonl").write_text(workload)
    (directory / "cluster.toml").write_text(text)
    return load_config(directory / "cluster.toml"), workload


@pytest.mark.parametrize(
    ("said", "version"),
    [({"vllm_version": "0.15.1"}, "0.15"), ({"vllm_version": "0.18.0"}, "0.15")],
)
def test_a_run_has_the_version_that_was_measured(
    tmp_path: Path, said: dict[str, str], version: str
) -> None:
    config, _ = config_of(write_case(tmp_path / "case", META | said))
    assert (config.engine.name, config.engine.version) == ("vllm", version)


def test_the_engines_record_says_the_machine(tmp_path: Path) -> None:
    config, workload = config_of(write_case(tmp_path / "case", META))
    assert config.nodes[0].gpu == "RTX4090"
    scheduler = config.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (96, 1024)
    assert (scheduler.num_blocks, scheduler.prefix_caching) == (
        2587,
        False,
    )  # one is the null block
    rows = [json.loads(line) for line in workload.splitlines()]
    assert [row["input_toks"] for row in rows] == [100, 101, 102, 103, 104, 105]
    assert [round(row["arrival_time_ns"] / 1e6) for row in rows] == [0, 100, 200, 300, 400, 500]


@pytest.mark.parametrize("is_same", [True, False])
def test_tokens_are_taken_from_the_dataset_if_its_hash_is_that_of_the_run(
    tmp_path: Path, is_same: bool
) -> None:
    """Its arrivals are plans: those of the measurement are taken. A line of another length than
    the measured request's has the tokens of another one."""
    rows = [
        {"arrival_time_ns": 7, "input_toks": 100 + i, "input_tok_ids": [i] * (100 + i)}
        | {"output_toks": 1, "output_tok_ids": [i]}
        for i in range(6)
    ]
    rows[2]["input_tok_ids"] = [1, 2, 3]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "w.jsonl").write_text(text if is_same else text + "\n")
    digest = hashlib.sha256(text.encode()).hexdigest()
    meta = META | {"dataset_path": "workloads/w.jsonl", "dataset_hash": digest}
    config, made = config_of(write_case(tmp_path / "runs" / "case", meta))
    found = [json.loads(line) for line in made.splitlines()]
    assert [round(row["arrival_time_ns"] / 1e6) for row in found] == [0, 100, 200, 300, 400, 500]
    lengths = [len(row.get("input_tok_ids", ())) for row in found]
    assert lengths == ([100, 101, 0, 103, 104, 105] if is_same else [0] * 6)
    assert not any("output_tok_ids" in row for row in found)
    assert config.workload.path.endswith("workload.jsonl")


@pytest.mark.parametrize("text", ['[{"conversations": []}]', "a,b\n1,2\n", "\x00\xff"])
def test_a_dataset_of_another_format_has_no_tokens(tmp_path: Path, text: str) -> None:
    meta = META | {"dataset_path": "workloads/other"}
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "other").write_bytes(text.encode("latin-1"))
    _, made = config_of(write_case(tmp_path / "runs" / "case", meta))
    assert [set(json.loads(line)) for line in made.splitlines()] == [
        {"arrival_time_ns", "input_toks", "output_toks"}
    ] * 6


def test_arrivals_are_of_one_clock(tmp_path: Path) -> None:
    case = write_case(tmp_path / "case", META)
    rows = [json.loads(line) for line in (case / "requests.jsonl").read_text().splitlines()]
    rows[0]["arrival_time"] = None
    (case / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config_of(case)[1].splitlines()
    assert [round(json.loads(line)["arrival_time_ns"] / 1e6) for line in made] == [
        *range(0, 600, 100)
    ]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_gpus_as_cuda_calls_them(tmp_path: Path, device: str, name: str) -> None:
    case = write_case(tmp_path / "case", META | {"hardware": {"device_name": device}})
    assert config_of(case)[0].nodes[0].gpu == name


def test_a_mixture_in_a_data_parallel_group(tmp_path: Path) -> None:
    engine = ENGINE | {
        "model": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    }
    meta = {"model": engine["model"], "engine_kwargs": engine}
    config, _ = config_of(write_case(tmp_path / "case", meta), gpu="H200")
    (replicas,) = config.replicas
    assert (replicas.count, replicas.tensor_parallel, replicas.expert_parallel) == (2, 2, 4)
    assert replicas.data_parallel_group == "A"
    assert config.nodes[0].gpus == 4


@pytest.mark.parametrize(
    ("meta", "field"),
    [
        ({"engine_kwargs": ENGINE}, "hardware.device_name"),
        (META | {"hardware": {"device_name": "NVIDIA Nothing 1"}}, "hardware.device_name"),
        (META | {"model": "nobody/knows"}, "model"),
        ({"hardware": META["hardware"]}, "model"),
        (
            META | {"engine_kwargs": ENGINE | {"tensor_parallel_size": "two"}},
            "engine_kwargs.tensor_parallel_size",
        ),
    ],
)
def test_what_a_record_lacks_is_said(tmp_path: Path, meta: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        config_of(write_case(tmp_path / "case", meta))
    assert error.value.field == field
    assert error.value.source.endswith("meta.json")


@pytest.mark.parametrize("files", [[], ["meta.json"]])
def test_a_directory_without_requests(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=r"requests\.jsonl"):
        read_case(tmp_path)


def test_reproduce_runs_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = write_case(tmp_path / "case", META)
    assert main(["reproduce", str(case), "--set", "output.report=false"]) == 0
    said = capsys.readouterr().out
    assert "6 requests measured (0 left out), 6 completed here" in said
    # Request by request: every measured id was found.
    assert "TTFT │     6" in said
    assert (tmp_path / "runs" / "case" / "run" / "requests.csv").is_file()
    assert main(["compare", "runs/case/run", "--measured", str(case)]) == 0
    assert capsys.readouterr().out in said
    # What was written runs by itself.
    assert main(["validate", "runs/case/cluster.toml"]) == 0


def test_a_part_of_a_run_is_paired_by_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the dataset, the workload's first line is the request with the lowest id."""
    monkeypatch.chdir(tmp_path)
    case = write_case(tmp_path / "case", META, first_id=3)
    assert main(["reproduce", str(case), "--set", "output.report=false"]) == 0
    said = capsys.readouterr().out
    assert "TTFT │     6" in said
    assert "other lengths" not in said
    # By their ids, 3 would be another request, which is said.
    assert main(["compare", "runs/case/run", "--measured", str(case)]) == 0
    said = capsys.readouterr().out
    assert "TTFT │     3" in said
    assert "3 requests with the same id have other lengths here" in said


def test_types_of_the_engine_hold_where_the_cluster_file_says_none(tmp_path: Path) -> None:
    instance: dict[str, Any] = {
        "model_name": ENGINE["model"],
        "hardware": "RTX4090",
        "npu_mem": {"mem_size": 24, "mem_bw": 1008, "mem_latency": 0},
        "pd_type": None,
    }
    node = {"num_instances": 2, "cpu_mem": {"mem_size": 64, "mem_bw": 50, "mem_latency": 0}}
    node["instances"] = [instance, instance | {"kv_cache_dtype": "auto"}]
    cluster = {"num_nodes": 1, "link_bw": 16, "link_latency": 0, "nodes": [node]}
    engine = ENGINE | {"kv_cache_dtype": "fp8", "enforce_eager": True, "seed": 3}
    case = write_case(tmp_path / "case", META | {"engine_kwargs": engine})
    (case / "config.json").write_text(json.dumps(cluster))
    config, _ = config_of(case)
    assert [group.model for group in config.replicas] == [{"kv_cache_dtype": "fp8"}, {}]
    text = (case / "cluster.toml").read_text()
    assert [line for line in text.splitlines() if "not carried over" in line] == [
        "# not carried over: enforce_eager = true"
    ]


def test_reproduce_without_the_gpu_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = write_case(tmp_path / "case", {"engine_kwargs": ENGINE, "model": ENGINE["model"]})
    assert main(["reproduce", str(case), "-o", str(tmp_path / "out")]) == 2
    assert "--gpu NAME" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_its_dataset_a_run_is_refused_or_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix hits that the measured run had are never dropped in silence."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"arrival_time_ns": 0, "input_toks": 100 + i, "input_tok_ids": [7] * (100 + i)}
        for i in range(6)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    digest = hashlib.sha256(text.encode()).hexdigest()
    cached = META["kv_cache"] | {"enable_prefix_caching": True}
    meta = META | {"dataset_path": "w.jsonl", "dataset_hash": digest, "kv_cache": cached}
    case = write_case(tmp_path / "case", meta)
    command = ["reproduce", str(case), "--set", "output.report=false"]
    assert main(command) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "dataset_path" in error
    assert "--no-tokens" in error
    assert not (tmp_path / "runs").exists()

    assert main([*command, "--no-tokens"]) == 0
    assert "no prefix hits where tokens are unknown: w.jsonl" in capsys.readouterr().out
    assert "no prefix hits" in (tmp_path / "runs" / "case" / "cluster.toml").read_text()

    elsewhere = tmp_path / "elsewhere" / "set.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.write_text(text)
    assert main([*command, "--dataset", str(elsewhere)]) == 0
    assert "no prefix hits" not in capsys.readouterr().out
    hits = [row.split(",")[9] for row in Path("runs/case/run/requests.csv").read_text().split()]
    assert sum(map(int, hits[1:])) > 0
    elsewhere.write_text(text + "\n")
    assert main([*command, "--dataset", str(elsewhere)]) == 2
    assert "is not the dataset of the run" in capsys.readouterr().err


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize("name", ["RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B"])
def test_the_measured_runs(tmp_path: Path, name: str) -> None:
    case = read_case(SHARED / "vllm-measured" / name)
    text, workload = case_config(case, SHARED / "profiles")
    (tmp_path / "workload.jsonl").write_text(workload)
    config = config_from_text(text, name, base_dir=tmp_path)
    assert config.latency.backend == "profile"
    rows = [json.loads(line) for line in workload.splitlines()]
    assert len(rows) == 300
    assert all(len(row["input_tok_ids"]) == row["input_toks"] for row in rows)
    engine = case.meta["engine_kwargs"]
    assert config.scheduler.max_num_seqs == engine["max_num_seqs"]


@needs_shared
@pytest.mark.shared
def test_an_example_with_its_folders(tmp_path: Path) -> None:
    """As in LLMServingSim's repository: the recording below `vllm/`."""
    source = SHARED / "vllm-measured" / "RTXPRO6000-Llama-3.1-8B"
    (tmp_path / "vllm").mkdir()
    for name in ("requests.jsonl", "meta.json"):
        (tmp_path / "vllm" / name).write_bytes((source / name).read_bytes())
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    config, workload = config_of(tmp_path)
    assert len(workload.splitlines()) == 300
    assert config.latency.backend == "roofline"
