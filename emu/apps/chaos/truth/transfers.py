"""Every transfer: over which links it went, how many bytes it moved, when it had to arrive."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth import Record, Tape
from emu.apps.chaos.truth.windows import Windows
from emu.config.schema import CarriedTable

# --- routes: NVLink, PCIe or NICs, by where both ends stand ---------------------------------------
# Restates `[[nodes]]` of docs/reference/config.md (`nvlink_domain`, `pcie_shared_by`,
# `nic_over_pcie`, `leaf`) and which replicas may send weights (`autoscale.prefill_never_sends`).

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
        if (
            not isinstance(table, CarriedTable)
            or not table.prefill_never_sends
            or state not in _SENDS_KV
        ):
            return
        if any(link.endswith("nic.out") for links, _ in record["parts"] for link in links):
            self._tape.say(
                f"T6: replica {record['source']} is {state} and sends weights at "
                f"{record['at_ns']} ns, with prefill_never_sends"
            )


# --- links: a slow fluid model, worked out from scratch at each change ----------------------------
# Restates the rules of docs/model.md (network) in floating point: flows share every link max-min
# fairly, a flow is over in the first whole nanosecond in which all its bytes are through, and what
# follows another transfer stays a chunk behind it. Sizes are small (a world has some hundred
# transfers), so each change costs all flows again.

_TINY_BYTES: Final = 1e-4
_FOREVER: Final = math.inf


class Stream(msgspec.Struct, eq=False):
    """One part of a transfer."""

    transfer: int
    links: tuple[str, ...]
    size: float
    feeder: Stream | None = None
    lag: float = 0.0
    """Bytes that it stays behind its feeder."""
    done: float = 0.0
    rate: float = 0.0
    is_cut: bool = False
    is_over: bool = False

    @property
    def left(self) -> float:
        """Bytes still to move."""
        return self.size - self.done

    def room(self) -> float:
        """How far it may go before it is as near to its feeder as it may come."""
        feeder = self.feeder
        if feeder is None or feeder.is_over:
            return _FOREVER
        return feeder.done - self.lag - self.done


class Fluid:
    """All streams that are under way, at one instant."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.rates: dict[str, float] = {}
        """Bytes per nanosecond of each link."""
        self.streams: list[Stream] = []
        self._is_stale = False

    def set_rate(self, link: str, bytes_per_s: float) -> None:
        """A link carries so much from now on."""
        self.rates[link] = bytes_per_s / 1e9
        self._is_stale = True

    def start(self, streams: Iterable[Stream]) -> None:
        """These set out now."""
        self.streams += streams
        self._is_stale = True

    def stop(self, transfer: int) -> None:
        """What is left of a transfer does not come."""
        self.streams = [s for s in self.streams if s.transfer != transfer]
        self._is_stale = True

    def changed(self) -> None:
        """Something else about the streams has changed."""
        self._is_stale = True

    def advance(self, to_ns: int) -> list[tuple[int, Stream]]:
        """Move time on; the streams that end on the way, each with its last nanosecond."""
        ended: list[tuple[int, Stream]] = []
        while True:
            if self._is_stale:
                self._share()
                self._is_stale = False
            next_ns = self._next_ns()
            step_ns = min(float(to_ns), next_ns) - self.now_ns
            if step_ns > 0:
                for stream in self.streams:
                    stream.done += stream.rate * step_ns
                self.now_ns = int(min(float(to_ns), next_ns))
            over = [s for s in self.streams if s.left <= _slack(s) and self.now_ns <= to_ns]
            for stream in over:
                stream.done, stream.is_over = stream.size, True
                ended.append((self.now_ns, stream))
            if over:
                self.streams = [s for s in self.streams if not s.is_over]
                self._is_stale = True
            if next_ns > to_ns and not over:
                return ended
            if next_ns <= to_ns:
                self._is_stale = True

    def _next_ns(self) -> float:
        """The first whole nanosecond at which a stream ends, or comes up with its feeder."""
        at = _FOREVER
        for stream in self.streams:
            if stream.rate > 0:
                at = min(at, self.now_ns + max(1.0, math.ceil(_after(stream.left, stream.rate))))
            feeder, room = stream.feeder, stream.room()
            if feeder is None or feeder.is_over:
                continue
            near = self._near(stream)
            if room > near and stream.rate > feeder.rate:
                after = math.ceil((room - near) / (stream.rate - feeder.rate))
                at = min(at, self.now_ns + max(1.0, after))
            elif self._waits(stream) and feeder.rate > 0:
                ahead = near if stream.done else 0.0
                at = min(at, self.now_ns + max(1.0, math.ceil((-room - ahead) / feeder.rate)))
        return at

    def _waits(self, stream: Stream) -> bool:
        """It is too near to its feeder: not a byte too early at its start, a few ns later on."""
        ahead = self._near(stream) if stream.done else 0.0
        return stream.room() < -ahead - _TINY_BYTES

    def _near(self, stream: Stream) -> float:
        """What its links carry in a few nanoseconds: so near to its feeder is come up with it."""
        return _TINY_BYTES + 2 * min((self.rates[link] for link in stream.links), default=0.0)

    def _share(self) -> None:
        """Max-min: all rates rise together until a link of theirs is full."""
        free = dict(self.rates)
        rising: list[Stream] = []
        for stream in self.streams:
            stream.rate = 0.0
            is_down = any(self.rates[link] <= 0 for link in stream.links)
            if not (stream.is_cut or is_down or self._waits(stream) or not stream.links):
                rising.append(stream)
        rising = self._free_of_feeders(rising)
        while rising:
            users: dict[str, int] = {}
            for stream in rising:
                for link in stream.links:
                    users[link] = users.get(link, 0) + 1
            rise = min(free[link] / count for link, count in users.items())
            full = {
                link for link, count in users.items() if free[link] / count <= rise * (1 + 1e-12)
            }
            for stream in rising:
                stream.rate += rise
            for link, count in users.items():
                free[link] = max(0.0, free[link] - rise * count)
            kept = [s for s in rising if not full.intersection(s.links)]
            rising = self._free_of_feeders(kept)

    def _free_of_feeders(self, rising: list[Stream]) -> list[Stream]:
        """Streams that have not come up with a feeder that rises no more."""
        while True:
            stuck = [
                s
                for s in rising
                if s.feeder is not None
                and not s.feeder.is_over
                and s.room() <= self._near(s) + _TINY_BYTES
                and all(s.feeder is not other for other in rising)
            ]
            if not stuck:
                return rising
            rising = [s for s in rising if s not in stuck]


def _after(size: float, rate: float) -> float:
    """Nanoseconds for so many bytes, less what rounding has added."""
    return size / rate - 1e-6


def _slack(stream: Stream) -> float:
    """So few bytes are no bytes."""
    return max(_TINY_BYTES, 1e-12 * stream.size) if stream.links else _FOREVER


def bytes_per_s(gbps: float) -> int:
    """A rate that is quoted in 1e9 bits per second."""
    return max(1, round(gbps * 1e9 / 8))


# --- transfers: bytes and times -------------------------------------------------------------------
# Bytes of KV follow from the tokens of the requests that moved, those of weights from what equal
# replicas load. Times come from the fluid model (`links`) with the rates that the configuration and
# the faults in force give each link.

_SLACK_NS: Final = 4
_CHAIN_SLACK_NS: Final = 200
"""Where some transfers follow others: the instant at which one has caught up is not exact here."""
_CUT_CHAIN_SLACK_NS: Final = 100_000
"""And where a partition stops a link of a chain: those behind it run dry one after the other."""
_NEAR: Final = 0.01
"""Norms and biases are left out of what a rank weighs."""
_OWN_ROUTE: Final = ("host.", "ssd.", "cxl.", "pcie.")


class Transfers:
    """All transfers of a run."""

    def __init__(self, tape: Tape, windows: Windows) -> None:
        self._tape = tape
        self._windows = windows
        self._fluid = Fluid()
        self._base: dict[str, int] = {}
        self._latencies: dict[str, int] = {}
        """Of links, as configured, ns."""
        self._streams: dict[int, list[Stream]] = {}
        self._left: dict[int, int] = {}
        self._start: dict[int, Record] = {}
        self._due_ns: dict[int, int] = {}
        """When the last byte of each transfer is through (its report comes a latency later)."""
        self._over: set[int] = set()
        is_chained = any("after" in record for record in tape.by_event["transfer"])
        self._slack_ns = _CHAIN_SLACK_NS if is_chained else _SLACK_NS

    def judge(self) -> None:
        """Routes, bytes and times."""
        edges = deque(self._rates())
        for record in self._tape.records:
            while edges and edges[0][0] <= record["at_ns"]:
                at_ns, changes = edges.popleft()
                self._advance(at_ns)
                for link, rate in changes.items():
                    self._fluid.set_rate(link, rate)
            event = record["event"]
            if event == "transfer":
                self._advance(record["at_ns"])
                self._begin(record)
            elif event == "transfer_over":
                self._advance(record["at_ns"])
                self._end(record)
            elif event == "partition":
                self._advance(record["at_ns"])
                self._part(tuple(record["pair"]), record["is_cut"])
        self._never()
        self._judge_bytes()

    def _advance(self, to_ns: int) -> None:
        for at_ns, stream in self._fluid.advance(to_ns):
            self._left[stream.transfer] -= 1
            if not self._left[stream.transfer]:
                self._due_ns[stream.transfer] = at_ns

    # --- links --------------------------------------------------------------------------------
    def _rates(self) -> list[tuple[int, dict[str, float]]]:
        """Rates at the start, and every change of one, by the configuration; told ones agree."""
        tape = self._tape
        told: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for record in tape.by_event["link"]:
            if "bytes_per_s" in record:
                told[record["link"]].append((record["at_ns"], record["bytes_per_s"]))
        wanted = self._configured()
        edges: dict[int, dict[str, float]] = defaultdict(dict)
        for link, changes in told.items():
            base = self._base[link] = changes[0][1]
            if link in wanted and base != wanted[link]:
                tape.say(f"T3: {link} carries {base} bytes/s, {wanted[link]} are configured")
            self._fluid.set_rate(link, base)
            spans = [
                (span, factor)
                for span, names, factor in self._windows.factors
                if link.startswith(names) and span.since_ns < tape.end_ns
            ]
            if self._windows.has_swizzle and ".n" in link:
                for at_ns, bare in changes[1:]:
                    edges[at_ns][link] = bare
                continue
            times = {t for span, _ in spans for t in (span.since_ns, span.until_ns)}
            for at_ns in sorted(t for t in times if t < tape.end_ns):
                rate = float(base)
                for span, factor in spans:
                    if span.holds(at_ns):
                        rate *= factor
                rate = float(max(1, int(rate))) if rate else 0.0
                now = [r for t, r in changes[1:] if t == at_ns][-1:]
                if now and abs(now[0] - rate) > 1 + 1e-9 * rate:
                    tape.say(f"T1: {link} carries {now[0]} bytes/s at {at_ns} ns, should {rate}")
                elif not now:
                    tape.say(f"T1: {link} does not change at {at_ns} ns, should carry {rate}")
                edges[at_ns][link] = rate
            for at_ns, bare in changes[1:]:
                if at_ns not in times:
                    tape.say(f"T1: {link} changes at {at_ns} ns to {bare} bytes/s, without cause")
                    edges[at_ns][link] = bare
        return sorted(edges.items())

    def _configured(self) -> dict[str, int]:
        """What the configuration says of links by their names."""
        wanted: dict[str, int] = {}
        late = self._latencies
        gpu = machine = 0
        for node in self._tape.config.nodes:
            for _ in range(node.count):
                host = round(node.host_memory_gbytes_per_s * 1e9)
                wanted |= dict.fromkeys(
                    (f"machine{machine}.host.read", f"machine{machine}.host.write"), host
                )
                late |= dict.fromkeys(
                    (f"machine{machine}.host.read", f"machine{machine}.host.write"),
                    node.host_memory_latency_ns,
                )
                if node.cxl_gib > 0:
                    cxl = max(1, round(node.cxl_gbytes_per_s * node.cxl_devices * 1e9))
                    wanted |= dict.fromkeys(
                        (f"machine{machine}.cxl.read", f"machine{machine}.cxl.write"), cxl
                    )
                for _ in range(node.gpus):
                    nic = bytes_per_s(node.nic_gbps)
                    wanted |= dict.fromkeys((f"gpu{gpu}.nic.out", f"gpu{gpu}.nic.in"), nic)
                    nic_ns = round(node.nic_latency_us * 1000)
                    late |= dict.fromkeys((f"gpu{gpu}.nic.out", f"gpu{gpu}.nic.in"), nic_ns)
                    wanted[f"gpu{gpu}.ssd.read"] = bytes_per_s(node.ssd_gbps)
                    gpu += 1
                machine += 1
        return wanted

    # --- times --------------------------------------------------------------------------------
    def _begin(self, record: Record) -> None:
        number = record["transfer"]
        self._start[number] = record
        feeders = self._streams.get(record.get("after", -1))
        streams = [
            Stream(
                number,
                tuple(links),
                float(size),
                feeder=None if feeders is None else feeders[index],
                lag=float(record.get("lag_bytes", 0)),
            )
            for index, (links, size) in enumerate(record["parts"])
        ]
        self._streams[number] = streams
        self._left[number] = len(streams)
        pair = (record.get("source", -1), record.get("destination", -1))
        for stream in streams:
            stream.is_cut = self._is_cut(pair)
        total = sum(size for _, size in record["parts"])
        if total != record["bytes"]:
            self._tape.say(f"T3: transfer {number} of {record['bytes']} bytes has parts of {total}")
        self._route(record)
        self._delays(record)
        self._fluid.start(streams)

    def _delays(self, record: Record) -> None:
        """A path is as late as its latest link, or later; the last layer is never hidden."""
        number, due_ns = record["transfer"], 0
        for links, _ in record["parts"]:
            due_ns = max([due_ns, *(self._latencies.get(link, 0) for link in links)])
        if record["latency_ns"] < due_ns:
            told_ns = record["latency_ns"]
            self._tape.say(f"T3: transfer {number} is {told_ns} ns late, should be {due_ns}")
        hidden = record.get("overlapped_bytes", 0)
        if hidden:
            whole = hidden + record["bytes"]
            layers = self._tape.seats[record["source"]].layers
            if record["bytes"] < whole // layers:
                self._tape.say(f"T3: transfer {number} of {whole} bytes hides {hidden} of them")

    def _route(self, record: Record) -> None:
        """KV and weights between replicas leave GPUs of the one and reach GPUs of the other."""
        source, destination = record.get("source", -1), record.get("destination", -1)
        if destination < 0:
            return
        seats = self._tape.seats
        ins = {f"gpu{gpu}" for gpu in seats[destination].gpus}
        for links, _ in record["parts"]:
            last = links[-1].partition(".")[0] if links else ""
            is_shared = links and links[-1].partition(".")[2].startswith(_OWN_ROUTE)
            if links and last not in ins and not is_shared:
                self._tape.say(f"T3: transfer {record['transfer']} ends on {links[-1]}")
            if source >= 0 and links:
                first = links[0].partition(".")[0]
                outs = {f"gpu{gpu}" for gpu in seats[source].gpus}
                if first not in outs and not links[0].partition(".")[2].startswith(_OWN_ROUTE):
                    self._tape.say(f"T3: transfer {record['transfer']} begins on {links[0]}")

    def _is_cut(self, pair: tuple[int, int]) -> bool:
        now_ns = self._fluid.now_ns
        return any(span.holds(now_ns) and cut == pair for span, cut in self._windows.cuts)

    def _part(self, pair: tuple[int, ...], is_cut: bool) -> None:
        for number, record in self._start.items():
            if (record.get("source"), record.get("destination")) == pair:
                for stream in self._streams[number]:
                    stream.is_cut = is_cut
        self._fluid.changed()

    def _end(self, record: Record) -> None:
        number, at_ns = record["transfer"], record["at_ns"]
        start = self._start.get(number)
        if start is None:
            self._tape.say(f"T3: transfer {number} is over, and never began")
            return
        if number in self._over:
            return  # it had arrived; its owner hears of it in another way, or not at all
        self._over.add(number)
        due_ns = self._due_ns.get(number)
        if record["how"] != "arrived":
            self._fluid.stop(number)
            moved = sum(stream.done for stream in self._streams[number])
            told, slack = record["moved_bytes"], self._slack_bytes(number)
            if record["how"] != "never_began" and abs(moved - told) > slack:
                self._tape.say(
                    f"T3: transfer {number} had moved {told} bytes at its end, should {moved:.0f}"
                )
            return
        what = f"transfer {number} ({start['kind']}, {start['bytes']} bytes)"
        if due_ns is None:
            moved = sum(stream.done for stream in self._streams[number])
            if start["bytes"] - moved > self._slack_bytes(number):
                self._tape.say(f"T3: {what} arrives at {at_ns} ns with {moved:.0f} bytes moved")
            self._fluid.stop(number)
            return
        late_ns = at_ns - due_ns - start["latency_ns"]
        least_ns, most_ns = self._extra(start, due_ns)
        if not least_ns - self._slack_ns <= late_ns <= most_ns + self._slack_ns:
            self._tape.say(
                f"T3: {what} arrives at {at_ns} ns, should at {due_ns + start['latency_ns']} ns"
            )

    def _slack_bytes(self, number: int) -> float:
        slack_ns = self._slack_ns
        if "after" in self._start[number] and self._windows.cuts:
            slack_ns = _CUT_CHAIN_SLACK_NS
        return sum(
            slack_ns * min((self._base[link] / 1e9 for link in s.links), default=0.0) + 1
            for s in self._streams[number]
        )

    def _extra(self, start: Record, due_ns: int) -> tuple[int, int]:
        """What faults add to the latency, at least and at most (delays change in between)."""
        longest = 0
        for links, _ in start["parts"]:
            extra = 0
            for link in links:
                extra += sum(
                    delay_ns
                    for span, names, delay_ns in self._windows.delays
                    if link.startswith(names)
                    and span.since_ns <= due_ns + _SLACK_NS
                    and span.until_ns >= due_ns - _SLACK_NS
                )
            longest = max(longest, extra)
        is_sure = all(
            not any(link.startswith(names) for links, _ in start["parts"] for link in links)
            or (span.since_ns + _SLACK_NS < start["at_ns"] and due_ns + _SLACK_NS < span.until_ns)
            for span, names, _ in self._windows.delays
        )
        least = longest if is_sure and len(start["parts"]) == 1 else 0
        return least, max(longest, self._in_order(start, due_ns))

    def _in_order(self, start: Record, due_ns: int) -> int:
        """Reports come in order: one of an earlier layer that a delay holds up holds up the end."""
        if start["kind"] != "weights":
            return 0
        links = {link for links, _ in start["parts"] for link in links}
        before = [
            (span, delay_ns)
            for span, names, delay_ns in self._windows.delays
            if span.since_ns < due_ns and any(link.startswith(names) for link in links)
        ]
        whole_ns = sum(delay_ns for _, delay_ns in before) * len(links)
        return max(
            (min(span.until_ns, due_ns) + whole_ns - due_ns for span, _ in before), default=0
        )

    def _never(self) -> None:
        """What should have arrived long before the end of the run, and did not."""
        self._advance(self._tape.end_ns)
        if self._windows.delays:
            return
        for number, due_ns in self._due_ns.items():
            latency_ns = self._start[number]["latency_ns"]
            if (
                number not in self._over
                and due_ns + latency_ns + self._slack_ns < self._tape.end_ns
            ):
                self._tape.say(
                    f"T3: transfer {number} should arrive at {due_ns} ns, and never does"
                )

    # --- bytes --------------------------------------------------------------------------------
    def _judge_bytes(self) -> None:
        """KV in whole blocks of all that a request has reached; equal replicas, equal weights."""
        tape = self._tape
        tokens: dict[int, list[int]] = defaultdict(list)
        arrived: dict[tuple[int, int, int], list[Record]] = defaultdict(list)
        layers: dict[int, set[int]] = defaultdict(set)
        for record in tape.records:
            event = record["event"]
            if event == "tokens":
                for row in record["rows"]:
                    tokens[row] += record["ends"]
            elif event == "batch" and "first_layer" in record:
                for row, _, _ in record["members"]:
                    layers[row].add(record["first_layer"])
            elif event == "transfer_over" and record["how"] == "arrived":
                start = self._start[record["transfer"]]
                if start["kind"] == "kv" and "source" in start:
                    key = record["at_ns"], start["source"], start["destination"]
                    arrived[key].append(start)
            elif event == "migrated" and "kv_bytes" in record:
                self._kv(record, tokens, layers, arrived)
        self._recalls()
        self._weights()

    def _recalls(self) -> None:
        """What is read from a lower tier: whole blocks of it around the tokens that are there."""
        step = self._tape.config.network.tier_block_tokens
        for record in self._tape.by_event["batch"]:
            token_bytes = self._tape.seats[record["replica"]].kv_token_bytes
            for row, _, size, tokens in record.get("recalls", ()):
                blocks, rest = divmod(size, step * token_bytes)
                if rest or not tokens <= blocks * step < tokens + 2 * step:
                    self._tape.say(
                        f"T3: row {row} reads {size} bytes from a tier for {tokens} tokens of "
                        f"{token_bytes}, in blocks of {step}"
                    )

    def _kv(
        self,
        record: Record,
        tokens: dict[int, list[int]],
        layers: dict[int, set[int]],
        arrived: dict[tuple[int, int, int], list[Record]],
    ) -> None:
        tape, seat = self._tape, self._tape.seats[record["source"]]
        block = seat.scheduler.block_size

        def whole_at(at_ns: int) -> int:
            reached = [
                tape.arrived[row]["prompt"] + max(1, bisect_right(tokens[row], at_ns))
                for row in record["rows"]
            ]
            blocks = sum(-(-one // block) for one in reached)
            return int(blocks * block * seat.kv_token_bytes)

        allowed = {whole_at(record["at_ns"])}
        splits = set().union(*(layers[row] for row in record["rows"]))
        if splits:  # a half may leave before the token that the other layers bring
            key = record["at_ns"], record["source"], record["destination"]
            for whole in {whole_at(start["at_ns"]) for start in arrived[key]} | allowed:
                for split in splits:
                    allowed |= {whole * split // seat.layers, whole - whole * split // seat.layers}
        if record["kv_bytes"] not in allowed:
            tape.say(
                f"T3: rows {record['rows']} moved {record['kv_bytes']} bytes of KV at "
                f"{record['at_ns']} ns, should {sorted(allowed)}"
            )
        moved = [
            start["bytes"] + start.get("overlapped_bytes", 0)
            for key, starts in arrived.items()
            if key[1:] == (record["source"], record["destination"])
            for start in starts
        ]
        if record["kv_bytes"] and record["kv_bytes"] not in moved:
            tape.say(f"T3: no transfer of {record['kv_bytes']} bytes brought rows {record['rows']}")

    def _weights(self) -> None:
        """What has come when a replica has its weights: each GPU its part of the model."""
        come: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for record in self._tape.of("state", "transfer", "noted"):
            if record["event"] == "state":
                if record["from"] in ("inactive", "failed"):
                    come.pop(record["replica"], None)
            elif record["event"] == "transfer" and record["kind"] == "weights":
                for links, size in record["parts"]:
                    end = links[-1].partition(".")[0]
                    if end.startswith("gpu"):  # else from a disk to the machine's memory
                        come[record["destination"]][end] += size
            elif record["event"] == "noted" and record["kind"] == "loaded":
                seat = self._tape.seats[int(record["target"].split()[-1])]
                if not seat.rank_bytes or record["text"].startswith("delay"):
                    continue
                sizes = come[seat.replica]
                whole = seat.rank_bytes * len(seat.gpus)
                # GPUs may share the way from their machine's memory; only all of them count then.
                is_apart = all(f"gpu{gpu}" in sizes for gpu in seat.gpus)
                each = [sizes[f"gpu{gpu}"] * len(seat.gpus) for gpu in seat.gpus if is_apart]
                for size in (sum(sizes.values()), *each):
                    if abs(size / whole - 1) > _NEAR:
                        self._tape.say(
                            f"T3: {size} bytes of weights came to replica {seat.replica} by "
                            f"{record['at_ns']} ns, should {whole}: {dict(sizes)}"
                        )
