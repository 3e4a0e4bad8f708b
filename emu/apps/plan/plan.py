"""`emu.plan` and `emu plan`: from arguments to the answer, its lines, its files and manifests."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from emu.apps.plan.answer import Answer, Ranked, Watch, find_cluster
from emu.apps.plan.question import (
    MODES,
    NOT_SCALED,
    OBJECTIVES,
    SYSTEMS,
    Question,
    gpu_kinds,
    objective,
    traffic,
    wrong,
)
from emu.apps.sweeps.results import settings_of
from emu.catalogue.checkpoints import split_name
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.config.names import toml_text
from emu.config.schema import Config, ModelTable, SchedulerTable, VllmTable
from emu.config.tables import Dtype
from emu.errors import InputError
from emu.process.exits import open_console
from emu.report.atomic import write_text
from emu.report.chart import PALETTE, Axis, Chart, Limit, Series, spread_axis
from emu.report.html import page
from emu.report.table import number

# --- manifests: Kubernetes, NVIDIA Dynamo, llm-d. Pure --------------------------------------------
# - Kubernetes: a Deployment and a Service for each role, and a HorizontalPodAutoscaler where the
#   cluster was scaled as Kubernetes does it (planner `hpa`).
# - Dynamo: a DynamoGraphDeployment (nvidia.com/v1alpha1) with a frontend and a worker of each role;
#   prefill workers are marked as such, everything else are vLLM's flags.
# - llm-d: values for its chart llm-d-modelservice. The chart names the model, the port and the
#   tensor-parallel degree itself; a colocated cluster has decode replicas alone.
#
# What scales in another way than Kubernetes has no product that deploys it: the manifests then hold
# the least number of replicas, and say so.

_IMAGE: Final = "vllm/vllm-openai:latest"
_DYNAMO_IMAGE: Final = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:latest"
_LLM_D_IMAGE: Final = "ghcr.io/llm-d/llm-d-cuda:latest"
_PORT: Final = 8000
_PROXIED_PORT: Final = 8200
"""Of vLLM behind llm-d's routing sidecar."""
_SIDE_CHANNEL_PORT: Final = 5600
"""Of the NIXL connector."""
_METRICS: Final = {
    "concurrency": "vllm:num_requests_running",
    "queue": "vllm:num_requests_waiting",
    "kv_utilization": "vllm:kv_cache_usage_perc",
}
"""autoscale.metric -> vLLM's name of it."""


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas."""

    role: str
    count: int
    """At least."""
    count_max: int
    gpus: int
    """Of one replica."""
    flags: list[str]
    """`vllm serve MODEL --flags`."""

    @property
    def numbers(self) -> str:
        """4, or 1 to 4 where the cluster scales."""
        return f"{self.count}" + (f" to {self.count_max}" * (self.count_max > self.count))


def _short(model: str) -> str:
    """A model's name as Kubernetes takes it."""
    words = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")
    return words[:40].strip("-")


def _documents(documents: Sequence[dict[str, Any]]) -> str:
    return "".join("---\n" + "\n".join(_yaml(document, 0)) + "\n" for document in documents)


def _scales(roles: Sequence[Role]) -> str:
    """A comment where a cluster scales."""
    if not any(one.count_max > one.count for one in roles):
        return ""
    numbers = ", ".join(f"{one.role} {one.numbers}" for one in roles)
    return f"# Least numbers of replicas; the plan scales them: {numbers}.\n"


# --- Kubernetes ----------------------------------------------------------------------------------
def kubernetes(config: Config, roles: Sequence[Role], model: str) -> str:
    """Documents of YAML: a Deployment and a Service for each role, and what scales them."""
    table = config.autoscale
    is_hpa = table is not None and table.planner == "hpa"
    documents: list[dict[str, Any]] = []
    for one in roles:
        name = f"{_short(model)}-{one.role}"
        labels = {"app": name, "role": one.role}
        documents.append(_deployment(name, labels, one))
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
        if is_hpa:
            documents.append(_autoscaler(name, labels, one, config))
    return ("" if is_hpa else _scales(roles)) + _documents(documents)


def _deployment(name: str, labels: dict[str, str], one: Role) -> dict[str, Any]:
    model, *flags = one.flags[2:]
    container = {
        "name": "vllm",
        "image": _IMAGE,
        "args": ["--model", model, *flags],
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}},
        "resources": {"limits": {"nvidia.com/gpu": str(one.gpus)}},
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
            "replicas": one.count,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _autoscaler(name: str, labels: dict[str, str], one: Role, config: Config) -> dict[str, Any]:
    """What scales a Deployment. Its metric comes from an adapter (Prometheus adapter, KEDA)."""
    table = config.autoscale
    assert table is not None
    target = table.target_value
    if table.metric == "kv_utilization":
        target = table.target_utilization
    quantity = f"{round(1000 * target)}m" if target != int(target) else str(int(target))
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": one.count,
            "maxReplicas": one.count_max,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": _METRICS[table.metric]},
                        "target": {"type": "AverageValue", "averageValue": quantity},
                    },
                }
            ],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": round(table.scale_up_stabilization_s)},
                "scaleDown": {
                    "stabilizationWindowSeconds": round(table.scale_down_stabilization_s)
                },
            },
        },
    }


# --- Dynamo --------------------------------------------------------------------------------------
def dynamo(roles: Sequence[Role], model: str) -> str:
    """A DynamoGraphDeployment."""
    image = {"image": _DYNAMO_IMAGE}
    services: dict[str, Any] = {
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
        "metadata": {"name": _short(model)},
        "spec": {"services": services},
    }
    return _scales(roles) + _documents([graph])


# --- llm-d ---------------------------------------------------------------------------------------
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
            "labels": {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": _short(model)},
        },
        "routing": {
            "servicePort": _PORT,
            "proxy": {"enabled": prefill is not None, "targetPort": _PROXIED_PORT},
        },
        "decode": _pods(decode, _PORT if prefill is None else _PROXIED_PORT),
        "prefill": _pods(prefill, _PORT),
    }
    note = ""
    if name.startswith(("/", ".")):
        note = (
            f"# modelArtifacts.uri: the checkpoint lies in {name}; put it where the chart reads.\n"
        )
        values["modelArtifacts"]["uri"] = f"pvc://model/{name.rpartition('/')[2]}"  # type: ignore[index]
    return _scales(roles) + note + "\n".join(_yaml(values, 0)) + "\n"


def _pods(one: Role | None, port: int) -> dict[str, Any]:
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


# --- YAML ----------------------------------------------------------------------------------------
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


# --------------------------------------------------------------------------------------------------
# The best cluster as files: a runnable configuration, vLLM's flags, manifests.
#
#     cluster.toml        `emu run cluster.toml` repeats the run that the plan rests on
#     vllm.txt            one `vllm serve` command for each role
#     kubernetes.yaml     a Deployment and a Service for each role
#     dynamo.yaml         a DynamoGraphDeployment
#     llm-d.yaml          values for the chart llm-d-modelservice
#     plan.json           the answer
#
# Flags are those of `vllm serve`. They can only say what the emulated engine did: a configuration
# with another scheduler than vLLM's gets no flags and no manifest.

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
        roles = roles_of(config)
        lines = [f"# {one.role}, {one.numbers} of them\n{shlex.join(one.flags)}\n" for one in roles]
        files["vllm.txt"] = f"# {_checkpoint(config.model, answer)}\n" + "\n".join(lines)
        files["kubernetes.yaml"] = kubernetes(config, roles, answer.model)
        files["dynamo.yaml"] = dynamo(roles, answer.model)
        files["llm-d.yaml"] = llm_d(roles, answer.model)
    for name, text in files.items():
        write_text(directory / name, text)
    return [directory / name for name in files]


def _scheduler_of(config: Config, group: int) -> SchedulerTable:
    """The scheduler of a group, with the defaults of its engine on its GPU."""
    plan = make_plan(config)
    return next((r.scheduler for r in plan.replicas if r.group == group), config.scheduler)


def _checkpoint(table: ModelTable, answer: Answer) -> str:
    """The types that the plan rests on, and whether the named checkpoint has them."""
    told = f"{answer.model}: {answer.weights}"
    if table.dtype in ("auto", *_PLAIN, *_QUANTIZED) or split_name(answer.model)[1]:
        return told
    return f"{told}; vLLM does not quantize so while loading: name a checkpoint that is stored so"


def vllm_flags(config: Config, group: int) -> list[str]:
    """`vllm serve MODEL --flags` of a group of replicas."""
    table, model = config.replicas[group], config.model
    scheduler = _scheduler_of(config, group)
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


def roles_of(config: Config) -> list[Role]:
    """The groups of replicas that are deployed; inactive ones are what scaling may add."""
    spare = sum(table.count for table in config.replicas if table.role == "inactive")
    return [
        Role(
            role=table.role,
            count=table.count,
            count_max=table.count + spare,
            gpus=table.tensor_parallel * table.pipeline_parallel,
            flags=vllm_flags(config, group),
        )
        for group, table in enumerate(config.replicas)
        if table.role != "inactive" and table.count
    ]


# --- the plan -------------------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------
# The answer of a plan as a page: the best clusters, what was ruled out, the flags.


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    room = answer.headroom
    headroom = f"meets everything up to {room.factor:g} times the traffic tried"
    if room.breaks_at is not None:
        headroom = (
            f"{100 * (room.factor - 1):.0f} % more traffic; at "
            f"{100 * (room.breaks_at - 1):.0f} % more {' and '.join(room.breaks)} breaks"
        )
    flags = directory / "vllm.txt"
    text = page(
        "plan.html",
        title=f"emu: plan for {answer.model} ({answer.weights})",
        charts=_charts(answer),
        facts=[
            answer.engine,
            f"{answer.rate_per_s:g} requests/s",
            *answer.objectives,
            f"{answer.runs} runs",
        ],
        best=answer.rows[0].label,
        headroom=headroom,
        head=[
            "cluster",
            *(["GPUs, mean"] if any(row.system for row in answer.rows) else []),
            "$/h" if answer.has_prices else "GPUs",
            "of a limit",
            *_labels(answer),
        ],
        rows=[_cells(row, has_mean=any(one.system for one in answer.rows)) for row in answer.rows],
        refused=list(answer.refused.items()),
        flags=flags.read_text(encoding="utf-8") if flags.is_file() else "",
        files=", ".join(sorted(path.name for path in directory.glob("*.[ty][oa]ml"))),
    )
    path = directory / "report.html"
    write_text(path, text)
    return path


def _labels(answer: Answer) -> list[str]:
    return [f"{reading.label}, ms" for reading in answer.rows[0].readings]


def _cells(row: Ranked, *, has_mean: bool) -> list[str]:
    cells = [row.label, *([f"{row.gpus_mean:.1f}"] if has_mean else [])]
    cells += [f"{row.cost_per_h:,.2f}", f"{100 * row.worst:.0f} %"]
    for reading in row.readings:
        text = number(reading.mean_ms)
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        cells.append(text)
    return cells


def _charts(answer: Answer) -> list[Chart]:
    """What the clusters cost, and how near to their limits they are."""
    if len(answer.rows) < 2:
        return []
    costs = [row.cost_per_h for row in answer.rows]
    used = [100 * row.worst for row in answer.rows]
    return [
        Chart(
            chart_id="clusters",
            section="clusters",
            title="Cost and how near the tightest objective is to its limit",
            x=spread_axis(min(costs), max(costs), "$/h" if answer.has_prices else "GPUs"),
            y=Axis(title="% of the limit", unit="%", low=0, high=110),
            limits=[Limit(axis="y", value=100, text="the limit")],
            is_wide=True,
            series=[
                Series(
                    name="clusters",
                    color=PALETTE[0],
                    x=costs,
                    y=used,
                    shape="points",
                    size=9,
                    text=[row.label for row in answer.rows],
                    labels=[row.label.partition(": ")[2] for row in answer.rows],
                )
            ],
        )
    ]


# --- `emu.plan` and `emu plan` --------------------------------------------------------------------

TENSOR_PARALLEL = (1, 2, 4, 8)


def plan(
    model: str = "",
    *,
    gpu: str | Sequence[str] = (),
    hf_config: str | Path = "",
    workload: str | Path = "",
    rate: float = 0.0,
    prompt_tokens: str | int = "",
    output_tokens: str | int = "",
    preset: str = "",
    requests: int = 0,
    output: str | Path = "runs/plan",
    tensor_parallel: Iterable[int] = (),
    mode: Iterable[str] = (),
    dtype: Iterable[str] = (),
    autoscale: Iterable[str] = (),
    pipeline_parallel: Iterable[int] = (),
    max_num_batched_tokens: Iterable[int] = (),
    max_num_seqs: Iterable[int] = (),
    seeds: int = 0,
    max_gpus: int = 256,
    gpus_per_node: int = 8,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    jobs: int = 0,
    ray: str | None = None,
    watch: Watch | None = None,
    **objectives: str | float | None,
) -> Answer:
    """The cheapest cluster that meets objectives, with the ranked rows behind it.

        answer = emu.plan("meta-llama/Llama-3.1-8B", gpu="H100=2.5", rate=20,
                          preset="conversation", ttft_p95="500ms", tpot_p95="50ms")
        answer.rows[0].label, answer.rows[0].cost_per_h, answer.headroom.factor

    Arguments are the options of `emu plan` (docs/planning.md). `output` receives the store of
    runs, cluster.toml, plan.json, report.html, vLLM flags and a Kubernetes manifest. Raises
    InputError for a wrong argument, RunError if no cluster meets the objectives.
    """
    if not model and not hf_config:
        raise wrong("--model", "give a model of the catalogue, or --hf-config FILE")
    given = [
        objective(name, text)
        for name, text in objectives.items()
        if text is not None and text != ""
    ]
    if not given:
        first = ", ".join(f"--{name.replace('_', '-')}" for name in OBJECTIVES[:3])
        raise wrong("--ttft-p95", f"give at least one objective ({first}, ...)")
    gpus, has_prices = gpu_kinds([gpu] if isinstance(gpu, str) else list(gpu))
    table = traffic(
        workload=str(workload),
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        preset=preset,
        requests=requests,
    )
    for count, option in ((max_gpus, "--max-gpus"), (gpus_per_node, "--gpus-per-node")):
        if count < 1:
            raise wrong(option, f"must be at least 1, not {count}")
    settings = dict(overrides) if isinstance(overrides, Mapping) else settings_of(overrides)
    for key in settings:
        if key.startswith(("replicas", "nodes.0.gpu", "nodes.0.count", "model.dtype", "seed")):
            raise InputError("--set", None, key, "the plan chooses it")
    systems = _words(autoscale, (NOT_SCALED, *SYSTEMS), (NOT_SCALED,), "--autoscale")
    scaling = {key: settings.pop(key) for key in list(settings) if key.startswith("autoscale.")}
    for key in scaling:
        if key.startswith(("autoscale.preset", "autoscale.min_", "autoscale.max_")):
            raise InputError("--set", None, key, "the plan chooses it")
    if scaling and systems == (NOT_SCALED,):
        raise InputError("--set", None, next(iter(scaling)), "give --autoscale")
    question = Question(
        model=model,
        hf_config=str(hf_config),
        gpus=gpus,
        has_prices=has_prices,
        workload=table,
        rate_per_s=rate,
        objectives=tuple(given),
        tensor_parallel=_numbers(tensor_parallel, TENSOR_PARALLEL, "--tensor-parallel"),
        pipeline_parallel=_numbers(pipeline_parallel, (1,), "--pipeline-parallel"),
        batch_tokens=_numbers(max_num_batched_tokens, (0,), "--max-num-batched-tokens"),
        batch_requests=_numbers(max_num_seqs, (0,), "--max-num-seqs"),
        modes=_words(mode, MODES, MODES, "--mode"),
        dtypes=_words(dtype, get_args(Dtype), ("auto",), "--dtype"),
        seeds=_seeds(seeds, is_trace="path" in table),
        gpus_max=max_gpus,
        gpus_per_node=gpus_per_node,
        settings=settings,
        systems=systems,
        scaling=scaling,
    )
    directory = Path(output)
    answer = find_cluster(question, directory, jobs=jobs, ray=ray, watch=watch)
    write_answer(answer, directory)
    write_page(answer, directory)
    return answer


def _numbers(given: Iterable[int], default: tuple[int, ...], option: str) -> tuple[int, ...]:
    numbers = tuple(sorted(set(given)))
    if numbers and numbers[0] < 1:
        raise wrong(option, f"must be at least 1, not {numbers[0]}")
    return numbers or default


def _words(
    given: Iterable[str], known: Sequence[str], default: Sequence[str], option: str
) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(given)) or tuple(default)
    for word in words:
        if word not in known:
            raise wrong(option, f"unknown {word!r}; there are {', '.join(known)}")
    return words


def _seeds(count: int, *, is_trace: bool) -> tuple[int, ...]:
    """A trace is the same with every seed, so one run tells all of it."""
    if count < 0:
        raise wrong("--seeds", f"must be at least 1, not {count}")
    return tuple(range(1, (count or (1 if is_trace else 3)) + 1))


def plan_command(*, quiet: bool, as_json: bool, **arguments: Any) -> int:
    """`emu plan`: print the answer, or its file with --json."""
    shows = not (quiet or as_json) and sys.stderr.isatty()
    try:
        answer = plan(**arguments, watch=_say if shows else None)
    except KeyboardInterrupt:
        print("what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise
    finally:
        if shows:
            print(file=sys.stderr)
    directory = Path(arguments["output"])
    if as_json:
        print((directory / "plan.json").read_text(encoding="utf-8"), end="")
    elif not quiet:
        console = open_console()
        for line in lines_of(answer):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        files = sorted(path.name for path in directory.iterdir() if path.is_file())
        console.print(f"{answer.runs} runs; {directory}: {', '.join(files)}", soft_wrap=True)
    return 0


def _say(done: int, known: int, line: str) -> None:
    print(f"\r{done} of {known} runs {line}", end="", file=sys.stderr, flush=True)


def lines_of(answer: Answer) -> list[str]:
    """The answer in words."""
    best, *others = answer.rows
    lines = [f"{_row_text(best, answer)}"]
    lines += [f"next best: {_row_text(row, answer)}" for row in others[:3]]
    room = answer.headroom
    if room.breaks_at is None:
        lines.append(f"headroom: meets everything up to {room.factor:g} times the traffic tried")
    else:
        more = 100 * (room.factor - 1)
        lines.append(
            f"headroom: {more:.0f} % more traffic; at {100 * (room.breaks_at - 1):.0f} % more "
            f"{' and '.join(room.breaks)} breaks"
        )
    kinds: dict[str, list[str]] = {}
    for layout, reason in answer.refused.items():
        kinds.setdefault(reason, []).append(layout)
    lines += [f"ruled out: {', '.join(layouts)}: {reason}" for reason, layouts in kinds.items()]
    return lines


def _row_text(row: Ranked, answer: Answer) -> str:
    readings = []
    for reading in row.readings:
        text = f"{reading.label} {number(reading.mean_ms)} ms"
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        readings.append(text)
    cost = f", {row.cost_per_h:,.2f} $/h" if answer.has_prices else ""
    mean = f", {row.gpus_mean:.1f} GPUs on average" if row.system else ""
    return f"{row.label}; {', '.join(readings)}{mean}{cost}"
