"""Commands about ASTRA-Sim: graphs of a batch, a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.options.declare import Argument, Option
from emu.options.shared import Json, Settings


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
