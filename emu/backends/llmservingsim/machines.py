"""The machines of a cluster file as `[[nodes]]` tables: GPUs, memories and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emu.backends.llmservingsim.cluster_file import ClusterFile, Instance
from emu.backends.llmservingsim.toml_text import toml_line
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu


def gpu_kinds(file: ClusterFile) -> list[dict[str, object]]:
    """The inline table of each instance's GPU: memory from the file, the rest of the catalogue."""
    kinds = []
    for placed in file.instances:
        spec = lookup_gpu(placed.instance.hardware, file.source, f"{placed.field}.hardware")
        kinds.append(_gpu_table(placed.instance, spec))
    return kinds


def _gpu_table(instance: Instance, spec: GpuSpec) -> dict[str, object]:
    return {
        "name": instance.hardware,
        "memory_gib": instance.npu_mem.mem_size,
        "memory_gbytes_per_s": instance.npu_mem.mem_bw,
        "tflops_fp16": spec.tflops_fp16,
        "tflops_fp8": spec.tflops_fp8,
        "sm_count": spec.sm_count,
        "pcie_gbps": spec.pcie_gbps,
    }


def node_tables(
    file: ClusterFile, kinds: Sequence[dict[str, object]]
) -> tuple[list[str], list[list[int]]]:
    """([[nodes]] tables, GPU indices of every instance).

    A machine of ours has GPUs of one kind, so a node with several becomes several machines.
    """
    tables: list[tuple[list[str], int]] = []
    gpu_of: list[list[int]] = [[] for _ in file.instances]
    next_gpu = 0
    for n in range(len(file.cluster.nodes)):
        here = [i for i, placed in enumerate(file.instances) if placed.node == n]
        parts: list[tuple[dict[str, object], list[int]]] = []
        for i in here:
            same = next((members for kind, members in parts if kind == kinds[i]), None)
            if same is None:
                parts.append((kinds[i], [i]))
            else:
                same.append(i)
        for kind, members in parts:
            count = 0
            for i in members:
                size = file.instances[i].shape.gpus
                gpu_of[i] = list(range(next_gpu, next_gpu + size))
                next_gpu += size
                count += size
            lines = list(_node_lines(file, n, kind, count, len(parts)))
            if tables and tables[-1][0] == lines:
                tables[-1] = (lines, tables[-1][1] + 1)
            else:
                tables.append((lines, 1))
    written: list[str] = []
    for lines, machines in tables:
        written += ["[[nodes]]", toml_line("count", machines), *lines, ""]
    return written, gpu_of


def _node_lines(
    file: ClusterFile, n: int, kind: dict[str, object], gpus: int, parts: int
) -> Iterator[str]:
    cluster, node = file.cluster, file.cluster.nodes[n]
    if parts > 1:
        yield "# one of several parts of a node with different GPUs: here machines of their own"
    yield "# memory from npu_mem, peak rates from the catalogue"
    yield toml_line("gpu", kind)
    yield toml_line("gpus", gpus)
    yield toml_line("host_memory_gib", node.cpu_mem.mem_size, "cpu_mem")
    yield toml_line("host_memory_gbytes_per_s", node.cpu_mem.mem_bw)
    yield toml_line("host_memory_latency_ns", round(node.cpu_mem.mem_latency))
    yield from _links(file)
    if cluster.cxl_mem is not None:
        cxl = cluster.cxl_mem
        yield toml_line("cxl_gib", cxl.mem_size, "cxl_mem")
        yield toml_line("cxl_gbytes_per_s", cxl.mem_bw)
        yield toml_line("cxl_latency_ns", round(cxl.mem_latency))
        yield toml_line("cxl_devices", cxl.num_devices)
    if node.cpu_mem.pim_config is not None:
        pim = node.cpu_mem.pim_config
        yield toml_line("pim", pim.removesuffix("_pim"), "pim_config")


def _links(file: ClusterFile) -> Iterator[str]:
    """One figure for all links, or one for each dimension: the first within, the last between."""
    rates, latencies = _per_dim(file.cluster.link_bw), _per_dim(file.cluster.link_latency)
    inner, outer = rates[0], rates[-1]
    yield toml_line("nvlink_gbps", _gbps(inner), f"link_bw {inner:g} GB/s of 2^30 bytes")
    yield toml_line("nvlink_latency_ns", round(latencies[0]), "link_latency")
    yield toml_line("nic_gbps", _gbps(outer), f"link_bw {outer:g} GB/s of 2^30 bytes")
    yield toml_line("nic_latency_us", latencies[-1] / 1000, "link_latency")
    if len(set(rates)) > 2 or len(set(latencies)) > 2:
        yield f"# not carried over: links of the dimensions between {list(file.dims)[1:-1]}"
    elif len(file.cluster.nodes) == 1 and (len(set(rates)) > 1 or len(set(latencies)) > 1):
        yield "# all GPUs of a machine share the first figure; the last is for other machines"


def _gbps(link_bw: float) -> float:
    """The simulator's GB/s of a link are 2^30 bytes."""
    return link_bw * 8 * 2**30 / 1e9


def _per_dim(value: float | list[float]) -> list[float]:
    return list(value) if isinstance(value, list) else [value]
