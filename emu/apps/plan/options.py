"""What `emu plan` and `emu.plan` are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from emu.options.declare import Option, Options
from emu.options.shared import SET, Shown, Traffic, Workers, output

DURATION = "TIME"


class Model(Options, kw_only=False):
    """What Python takes without a name: `emu.plan("Llama-3.1-8B", gpu="H100", ...)`."""

    model: Annotated[str, Option("Model of the catalogue, or its label with --hf-config.")] = ""


class PlanOptions(Model, Traffic, Workers):
    """A model, traffic, kinds of GPUs, objectives, and which clusters come into question."""

    command = "plan"

    hf_config: Annotated[str | Path, Option("A Hugging Face config.json.", metavar="FILE")] = ""
    gpu: Annotated[
        str | Sequence[str],
        Option(
            "Kind of GPU, its price of one hour, how many there are: H100=2.5:64 (may be"
            " repeated).",
            metavar="NAME[=PRICE][:COUNT]",
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
    seeds: Annotated[
        int,
        Option(
            "Every objective must be met with each of so many seeds; 0 = 3, or 1 of a trace.",
            at_least=0,
        ),
    ] = 0
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
