"""KV that leaves a prefill replica: in which order, how late, and with the first token or without.

Restates docs/disaggregation.md and `[network]` of docs/reference/config.md: batches leave in the
order in which their prompts ended, also those whose transfer failed; a connector adds its time and
that of each block; only layer-wise transfers hide behind their iteration; with
`first_token = "decode"` clients have their first token when its KV is there.
"""

from __future__ import annotations

from collections import defaultdict

from emu.apps.chaos.truth.tape import Record, Tape


class Leaving:
    """All KV that is handed over in a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._waiting: dict[int, dict[int, int]] = defaultdict(dict)
        """By source, when the prompt of each row ended whose KV has not arrived elsewhere."""
        self._got: dict[int, int] = defaultdict(int)
        self._first_ns: dict[int, int] = {}
        self._last: Record = {}
        """The destination that was taken last."""
        self._lane_ns: dict[tuple[int, int], int] = {}
        """What transfers between two replicas take besides, without the connector."""
        self._came_ns: dict[int, list[int]] = defaultdict(list)
        self._took_ns: dict[tuple[int, int], int] = {}
        """What the iteration took that ended at a replica at an instant."""
        self._rates = {link: changes[0][1] for link, changes in tape.link_rates().items()}
        """Of each link as it was at first; faults may strike at the first instant."""
        self._sent: set[int] = set()
        """Rows whose KV has set out once."""
        self._odd: set[int] = set()
        """Rows that were lost, sent elsewhere, or moved while they ran."""

    def judge(self) -> None:
        """Replay what was handed over between fixed replicas."""
        config = self._tape.config
        roles = {seat.role for seat in self._tape.seats}
        if config.autoscale is not None or config.commands or roles != {"prefill", "decode"}:
            return
        self._tape.replay(
            {
                "ran": self._ran,
                "tokens": self._tokens,
                "taken": self._taken,
                "transfer": self._transfer,
                "migrated": self._migrated,
                "ended": self._ended,
                "lost": self._lost,
                "routed": self._lost,
            }
        )

    def _ran(self, record: Record) -> None:
        self._took_ns[record["replica"], record["at_ns"]] = record["at_ns"] - record["start_ns"]

    def _tokens(self, record: Record) -> None:
        source = record["replica"]
        for row in record["rows"]:
            self._got[row] += len(record["ends"])
            self._first_ns.setdefault(row, record["ends"][0])
            if self._tape.seats[source].role == "prefill":
                self._waiting[source][row] = record["ends"][-1]

    def _leave(self, row: int) -> None:
        for rows in self._waiting.values():
            rows.pop(row, None)

    def _taken(self, record: Record) -> None:
        self._last = record
        ended = self._waiting[record["source"]]
        mine = [ended[row] for row in record["rows"] if row in ended]
        if "pinned" in record or not mine:
            return
        before = [
            row
            for row, at_ns in ended.items()
            if at_ns < min(mine) and self._tape.cut_ns.get(row) != record["at_ns"]
        ]
        self._tape.count("leaving_order")
        if before:
            self._tape.say(
                f"T3: rows {record['rows']} leave replica {record['source']} at {record['at_ns']} "
                f"ns before row {before[0]}, whose prompt ended first"
            )

    def _transfer(self, record: Record) -> None:
        """Right after its destination was taken."""
        network, taken = self._tape.config.network, self._last
        if record["kind"] != "kv" or not taken:
            return
        pair = record.get("source", -1), record.get("destination", -1)
        if (taken["source"], taken["destination"], taken["at_ns"]) != (*pair, record["at_ns"]):
            return
        self._last = {}
        self._tape.count("connector")
        if network.kv_transfer != "layerwise" and record.get("overlapped_bytes"):
            self._tape.say(f"T3: transfer {record['transfer']} hides bytes, and is not layer-wise")
        if network.kv_transfer == "layerwise":
            self._hidden(record, taken)
        page = self._tape.seats[pair[0]].page_tokens
        reached = [
            self._tape.arrived[row]["prompt"] + max(1, self._got[row]) for row in taken["rows"]
        ]
        blocks = sum(-(-tokens // page) for tokens in reached)
        setup_ns = round(network.connector_us * 1e3) + blocks * round(
            network.connector_block_us * 1e3
        )
        lane_ns = record["latency_ns"] - setup_ns
        due_ns = self._lane_ns.setdefault(pair, lane_ns)
        if lane_ns != due_ns or lane_ns < 0:
            self._tape.say(
                f"T3: transfer {record['transfer']} of {blocks} blocks is {record['latency_ns']} "
                f"ns late, should be {due_ns + setup_ns}"
            )

    def _hidden(self, record: Record, taken: Record) -> None:
        """While the iteration ran, all layers but the last could leave, at the rate of the way."""
        rows, tape = taken["rows"], self._tape
        ended_ns = self._waiting[record["source"]].get(rows[0], -1)
        took_ns = self._took_ns.get((record["source"], ended_ns))
        links, _ = record["parts"][0]
        is_again = any(row in self._sent for row in rows)
        self._sent.update(rows)
        if took_ns is None or not links or any(link not in self._rates for link in links):
            return
        ends = (tape.seats[record["source"]], tape.seats[record["destination"]])
        rate = min(self._rates[link] for link in links) * min(len(end.gpus) for end in ends)
        layers = ends[0].layers
        told = record.get("overlapped_bytes", 0)
        whole = told + record["bytes"]
        due = min(rate * (took_ns * (layers - 1) // layers) / 1e9, whole - whole // layers)
        is_less = not is_again and not tape.faults and told < due - 1
        tape.count("hidden_part")
        if told > due + 1 or is_less:
            tape.say(
                f"T3: transfer {record['transfer']} hides {told} of {whole} bytes behind {took_ns} "
                f"ns, should {due:.0f}"
            )

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            self._leave(row)
            self._came_ns[row].append(record["at_ns"])
            if record.get("live"):
                self._odd.add(row)

    def _lost(self, record: Record) -> None:
        self._leave(record["row"])
        self._odd.add(record["row"])

    def _ended(self, record: Record) -> None:
        row = record["row"]
        self._leave(row)
        came = self._came_ns[row]
        if row in self._odd or len(came) != 1 or record["status"] != "completed":
            return
        if any(seat.latency.backend != "linear" for seat in self._tape.seats):
            return  # a front end adds its own
        goes = self._tape.config.network.first_token == "decode"
        due_ns = came[0] - self._first_ns[row] if goes else 0
        self._tape.count("first_out")
        if record["first_out"] != due_ns:
            self._tape.say(
                f"T3: the client of row {row} has its first token {record['first_out']} ns after "
                f"it was made, should {due_ns}"
            )
