"""`emu trace`: the files of one batch, to be looked at or given to ASTRA-Sim.

Owns the text form of a batch (`--prefill NEW:CONTEXT,... --decode COUNTxCONTEXT,...`) and the
directory with the text trace, one `.et` per NPU and the program's input files. The rows and
graphs are those that the `astra-sim` backend runs, whatever backend the configuration names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from emu.backends.astra.backend import AstraBackend
from emu.backends.astra.build import input_setup, make_astra
from emu.backends.astra.etfile import Dialect, describe_file, write_graph
from emu.backends.astra.inputs import write_inputs
from emu.backends.astra.oneshot import on_kept_dims
from emu.backends.astra.trace import format_trace
from emu.cluster.plan import make_plan
from emu.config.kinds import overridden
from emu.config.load import load_config
from emu.errors import InputError
from emu.latency.base import BatchShape


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
