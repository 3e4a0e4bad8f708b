"""What `emu plan` is asked, and which clusters come into question. Runs nothing.

    gpu_kind("H100=2.5/4:64")            2.5 per GPU hour, 4 on demand, at most 64 of them
    objective("ttft_p95", "500ms")
    lengths("median=1000,sigma=0.8,max=8000", "--prompt-tokens")

Everything wrong is an InputError that names the option.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from emu.apps.plan.traffic import SOURCE, wrong
from emu.apps.shared.conditions import Condition
from emu.apps.shared.give_up import Limit
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.config.suggestions import did_you_mean
from emu.documents import Document

METRICS: Final[Mapping[str, str]] = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
"""Metric of an option -> its name in summary.json."""
STATISTICS: Final[Mapping[str, str]] = {"p50": "median", "p95": "p95", "p99": "p99"}
OBJECTIVES: Final = tuple(f"{metric}_{at}" for metric in METRICS for at in STATISTICS)
_COUNTED: Final = re.compile(r"(\d+) ?[x*] ?(.+)")
_COMMA: Final = re.compile(r"([^=,]+=\d+),(\d+)")
"""A price as most of Europe writes it."""
_OTHER_UNITS: Final[Mapping[str, str]] = {
    "msec": "ms",
    "millis": "ms",
    "sec": "s",
    "secs": "s",
    "seconds": "s",
    "min": "m",
    "minutes": "m",
    "hours": "h",
}
_UNITS_MS: Final[Mapping[str, float]] = {"ms": 1.0, "s": 1e3, "m": 60e3, "h": 3600e3}


class GpuKind(msgspec.Struct, frozen=True):
    """A kind of GPU that may be used."""

    spec: GpuSpec
    price: float
    """Of one GPU hour; 1 for every kind if no kind has a price."""
    count_max: int
    """How many there are; 0 = as many as needed."""
    on_demand: float = 0.0
    """Price of what is not always there, where that is another; 0 = the same."""

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
    def percentile(self) -> tuple[str, int]:
        """The latency that it is about, and the percentile."""
        return self.metric, int(self.at[1:])

    def limit(self, slack: float) -> Limit:
        """What a run may be given up for that misses by more than the factor `slack`."""
        return Limit(*self.percentile, self.limit_ms, slack)

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
    workload: Document
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
    settings: Document
    """Overrides of every configuration (dotted keys)."""
    systems: tuple[str, ...] = ("none",)
    """Presets of [autoscale] to try; "none" = a cluster that does not scale."""
    scaling: Document = {}
    """Overrides of every configuration that scales (dotted keys)."""
    day: tuple[tuple[float, float], ...] = ()
    """(hour, requests per second) of a day's curve."""
    mixes: bool = False
    """Prefill and decode may have different kinds of GPUs."""
    confidence: float = 0.9
    """Part of the draws in which a cluster must meet the objectives."""
    draws: int = 0
    """Of the engine; 0 = none: every seed must meet them with the engine as it is."""
    run_s: float = 0.0
    """Seconds of arrivals of the runs that the answer rests on; 0 = by residence and rate."""
    has_count: bool = False
    """Runs have a number of requests, or a trace's, and no length in time."""
    survive: str = ""
    """A loss that the cluster must live through: replica, machine, rank or zone; empty = none."""
    zones: int = 3
    """Machines are dealt over so many."""
    away_s: float = 0.0
    """What is lost comes back after so long; 0 = not before the end of the run."""
    during: tuple[Objective, ...] = ()
    """Objectives after the loss."""
    beside: str = ""
    """A tool that is asked the same; empty = none."""


class Kinds(NamedTuple):
    """Kinds of GPUs that are compared."""

    gpus: tuple[GpuKind, ...]
    have_prices: bool


def gpu_kinds(texts: Sequence[str]) -> Kinds:
    """What `--gpu` says. Raises InputError."""
    if not texts:
        raise wrong("--gpu", "give at least one kind, such as --gpu H100=2.5 (emu gpus lists them)")
    read = [_gpu_kind(text) for text in texts]
    names = [spec.name for spec, _, _ in read]
    for name in names:
        if names.count(name) > 1:
            raise wrong("--gpu", f"{name} is given more than once")
    priced = [price is not None for _, (price, _), _ in read]
    if any(priced) and not all(priced):
        without = names[priced.index(False)]
        raise wrong("--gpu", f"{without} has no price, others have; prices compare only if all do")
    kinds = tuple(
        GpuKind(spec, 1.0 if price is None else price, count_max, on_demand)
        for spec, (price, on_demand), count_max in read
    )
    return Kinds(kinds, all(priced))


def _gpu_kind(text: str) -> tuple[GpuSpec, tuple[float | None, float], int]:
    """NAME[=PRICE[/ON_DEMAND]][:COUNT]; the prices, None without."""
    rest, colon, count_text = text.partition(":")
    name, equals, price_text = rest.partition("=")
    if found := _COMMA.fullmatch(text):
        raise wrong("--gpu", f"{text!r}: write {found[1]}.{found[2]}")
    if "," in text:
        each = " ".join(f"--gpu {one.strip()}" for one in text.split(",") if one.strip())
        raise wrong("--gpu", f"{text!r}: one kind at a time: {each}")
    if found := _COUNTED.fullmatch(name):
        problem = f"{text!r}: how many there are stands behind a colon: {found[2]}:{found[1]}"
        raise wrong("--gpu", problem)
    spec = lookup_gpu(name.strip(), SOURCE, "--gpu")
    price, on_demand = None, 0.0
    if equals:
        reserved, slash, other = price_text.partition("/")
        price = _positive(reserved, "--gpu", f"price of {text!r}")
        if slash:
            on_demand = _positive(other, "--gpu", f"price on demand of {text!r}")
            if on_demand < price:
                problem = (
                    f"{text!r}: the price of a reserved GPU comes first, so it is the lower one"
                )
                raise wrong("--gpu", problem)
    if not colon:
        return spec, (price, on_demand), 0
    if not (count_text.isascii() and count_text.isdigit() and int(count_text) > 0):
        raise wrong("--gpu", f"number of GPUs of {text!r}: expected a whole number from 1")
    return spec, (price, on_demand), int(count_text)


def objective(name: str, text: str | float) -> Objective:
    """`ttft_p95`, `500ms` -> an objective; a bare number is refused. Raises InputError."""
    if name not in OBJECTIVES:
        raise wrong(name, f"no such objective{did_you_mean(name, OBJECTIVES)}")
    metric, _, at = name.partition("_")
    return Objective(metric, at, duration_ms(text, f"--{name.replace('_', '-')}"))


def objectives_during(texts: Sequence[str]) -> tuple[Objective, ...]:
    """`ttft_p95=3s` each. Raises InputError."""
    found = []
    for text in texts:
        name, equals, limit = text.partition("=")
        if not equals:
            raise wrong("--during", f"{text!r}: expected an objective such as ttft_p95=3s")
        found.append(objective(name.strip().replace("-", "_"), limit))
    return tuple(found)


def duration_ms(text: str | float, option: str) -> float:
    """`500ms`, `0.5s` or `10m`, in ms; a bare number is refused. Raises InputError."""
    given = str(text).strip()
    unit = given.lstrip("0123456789.+-eE ")
    if unit not in _UNITS_MS:
        if unit in _OTHER_UNITS:
            number = given.removesuffix(unit).strip()
            raise wrong(option, f"{given!r}: write {number}{_OTHER_UNITS[unit]}")
        problem = f"has no unit that is known ({unit!r})" if unit else "needs a unit"
        raise wrong(option, f"{given!r} {problem}: 500ms, 0.5s, 10m or 2h")
    value = _positive(given.removesuffix(unit), option, f"duration {given!r}")
    return value * _UNITS_MS[unit]


def _positive(text: str, option: str, what: str) -> float:
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        hint = "; write the number alone, in any currency" if text[:1] in ("$", "€", "£") else ""
        raise wrong(option, f"{what}: expected a positive number{hint}")
    return value
