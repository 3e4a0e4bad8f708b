"""What `emu plan` is asked: a model, kinds of GPUs, traffic, objectives. Reads texts, runs nothing.

    gpu_kind("H100=2.5:64")              2.5 per GPU hour, at most 64 of them
    objective("ttft_p95", "500ms")
    lengths("median=1000,sigma=0.8,max=8000", "--prompt-tokens")

Everything wrong is an InputError that names the option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.catalogue.lookup import GpuSpec, lookup_gpu
from emu.config.files import toml_text
from emu.config.names import did_you_mean
from emu.config.presets import WORKLOADS
from emu.errors import InputError
from emu.report.atomic import write_text
from emu.sweeps.sweepfile import Condition
from emu.units import ceil_div

SOURCE: Final = "plan"
METRICS: Final[Mapping[str, str]] = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
"""Metric of an option -> its name in summary.json."""
STATISTICS: Final[Mapping[str, str]] = {"p50": "median", "p95": "p95", "p99": "p99"}
OBJECTIVES: Final = tuple(f"{metric}_{at}" for metric in METRICS for at in STATISTICS)
_UNITS_MS: Final[Mapping[str, float]] = {"ms": 1.0, "s": 1000.0}


class GpuKind(msgspec.Struct, frozen=True):
    """A kind of GPU that may be used."""

    spec: GpuSpec
    price: float
    """Of one GPU hour; 1 for every kind if no kind has a price."""
    count_max: int
    """How many there are; 0 = as many as needed."""

    @property
    def name(self) -> str:
        """Its name in the catalogue."""
        return self.spec.name


class Objective(msgspec.Struct, frozen=True):
    """A percentile of a latency and its limit."""

    metric: str
    at: str
    limit_ms: float

    @property
    def figure(self) -> str:
        """Its name in summary.json."""
        return f"{STATISTICS[self.at]}_{METRICS[self.metric]}_ms"

    @property
    def condition(self) -> Condition:
        """What a run's figures must meet."""
        return Condition(self.figure, "<=", self.limit_ms)

    @property
    def label(self) -> str:
        """The reader's name for it, such as TTFT p95."""
        return f"{self.metric.upper()} {self.at}"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    model: str
    hf_config: str
    gpus: tuple[GpuKind, ...]
    has_prices: bool
    workload: dict[str, Any]
    """The table [workload] of a configuration, without the rate of a trace."""
    rate_per_s: float
    """Requests per second; 0 = as the trace has it."""
    objectives: tuple[Objective, ...]
    tensor_parallel: tuple[int, ...]
    pipeline_parallel: tuple[int, ...] = (1,)
    batch_tokens: tuple[int, ...] = (0,)
    """max_num_batched_tokens to try; 0 = as configured."""
    batch_requests: tuple[int, ...] = (0,)
    """max_num_seqs to try; 0 = as configured."""
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    seeds: tuple[int, ...]
    gpus_max: int
    gpus_per_node: int
    settings: dict[str, Any]
    """Overrides of every configuration (dotted keys)."""
    systems: tuple[str, ...] = ("none",)
    """Presets of [autoscale] to try; "none" = a cluster that does not scale."""
    scaling: dict[str, Any] = {}
    """Overrides of every configuration that scales (dotted keys)."""


def wrong(option: str, problem: str) -> InputError:
    """The error about an option."""
    return InputError(SOURCE, None, option, problem)


def gpu_kinds(texts: Sequence[str]) -> tuple[tuple[GpuKind, ...], bool]:
    """The kinds of GPUs, and whether they have prices. Raises InputError."""
    if not texts:
        raise wrong("--gpu", "give at least one kind, such as --gpu H100=2.5 (emu gpus lists them)")
    read = [_gpu_kind(text) for text in texts]
    names = [spec.name for spec, _, _ in read]
    for name in names:
        if names.count(name) > 1:
            raise wrong("--gpu", f"{name} is given more than once")
    priced = [price is not None for _, price, _ in read]
    if any(priced) and not all(priced):
        without = names[priced.index(False)]
        raise wrong("--gpu", f"{without} has no price, others have; prices compare only if all do")
    kinds = tuple(
        GpuKind(spec, 1.0 if price is None else price, count_max) for spec, price, count_max in read
    )
    return kinds, all(priced)


def _gpu_kind(text: str) -> tuple[GpuSpec, float | None, int]:
    """NAME, NAME=PRICE, NAME:COUNT or NAME=PRICE:COUNT."""
    rest, colon, count_text = text.partition(":")
    name, equals, price_text = rest.partition("=")
    spec = lookup_gpu(name.strip(), SOURCE, "--gpu")
    price = _positive(price_text, "--gpu", f"price of {text!r}") if equals else None
    if not colon:
        return spec, price, 0
    if not (count_text.isascii() and count_text.isdigit() and int(count_text) > 0):
        raise wrong("--gpu", f"number of GPUs of {text!r}: expected a whole number from 1")
    return spec, price, int(count_text)


def objective(name: str, text: str | float) -> Objective:
    """`ttft_p95`, `500ms` -> an objective; a bare number is refused. Raises InputError."""
    if name not in OBJECTIVES:
        raise wrong(name, f"no such objective{did_you_mean(name, OBJECTIVES)}")
    option = f"--{name.replace('_', '-')}"
    given = str(text).strip()
    unit = "ms" if given.endswith("ms") else "s" if given.endswith("s") else ""
    if not unit:
        raise wrong(option, f"{given!r} needs a unit: 500ms or 0.5s")
    value = _positive(given.removesuffix(unit), option, f"duration {given!r}")
    metric, _, at = name.partition("_")
    return Objective(metric, at, value * _UNITS_MS[unit])


def _positive(text: str, option: str, what: str) -> float:
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise wrong(option, f"{what}: expected a positive number")
    return value


def lengths(text: str | int, option: str) -> dict[str, Any]:
    """A distribution of lengths: `512`, `100-2000` (uniform), or keys of a table of lengths."""
    given = str(text).strip()
    if given.isascii() and given.isdigit():
        return {"distribution": "fixed", "value": int(given), "max": max(int(given), 1)}
    low, dash, high = given.partition("-")
    if dash and low.isdigit() and high.isdigit():
        return {"distribution": "uniform", "min": int(low), "max": int(high)}
    table: dict[str, Any] = {}
    for part in given.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            problem = f"{given!r}: expected 512, 100-2000 or median=1000,sigma=0.8,max=8000"
            raise wrong(option, problem)
        table[key] = _number_or_word(value)
    return table


def _number_or_word(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def traffic(
    *,
    workload: str,
    rate: float,
    prompt_tokens: str | int,
    output_tokens: str | int,
    preset: str,
    requests: int,
) -> dict[str, Any]:
    """The table [workload]. Raises InputError for what does not go together."""
    if rate and not (math.isfinite(rate) and rate > 0):
        raise wrong("--rate", f"must be positive, not {rate:g}")
    given = [
        name
        for name, value in (
            ("--preset", preset),
            ("--prompt-tokens", prompt_tokens),
            ("--output-tokens", output_tokens),
        )
        if value
    ]
    if workload:
        if given:
            raise wrong(given[0], "a --workload file has its own lengths")
        return {"path": workload, **({"limit": requests} if requests else {})}
    if not rate:
        raise wrong("--rate", "give requests per second, or a --workload file that has them")
    service: Mapping[str, Any]
    if preset and len(given) > 1:
        raise wrong(given[1], "a --preset has its own lengths")
    if preset:
        if preset not in WORKLOADS:
            names = ", ".join(sorted(WORKLOADS))
            raise wrong("--preset", f"unknown preset {preset!r}; there are {names}")
        service = WORKLOADS[preset]
    elif len(given) == 2:
        service = {
            "prompt": lengths(prompt_tokens, "--prompt-tokens"),
            "output": lengths(output_tokens, "--output-tokens"),
        }
    else:
        problem = "give --workload FILE, --preset, or both --prompt-tokens and --output-tokens"
        raise wrong("--prompt-tokens", problem)
    synthetic = {
        "requests": requests or 2000,
        "arrivals": {"rate_per_s": float(rate)},
        **{key: dict(part) if isinstance(part, Mapping) else part for key, part in service.items()},
    }
    return {"synthetic": synthetic}


# --------------------------------------------------------------------------------------------------
# A configuration from a few words: what `emu run` does without a file.

GPUS_PER_NODE = 8


def plain_config(
    output: Path,
    *,
    model: str,
    gpu: Sequence[str],
    replicas: int,
    tensor_parallel: int,
    workload: str,
    rate: float,
    prompt_tokens: str,
    output_tokens: str,
    preset: str,
    requests: int,
) -> Path:
    """Write `OUTPUT.toml`, a configuration of colocated replicas; its path. Raises InputError."""
    if not model:
        raise InputError("run", None, "--model", "give a configuration file, or a model")
    kinds, has_prices = gpu_kinds(gpu)
    if len(kinds) != 1:
        raise InputError("run", None, "--gpu", "a run has one kind; emu plan compares them")
    table = traffic(
        workload=workload,
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        preset=preset,
        requests=requests,
    )
    if workload:
        path = Path(workload).resolve()
        table["path"] = str(path)
        if rate:
            table["rate_per_s"] = float(rate)
    machines = ceil_div(max(1, replicas), max(1, GPUS_PER_NODE // tensor_parallel))
    node: dict[str, Any] = {"gpu": kinds[0].name, "gpus": GPUS_PER_NODE, "count": machines}
    if has_prices:
        node["hourly_price"] = kinds[0].price
    tables = {
        "model": {"name": model},
        "nodes": [node],
        "replicas": [{"count": max(1, replicas), "tensor_parallel": tensor_parallel}],
        "workload": table,
        "output": {"dir": str(output.resolve())},
    }
    path = output.with_name(f"{output.name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"# Written by emu run.\n{toml_text(tables)}")
    return path
