"""Routes: NVLink, PCIe or NICs, by where both ends stand.

Restates `[[nodes]]` of docs/reference/config.md (`nvlink_domain`, `pcie_shared_by`,
`nic_over_pcie`, `leaf`) and which replicas may send weights (`autoscale.prefill_never_sends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth.tape import Record, Tape
from emu.config.schema import CarriedTable

_SENDS_KV: Final = ("prefill", "old_prefill", "aus_prefill", "shutting_prefill")


class Slot(msgspec.Struct, frozen=True):
    """One GPU in its machine."""

    machine: int
    domain: int
    """Number of the group of GPUs joined by NVLink."""
    pcie: str
    """The GPU that names its PCIe link."""
    leaf: str
    is_over_pcie: bool
    """Its NIC is behind that link."""


class Routes:
    """The ways of all transfers."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        links = {record["link"] for record in tape.by_event["link"] if not record["at_ns"]}
        self._links = links
        self._slots: list[Slot] = []
        domain = machine = -1
        for node in tape.config.nodes:
            size = node.nvlink_domain or node.gpus
            for place in range(node.count * node.gpus):
                machine += place % node.gpus == 0
                domain += place % size == 0
                slot = place % node.gpus
                first = len(self._slots) - slot % node.pcie_shared_by
                pcie, over = f"gpu{first}", node.nic_over_pcie
                self._slots.append(Slot(machine, domain, pcie, node.leaf, over))
        self._ways: dict[tuple[int, int], set[tuple[str, ...]]] = {}

    def judge(self) -> None:
        """One transfer after the other."""
        states = {seat.replica: seat.role for seat in self._tape.seats}
        for record in self._tape.of("state", "transfer"):
            if record["event"] == "state":
                states[record["replica"]] = record["to"]
                continue
            for links, _ in record["parts"]:
                self._nics(record, links)
            if min(record.get("source", -1), record.get("destination", -1)) >= 0:
                self._between(record, states[record["source"]])

    def _say(self, record: Record, links: Sequence[str], problem: str) -> None:
        number, kind = record["transfer"], record["kind"]
        self._tape.say(f"T3: transfer {number} ({kind}) goes over {links}, {problem}")

    def _nics(self, record: Record, links: Sequence[str]) -> None:
        """Before a NIC that sends, and after one that receives, is the PCIe link or not."""
        for place, link in enumerate(links):
            owner, _, kind = link.partition(".")
            if kind not in ("nic.out", "nic.in"):
                continue
            slot = self._slots[int(owner[3:])]
            if kind == "nic.in":
                beside, due = links[place + 1 : place + 2], f"{slot.pcie}.pcie.down"
            else:
                beside, due = links[max(0, place - 1) : place], f"{slot.pcie}.pcie.up"
                if beside and beside[0].endswith("host.read"):
                    continue  # the bytes come from the memory of the machine
            self._tape.count("nic_route")
            if (list(beside) == [due]) != slot.is_over_pcie:
                self._say(record, links, f"and nic_over_pcie is {slot.is_over_pcie}")

    def _between(self, record: Record, state: str) -> None:
        """From a GPU of the one replica to a GPU of the other."""
        if record["kind"] == "weights":
            if "after" not in record:
                self._sender(record, state)
            return  # lanes exchange what they have on the machine
        key = source, destination = record["source"], record["destination"]
        if key not in self._ways:
            seats = self._tape.seats
            pairs = [(a, b) for a in seats[source].gpus for b in seats[destination].gpus]
            self._ways[key] = {self._way(a, b) for a, b in pairs}
        for links, _ in record["parts"]:
            self._tape.count("route")
            if tuple(links) not in self._ways[key]:
                self._say(record, links, f"no way from replica {source} to {destination}")

    def _way(self, a: int, b: int) -> tuple[str, ...]:
        one, other = self._slots[a], self._slots[b]
        if a == b:
            return ()
        if one.domain == other.domain and f"gpu{a}.nvlink.out" in self._links:
            return (f"gpu{a}.nvlink.out", f"gpu{b}.nvlink.in")
        if one.machine == other.machine:
            return (f"{one.pcie}.pcie.up", f"{other.pcie}.pcie.down")
        return self._by_nic(a, b)

    def _by_nic(self, a: int, b: int) -> tuple[str, ...]:
        one, other = self._slots[a], self._slots[b]
        up = (f"{one.pcie}.pcie.up",) if one.is_over_pcie else ()
        down = (f"{other.pcie}.pcie.down",) if other.is_over_pcie else ()
        leaves: tuple[str, ...] = ()
        if one.leaf != other.leaf and self._tape.config.network.leaf_uplink_gbps > 0:
            names = f"leaf.{one.leaf or 'default'}", f"leaf.{other.leaf or 'default'}"
            leaves = (f"{names[0]}.uplink", f"{names[1]}.downlink")
        return (*up, f"gpu{a}.nic.out", *leaves, f"gpu{b}.nic.in", *down)

    def _sender(self, record: Record, state: str) -> None:
        """Prefill replicas keep their NICs for KV, if they are to."""
        table = self._tape.config.autoscale
        if not isinstance(table, CarriedTable) or not table.prefill_never_sends:
            return
        self._tape.count("sender")
        if state in _SENDS_KV and any(
            link.endswith("nic.out") for links, _ in record["parts"] for link in links
        ):
            self._tape.say(
                f"T6: replica {record['source']} is {state} and sends weights at "
                f"{record['at_ns']} ns, with prefill_never_sends"
            )
