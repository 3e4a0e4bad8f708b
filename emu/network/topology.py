"""The cluster as a graph: machines, GPUs, directed links with their rates, and the paths over them.

Owns: the numbering of GPUs and links (in order of the `[[nodes]]` tables), and which links a
transfer uses. Immutable once built; what happens to a link later (a fault) is the flow table's.

Links of one direction each, rates in bytes per second:

    GPU       NIC out, NIC in; NVLink out, in (where there is NVLink)
    PCIe      down (host to GPU), up (GPU to host); shared by `pcie_shared_by` GPUs; with
              `nic_over_pcie` traffic of the NIC crosses it, too
    machine   host memory read, host memory write; CXL read, CXL write (where there is CXL)
    GPU       SSD read (the disk's rate is given per GPU)
    leaf      uplink, downlink, only where `leaf_uplink_gbps` is given; otherwise the fabric above
              the NICs never limits

Does not do: sharing (`flows`), collectives inside an iteration (`collectives`), placement of
replicas (`placement`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from emu.config.schema import NodeTable
from emu.errors import InputError
from emu.units import NS_PER_US, gbps_to_bytes_per_s

LinkPath = tuple[int, ...]


class GpuFigures(Protocol):
    """What the topology needs of a resolved GPU."""

    @property
    def name(self) -> str:
        """Kind of GPU."""
        ...

    @property
    def nvlink_gbps(self) -> float:
        """Per direction, 1e9 bit/s; 0 = none."""
        ...

    @property
    def pcie_gbps(self) -> float:
        """Per direction, 1e9 bit/s."""
        ...


class LinkKind(enum.StrEnum):
    """What a link is, for reports and faults."""

    NIC_OUT = "nic.out"
    NIC_IN = "nic.in"
    NVLINK_OUT = "nvlink.out"
    NVLINK_IN = "nvlink.in"
    PCIE_DOWN = "pcie.down"
    PCIE_UP = "pcie.up"
    SSD_READ = "ssd.read"
    HOST_READ = "host.read"
    HOST_WRITE = "host.write"
    CXL_READ = "cxl.read"
    CXL_WRITE = "cxl.write"
    LEAF_UP = "uplink"
    LEAF_DOWN = "downlink"


class LinkSpec(msgspec.Struct, frozen=True):
    """One direction of a link as configured."""

    index: int
    name: str
    """For example `gpu3.nic.out`, `machine0.host.read`, `leaf.a.uplink`."""
    kind: LinkKind
    bytes_per_s: int
    latency_ns: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: where it is and which links are its own. A link of -1 does not exist.

    Links (`nic_out`, `nic_in`, `nvlink_out`, `nvlink_in`, `pcie_down`, `pcie_up`, `ssd_read`) are
    indices.
    """

    index: int
    kind: str
    machine: int
    nvlink_domain: int
    """Cluster-wide number of the group of GPUs joined by NVLink."""
    nic_out: int
    nic_in: int
    nvlink_out: int
    nvlink_in: int
    pcie_down: int
    pcie_up: int
    ssd_read: int
    nic_over_pcie: bool = False
    """The NIC is reached over the PCIe link."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine.

    Fields of links (`host_read`, `host_write`, `cxl_read`, `cxl_write`) are their indices.
    """

    index: int
    table: int
    """Position of its table in `[[nodes]]`."""
    leaf: str
    gpus: tuple[int, ...]
    host_read: int
    host_write: int
    cxl_read: int = -1
    cxl_write: int = -1


class Topology(msgspec.Struct, frozen=True):
    """Machines, GPUs and links of a cluster."""

    machines: tuple[Machine, ...]
    gpus: tuple[Gpu, ...]
    links: tuple[LinkSpec, ...]
    leaf_links: dict[str, tuple[int, int]]
    """(uplink, downlink) of each leaf switch that has a limit."""

    @property
    def link_rates(self) -> list[int]:
        """Bytes per second of every link, by index: what a `FlowTable` is made from."""
        return [link.bytes_per_s for link in self.links]

    def path(self, src_gpu: int, dst_gpu: int) -> LinkPath:
        """Links from one GPU to another: NVLink within a domain, PCIe within a machine, else NIC.

        Empty when they are the same GPU.
        """
        if src_gpu == dst_gpu:
            return ()
        src, dst = self.gpus[src_gpu], self.gpus[dst_gpu]
        if self.has_nvlink(src_gpu, dst_gpu):
            return (src.nvlink_out, dst.nvlink_in)
        if src.machine == dst.machine:
            return (src.pcie_up, dst.pcie_down)
        return self.nic_path(src_gpu, dst_gpu)

    def nic_path(self, src_gpu: int, dst_gpu: int) -> LinkPath:
        """Links from one GPU to another through their NICs, wherever they are."""
        src, dst = self.gpus[src_gpu], self.gpus[dst_gpu]
        first = (src.pcie_up, src.nic_out) if src.nic_over_pcie else (src.nic_out,)
        last = (dst.nic_in, dst.pcie_down) if dst.nic_over_pcie else (dst.nic_in,)
        src_leaf, dst_leaf = self.machines[src.machine].leaf, self.machines[dst.machine].leaf
        if src_leaf == dst_leaf or not self.leaf_links:
            return (*first, *last)
        up, down = self.leaf_links[src_leaf][0], self.leaf_links[dst_leaf][1]
        return (*first, up, down, *last)

    def has_nvlink(self, src_gpu: int, dst_gpu: int) -> bool:
        """Both are in one NVLink domain."""
        src, dst = self.gpus[src_gpu], self.gpus[dst_gpu]
        return src.nvlink_domain == dst.nvlink_domain and src.nvlink_out >= 0

    def host_to_gpu_path(self, gpu: int) -> LinkPath:
        """Links of a load from the memory of the GPU's own machine."""
        target = self.gpus[gpu]
        return (self.machines[target.machine].host_read, target.pcie_down)

    def host_to_remote_path(self, machine: int, gpu: int) -> LinkPath:
        """Links of a load from another machine's memory: by the NIC at the GPU's own place there.

        So GPUs of one machine use different NICs of the giver.
        """
        giver, own = self.machines[machine].gpus, self.machines[self.gpus[gpu].machine].gpus
        lane = own.index(gpu) % len(giver)
        path = self.nic_path(giver[lane], gpu)
        if self.gpus[giver[lane]].nic_over_pcie:
            path = path[1:]  # the bytes come from the host, not over the link of the GPU there
        return (self.machines[machine].host_read, *path)

    def gpu_to_host_path(self, gpu: int) -> LinkPath:
        """Links of a write into the memory of the GPU's own machine."""
        source = self.gpus[gpu]
        return (source.pcie_up, self.machines[source.machine].host_write)

    def cxl_to_gpu_path(self, gpu: int) -> LinkPath:
        """Links of a read from the CXL memory of the GPU's machine."""
        target = self.gpus[gpu]
        return (self.machines[target.machine].cxl_read, target.pcie_down)

    def gpu_to_cxl_path(self, gpu: int) -> LinkPath:
        """Links of a write into the CXL memory of the GPU's machine."""
        source = self.gpus[gpu]
        return (source.pcie_up, self.machines[source.machine].cxl_write)

    def ssd_to_host_path(self, gpu: int) -> LinkPath:
        """Links of a read from the GPU's share of the disk into host memory."""
        source = self.gpus[gpu]
        return (source.ssd_read, self.machines[source.machine].host_write)

    def latency_ns(self, path: LinkPath) -> int:
        """Latency of a path: one message between NICs (the slower end's), one host access."""
        return max([self.links[index].latency_ns for index in path], default=0)


GPUS_MAX: Final = 65_536
"""Of one cluster: their links are made in less than two seconds, in 200 MB."""


def build_topology(
    nodes: Sequence[NodeTable],
    gpus: Sequence[GpuFigures],
    *,
    leaf_uplink_gbps: float = 0.0,
    source: str = "config",
) -> Topology:
    """The cluster of the `[[nodes]]` tables; `gpus[i]` are the resolved figures of table i.

    `leaf_uplink_gbps` is the rate of each leaf switch towards the others, per direction;
    0 = never a limit. Raises InputError naming the key that cannot be.
    """
    builder = _Builder()
    for table, (node, figures) in enumerate(zip(nodes, gpus, strict=True)):
        _check_node(node, f"nodes.{table}", source)
        gpus_in_all = len(builder.gpus) + node.count * node.gpus
        if gpus_in_all > GPUS_MAX:
            key = f"nodes.{table}.{'gpus' if node.gpus > node.count else 'count'}"
            problem = f"{gpus_in_all:,} GPUs in all, more than {GPUS_MAX:,}"
            raise InputError(source, None, key, problem)
        for position in range(node.count):
            builder.add_machine(table, position, node, figures)
    if leaf_uplink_gbps > 0:
        builder.add_leaves(_rate(leaf_uplink_gbps))
    return Topology(
        tuple(builder.machines), tuple(builder.gpus), tuple(builder.links), builder.leaf_links
    )


def _check_node(node: NodeTable, key: str, source: str) -> None:
    if node.nvlink_gbps < 0 and node.nvlink_gbps != -1:
        raise InputError(source, None, f"{key}.nvlink_gbps", "must be 0 or more, or -1")
    if node.pcie_gbps <= 0 and node.pcie_gbps != -1:
        raise InputError(source, None, f"{key}.pcie_gbps", "must be above 0, or -1")
    domain = node.nvlink_domain
    if domain and max(domain, node.gpus) % min(domain, node.gpus):
        raise InputError(
            source,
            None,
            f"{key}.nvlink_domain",
            f"{domain} is neither a divisor nor a multiple of the machine's {node.gpus} GPUs",
        )


def _rate(gbps: float) -> int:
    return max(1, round(gbps_to_bytes_per_s(gbps)))


class _Rates(msgspec.Struct, frozen=True):
    """The links of each GPU of a machine: bytes per second."""

    nic: int
    nic_latency_ns: int
    nvlink: int
    """0 = there is none."""
    pcie: int
    ssd: int


def _rates_of(node: NodeTable, figures: GpuFigures) -> _Rates:
    nvlink_gbps = figures.nvlink_gbps if node.nvlink_gbps < 0 else node.nvlink_gbps
    return _Rates(
        _rate(node.nic_gbps),
        round(node.nic_latency_us * NS_PER_US),
        _rate(nvlink_gbps) if nvlink_gbps > 0 else 0,
        _rate(figures.pcie_gbps if node.pcie_gbps < 0 else node.pcie_gbps),
        _rate(node.ssd_gbps),
    )


class _Builder:
    """Numbers machines, GPUs and links while they are added."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self.gpus: list[Gpu] = []
        self.links: list[LinkSpec] = []
        self.leaf_links: dict[str, tuple[int, int]] = {}
        self._domain = -1

    def add_machine(self, table: int, position: int, node: NodeTable, figures: GpuFigures) -> None:
        host_rate = max(1, round(node.host_memory_gbytes_per_s * 1e9))
        host_latency_ns = node.host_memory_latency_ns
        owner = f"machine{len(self.machines)}"
        first_gpu = len(self.gpus)
        machine = Machine(
            index=len(self.machines),
            table=table,
            leaf=node.leaf,
            gpus=tuple(range(first_gpu, first_gpu + node.gpus)),
            host_read=self._link(owner, LinkKind.HOST_READ, host_rate, host_latency_ns),
            host_write=self._link(owner, LinkKind.HOST_WRITE, host_rate, host_latency_ns),
            cxl_read=self._cxl(owner, LinkKind.CXL_READ, node),
            cxl_write=self._cxl(owner, LinkKind.CXL_WRITE, node),
        )
        self.machines.append(machine)
        pcie = (-1, -1)
        domain_gpus = node.nvlink_domain or node.gpus
        rates = _rates_of(node, figures)
        for slot in range(node.gpus):
            if slot % node.pcie_shared_by == 0:
                pcie = self._pcie(rates)
            if (position * node.gpus + slot) % domain_gpus == 0:
                self._domain += 1
            self.gpus.append(self._gpu(machine, node, figures.name, rates, pcie))

    def _cxl(self, owner: str, kind: LinkKind, node: NodeTable) -> int:
        """A link of the pool of a machine; -1 without one."""
        if node.cxl_gib <= 0:
            return -1
        # Blocks are spread over the devices of the pool, which answer in parallel.
        rate = max(1, round(node.cxl_gbytes_per_s * node.cxl_devices * 1e9))
        return self._link(owner, kind, rate, node.cxl_latency_ns)

    def add_leaves(self, rate: int) -> None:
        for leaf in dict.fromkeys(machine.leaf for machine in self.machines):
            owner = f"leaf.{leaf or 'default'}"
            self.leaf_links[leaf] = (
                self._link(owner, LinkKind.LEAF_UP, rate),
                self._link(owner, LinkKind.LEAF_DOWN, rate),
            )

    def _pcie(self, rates: _Rates) -> tuple[int, int]:
        owner = f"gpu{len(self.gpus)}"
        return (
            self._link(owner, LinkKind.PCIE_DOWN, rates.pcie),
            self._link(owner, LinkKind.PCIE_UP, rates.pcie),
        )

    def _gpu(
        self, machine: Machine, node: NodeTable, name: str, rates: _Rates, pcie: tuple[int, int]
    ) -> Gpu:
        owner = f"gpu{len(self.gpus)}"
        nic_latency_ns = rates.nic_latency_ns
        nvlink = (-1, -1)
        if rates.nvlink:
            nvlink = (
                self._link(owner, LinkKind.NVLINK_OUT, rates.nvlink),
                self._link(owner, LinkKind.NVLINK_IN, rates.nvlink),
            )
        return Gpu(
            index=len(self.gpus),
            kind=name,
            machine=machine.index,
            nvlink_domain=self._domain,
            nic_out=self._link(owner, LinkKind.NIC_OUT, rates.nic, nic_latency_ns),
            nic_in=self._link(owner, LinkKind.NIC_IN, rates.nic, nic_latency_ns),
            nvlink_out=nvlink[0],
            nvlink_in=nvlink[1],
            pcie_down=pcie[0],
            pcie_up=pcie[1],
            ssd_read=self._link(owner, LinkKind.SSD_READ, rates.ssd),
            nic_over_pcie=node.nic_over_pcie,
        )

    def _link(self, owner: str, kind: LinkKind, rate: int, latency_ns: int = 0) -> int:
        index = len(self.links)
        self.links.append(LinkSpec(index, f"{owner}.{kind}", kind, rate, latency_ns))
        return index
