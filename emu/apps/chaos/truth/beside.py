"""What a step does beside its tokens: loads of adapters, masks of grammars.

Restates docs/lab/adapters.md and "guided decoding" of docs/lab/features.md. Slots and copies of
adapters are followed step by step: what a step needs and does not find takes the place of the one
that was used longest ago, and the batch waits for its load. A constrained request has a mask for
each of its tokens. Counts of the summary follow; what a step spends so is taken from its time, so
that steps with the same tokens, adapters and sequences compare (`costs`).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape, keys_of, to_ns
from emu.documents import DocumentView

_COUNTS: Final = ("cold_loads", "host_loads", "hits")


class Spent(NamedTuple):
    """What a step does beside its tokens."""

    wait_ns: int
    """For loads and masks, whatever the kernels take."""
    adapters: int
    tokens: int
    """New tokens of members with an adapter."""


NOTHING: Final = Spent(0, 0, 0)


class Slots:
    """Adapters of one replica, the least recently used first."""

    def __init__(self, on_gpu: int, on_host: int) -> None:
        """`on_gpu` slots of adapters there, and `on_host` copies in the memory of the machine."""
        self._sizes = on_gpu, on_host
        self._gpu: list[str] = []
        self._host: list[str] = []

    def use(self, names: Sequence[str]) -> Counter[str]:
        """A step needs these: how many it found, and loads from where."""
        found: Counter[str] = Counter()
        for name in names:
            in_host, in_gpu = name in self._host, name in self._gpu
            found["hits" if in_gpu else "host_loads" if in_host else "cold_loads"] += 1
            for place, most in ((self._host, self._sizes[1]), (self._gpu, self._sizes[0])):
                if name in place:
                    place.remove(name)
                elif len(place) >= most:
                    gone = next(other for other in place if other not in names)
                    place.remove(gone)
                    if place is self._host and gone in self._gpu:
                        self._gpu.remove(gone)
                place.append(name)
        return found

    @property
    def on_gpu(self) -> frozenset[str]:
        """Those that have a slot."""
        return frozenset(self._gpu)

    def clear(self) -> None:
        """Its process has ended."""
        self._gpu.clear()
        self._host.clear()


class Beside:
    """All steps of a run."""

    def __init__(self, tape: Tape, lines: Sequence[Record]) -> None:
        self._tape = tape
        self._adapter = _adapters_of(tape, lines)
        self._slots: dict[int, Slots] = {}
        self._of_step: dict[tuple[int, int], Spent] = {}
        self._on_gpu: dict[tuple[int, int], frozenset[str]] = {}
        """Adapters of a replica once a batch of it has been formed."""
        self._counts: Counter[str] = Counter()
        self._got: Counter[int] = Counter()
        self._share = 0.0
        self._masks = [0, 0]
        """At least, and at most: tokens that were got, and members that a step gives one."""
        self._read()

    def spent(self, replica: int, batch: int) -> Spent:
        """What a batch did beside its tokens."""
        return self._of_step.get((replica, batch), NOTHING)

    def adapters_after(self, replica: int, batch: int) -> frozenset[str]:
        """Adapters on the GPU once this batch has been formed."""
        return self._on_gpu.get((replica, batch), frozenset())

    def adapter_of(self, request: int) -> str | None:
        """The adapter that a request names; None where lines do not say it."""
        return None if self._adapter is None else self._adapter.get(request, "")

    def knows(self, seat: Seat) -> bool:
        """Whether all that its steps do beside their tokens is followed here."""
        return seat.is_beside and (self._adapter is not None or seat.replica not in self._slots)

    def judge(self, rows: Sequence[Mapping[str, str]], summary: DocumentView) -> None:
        """Counts of the summary."""
        tape = self._tape
        if "adapters" in summary and self._adapter is not None:
            tape.count("adapters")
            told = {
                name: summary["adapters"][name] for name in ("cold_loads", "host_loads", "hits")
            }
            due = {name: self._counts[name] for name in told}
            if told != due:
                tape.say(f"T4: adapters are {told}, the steps need {due}")
        if "guided" in summary and self._share:
            tape.count("masks")
            least, most = self._masks
            masks, spent_s = summary["guided"]["masks"], summary["guided"]["mask_s"]
            if not least <= masks <= most:
                tape.say(f"T4: {masks} masks, were {least} to {most}")
            token_ns = {_token_ns(seat) for seat in tape.seats}
            if len(token_ns) == 1 and abs(spent_s - masks * min(token_ns) / 1e9) > 1e-6:
                tape.say(f"T4: {masks} masks take {spent_s} s, each {min(token_ns)} ns")
            for row in rows:
                told_row, request = row.get("guided"), int(row["request_id"])
                if told_row is not None and int(told_row) != self._is_constrained(request):
                    tape.say(f"T4: guided of request {request} is {told_row}")

    def _read(self) -> None:
        shares = set()
        for seat in self._tape.seats:
            keys = keys_of(seat.scheduler)
            shares.add(keys.get("guided_share") or 0.0)
            if keys.get("enable_lora"):
                slots = keys["max_loras"]
                self._slots[seat.replica] = Slots(slots, keys["max_cpu_loras"] or slots)
        if len(shares) == 1:
            (self._share,) = shares
        if not self._share and (self._adapter is None or not self._slots):
            return
        constrained = {
            row
            for row, record in self._tape.arrived.items()
            if self._is_constrained(record["request"])
        }
        for record in self._tape.of("batch", "state", "tokens"):
            if record["event"] == "tokens":
                for row in record["rows"]:
                    self._got[row] += len(record["ends"])
                    self._masks[0] += len(record["ends"]) * (row in constrained)
            elif record["event"] == "batch":
                self._step(record, constrained)
            elif record["to"] in ("failed", "inactive") and record["replica"] in self._slots:
                self._slots[record["replica"]].clear()

    def _step(self, record: Record, constrained: set[int]) -> None:
        tape, replica = self._tape, record["replica"]
        seat, arrived = tape.seats[replica], tape.arrived
        masks = sum(
            row in constrained and before + new >= arrived[row]["prompt"] + self._got[row]
            for row, before, new in record["members"]
        )
        self._masks[1] += masks
        wait_ns, slots = masks * _token_ns(seat), self._slots.get(replica)
        needed: dict[str, int] = defaultdict(int)
        if slots is not None and self._adapter is not None:
            for row, _, new in record["members"]:
                name = self._adapter.get(arrived[row]["request"], "")
                if name:
                    needed[name] += new
            found = slots.use(list(needed))
            self._on_gpu[replica, record["batch"]] = slots.on_gpu
            self._counts += found
            tape.count("adapters")
            if len(needed) > keys_of(seat.scheduler)["max_loras"]:
                tape.say(f"T5: batch {record['batch']} of replica {replica} has {list(needed)}")
            wait_ns += found["host_loads"] * seat.adapter_ns[0]
            wait_ns += found["cold_loads"] * sum(seat.adapter_ns)
        spent = Spent(wait_ns, len(needed), sum(needed.values()))
        self._of_step[replica, record["batch"]] = spent

    def _is_constrained(self, request: int) -> bool:
        """A grammar constrains so many of all requests, by a hash of seed and number."""
        text = f"{self._tape.config.seed} guided {request}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._share * 2.0**64


def _token_ns(seat: Seat) -> int:
    keys = keys_of(seat.scheduler)
    return round((keys.get("guided_token_us") or 0.0) * 1000) if keys.get("guided_share") else 0


def _adapters_of(tape: Tape, lines: Sequence[Record]) -> dict[int, str] | None:
    """The adapter of each request by number; None where lines do not say it."""
    workload = keys_of(tape.config.workload)
    if not lines or (workload.get("upscale") or 1) != 1:
        return None
    start_ns = to_ns(workload["start_s"])
    kept = [line for line in lines if line["arrival_time_ns"] >= start_ns]
    found: dict[int, str] = {}
    for line in kept[: workload["limit"] or None]:
        for turn in line.get("sub_requests", [line]):
            found[len(found)] = turn.get("adapter", line.get("adapter", ""))
    is_whole = all(record["request"] in found for record in tape.by_event["arrived"])
    return found if is_whole else None  # else an overload has copied some
