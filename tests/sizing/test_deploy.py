"""Deployments: flags that vLLM knows, manifests that Kubernetes takes, layouts of every shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import emu
from emu.apps.plan.flags import roles_of, vllm_flags
from emu.apps.plan.manifests.dynamo import dynamo
from emu.apps.plan.manifests.kubernetes import kubernetes
from emu.apps.plan.manifests.llm_d import llm_d
from emu.cli import main
from emu.config.load import config_from_dict
from emu.config.schema import Config

FLAGS = frozenset(
    (
        *("--tensor-parallel-size", "--pipeline-parallel-size", "--gpu-memory-utilization"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--max-model-len"),
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill"),
        *("--no-enable-chunked-prefill", "--dtype", "--quantization", "--kv-cache-dtype"),
        *("--kv-transfer-config", "--served-model-name"),
    )
)
"""Of `vllm serve` 0.33, as its documentation lists them."""


def configs() -> list[Config]:
    """Every kind of flag."""
    found = []
    for dtype in ("auto", "bfloat16", "fp8"):
        for roles in (["colocated"], ["prefill", "decode"]):
            for scheduler in ({}, {"prefix_caching": False, "chunked_prefill": False}):
                tables: dict[str, Any] = {
                    "model": {"name": "Llama-3.1-8B", "dtype": dtype, "max_model_tokens": 8192},
                    "nodes": [{"gpu": "H100", "gpus": 8, "count": 2}],
                    "replicas": [
                        {"role": r, "count": 2, "tensor_parallel": 2, "pipeline_parallel": 2}
                        for r in roles
                    ],
                    "scheduler": {"max_num_seqs": 64, **scheduler},
                    "workload": {"synthetic": {}},
                }
                found.append(config_from_dict(tables))
    return found


def scaled_config(metric: str = "concurrency") -> Config:
    """A cluster that scales as Kubernetes does it."""
    tables: dict[str, Any] = {
        "model": {"name": "Llama-3.1-8B"},
        "nodes": [{"gpu": "H100", "gpus": 8}],
        "replicas": [{"count": 2}, {"role": "inactive", "count": 3}],
        "autoscale": {
            "preset": "hpa",
            "metric": metric,
            **({} if metric == "kv_utilization" else {"target_value": 12.5}),
            "min_replicas": 2,
            "max_replicas": 5,
        },
        "workload": {"synthetic": {}},
    }
    return config_from_dict(tables)


def every_flags() -> list[list[str]]:
    return [
        vllm_flags(config, group) for config in configs() for group in range(len(config.replicas))
    ]


def test_flags_are_among_those_of_vllm() -> None:
    for flags in every_flags():
        assert flags[:2] == ["vllm", "serve"] and not flags[2].startswith("-")
        assert {word for word in flags if word.startswith("--")} <= FLAGS
        assert flags[flags.index("--pipeline-parallel-size") + 1] == "2"


def test_flags_are_parsed_by_vllm() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = arguments.EngineArgs.add_cli_args(FlexibleArgumentParser())
    for flags in every_flags():
        parsed = parser.parse_args(["--model", flags[2], *flags[3:]])
        assert parsed.tensor_parallel_size == 2 and parsed.max_num_seqs == 64


def test_manifests_are_valid_by_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for config in [*configs(), scaled_config()]:
        for document in yaml.safe_load_all(kubernetes(config, roles_of(config), "a/Llama-3.1-8B")):
            validate.validate(document, "1.30", strict=True)


SCHEMAS = json.loads((Path(__file__).parent / "manifests.schema.json").read_text())


def test_graphs_of_dynamo_and_values_of_llm_d_are_valid_by_their_schemas() -> None:
    for config in [*configs(), scaled_config()]:
        roles = roles_of(config)
        graph = yaml.safe_load(dynamo(roles, "a/Llama-3.1-8B"))
        jsonschema.validate(graph, SCHEMAS["dynamo"])
        values = yaml.safe_load(llm_d(roles, "a/Llama-3.1-8B"))
        jsonschema.validate(values, SCHEMAS["llm-d"])
        workers = [s for s in graph["spec"]["services"].values() if s["componentType"] == "worker"]
        pods = [values[name] for name in ("prefill", "decode") if values[name]["create"]]
        for found in (workers, pods):
            assert [one["replicas"] for one in found] == [role.count for role in roles]
        for role, worker, pod in zip(roles, workers, pods, strict=True):
            assert worker["resources"]["limits"]["gpu"] == str(role.gpus)
            container = pod["containers"][0]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == str(role.gpus)
            assert not {"--tensor-parallel-size", "--served-model-name"} & set(container["args"])
            part = worker.get("subComponentType")
            assert (f"--is-{part}-worker" in worker["extraPodSpec"]["mainContainer"]["args"]) == (
                part is not None
            )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(graph | {"kind": "Graph"}, SCHEMAS["dynamo"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"decode": {"replicas": -1}}, SCHEMAS["llm-d"])


@pytest.mark.parametrize(
    ("metric", "name", "target"),
    [
        ("concurrency", "vllm:num_requests_running", "12500m"),
        ("queue", "vllm:num_requests_waiting", "12500m"),
        ("kv_utilization", "vllm:kv_cache_usage_perc", "700m"),
    ],
)
def test_what_scales_a_deployment_has_the_bounds_of_the_plan(
    metric: str, name: str, target: str
) -> None:
    config = scaled_config(metric)
    roles = roles_of(config)
    documents = list(yaml.safe_load_all(kubernetes(config, roles, "a/b")))
    assert [one["kind"] for one in documents] == [
        *("Deployment", "Service", "HorizontalPodAutoscaler")
    ]
    spec = documents[2]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["scaleTargetRef"]["name"] == documents[0]["metadata"]["name"]
    pods = spec["metrics"][0]["pods"]
    assert (pods["metric"]["name"], pods["target"]["averageValue"]) == (name, target)
    assert "scales them: colocated 2 to 5" in dynamo(roles, "a/b")


def test_a_checkpoint_of_its_own_is_served_from_its_folder(tmp_path: Path) -> None:
    from tests.catalogue.test_architectures import CONFIGS  # type: ignore[attr-defined]

    source = next(path for path in sorted(CONFIGS.iterdir()) if "llama" in path.name.lower())
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(source.read_text())
    tables = {
        "model": {"hf_config": str(folder / "config.json"), "name": "mine"},
        "nodes": [{"gpu": "H200"}],
        "replicas": [{"tensor_parallel": 8}],
        "workload": {"synthetic": {}},
    }
    flags = vllm_flags(config_from_dict(tables), 0)
    assert flags[2] == str(folder)
    assert flags[flags.index("--served-model-name") + 1] == "mine"


def test_stages_and_limits_of_a_batch_are_searched(tmp_path: Path) -> None:
    answer = emu.plan(
        "meta-llama/Llama-3.1-8B",
        gpu="L40S=1",
        rate=4,
        prompt_tokens=400,
        output_tokens=30,
        requests=40,
        ttft_p95="2s",
        tpot_p95="80ms",
        tensor_parallel=[1],
        pipeline_parallel=[1, 2],
        max_num_batched_tokens=[512, 4096],
        mode=["colocated"],
        seeds=1,
        jobs=1,
        output=tmp_path,
    )
    shapes = {
        (row.pipeline_parallel, row.limits.get("max_num_batched_tokens"))
        for row in [*answer.rows, *answer.others]
    }
    ruled_out = " ".join(answer.refused)
    for stages in (1, 2):
        for tokens in (512, 4096):
            assert (stages, tokens) in shapes or f"{tokens} tokens" in ruled_out
    best = answer.rows[0]
    assert answer.config["scheduler"] == best.limits
    assert best.gpus == best.replicas * best.tensor_parallel * best.pipeline_parallel
    page = (tmp_path / "report.html").read_text()
    assert best.label in page and "vllm serve" in page


def test_a_run_needs_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--model", "Llama-3.1-8B", "--gpu", "H100=2", "--rate", "10", "--tp", "2"]
    words += ["--prompt-tokens", "300", "--output-tokens", "10", "--requests", "30", "--no-report"]
    assert main([*words, "-o", str(tmp_path / "mine"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 30
    assert (tmp_path / "mine.toml").is_file()
    config = emu.load(tmp_path / "mine").config
    assert config["replicas"][0]["tensor_parallel"] == 2
    assert main(["run", "--model", "Llama-3.1-8B", "--rate", "1", "--preset", "code"]) == 2
    assert "--gpu" in capsys.readouterr().err
    assert main(["run", "--gpu", "H100", "--rate", "1", "--preset", "code"]) == 2
    assert "--model: give a configuration file, or a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "is_narrow"),
    [
        ({"name": "nvidia/Llama-3.3-70B-Instruct-FP8"}, True),
        ({"name": "nvidia/Llama-3.3-70B-Instruct-FP8", "kv_cache_dtype": "bfloat16"}, False),
        ({"name": "meta-llama/Llama-3.1-8B", "kv_cache_dtype": "fp8"}, True),
        ({"name": "meta-llama/Llama-3.1-8B"}, False),
    ],
)
def test_keys_and_values_have_the_type_that_was_emulated(
    model: dict[str, str], is_narrow: bool
) -> None:
    config = config_from_dict({"model": model, "nodes": [{"gpu": "B200"}], "replicas": [{}]})
    assert ("--kv-cache-dtype" in vllm_flags(config, 0)) == is_narrow
