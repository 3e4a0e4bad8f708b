"""What is measured: configurations as text, in groups that the tables and the figure name.

| group | question |
|---|---|
| azure | the Azure conversation trace, 1,000, 5,000 and all requests, three clusters |
| million | 64 replicas, 100,000 and 1,000,000 requests: does memory stay flat? |
| replicas | 5,000 requests at one a second for each replica, 1 to 1024 of them |
| start | ten requests on 4,096 and on 16,384 replicas: is a start in proportion? (`--quick`) |
| output | 2,000 requests, answers of 25 to 1600 tokens: do leaps make tokens free? |
| overload | more than two replicas can serve, few KV blocks: preemptions, where leaps help least |
| burst | ten minutes of bursts, 32 replicas, most of them off, a planner that looks every 10 ms |
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
TRACE: Final = ROOT.parent / "shared/data/traces/AzureLLMInferenceTrace_conv.csv"
AZURE_REQUESTS: Final = 19_366
REPLICAS: Final = (1, 4, 16, 64, 256, 1024)
START_REPLICAS: Final = (4096, 16_384)
OUTPUT_TOKENS: Final = (25, 100, 400, 1600)

_NODE: Final = '[[nodes]]\ngpu = "H100-SXM5-80GB"\ngpus = 8\ncount = {nodes}\n'
_LIMITS: Final = "scheduler = { max_num_seqs = 256, max_num_batched_tokens = 2048 }\n"
"""Those of the other emulators; H100's own are larger."""
ROLES: Final = _NODE.format(nodes=1) + (
    f'[[replicas]]\nrole = "prefill"\ncount = 4\n{_LIMITS}'
    + f'[[replicas]]\nrole = "decode"\ncount = 4\n{_LIMITS}'
    + '[router]\ndecode_policy = "first_free"\n'  # as in the published figures
)
_BURST: Final = (
    _NODE.format(nodes=4)
    + '[[replicas]]\nrole = "prefill"\ncount = 2\n[[replicas]]\nrole = "decode"\ncount = 2\n'
    + '[[replicas]]\nrole = "inactive"\ncount = 28\n[scheduler]\npolicy = "fcfs"\nblock_size = 64\n'
    + '[autoscale]\npreset = "blitzscale"\ntick_ms = 10\n'
    + "[workload.synthetic]\nrequests = {requests}\n"
    + '[workload.synthetic.arrivals]\nprocess = "burst"\nrate_per_s = 10.0\n'
    + "burst_rate_per_s = 80.0\nburst_every_s = 30.0\nburst_length_s = 5.0\n"
    + "[workload.synthetic.prompt]\nmedian = 1000.0\nmax = 4000\n"
    + "[workload.synthetic.output]\nmedian = 100.0\nmax = 800\n"
)


class Case(NamedTuple):
    """One row of a table."""

    name: str
    group: str
    requests: int
    config: str
    x: int = 0
    """Where the row stands on the horizontal axis of its group."""


def has_trace() -> bool:
    """Whether the Azure trace is here; else a synthetic one of the same size stands in."""
    return TRACE.is_file()


def azure(requests: int) -> str:
    """The first requests of the Azure conversation trace, at the trace's own times."""
    if has_trace():
        return f'[workload]\npath = "{TRACE}"\nlimit = {requests}\n'
    return synthetic(requests, 5.5, 211)


def synthetic(requests: int, rate: float, output: int, prompt: int = 1000) -> str:
    """Poisson arrivals and log-normal lengths."""
    return (
        f"[workload.synthetic]\nrequests = {requests}\narrivals = {{ rate_per_s = {rate} }}\n"
        f"prompt = {{ median = {prompt}.0, max = 8000 }}\n"
        f"output = {{ median = {output}.0, sigma = 0.5, max = {output * 8} }}\n"
    )


def colocated(count: int) -> str:
    """Machines and replicas without roles."""
    return _NODE.format(nodes=-(-count // 8)) + f"[[replicas]]\ncount = {count}\n{_LIMITS}"


WARM_UP: Final = Case("warm-up", "", 10, colocated(1) + synthetic(10, 1.0, 10))


def azure_cases(requests: int) -> list[Case]:
    """Three clusters, one piece of the trace."""
    work = azure(requests)
    return [
        Case(f"azure {requests}, 1 replica", "azure", requests, colocated(1) + work, requests),
        Case(f"azure {requests}, 8 replicas", "azure", requests, colocated(8) + work, requests),
        Case(f"azure {requests}, 4P+4D", "azure", requests, ROLES + work, requests),
    ]


def million_cases(small: int = 100_000, large: int = 1_000_000) -> list[Case]:
    """Ten times the requests on the same 64 replicas."""
    return [
        Case(
            f"{requests} requests, 64 replicas",
            "million",
            requests,
            colocated(64) + synthetic(requests, 320.0, 100, 500),
            requests,
        )
        for requests in (small, large)
    ]


def replica_cases(requests: int = 5000) -> list[Case]:
    """The same load for each replica, more and more replicas."""
    return [
        Case(
            f"{count} replicas, {requests} requests",
            "replicas",
            requests,
            colocated(count) + synthetic(requests, 1.0 * count, 150),
            count,
        )
        for count in REPLICAS
    ]


def start_cases() -> list[Case]:
    """Next to no work, and very many replicas."""
    return [
        Case(
            f"ten requests, {count:,} replicas",
            "start",
            10,
            colocated(count) + synthetic(10, 1.0, 10),
            count,
        )
        for count in START_REPLICAS
    ]


def output_cases(requests: int = 2000) -> list[Case]:
    """Longer and longer answers."""
    return [
        Case(
            f"output {tokens}, {requests} requests",
            "output",
            requests,
            colocated(8) + synthetic(requests, 2.0, tokens),
            tokens,
        )
        for tokens in OUTPUT_TOKENS
    ]


def overload_case(requests: int = 3000) -> Case:
    """Two replicas with few blocks, and far more work than they can do."""
    tight = "[scheduler]\nnum_blocks = 1500\n"
    work = synthetic(requests, 20.0, 200)
    return Case("overloaded, preemptions", "overload", requests, colocated(2) + tight + work)


def burst_case(requests: int = 13_000) -> Case:
    """Bursts that a planner answers with more replicas."""
    return Case("autoscaled burst", "burst", requests, _BURST.format(requests=requests))


def build_cases() -> list[Case]:
    """Rows of the first table of docs/speed.md: what other emulators run too, and what is slow."""
    moon = TRACE.parent / "mooncake_conversation.jsonl"
    cached = '[scheduler]\nprefix_caching = true\n[workload]\noversized = "clip"\n'
    astra = '[latency]\nbackend = "astra-sim"\n'
    two_of_four = _NODE.format(nodes=1) + f"[[replicas]]\ncount = 2\ntensor_parallel = 4\n{_LIMITS}"
    stages = _NODE.format(nodes=1) + f"[[replicas]]\npipeline_parallel = 4\n{_LIMITS}"
    group = colocated(4) + 'data_parallel_group = "a"\n'
    return [
        *azure_cases(AZURE_REQUESTS),
        *azure_cases(1000),
        million_cases()[0],
        *(
            [
                Case(
                    "Mooncake, 8 replicas, prefix caching",
                    "moon",
                    12_031,
                    colocated(8) + cached + f'path = "{moon}"\n',
                )
            ]
            if moon.is_file()
            else []
        ),
        Case("ten requests", "start", 10, WARM_UP.config),
        *start_cases(),
        Case("1 pipeline of 4 stages", "slow", 400, stages + azure(400)),
        Case("1 data-parallel group of 4", "slow", 400, group + azure(400)),
        Case(
            "embedded ASTRA-Sim, TP 4",
            "slow",
            3000,
            two_of_four + astra + synthetic(3000, 16.0, 150),
        ),
    ]


def quick_cases() -> list[Case]:
    """A first result in about a minute: one case of each group, small."""
    return [
        *azure_cases(1000),
        million_cases()[0],
        *(case for case in replica_cases(2000) if case.x in (1, 64, 1024)),
        *start_cases(),
        *(case for case in output_cases(500) if case.x in (25, 1600)),
        overload_case(500),
        burst_case(1000),
    ]


def all_cases() -> list[Case]:
    """Everything, the long ones last."""
    return [
        *(case for requests in (1000, 5000, AZURE_REQUESTS) for case in azure_cases(requests)),
        *replica_cases(),
        *output_cases(),
        overload_case(),
        burst_case(),
        *million_cases(),
    ]
