"""Transfers: the bytes that go, and when they arrive.

Bytes of KV follow from the tokens of the requests that moved, those of weights from what equal
replicas load. Times come from the fluid model (`links`) with the rates that the configuration and
the faults in force give each link.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from typing import Final

from emu.apps.chaos.truth.links import Fluid, Stream, bytes_per_s
from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape
from emu.apps.chaos.truth.windows import Windows

_SLACK_NS: Final = 4
_CHAIN_SLACK_NS: Final = 200
"""Where some transfers follow others: the instant at which one has caught up is not exact here."""
_CUT_CHAIN_SLACK_NS: Final = 100_000
"""And where a partition stops a link of a chain: those behind it run dry one after the other."""
_NEAR: Final = 0.01
"""Norms and biases are left out of what a rank weighs."""
_LEAF_ENDS: Final = ("uplink", "downlink")
_ENDS: Final = {"pcie": ("up", "down"), "nvlink": ("out", "in")}
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

    def _rates(self) -> list[tuple[int, dict[str, float]]]:
        """Rates at the start, and every change of one, by the configuration; told ones agree."""
        tape = self._tape
        told = tape.link_rates()
        wanted = self._configured()
        edges: dict[int, dict[str, float]] = defaultdict(dict)
        for link, changes in told.items():
            base = self._base[link] = changes[0][1]
            tape.count("link_rate")
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
                tape.count("link_rate")
                if now and abs(now[0] - rate) > 1 + 1e-9 * rate:
                    tape.say(f"T1: {link} carries {now[0]} bytes/s at {at_ns} ns, should {rate}")
                elif not now:
                    tape.say(f"T1: {link} does not change at {at_ns} ns, should carry {rate}")
                edges[at_ns][link] = rate
            for at_ns, bare in changes[1:]:
                tape.count("link_rate")
                if at_ns not in times:
                    tape.say(f"T1: {link} changes at {at_ns} ns to {bare} bytes/s, without cause")
                    edges[at_ns][link] = bare
        return sorted(edges.items())

    def _configured(self) -> dict[str, int]:
        """What the configuration says of links by their names."""
        wanted: dict[str, int] = {}
        late = self._latencies
        uplink_gbps = self._tape.config.network.leaf_uplink_gbps
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
                    late |= dict.fromkeys(
                        (f"machine{machine}.cxl.read", f"machine{machine}.cxl.write"),
                        node.cxl_latency_ns,
                    )
                if uplink_gbps > 0:
                    ends = (f"leaf.{node.leaf or 'default'}.{end}" for end in _LEAF_ENDS)
                    wanted |= dict.fromkeys(ends, bytes_per_s(uplink_gbps))
                for _ in range(node.gpus):
                    for kind, gbps in (("pcie", node.pcie_gbps), ("nvlink", node.nvlink_gbps)):
                        if gbps > 0:  # else that of the GPU
                            ends = (f"gpu{gpu}.{kind}.{end}" for end in _ENDS[kind])
                            wanted |= dict.fromkeys(ends, bytes_per_s(gbps))
                    nic = bytes_per_s(node.nic_gbps)
                    wanted |= dict.fromkeys((f"gpu{gpu}.nic.out", f"gpu{gpu}.nic.in"), nic)
                    nic_ns = round(node.nic_latency_us * 1000)
                    late |= dict.fromkeys((f"gpu{gpu}.nic.out", f"gpu{gpu}.nic.in"), nic_ns)
                    wanted[f"gpu{gpu}.ssd.read"] = bytes_per_s(node.ssd_gbps)
                    gpu += 1
                machine += 1
        return wanted

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
        self._tape.count("parts")
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
        self._tape.count("hidden_bytes")
        if record["latency_ns"] < due_ns:
            told_ns = record["latency_ns"]
            self._tape.say(f"T3: transfer {number} is {told_ns} ns late, should be {due_ns}")
        hidden = record.get("overlapped_bytes", 0)
        if hidden:
            whole = hidden + record["bytes"]
            layers = self._tape.seats[record["source"]].layers
            self._tape.count("hidden_bytes")
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
            self._tape.count("ends_of_route")
            if links and last not in ins and not is_shared:
                self._tape.say(f"T3: transfer {record['transfer']} ends on {links[-1]}")
            if source >= 0 and links:
                first = links[0].partition(".")[0]
                outs = {f"gpu{gpu}" for gpu in seats[source].gpus}
                self._tape.count("ends_of_route")
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
        self._tape.count("arrival_of_bytes")
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
            self._tape.count("arrival_of_bytes")
            if record["how"] != "never_began" and abs(moved - told) > slack:
                self._tape.say(
                    f"T3: transfer {number} had moved {told} bytes at its end, should {moved:.0f}"
                )
            return
        what = f"transfer {number} ({start['kind']}, {start['bytes']} bytes)"
        if due_ns is None:
            moved = sum(stream.done for stream in self._streams[number])
            self._tape.count("arrival_of_bytes")
            if start["bytes"] - moved > self._slack_bytes(number):
                self._tape.say(f"T3: {what} arrives at {at_ns} ns with {moved:.0f} bytes moved")
            self._fluid.stop(number)
            return
        late_ns = at_ns - due_ns - start["latency_ns"]
        least_ns, most_ns = self._extra(start, due_ns)
        self._tape.count("arrival_of_bytes")
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
            self._tape.count("never_ends")
            if (
                number not in self._over
                and due_ns + latency_ns + self._slack_ns < self._tape.end_ns
            ):
                self._tape.say(
                    f"T3: transfer {number} should arrive at {due_ns} ns, and never does"
                )

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
        due: Counter[int] = Counter()
        for record in self._tape.by_event["batch"]:
            due[record["at_ns"]] += sum(size for _, _, size, _ in record.get("recalls", ()))
            token_bytes = self._tape.seats[record["replica"]].kv_token_bytes
            seat = self._tape.seats[record["replica"]]
            for row, _, size, tokens in record.get("recalls", ()):
                if seat.is_hybrid:
                    self._recalls_states(seat, row, size, tokens)
                    continue
                blocks, rest = divmod(size, step * token_bytes)
                self._tape.count("recall_bytes")
                if rest or not tokens <= blocks * step < tokens + 2 * step:
                    self._tape.say(
                        f"T3: row {row} reads {size} bytes from a tier for {tokens} tokens of "
                        f"{token_bytes}, in blocks of {step}"
                    )
        moved: Counter[int] = Counter()
        for record in self._tape.by_event["transfer"]:
            if record["kind"] == "kv_recall":
                moved[record["at_ns"]] += record["bytes"]
        for at_ns in due | moved:
            self._tape.count("recall_bytes")
            if due[at_ns] != moved[at_ns]:
                told = f"tiers send {moved[at_ns]} bytes at {at_ns} ns"
                self._tape.say(f"T3: {told}, batches ask for {due[at_ns]}")

    def _recalls_states(self, seat: Seat, row: int, size: int, tokens: int) -> None:
        """Whole pages, and one state."""
        self._tape.count("recall_bytes")
        due = tokens * seat.kv_token_bytes + seat.state_bytes
        if size != due or tokens % seat.page_tokens:
            self._tape.say(
                f"T3: row {row} reads {size} bytes from a tier for {tokens} tokens and a state, "
                f"should read {due}"
            )

    def _kv(
        self,
        record: Record,
        tokens: dict[int, list[int]],
        layers: dict[int, set[int]],
        arrived: dict[tuple[int, int, int], list[Record]],
    ) -> None:
        tape, seat = self._tape, self._tape.seats[record["source"]]
        block = seat.page_tokens
        token_bytes = seat.kv_token_bytes * tape.seats[record["destination"]].kv_copies

        def whole_at(at_ns: int) -> int:
            reached = [
                tape.arrived[row]["prompt"] + max(1, bisect_right(tokens[row], at_ns))
                for row in record["rows"]
            ]
            blocks = sum(-(-one // block) for one in reached)
            return int(blocks * block * token_bytes + len(reached) * seat.state_bytes)

        allowed = {whole_at(record["at_ns"])}
        splits = set().union(*(layers[row] for row in record["rows"]))
        if splits:  # a half may leave before the token that the other layers bring
            key = record["at_ns"], record["source"], record["destination"]
            for whole in {whole_at(start["at_ns"]) for start in arrived[key]} | allowed:
                for split in splits:
                    allowed |= {whole * split // seat.layers, whole - whole * split // seat.layers}
        tape.count("kv_bytes")
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
                    self._tape.count("weight_bytes")
                    if abs(size / whole - 1) > _NEAR:
                        self._tape.say(
                            f"T3: {size} bytes of weights came to replica {seat.replica} by "
                            f"{record['at_ns']} ns, should {whole}: {dict(sizes)}"
                        )
