"""Commands about ASTRA-Sim and LLMServingSim: one collective, and a run by the original's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.cli.options import Count, Json, Parameter, Positive, Seconds


def collective(
    kind: Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"],
    size_bytes: Positive,
    *,
    dims: str = "FullyConnected:8:450:500",
    algorithm: str = "ring",
    splits: Positive = 1,
    active_chunks: Positive = 1,
    local_memory_gbytes_per_s: Annotated[float, Parameter(name="--local-memory-gbps")] = 1600.0,
    endpoint_delay_ns: Count = 10,
    optimization: Literal["localBWAware", "baseline"] = "localBWAware",
    congestion: bool = False,
    binary: Path | None = None,
    json: Json = False,
) -> int:
    """Print how many cycles (of 1 ns) a collective takes on an idle network, as ASTRA-Sim counts.

    Parameters
    ----------
    kind
        all-reduce, reduce-scatter, all-gather or all-to-all.
    size_bytes
        The full tensor; of an all-gather the local shard, of an all-to-all the local buffer.
    dims
        Dimensions, the first one fastest: TOPOLOGY:NPUS:GIB_PER_S:LATENCY_NS, separated by commas;
        TOPOLOGY is Ring, FullyConnected or Switch.
    algorithm
        ring, direct, direct4, halvingDoubling, doubleBinaryTree, oneRing, ...; one for all
        dimensions or one for each, separated by commas.
    splits
        Chunks that it is cut into (preferred-dataset-splits).
    active_chunks
        Chunks under way in a dimension at a time.
    local_memory_gbytes_per_s
        Memory bandwidth of a rank, 1e9 bytes/s: what a reduction costs.
    endpoint_delay_ns
        Fixed cost of a message step.
    optimization
        How an all-reduce is spread over several dimensions.
    congestion
        Messages wait for links that others use (one dimension).
    binary
        The published ASTRA-Sim program: run it too and compare.
    json
        Print one JSON object.
    """
    from emu.tools.collective import CollectiveQuestion, print_collective

    question = CollectiveQuestion(
        kind=kind,
        size_bytes=size_bytes,
        dims=dims,
        algorithm=algorithm,
        splits=splits,
        active_chunks=active_chunks,
        local_mem_gbytes_per_s=local_memory_gbytes_per_s,
        endpoint_delay_ns=endpoint_delay_ns,
        optimization=optimization,
        congestion=congestion,
    )
    return print_collective(question, binary, as_json=json)


def parity(
    cluster: Path,
    workload: Path | None = None,
    *,
    profiles: Path,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    limit: Count = 0,
    max_num_seqs: Positive = 128,
    max_num_batched_tokens: Positive = 2048,
    block_size: Positive = 16,
    prefix_caching: bool = True,
    prefix_storage: Literal["none", "cpu", "cxl"] = "none",
    prefix_sharing: bool = False,
    attention_offloading: bool = False,
    sub_batches: bool = False,
    local_offloading: bool = False,
    expert_routing: str = "balanced",
    request_routing: Literal["load", "rr", "rand"] = "load",
    block_copy: bool = True,
    log_interval_s: Seconds = 1.0,
    habits: bool = True,
) -> int:
    """Run LLMServingSim's own loop on the embedded executor; its clock to the nanosecond.

    For comparisons with that simulator: its habits (an idle clock in steps of 1 ms, late arrivals)
    are kept unless `--no-habits` is given. docs/astra-sim.md says which.

    Parameters
    ----------
    cluster
        LLMServingSim's cluster file (JSON).
    workload
        Its workload (JSON Lines); without one each instance gets the original's default requests.
    profiles
        Folder with LLMServingSim's profiles (and `pim/` for memories that compute).
    output
        Write the rows of the original's result file there (CSV).
    limit
        First N lines of the workload; 0 = all.
    max_num_seqs
        Requests of a batch at most.
    max_num_batched_tokens
        Tokens of a batch at most.
    block_size
        Tokens of a KV block.
    prefix_caching
        Reuse KV of equal prefixes.
    prefix_storage
        Where prefixes go behind the GPU.
    prefix_sharing
        Instances of a node share that storage.
    attention_offloading
        Attention of decodes in memories that compute.
    sub_batches
        Interleave two halves of a batch.
    local_offloading
        Bill reads of weights in GPU memory.
    expert_routing
        The gate of experts.
    request_routing
        How requests go to instances.
    block_copy
        All blocks of a model with experts run, not one.
    log_interval_s
        The original's interval of its log: its first event comes after it.
    habits
        Keep what the original does by accident.
    """
    from emu.astra.convert import QUIRKS
    from emu.astra.parity_replica import ParityOptions
    from emu.tools.parity import run_parity

    options = ParityOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        prefix_caching=prefix_caching,
        prefix_storage=prefix_storage,
        prefix_sharing=prefix_sharing,
        attention_offloading=attention_offloading,
        sub_batches=sub_batches,
        local_offloading=local_offloading,
        expert_routing=expert_routing,
        request_routing=request_routing,
        block_copy=block_copy,
        log_interval_s=log_interval_s,
        idle_grid=habits,
        late_arrivals=habits,
        end_npu_stagger=habits,
        quirks=QUIRKS if habits else (),
        pim_prompt_length=habits,
    )
    return run_parity(cluster, workload, profiles, options, output=output, limit=limit)
