"""Commands about ASTRA-Sim and LLMServingSim: graphs of a batch, a collective, parity runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.options.declare import Argument, Option, Options
from emu.options.shared import Json, Settings, output


class TraceOptions(Settings):
    """A batch of a configuration, or a graph."""

    config: Annotated[Path | None, Argument("Configuration file.")] = None
    prefill: Annotated[
        str, Option("Prompt chunks: NEW:CONTEXT, comma separated (512:0,100:412).")
    ] = ""
    decode: Annotated[str, Option("Decodes: COUNTxCONTEXT, comma separated (32x1000,4x200).")] = ""
    out: Annotated[Path, Option("Directory for trace.txt, batch.N.et and the input files.")] = Path(
        "trace"
    )
    replica: Annotated[int, Option("Whose model, degrees and network.")] = 0
    dialect: Annotated[
        Literal["fork", "upstream"],
        Option("LLMServingSim's ASTRA-Sim (ns), or the published one (us; docs/lab/astra-sim.md)."),
    ] = "fork"
    show: Annotated[Path | None, Option("Print this .et file instead.")] = None


def trace(options: TraceOptions) -> int:
    """Graphs of a batch."""
    from emu.apps.astra.trace import trace_command

    return trace_command(
        options.config,
        prefill=options.prefill,
        decode=options.decode,
        out=options.out,
        replica=options.replica,
        dialect=options.dialect,
        show=options.show,
        overrides=options.overrides,
    )


class CollectiveCommand(Json):
    """A collective on an idle network."""

    kind: Annotated[
        Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"],
        Argument("all-reduce, reduce-scatter, all-gather or all-to-all."),
    ]
    size_bytes: Annotated[
        int,
        Argument(
            "The full tensor; of an all-gather the local shard, of an all-to-all the local buffer.",
            at_least=1,
        ),
    ]
    dims: Annotated[
        str,
        Option(
            "Dimensions, the first one fastest: TOPOLOGY:NPUS:GIB_PER_S:LATENCY_NS, separated by"
            " commas; TOPOLOGY is Ring, FullyConnected or Switch."
        ),
    ] = "FullyConnected:8:450:500"
    algorithm: Annotated[
        str,
        Option(
            "ring, direct, direct4, halvingDoubling, doubleBinaryTree, oneRing, ...; one for all"
            " dimensions or one for each, separated by commas."
        ),
    ] = "ring"
    splits: Annotated[
        int, Option("Chunks that it is cut into (preferred-dataset-splits).", at_least=1)
    ] = 1
    active_chunks: Annotated[
        int, Option("Chunks under way in a dimension at a time.", at_least=1)
    ] = 1
    local_mem_gbytes_per_s: Annotated[
        float,
        Option(
            "Memory bandwidth of a rank, 1e9 bytes/s: what a reduction costs.",
            "--local-memory-gbps",
        ),
    ] = 1600.0
    endpoint_delay_ns: Annotated[int, Option("Fixed cost of a message step.", at_least=0)] = 10
    optimization: Annotated[
        Literal["localBWAware", "baseline"],
        Option("How an all-reduce is spread over several dimensions."),
    ] = "localBWAware"
    congestion: Annotated[
        bool, Option("Messages wait for links that others use (one dimension).")
    ] = False
    binary: Annotated[
        Path | None, Option("The published ASTRA-Sim program: run it too and compare.")
    ] = None
    as_json: Annotated[bool, Option("Print one JSON object.", "--json")] = False


def collective(options: CollectiveCommand) -> int:
    """Cycles of a collective."""
    import msgspec

    from emu.apps.astra.collective import CollectiveQuestion, print_collective
    from emu.process.prepared import prepared

    question = msgspec.convert(options, prepared(CollectiveQuestion), from_attributes=True)
    return print_collective(question, options.binary, as_json=options.as_json)


class ParityCommand(Options):
    """The original's command line, as far as it changes results."""

    cluster: Annotated[Path, Argument("LLMServingSim's cluster file (JSON).")]
    workload: Annotated[
        Path | None,
        Argument(
            "Its workload (JSON Lines); without one each instance gets the original's default"
            " requests."
        ),
    ] = None
    profiles: Annotated[
        Path,
        Option("Folder with LLMServingSim's profiles (and `pim/` for memories that compute)."),
    ]
    output: Annotated[
        Path | None, output("Write the rows of the original's result file there (CSV).")
    ] = None
    limit: Annotated[int, Option("First N lines of the workload; 0 = all.", at_least=0)] = 0
    max_num_seqs: Annotated[int, Option("Requests of a batch at most.", at_least=1)] = 128
    max_num_batched_tokens: Annotated[int, Option("Tokens of a batch at most.", at_least=1)] = 2048
    block_size: Annotated[int, Option("Tokens of a KV block.", at_least=1)] = 16
    prefix_caching: Annotated[bool, Option("Reuse KV of equal prefixes.")] = True
    prefix_storage: Annotated[
        Literal["none", "cpu", "cxl"], Option("Where prefixes go behind the GPU.")
    ] = "none"
    prefix_sharing: Annotated[bool, Option("Instances of a node share that storage.")] = False
    attention_offloading: Annotated[
        bool, Option("Attention of decodes in memories that compute.")
    ] = False
    sub_batches: Annotated[bool, Option("Interleave two halves of a batch.")] = False
    local_offloading: Annotated[bool, Option("Bill reads of weights in GPU memory.")] = False
    expert_routing: Annotated[str, Option("The gate of experts.")] = "balanced"
    request_routing: Annotated[
        Literal["load", "rr", "rand"], Option("How requests go to instances.")
    ] = "load"
    block_copy: Annotated[bool, Option("All blocks of a model with experts run, not one.")] = True
    log_interval_s: Annotated[
        float,
        Option("The original's interval of its log: its first event comes after it.", at_least=0),
    ] = 1.0
    habits: Annotated[bool, Option("Keep what the original does by accident.")] = True


def parity(options: ParityCommand) -> int:
    """LLMServingSim's own loop."""
    import msgspec

    from emu.lab.parity.command import run_parity
    from emu.lab.parity.instance import ParityOptions
    from emu.process.prepared import prepared

    asked = msgspec.convert(options, prepared(ParityOptions), from_attributes=True)
    if not options.habits:
        asked = msgspec.structs.replace(
            asked,
            idle_grid=False,
            late_arrivals=False,
            end_npu_stagger=False,
            quirks=(),
            pim_prompt_length=False,
        )
    return run_parity(
        options.cluster,
        options.workload,
        options.profiles,
        asked,
        output=options.output,
        limit=options.limit,
    )
