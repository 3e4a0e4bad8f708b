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
from collections.abc import Iterator, Sequence
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


_Figures = tuple[LinkKind, int, int]
"""Of a link: its kind, bytes per second, latency in ns."""


class Links:
    """The links of a cluster, by index: figures, of which a specification is made when one asks."""

    def __init__(self) -> None:
        self._figures: list[_Figures] = []
        self._owners: list[str] = []

    def __getitem__(self, index: int) -> LinkSpec:
        kind, rate, latency_ns = self._figures[index]
        return LinkSpec(index, f"{self._owners[index]}.{kind}", kind, rate, latency_ns)

    def __iter__(self) -> Iterator[LinkSpec]:
        return map(self.__getitem__, range(len(self._figures)))

    def __len__(self) -> int:
        return len(self._figures)

    def bytes_per_s(self, index: int) -> int:
        """The rate of one link."""
        return self._figures[index][1]

    @property
    def rates(self) -> list[int]:
        """Bytes per second of each."""
        return [rate for _, rate, _ in self._figures]

    def add(self, owner: str, figures: Sequence[_Figures]) -> int:
        """Links of a GPU, a machine or a leaf; the index of the first."""
        first = len(self._figures)
        self._figures.extend(figures)
        self._owners.extend([owner] * len(figures))
        return first


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
    links: Links
    leaf_links: dict[str, tuple[int, int]]
    """(uplink, downlink) of each leaf switch that has a limit."""

    @property
    def link_rates(self) -> list[int]:
        """Bytes per second of every link, by index: what a `FlowTable` is made from."""
        return self.links.rates

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
        own = _own_links(node, figures)
        for position in range(node.count):
            builder.add_machine(table, position, node, figures.name, own)
    if leaf_uplink_gbps > 0:
        builder.add_leaves(_rate(leaf_uplink_gbps))
    return Topology(tuple(builder.machines), tuple(builder.gpus), builder.links, builder.leaf_links)


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


class _Own(msgspec.Struct, frozen=True):
    """Figures of the links of a machine's parts."""

    host: list[_Figures]
    """Reads and writes of the memory; then those of the CXL pool, if there is one."""
    pcie: list[_Figures]
    """Of GPUs that share them."""
    gpu: list[_Figures]
    """Of each GPU: NVLink, if there is any, NIC and disk."""


def _own_links(node: NodeTable, figures: GpuFigures) -> _Own:
    host_rate = max(1, round(node.host_memory_gbytes_per_s * 1e9))
    kinds = [LinkKind.HOST_READ, LinkKind.HOST_WRITE]
    host = [(kind, host_rate, node.host_memory_latency_ns) for kind in kinds]
    if node.cxl_gib > 0:
        # Blocks are spread over the devices of the pool, which answer in parallel.
        cxl_rate = max(1, round(node.cxl_gbytes_per_s * node.cxl_devices * 1e9))
        kinds = [LinkKind.CXL_READ, LinkKind.CXL_WRITE]
        host += [(kind, cxl_rate, node.cxl_latency_ns) for kind in kinds]
    pcie_rate = _rate(figures.pcie_gbps if node.pcie_gbps < 0 else node.pcie_gbps)
    nic_rate, nic_latency_ns = _rate(node.nic_gbps), round(node.nic_latency_us * NS_PER_US)
    gpu = [(kind, nic_rate, nic_latency_ns) for kind in (LinkKind.NIC_OUT, LinkKind.NIC_IN)]
    gpu.append((LinkKind.SSD_READ, _rate(node.ssd_gbps), 0))
    nvlink_gbps = figures.nvlink_gbps if node.nvlink_gbps < 0 else node.nvlink_gbps
    if nvlink_gbps > 0:
        kinds = [LinkKind.NVLINK_OUT, LinkKind.NVLINK_IN]
        gpu = [(kind, _rate(nvlink_gbps), 0) for kind in kinds] + gpu
    pcie = [(kind, pcie_rate, 0) for kind in (LinkKind.PCIE_DOWN, LinkKind.PCIE_UP)]
    return _Own(host, pcie, gpu)


class _Builder:
    """Numbers machines, GPUs and links while they are added."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self.gpus: list[Gpu] = []
        self.links = Links()
        self.leaf_links: dict[str, tuple[int, int]] = {}
        self._domain = -1

    def add_machine(self, table: int, position: int, node: NodeTable, name: str, own: _Own) -> None:
        """The machine at a position of its table; its GPUs are called `name`."""
        at, first_gpu = len(self.machines), len(self.gpus)
        host = self.links.add(f"machine{at}", own.host)
        has_cxl, has_nvlink = len(own.host) > 2, len(own.gpu) > 3
        machine = Machine(
            index=at,
            table=table,
            leaf=node.leaf,
            gpus=tuple(range(first_gpu, first_gpu + node.gpus)),
            host_read=host,
            host_write=host + 1,
            cxl_read=host + 2 if has_cxl else -1,
            cxl_write=host + 3 if has_cxl else -1,
        )
        self.machines.append(machine)
        pcie = -1
        domain_gpus = node.nvlink_domain or node.gpus
        for slot in range(node.gpus):
            owner = f"gpu{first_gpu + slot}"
            if slot % node.pcie_shared_by == 0:
                pcie = self.links.add(owner, own.pcie)
            if (position * node.gpus + slot) % domain_gpus == 0:
                self._domain += 1
            first = self.links.add(owner, own.gpu)
            nic = first + 2 * has_nvlink
            gpu = Gpu(
                index=first_gpu + slot,
                kind=name,
                machine=at,
                nvlink_domain=self._domain,
                nic_out=nic,
                nic_in=nic + 1,
                nvlink_out=first if has_nvlink else -1,
                nvlink_in=first + 1 if has_nvlink else -1,
                pcie_down=pcie,
                pcie_up=pcie + 1,
                ssd_read=nic + 2,
                nic_over_pcie=node.nic_over_pcie,
            )
            self.gpus.append(gpu)

    def add_leaves(self, rate: int) -> None:
        """Both links of each leaf switch."""
        for leaf in dict.fromkeys(machine.leaf for machine in self.machines):
            kinds = (LinkKind.LEAF_UP, LinkKind.LEAF_DOWN)
            figures = [(kind, rate, 0) for kind in kinds]
            first = self.links.add(f"leaf.{leaf or 'default'}", figures)
            self.leaf_links[leaf] = first, first + 1
