"""`emu collective`: one collective's cycles by emu, and by the published ASTRA-Sim beside it.

    question = CollectiveQuestion(kind="all-reduce", size_bytes=1 << 20, dims="Ring:4:50:500")
    cycles(question)                      # emu
    program_cycles(question, binary)      # the program, in a scratch directory

One cycle is 1 ns. The program is the analytical one, congestion-unaware or -aware as the question
says; every NPU's trace has one node.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from emu.backends.astra.etfile import write_graph
from emu.backends.astra.graph import COLLECTIVE_KINDS, Graph, Node, NodeKind
from emu.backends.astra.inputs import InputSetup, network_text, system_table
from emu.backends.astra.memories import Memories
from emu.errors import InputError, RunError
from emu.network.collectives import collective_ns
from emu.network.congestion import congested_ns
from emu.network.dimensions import NetworkDim, Topology, rank_count
from emu.network.rounds import CollectiveSystem, Kind
from emu.process.interrupts import scratch
from emu.process.prepared import prepared

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
        return CollectiveSystem(
            dims=tuple(map(_dim, self.dims.split(","))),
            algorithms=self._algorithms(),
            splits=self.splits,
            active_chunks=self.active_chunks,
            local_mem_gbytes_per_s=self.local_mem_gbytes_per_s,
            endpoint_delay_ns=self.endpoint_delay_ns,
            optimization=self.optimization,
        )

    def _algorithms(self) -> tuple[str, ...]:
        """The algorithm of each dimension: one for all, or as many as there are."""
        names = tuple(name.strip() for name in self.algorithm.split(","))
        count = len(self.dims.split(","))
        if len(names) not in (1, count):
            problem = f"{len(names)} algorithms for {count} dimensions"
            raise InputError("collective", None, "--algorithm", problem)
        return names if len(names) == count else names * count


def _dim(text: str) -> NetworkDim:
    """`Ring:4:50:500`."""
    parts = text.strip().split(":")
    if len(parts) == 4 and parts[0] not in get_args(Topology):
        problem = f"{parts[0]!r} is not one of {', '.join(get_args(Topology))}"
        raise InputError("collective", None, "--dims", problem)
    try:
        named = dict(zip(NetworkDim.__struct_fields__, parts, strict=True))
        dim = msgspec.convert(named, prepared(NetworkDim), strict=False)
    except (ValueError, msgspec.ValidationError):
        problem = f"expected TOPOLOGY:NPUS:GIB_PER_S:LATENCY_NS, got {text.strip()!r}"
        raise InputError("collective", None, "--dims", problem) from None
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
