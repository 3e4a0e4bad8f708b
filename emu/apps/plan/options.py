"""What `emu plan` and `emu.plan` are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from emu.options.declare import Option, Options
from emu.options.shared import SET, Shown, Traffic, Workers, output

DURATION = "TIME"


class Model(Options, kw_only=False):
    """What Python takes without a name: `emu.plan("Llama-3.1-8B", gpu="H100", ...)`."""

    model: Annotated[str, Option("Model of the catalogue, or its label with --hf-config.")] = ""


class PlanOptions(Model, Traffic, Workers):
    """A model, traffic, kinds of GPUs, objectives, and which clusters come into question."""

    command = "plan"
    other_words: ClassVar[dict[str, str]] = {
        "--e2e": "--e2e-p95 10s",
        "--gpus": "--gpu H100:16",
        "--input-tokens": "--prompt-tokens",
        "--isl": "--prompt-tokens",
        "--itl": "--tpot-p95 50ms",
        "--itl-p50": "--tpot-p50",
        "--itl-p95": "--tpot-p95",
        "--itl-p99": "--tpot-p99",
        "--osl": "--output-tokens",
        "--price": "--gpu H100=2.5",
        "--qps": "--rate",
        "--rps": "--rate",
        "--slo": "--ttft-p95 500ms --tpot-p95 50ms",
        "--tpot": "--tpot-p95 50ms",
        "--trace": "--workload",
        "--ttft": "--ttft-p95 500ms",
    }

    hf_config: Annotated[str | Path, Option("A Hugging Face config.json.", metavar="FILE")] = ""
    gpu: Annotated[
        str | Sequence[str],
        Option(
            "Kind of GPU, its price of one hour (reserved/on demand), how many there are: H100=2.5,"
            " H100=2.5/4:64 (may be repeated).",
            metavar="NAME[=PRICE[/PRICE]][:COUNT]",
        ),
    ] = ()
    ttft_p50: Annotated[
        str | None,
        Option("Objective: time to first token, median; 500ms or 0.5s.", metavar=DURATION),
    ] = None
    ttft_p95: Annotated[str | None, Option("Its 95th percentile.", metavar=DURATION)] = None
    ttft_p99: Annotated[str | None, Option("Its 99th percentile.", metavar=DURATION)] = None
    tpot_p50: Annotated[
        str | None, Option("Objective: time per output token, median.", metavar=DURATION)
    ] = None
    tpot_p95: Annotated[str | None, Option("Its 95th percentile.", metavar=DURATION)] = None
    tpot_p99: Annotated[str | None, Option("Its 99th percentile.", metavar=DURATION)] = None
    e2e_p50: Annotated[
        str | None, Option("Objective: arrival to last token, median.", metavar=DURATION)
    ] = None
    e2e_p95: Annotated[str | None, Option("Its 95th percentile.", metavar=DURATION)] = None
    e2e_p99: Annotated[str | None, Option("Its 99th percentile.", metavar=DURATION)] = None
    tensor_parallel: Annotated[
        Sequence[int],
        Option("Degrees to try [1 2 4 8].", "--tensor-parallel", "--tp", at_least=1),
    ] = ()
    mode: Annotated[Sequence[str], Option("colocated, disaggregated; both if not given.")] = ()
    dtype: Annotated[
        Sequence[str], Option("Types of the weights to try, such as auto fp8 [auto].")
    ] = ()
    autoscale: Annotated[
        Sequence[str],
        Option(
            'Presets of autoscaling to try: hpa, blitzscale, ...; "none" = also without [none].',
            metavar="PRESET",
        ),
    ] = ()
    pipeline_parallel: Annotated[
        Sequence[int],
        Option("Numbers of pipeline stages to try [1].", "--pipeline-parallel", "--pp", at_least=1),
    ] = ()
    max_num_batched_tokens: Annotated[
        Sequence[int], Option("Tokens of an iteration to try [as configured].", at_least=1)
    ] = ()
    max_num_seqs: Annotated[
        Sequence[int], Option("Running requests of a replica to try [as configured].", at_least=1)
    ] = ()
    day: Annotated[
        str,
        Option(
            "A day's curve, from hour: rate; the largest is --rate. What each hour needs, what to"
            " reserve: 0=5,8=40,20=20.",
            metavar="HOUR=RATE,...",
        ),
    ] = ""
    mix: Annotated[
        bool, Option("Prefill and decode replicas may have different kinds of GPUs.")
    ] = False
    confidence: Annotated[
        float | None,
        Option(
            "Part of the draws that must meet every objective [0.9].", at_least=0.05, at_most=1.0
        ),
    ] = None
    draws: Annotated[
        int,
        Option(
            "Draws of the engine from what is known of it, each with a seed of its own; 0 = none:"
            " the engine as emu has it, with each of the seeds.",
            at_least=0,
        ),
    ] = 20
    seeds: Annotated[
        int,
        Option(
            "Seeds beside the draws, with the engine as it is; 0 = 3, or 1 of a trace.", at_least=0
        ),
    ] = 0
    requests: Annotated[
        int,
        Option(
            "Requests of each run, instead of a length in time; of a trace, its first ones.",
            at_least=0,
        ),
    ] = 0
    duration: Annotated[
        str | None,
        Option(
            "Arrivals of the runs that the answer rests on, such as 300s or 10m; without it by the"
            " time that requests stay, with --requests by their number.",
            metavar=DURATION,
        ),
    ] = None
    survive: Annotated[
        str,
        Option(
            "Also the cheapest cluster that meets the objectives after a loss: replica, machine,"
            " rank or zone."
        ),
    ] = ""
    during: Annotated[
        Sequence[str],
        Option(
            "Objectives after the loss, such as ttft_p95=3s; without it, all as before.",
            metavar="NAME=TIME",
        ),
    ] = ()
    away: Annotated[
        str | None,
        Option("What is lost is back after so long (10m); without it, never.", metavar=DURATION),
    ] = None
    zones: Annotated[
        int | None, Option("Zones that machines are dealt over (--survive zone) [3].", at_least=2)
    ] = None
    beside: Annotated[
        str,
        Option(
            "A second opinion for each kind of GPU: aiconfigurator, where it is installed.",
            metavar="TOOL",
        ),
    ] = ""
    max_gpus: Annotated[int, Option("Largest cluster to try.", at_least=1)] = 256
    gpus_per_node: Annotated[int, Option("GPUs of a machine.", at_least=1)] = 8
    output: Annotated[str | Path, output("Directory for the answer and the store of runs.")] = Path(
        "runs/plan"
    )
    overrides: Annotated[Mapping[str, object] | Sequence[str], SET] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of GPUs."""
        return (self.gpu,) if isinstance(self.gpu, str) else tuple(self.gpu)

    @property
    def limits(self) -> dict[str, str | None]:
        """The objectives by name (`ttft_p95`), None for those that are not given."""
        return {
            "ttft_p50": self.ttft_p50,
            "ttft_p95": self.ttft_p95,
            "ttft_p99": self.ttft_p99,
            "tpot_p50": self.tpot_p50,
            "tpot_p95": self.tpot_p95,
            "tpot_p99": self.tpot_p99,
            "e2e_p50": self.e2e_p50,
            "e2e_p95": self.e2e_p95,
            "e2e_p99": self.e2e_p99,
        }


class PlanCommand(PlanOptions, Shown):
    """The same, and what is told of it."""
