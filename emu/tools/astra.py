"""`emu trace`, `emu collective` and `emu parity`: files for ASTRA-Sim, and runs beside it."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from emu.astra.backend import AstraBackend, input_setup, make_astra
from emu.astra.calculator import on_kept_dims
from emu.astra.etfile import Dialect, describe_file, write_graph
from emu.astra.inputs import InputSetup, Memories, network_text, system_table, write_inputs
from emu.astra.parity import ParityOptions, ParityResult, ParityRun, make_instances, read_requests
from emu.astra.parity_cluster import read_cluster
from emu.astra.trace import COLLECTIVE_KINDS, Graph, Node, NodeKind, format_trace
from emu.cluster.plan import make_plan
from emu.config.check import overridden
from emu.config.load import load_config
from emu.errors import InputError, RunError
from emu.latency.base import BatchShape
from emu.network.collectives import collective_ns, congested_ns
from emu.network.rounds import CollectiveSystem, Kind, NetworkDim, rank_count
from emu.process.exits import scratch
from emu.report.atomic import write_text

# --------------------------------------------------------------------------------------------------
# The files of one batch, to be looked at or given to ASTRA-Sim: what `emu trace` does.
#
# Owns the text form of a batch (`--prefill NEW:CONTEXT,... --decode COUNTxCONTEXT,...`) and the
# directory with the text trace, one `.et` per NPU and the program's input files. The rows and
# graphs are those that the `astra-sim` backend runs, whatever backend the configuration names.


def parse_batch(prefill: str, decode: str) -> BatchShape:
    """A batch from its text. Chunks of one token are decodes. Raises InputError."""
    new: list[int] = []
    context: list[int] = []
    decodes: list[int] = []
    for part in filter(None, prefill.split(",")):
        tokens, _, before = part.partition(":")
        count = _number(tokens, "--prefill", part, 1)
        history = _number(before or "0", "--prefill", part, 0)
        if count == 1:
            decodes.append(history)
        else:
            new.append(count)
            context.append(history)
    for part in filter(None, decode.split(",")):
        count_text, _, before = part.rpartition("x")
        history = _number(before, "--decode", part, 0)
        decodes += [history] * _number(count_text or "1", "--decode", part, 1)
    if not new and not decodes:
        raise InputError("trace", None, "", "an empty batch: give --prefill, --decode or both")
    return BatchShape(
        prefill_new=new,
        prefill_context=context,
        decode_count=len(decodes),
        decode_context_sum=sum(decodes),
        decode_context_max=max(decodes, default=0),
        decode_context_min=min(decodes, default=0),
        sequences=len(new) + len(decodes),
    )


def _number(text: str, option: str, part: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        form = "NEW or NEW:CONTEXT" if option == "--prefill" else "CONTEXT or COUNTxCONTEXT"
        raise InputError("trace", None, option, f"{part!r} is not {form}")
    return int(text)


def backend_of(config: Path, overrides: Sequence[str], replica: int) -> AstraBackend:
    """The embedded executor of one replica of a configuration. Raises InputError."""
    loaded = load_config(config, overrides)
    plan = make_plan(loaded, str(config))
    if not 0 <= replica < len(plan.replicas):
        problem = f"{replica} does not exist; there are {len(plan.replicas)} replicas"
        raise InputError("trace", None, "--replica", problem)
    context = plan.replicas[replica].latency_context(loaded)
    table = context.table
    if table.backend != "astra-sim":
        compute = "profile" if table.backend == "profile" else "roofline"
        table = overridden(table, {"backend": "astra-sim", "compute": compute})
    table = msgspec.structs.replace(table, binary="", cache="", replay="")
    return make_astra(msgspec.structs.replace(context, table=table))


def write_batch(
    backend: AstraBackend, shape: BatchShape, directory: Path, dialect: Dialect = "fork"
) -> list[Path]:
    """Write all files of a batch; their paths. Raises InputError."""
    setup = input_setup(backend.network, backend.memories, dialect)
    kept = [dim.npus > 1 for dim in backend.network.dims]
    text = format_trace(backend.trace(shape))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = write_inputs(setup, directory)
        trace = directory / "trace.txt"
        trace.write_text(text, encoding="utf-8")
        written = [trace, files.network, files.system, files.memory]
        for graph in backend.graphs(shape, named=True):
            written.append(directory / f"batch.{graph.npu}.et")
            own = graph if dialect == "fork" else on_kept_dims(graph, kept)
            write_graph(written[-1], own, dialect, text)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise InputError(str(directory), None, "--out", problem) from None
    return written


def trace_command(
    config: Path | None,
    *,
    prefill: str,
    decode: str,
    out: Path,
    replica: int,
    dialect: Dialect,
    show: Path | None,
    overrides: Sequence[str],
) -> int:
    """`emu trace`."""
    if show is not None:
        for line in describe_file(show, dialect):
            print(line)
        return 0
    if config is None:
        raise InputError("trace", None, "", "give a configuration file, or --show FILE.et")
    shape = parse_batch(prefill, decode)
    backend = backend_of(config, overrides, replica)
    for path in write_batch(backend, shape, out, dialect):
        print(path)
    print(f"embedded executor: {backend.iteration_ns(shape)} ns, host time included")
    return 0


# --------------------------------------------------------------------------------------------------
# One collective: its cycles by emu, and by the published ASTRA-Sim if its program is given.
#
#     question = CollectiveQuestion(kind="all-reduce", size_bytes=1 << 20, dims="Ring:4:50:500")
#     cycles(question)                      # emu
#     program_cycles(question, binary)      # the program, in a scratch directory
#
# One cycle is 1 ns. The program is the analytical one, congestion-unaware or -aware as the question
# says; every NPU's trace has one node.

_TOPOLOGIES: Final = ("Ring", "FullyConnected", "Switch")
_FINISHED: Final = re.compile(r"sys\[\d+\] finished, (\d+) cycles")
_PROGRAM_S: Final = 120.0
"""A program that takes longer hangs."""


class CollectiveQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked; `emu collective --help` explains each."""

    kind: Kind
    size_bytes: int
    dims: str
    algorithm: str = "ring"
    splits: int = 1
    active_chunks: int = 1
    local_mem_gbytes_per_s: float = 1600.0
    endpoint_delay_ns: int = 10
    optimization: Literal["localBWAware", "baseline"] = "localBWAware"
    congestion: bool = False

    def system(self) -> CollectiveSystem:
        """The network that it describes. Raises InputError naming the option that is wrong."""
        dims = tuple(map(_dim, self.dims.split(",")))
        names = tuple(name.strip() for name in self.algorithm.split(","))
        if len(names) == 1:
            names *= len(dims)
        if len(names) != len(dims):
            problem = f"{len(names)} algorithms for {len(dims)} dimensions"
            raise InputError("collective", None, "--algorithm", problem)
        return CollectiveSystem(
            dims=dims,
            algorithms=names,
            splits=self.splits,
            active_chunks=self.active_chunks,
            local_mem_gbytes_per_s=self.local_mem_gbytes_per_s,
            endpoint_delay_ns=self.endpoint_delay_ns,
            optimization=self.optimization,
        )


def _dim(text: str) -> NetworkDim:
    """`Ring:4:50:500`."""
    parts = text.strip().split(":")
    try:
        topology, npus, rate, latency = parts
        dim = NetworkDim(
            topology=topology,  # type: ignore[arg-type]
            npus=int(npus),
            gib_per_s=float(rate),
            latency_ns=float(latency),
        )
    except ValueError:
        problem = f"expected TOPOLOGY:NPUS:GIB_PER_S:LATENCY_NS, got {text.strip()!r}"
        raise InputError("collective", None, "--dims", problem) from None
    if topology not in _TOPOLOGIES:
        problem = f"{topology!r} is not one of {', '.join(_TOPOLOGIES)}"
        raise InputError("collective", None, "--dims", problem)
    if not (dim.npus >= 1 and dim.gib_per_s > 0 and dim.latency_ns >= 0):
        raise InputError("collective", None, "--dims", f"{text.strip()!r} is out of range")
    return dim


def cycles(question: CollectiveQuestion) -> int:
    """How long it takes, all ranks starting together on an idle network."""
    system = question.system()
    if question.congestion:
        return congested_ns(system, question.kind, question.size_bytes)
    return collective_ns(system, question.kind, question.size_bytes)


def program_cycles(question: CollectiveQuestion, binary: Path) -> int:
    """What the program says: the last NPU's end. Raises RunError if it fails."""
    system = question.system()
    setup = InputSetup(network=system, memories=Memories())
    number = next(n for n, kind in COLLECTIVE_KINDS.items() if kind == question.kind)
    with scratch("emu-collective-") as directory:
        (directory / "network.yml").write_text(network_text(setup), encoding="utf-8")
        table = json.dumps(system_table(setup), indent=2)
        (directory / "system.json").write_text(table, encoding="utf-8")
        memory = json.dumps({"memory-type": "NO_MEMORY_EXPANSION"})
        (directory / "memory.json").write_text(memory, encoding="utf-8")
        for npu in range(rank_count(system.dims)):
            node = Node(
                0,
                NodeKind.COLL,
                "collective",
                size_bytes=question.size_bytes,
                collective=number,
                involved=(True,) * len(system.dims),
            )
            write_graph(directory / f"trace.{npu}.et", Graph(npu, [node]), "upstream")
        command = [
            str(binary.resolve()),
            f"--workload-configuration={directory / 'trace'}",
            f"--system-configuration={directory / 'system.json'}",
            f"--network-configuration={directory / 'network.yml'}",
            f"--remote-memory-configuration={directory / 'memory.json'}",
        ]
        try:
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, timeout=_PROGRAM_S
            )
        except FileNotFoundError:
            raise InputError("collective", None, "--binary", f"no such file: {binary}") from None
        except OSError as error:
            raise InputError("collective", None, "--binary", error.strerror or str(error)) from None
        except subprocess.TimeoutExpired:
            raise RunError(f"{binary.name} did not end within {_PROGRAM_S:.0f} s") from None
    ends = [int(end) for end in _FINISHED.findall(done.stdout)]
    if done.returncode or len(ends) != rank_count(system.dims):
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RunError(f"{binary.name} ended with status {done.returncode}: {last[0]}")
    return max(ends)


def print_collective(
    question: CollectiveQuestion, binary: Path | None, *, as_json: bool = False
) -> int:
    """`emu collective`. 1 if the program was asked and says something else."""
    own = cycles(question)
    program = None if binary is None else program_cycles(question, binary)
    if as_json:
        print(json.dumps({"cycles": own, "program_cycles": program}))
    elif program is None:
        print(f"{own:,} cycles")
    else:
        verdict = "equal" if own == program else f"difference {own - program:+,}"
        print(f"{own:,} cycles, {program:,} by the program: {verdict}")
    return 0 if program in (None, own) else 1


# --------------------------------------------------------------------------------------------------
# `emu parity`: a run of LLMServingSim's loop, its end clock, and the rows of its result file.

_COLUMNS: Final = (
    "instance id",
    "request id",
    "input",
    "output",
    "arrival",
    "end_time",
    "latency",
    "queuing_delay",
    "TTFT",
    "TPOT",
    "ITL",
)
"""Of the original's result file; times are ns."""


def run_parity(
    cluster: Path,
    workload: Path | None,
    profiles: Path,
    options: ParityOptions,
    *,
    output: Path | None = None,
    limit: int = 0,
) -> int:
    """Run and print. `profiles` holds the bundles, and `pim/` beside or in it the memories.

    `limit` is the number of requests to read; 0 = all.
    """
    for path in (cluster, workload, profiles):
        if path is not None and not path.exists():
            raise InputError(str(path), None, "", "no such file or folder")
    pim = profiles / "pim" if (profiles / "pim").exists() else profiles.parent / "pim"
    read = read_cluster(cluster, pim)
    lines = None if workload is None else read_requests(workload, limit)
    result = ParityRun(read, make_instances(read, profiles, options), lines, options).run()
    print(f"clock {result.clock_ns:,} ns, {len(result.rows):,} requests")
    if result.preemptions:
        print(f"{result.preemptions:,} preemptions, {result.recomputed_tokens:,} tokens again")
    if output is not None:
        write_text(output, table(result))
        print(f"rows: {output}")
    return 0


def table(result: ParityResult) -> str:
    """The rows as the original writes them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in result.rows:
        writer.writerow(
            [
                row.instance,
                row.request_id,
                row.prompt_tokens,
                row.output_tokens,
                row.arrival_ns,
                row.end_ns,
                row.latency_ns,
                row.queuing_ns,
                row.ttft_ns,
                row.tpot_ns,
                row.itl_ns,
            ]
        )
    return text.getvalue()
