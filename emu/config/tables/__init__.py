"""The tables of a configuration file, by family; here is what all of them share.

`emu/config/schema.py` puts them together. Annotations are evaluated in all of these modules, not
kept as text: msgspec would compile each of them at every start.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Count0 = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Tokens0 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0, le=1e15)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dtype = Literal[
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_block",
    "int8",
    "int8_wo",
    "int4",
    "int4_g32",
    "mxfp4",
    "nvfp4",
    "nvfp4_wo",
]
"""Types of weights: those that the catalogue can size and the kernels can price."""
KvDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "int8", "int4"]


def doc(text: str) -> Meta:
    """The description of a key."""
    return Meta(description=text)


class Table(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all tables."""


# --------------------------------------------------------------------------------------------------
# What is counted and written, and when to give up.


class SloTable(Table, kw_only=True, frozen=True):
    """Objectives that attainment and goodput are counted against."""

    ttft_ms: Annotated[NonNegative, doc("Time to first token; 0 = none.")] = 0.0
    ttft_ms_per_token: Annotated[
        NonNegative,
        doc(
            "The objective of TTFT grows with the prompt: so much for each of its tokens, and at least ttft_ms; 0 = it does not."
        ),
    ] = 0.0
    ttft_base_ms: Annotated[
        NonNegative, doc("Added to what grows with the prompt (ttft_ms_per_token).")
    ] = 0.0
    tpot_ms: Annotated[NonNegative, doc("Time per output token; 0 = none.")] = 0.0
    e2e_ms: Annotated[NonNegative, doc("From arrival to last token; 0 = none.")] = 0.0

    def ttft_limit_ms(self, prompt_tokens: int) -> float:
        """The objective of TTFT for a prompt of this length; 0 = none."""
        if not self.ttft_ms_per_token:
            return self.ttft_ms
        return max(self.ttft_ms, self.ttft_base_ms + self.ttft_ms_per_token * prompt_tokens)


class PowerTable(Table, kw_only=True, frozen=True):
    """Power of a machine's parts; absent = energy is not modeled."""

    base_node_w: Annotated[NonNegative, doc("A machine without its parts.")] = 60.0
    gpu_idle_w: Annotated[NonNegative, doc("A GPU that does nothing.")] = 0.0
    gpu_standby_w: Annotated[NonNegative, doc("A GPU shortly after an iteration.")] = 0.0
    gpu_active_w: Annotated[NonNegative, doc("A GPU during an iteration.")] = 0.0
    gpu_standby_s: Annotated[NonNegative, doc("How long standby lasts before a GPU is idle.")] = (
        18.0
    )
    cpu_idle_w: Annotated[NonNegative, doc("The processors, idle.")] = 0.0
    cpu_active_w: Annotated[NonNegative, doc("The processors at full load.")] = 0.0
    cpu_utilization: Annotated[
        Fraction, doc("Part of full load at rest; 0.7 while a GPU of theirs runs.")
    ] = 0.0
    dram_idle_w_per_dimm: Annotated[NonNegative, doc("One memory module.")] = 0.0
    dram_dimm_gib: Annotated[Positive, doc("Size of one memory module.")] = 64.0
    dram_pj_per_bit: Annotated[NonNegative, doc("Energy to move one bit of host memory.")] = 0.0
    link_idle_w: Annotated[NonNegative, doc("One link, idle.")] = 0.0
    links: Annotated[Count0, doc("Links of a machine.")] = 0
    link_pj_per_bit: Annotated[NonNegative, doc("Energy to move one bit over a link.")] = 0.0
    nic_idle_w: Annotated[NonNegative, doc("One network card.")] = 0.0
    nics: Annotated[Count0, doc("Network cards of a machine.")] = 0
    storage_idle_w: Annotated[NonNegative, doc("One storage device.")] = 0.0
    storage_devices: Annotated[Count0, doc("Storage devices of a machine.")] = 0


class OutputTable(Table, kw_only=True, frozen=True):
    """What is written, and where."""

    dir: Annotated[str, doc("Output directory, relative to the config file.")] = "runs/latest"
    trace: Annotated[bool, doc("Write trace.json.gz (Perfetto).")] = False
    trace_events_max: Annotated[Count0, doc("Stop adding to the trace after so many events.")] = (
        1_000_000
    )
    report: Annotated[bool, doc("Write report.html.")] = True
    timeseries_interval_ms: Annotated[
        NonNegative, doc("Sampling interval, at least 1; 0 = no timeseries.")
    ] = 1000.0
    events: Annotated[
        bool,
        doc("Write events.jsonl: all requests, iterations and transfers (steps, without leaps)."),
    ] = False


class LimitsTable(Table, kw_only=True, frozen=True):
    """When to give up."""

    simulated_s: Annotated[
        NonNegative, doc("Stop (exit 3, partial results) at this simulated time; 0 = none.")
    ] = 0.0
    stalled_s: Annotated[
        NonNegative,
        doc(
            "Stop (exit 3) when requests are in the system, and none has got a token or ended for "
            "so long while work went on; 0 = never."
        ),
    ] = 3600.0
    events_per_instant: Annotated[Count, doc("Zeno guard.")] = 100_000
    preemptions_per_request: Annotated[
        Count0, doc("A request preempted more often fails; 0 = none.")
    ] = 1_000
