"""The files that ASTRA-Sim is started with: network, system, memory, communicator groups.

Owns their text for both programs. The fork of LLMServingSim takes nanoseconds everywhere. The
published program multiplies durations by 1000 (it reads microseconds); so that nanoseconds
survive, its files are written on a clock that is 1000 times finer: latencies and delays times
1000, bandwidths divided by 1000, and the cycles that it reports divided by 1000
(`UPSTREAM_SCALE`). Its memory's bandwidth is a whole number, so there the sizes in the graphs are
multiplied instead (`etfile.py`). Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from emu.backends.astra.memories import Memories, Memory
from emu.errors import InputError
from emu.network.rounds import CollectiveSystem

UPSTREAM_SCALE: Final = 1000
_KINDS: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class InputFiles(msgspec.Struct, frozen=True):
    """Paths of the files of one run."""

    network: Path
    system: Path
    memory: Path
    groups: Path | None = None


class InputSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the files say."""

    network: CollectiveSystem
    memories: Memories
    groups: Mapping[str, Sequence[int]] = msgspec.field(default_factory=dict)
    """Communicator groups: name -> NPUs; empty = none."""
    dialect: Literal["fork", "upstream"] = "fork"


def _number(value: float) -> str:
    return repr(float(value))


def network_text(setup: InputSetup) -> str:
    """network.yml."""
    scale = UPSTREAM_SCALE if setup.dialect == "upstream" else 1
    dims = setup.network.dims
    if setup.dialect == "upstream" and any(dim.npus < 2 for dim in dims):
        problem = "the published ASTRA-Sim needs more than one NPU in every dimension"
        raise InputError("network.yml", None, "npus_count", problem)
    lists: dict[str, list[str]] = {
        "topology": [str(dim.topology) for dim in dims],
        "npus_count": [str(dim.npus) for dim in dims],
        "bandwidth": [_number(dim.gib_per_s / scale) for dim in dims],
        "latency": [_number(dim.latency_ns * scale) for dim in dims],
    }
    return "".join(f"{key}: [ {', '.join(values)} ]\n" for key, values in lists.items())


def system_table(setup: InputSetup) -> dict[str, object]:
    """system.json as a table."""
    system = setup.network
    scale = UPSTREAM_SCALE if setup.dialect == "upstream" else 1
    names = [system.algorithm(d) for d in range(len(system.dims))]
    rate = system.local_mem_gbytes_per_s / scale
    table: dict[str, object] = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": system.endpoint_delay_ns * scale,
        "active-chunks-per-dimension": system.active_chunks,
        "preferred-dataset-splits": system.splits,
    }
    table |= {f"{kind}-implementation": names for kind in _KINDS}
    table["collective-optimization"] = system.optimization
    table["local-mem-bw"] = int(rate) if scale == 1 else rate
    table["boost-mode"] = 0
    return table


def _memory_table(memory: Memory) -> dict[str, object]:
    table: dict[str, object] = {
        "memory-type": memory.memory_type,
        "mem-bw": memory.gbytes_per_s,
        "mem-latency": memory.latency_ns,
    }
    if memory.memory_type != "PER_NPU_MEMORY_EXPANSION":
        table["num-devices"] = memory.devices
    if memory.pim_channels:
        table["pim-channels"] = memory.pim_channels
    return table


def memory_table(setup: InputSetup) -> dict[str, object]:
    """memory_expansion.json as a table."""
    memories = setup.memories
    if setup.dialect == "fork":
        named = (
            ("remote_mem", memories.remote),
            ("cxl_mem", memories.cxl),
            ("local_mem", memories.local),
        )
        return {name: _memory_table(memory) for name, memory in named if memory is not None}
    remote = memories.remote
    if remote is None:
        return {"memory-type": "NO_MEMORY_EXPANSION"}
    # A memory that NPUs share looks at requests that the program has freed, and crashes; so each
    # NPU has its own, and loads do not queue.
    return {
        "memory-type": "PER_NPU_MEMORY_EXPANSION",
        "remote-mem-latency": int(remote.latency_ns * UPSTREAM_SCALE),
        "remote-mem-bw": int(remote.gbytes_per_s),
    }


def _npus(setup: InputSetup) -> int:
    total = 1
    for dim in setup.network.dims:
        total *= dim.npus
    return total


def groups_table(setup: InputSetup) -> dict[str, list[int]]:
    """Communicator groups. Raises InputError for an NPU that does not exist."""
    npus = _npus(setup)
    for name, members in setup.groups.items():
        for npu in members:
            if not 0 <= npu < npus:
                problem = f"NPU {npu} does not exist; there are {npus}"
                raise InputError("comm_group.json", None, name, problem)
        if setup.dialect == "upstream" and not name.isdecimal():
            problem = "the published ASTRA-Sim takes whole numbers as names of groups"
            raise InputError("comm_group.json", None, name, problem)
    return {name: list(members) for name, members in setup.groups.items()}


def write_inputs(setup: InputSetup, directory: Path) -> InputFiles:
    """Write all files into a directory, which must exist."""
    setup.memories.check("memory_expansion.json")
    files = InputFiles(
        network=directory / "network.yml",
        system=directory / "system.json",
        memory=directory / "memory_expansion.json",
        groups=directory / "comm_group.json" if setup.groups else None,
    )
    files.network.write_text(network_text(setup), encoding="utf-8")
    files.system.write_text(_json(system_table(setup)), encoding="utf-8")
    files.memory.write_text(_json(memory_table(setup)), encoding="utf-8")
    if files.groups is not None:
        files.groups.write_text(_json(groups_table(setup)), encoding="utf-8")
    return files


def _json(table: Mapping[str, object]) -> str:
    return json.dumps(table, indent=2) + "\n"
