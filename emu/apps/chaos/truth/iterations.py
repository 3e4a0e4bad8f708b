"""What schedulers chose for each iteration, when it began, and how long it should have taken."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import msgspec

from emu.apps.chaos.truth import FOREVER_NS, Record, Seat, Tape
from emu.apps.chaos.truth.windows import Windows
from emu.config.schema import (
    FasterTransformerTable,
    FcfsTable,
    LightLlmTable,
    OrcaTable,
    SarathiTable,
    SglangTable,
    VllmTable,
    VllmV0Table,
)

# --- choices: which requests, how much of each, in which order, and what was evicted --------------
# Restates docs/schedulers.md as limits and orders that hold for every batch, whatever memory
# allows: budgets and places; tokens computed one after the other; prompts cut only by the budget;
# prefix hits in whole blocks; all that runs takes part; first come, first served (or priority, or
# deadline); the request admitted last is preempted first.

_WHOLE: Final = (FcfsTable, OrcaTable, VllmV0Table, FasterTransformerTable, LightLlmTable)
"""Policies that compute a prompt in one piece."""
_FAIR: Final = (VllmTable, SarathiTable, OrcaTable, VllmV0Table, FasterTransformerTable)
"""Policies whose fair queues are followed."""
_SERVES: Final = ("colocated", "prefill", "decode")


class Desk(msgspec.Struct):
    """What one replica has in its queue and on its GPUs."""

    computed: dict[int, int] = {}
    """Tokens of each admitted request whose KV is there, those in flight included.

    Nothing is forgotten when a tier loses what a batch waits for: that batch computes it besides,
    so the next one goes on where it would have.
    """
    admitted: list[int] = []
    """Rows in order of admission."""
    waiting: dict[int, int] = {}
    """Rows in order of coming, and when; those that came back are not among them."""
    formed_ns: int = -1
    """When its last batch was formed."""
    formed_before_ns: int = -1


class Choices:
    """All batches of a run, in order."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._desks: dict[int, Desk] = defaultdict(Desk)
        self._got: dict[int, int] = defaultdict(int)
        self._gone: set[int] = set()
        self._returned: set[int] = set()
        """Rows that were preempted, lost or sent elsewhere: their place in a queue is special."""
        self._hopeless = {r["row"] for r in tape.by_event["ended"] if r["status"] == "failed"}
        """Rows that fail: one that can never be held blocks none behind it."""
        self._moved: set[int] = set()
        """Rows whose KV came from another replica."""

    def judge(self) -> None:
        """Replay the history."""
        for record in self._tape.records:
            handler = getattr(self, f"_{record['event']}", None)
            if handler is not None:
                handler(record)

    # --- where requests are -------------------------------------------------------------------
    def _queued(self, record: Record) -> None:
        self._leave(record["row"])
        self._desks[record["replica"]].waiting[record["row"]] = record["at_ns"]

    def _leave(self, row: int) -> None:
        for desk in self._desks.values():
            desk.waiting.pop(row, None)
            if desk.computed.pop(row, None) is not None:
                desk.admitted.remove(row)

    def _ended(self, record: Record) -> None:
        self._gone.add(record["row"])
        self._leave(record["row"])

    def _lost(self, record: Record) -> None:
        self._returned.add(record["row"])
        self._leave(record["row"])

    _routed = _lost

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            self._moved.add(row)
            self._leave(row)

    def _state(self, record: Record) -> None:
        if record["to"] in ("failed", "inactive"):
            self._desks.pop(record["replica"], None)

    def _tokens(self, record: Record) -> None:
        for row in record["rows"]:
            self._got[row] += len(record["ends"])

    # --- a batch ------------------------------------------------------------------------------
    def _batch(self, record: Record) -> None:
        seat = self._tape.seats[record["replica"]]
        desk = self._desks[record["replica"]]
        table, members = seat.scheduler, record["members"]
        where = f"batch {record['batch']} of replica {seat.replica} at {record['at_ns']} ns"
        is_own = not isinstance(table, (*_WHOLE, VllmTable, SarathiTable))
        if isinstance(table, SglangTable):
            # Reserves, orders and retraction are held against SGLang's classes (tests/scheduling).
            self._rounds(seat, record, where)
            for row in record.get("preempted", ()):
                self._returned.add(row)
                self._leave(row)
        if not is_own and "first_layer" not in record:
            self._limits(seat, record, where)
            self._victims(seat, desk, record, where)
            for row in record.get("preempted", ()):
                self._returned.add(row)
                self._leave(row)
            self._order(seat, desk, record, where)
            self._all_take_part(seat, desk, record, where)
        for row, before, new in members:
            self._progress(seat, desk, row, before, new, where)
        desk.formed_before_ns, desk.formed_ns = desk.formed_ns, record["at_ns"]

    def _limits(self, seat: Seat, record: Record, where: str) -> None:
        """Budgets and places."""
        table, members = seat.scheduler, record["members"]
        new = sum(member[2] for member in members)
        limits: dict[str, tuple[int, int]] = {}
        own = sum(m[0] not in self._moved for m in members)
        prompts = [m for m in members if m[1] + m[2] <= self._tape.arrived[m[0]]["prompt"]]
        if isinstance(table, VllmTable):
            limits["max_num_batched_tokens"] = new, table.tokens_max
            limits["max_num_seqs"] = len(members), table.requests_max
            self._cut(seat, record, new, where)
        elif isinstance(table, SarathiTable):
            chunks = sum(m[2] for m in prompts if m[2] > 1)
            limits["chunk_size"] = chunks, table.chunk_size
            limits["batch_size_cap"] = own, table.batch_size_cap
        elif isinstance(table, FcfsTable):
            chunks = sum(m[2] for m in members if m[2] > 1)
            limits["max_batch_prefill_tokens"] = chunks, table.max_batch_prefill_tokens
        else:
            limits["batch_size_cap"] = own, table.batch_size_cap
        for name, (count, limit) in limits.items():
            if count > limit:
                self._tape.say(f"T5: {where} has {count}, {name} is {limit}")
        if isinstance(table, _WHOLE):
            for row, before, tokens in members:
                reached = self._tape.arrived[row]["prompt"] + self._got[row]
                if before + tokens != reached and not self._is_late(row, before, tokens):
                    self._tape.say(f"T5: {where} reads {tokens} tokens of row {row} from {before}")

    def _rounds(self, seat: Seat, record: Record, where: str) -> None:
        """SGLang's batches: prompts without decodes, or decodes; within limits."""
        table, members = seat.scheduler, record["members"]
        if not isinstance(table, SglangTable):
            return
        if len(members) > table.requests_max:
            count = f"{len(members)}, max_running_requests is {table.requests_max}"
            self._tape.say(f"T5: {where} has {count}")
        decodes = [
            row
            for row, before, new in members
            if new == 1 and before >= self._tape.arrived[row]["prompt"] and self._got[row]
        ]
        prompts = [member for member in members if member[0] not in decodes]
        new = sum(member[2] for member in prompts)
        if table.chunk_tokens and new > table.chunk_tokens:
            self._tape.say(f"T5: {where} has {new}, chunked_prefill_size is {table.chunk_tokens}")
        if prompts and decodes and not table.enable_mixed_chunk and seat.role == "colocated":
            recomputed = [member for member in prompts if self._got[member[0]]]
            if not recomputed and len(prompts) < len(members):
                self._tape.say(f"T5: {where} mixes prompts and decodes: {prompts}, {decodes}")

    def _is_late(self, row: int, before: int, tokens: int) -> bool:
        """With stages a decode may be formed before the token that it follows is told."""
        return tokens == 1 and before >= self._tape.arrived[row]["prompt"]

    def _cut(self, seat: Seat, record: Record, new: int, where: str) -> None:
        """A piece of a prompt is shorter than what is left only for want of budget."""
        table = seat.scheduler
        threshold = getattr(table, "long_prefill_token_threshold", 0)
        if threshold or not seat.is_plain or new >= table.tokens_max:
            return
        if seat.is_hybrid:
            return
        for row, before, tokens in record["members"]:
            if before + tokens < self._tape.arrived[row]["prompt"]:
                self._tape.say(
                    f"T5: {where} reads {tokens} tokens of row {row} from {before} on, with "
                    f"{table.tokens_max - new} tokens of the budget left"
                )

    def _progress(
        self, seat: Seat, desk: Desk, row: int, before: int, new: int, where: str
    ) -> None:
        """Tokens are computed one after the other, none twice but after a loss."""
        if new <= 0:
            self._tape.say(f"T5: {where} computes {new} tokens of row {row}")
        if row in self._gone:
            self._tape.say(f"T5: {where} has row {row}, which has ended")
        known = desk.computed.get(row)
        if known is None:
            prompt = self._tape.arrived[row]["prompt"]
            reached = prompt + self._got[row]
            block = seat.scheduler.block_size
            is_hit = before and row not in self._moved and not seat.is_hybrid
            is_hit = is_hit and not self._got[row]  # else it decodes on where it was
            if getattr(self._tape.config.workload, "skip_prefill", False):
                is_hit = False  # all of the prompt but its last token is there
            if is_hit and (before % block or before >= reached):
                self._tape.say(f"T5: {where} finds {before} tokens of row {row} of {reached}")
            if is_hit and not seat.scheduler.caches_prefixes:
                self._tape.say(f"T5: {where} begins row {row} at token {before}")
            desk.admitted.append(row)
        elif not seat.is_plain:
            pass  # drafts that are refused are computed again
        elif before < known and before % seat.scheduler.block_size == 0:
            self._returned.add(row)  # it was preempted when no batch could be formed
            desk.admitted.remove(row)
            desk.admitted.append(row)
        elif known != before:
            self._tape.say(f"T5: {where} computes row {row} from {before}, had {known}")
        desk.computed[row] = before + new
        desk.waiting.pop(row, None)

    # --- order --------------------------------------------------------------------------------
    def _order(self, seat: Seat, desk: Desk, record: Record, where: str) -> None:
        """No request is admitted while one with a better place waits."""
        table = seat.scheduler
        if getattr(table, "skip_blocked", False) or getattr(table, "enable_lora", False):
            return
        if not seat.is_plain or table.order not in ("arrival", "priority", "deadline"):
            return
        if isinstance(table, FcfsTable) and (seat.role != "colocated" or table.order != "arrival"):
            return  # one queue for all, which is first in, first out
        joined = [m[0] for m in record["members"] if m[0] in desk.waiting]
        taken = set(joined)
        # What the engine may not have seen when it formed the batch counts for nothing.
        seen_ns = desk.formed_before_ns if seat.is_ahead else record["at_ns"]
        left = [
            (self._place(table.order, row, place), row)
            for place, (row, since_ns) in enumerate(desk.waiting.items())
            if row not in taken and row not in self._returned | self._hopeless
            if since_ns < seen_ns
        ]
        if not left:
            return
        best, first = min(left)
        places = {row: place for place, row in enumerate(desk.waiting)}
        for row in joined:
            if row in self._returned:
                continue
            if table.order == "arrival" and self._came_ns(row) == self._came_ns(first):
                continue  # of equal arrivals some queues keep the order of the file
            if best < self._place(table.order, row, places[row]):
                self._tape.say(f"T5: {where} takes row {row} before row {first}")

    def _came_ns(self, row: int) -> int:
        return int(self._tape.arrived[row]["at_ns"])

    def _place(self, order: str, row: int, place: int) -> tuple[Any, ...]:
        arrived = self._tape.arrived[row]
        if order == "priority":
            return (arrived.get("priority", 0), arrived["at_ns"], arrived["request"])
        if order == "deadline":
            due_ns = arrived.get("deadline_ns", FOREVER_NS)
            return (due_ns, arrived["at_ns"], arrived["request"])
        return (place,)

    def _all_take_part(self, seat: Seat, desk: Desk, record: Record, where: str) -> None:
        """With vLLM's policy and one stage, all that was admitted gets tokens in each batch."""
        table = seat.scheduler
        if (
            not isinstance(table, VllmTable)
            or seat.stages > 1
            or not seat.is_plain
            or seat.is_hybrid
        ):
            return
        if seat.role != "colocated" or self._tape.config.migration.rebalance:
            return  # a prompt that is done leaves; one that moves stops
        if sum(m[2] for m in record["members"]) >= table.tokens_max:
            return
        there = {m[0] for m in record["members"]}
        preempted = set(record.get("preempted", ()))
        for row in desk.admitted:
            if row in there or row in preempted or preempted or row in self._hopeless:
                continue
            arrived = self._tape.arrived[row]
            if self._got[row] >= arrived["output"]:
                continue
            self._tape.say(f"T5: {where} leaves row {row} out, which runs there")

    def _victims(self, seat: Seat, desk: Desk, record: Record, where: str) -> None:
        """The last that was admitted goes first."""
        table = seat.scheduler
        preempted = set(record.get("preempted", ()))
        own = getattr(table, "eviction", "last") not in ("", "last")
        if not isinstance(table, VllmTable) or not preempted or own or seat.stages > 1:
            return
        there = {m[0] for m in record["members"]}
        order = [row for row in desk.admitted if row not in self._moved]
        for place, row in enumerate(order):
            if row in preempted:
                younger = [r for r in order[place + 1 :] if r in there and r not in preempted]
                if younger:
                    self._tape.say(f"T5: {where} preempts row {row}, and keeps row {younger[0]}")


# --- fair queues: the tenant that was served least goes first -------------------------------------
# Restates `scheduler.order = "fair"` of docs/schedulers.md: a tenant is charged the prompt when a
# request is admitted and its output when it leaves, and starts at the level of the least served one
# that waits. A queue is followed until something else than arrivals and ends happens to it.

_OWN_QUEUE: Final = ("colocated", "prefill")


class Line(msgspec.Struct):
    """The queue of one replica."""

    waiting: dict[str, list[tuple[int, int, int]]] = {}
    """(arrival, request, row) of each that waits, by tenant."""
    served: dict[str, int] = {}
    running: set[int] = set()

    def rank(self, tenant: str) -> tuple[int, int, int]:
        """Smaller goes first."""
        arrival_ns, request, _ = min(self.waiting[tenant])
        return self.served[tenant], arrival_ns, request


class Fair:
    """All fair queues of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._lines: dict[int, Line] = {}
        self._place: dict[int, int] = {}
        """The replica of each row."""
        self._got: dict[int, int] = defaultdict(int)

    def judge(self) -> None:
        """Replay all queues."""
        for seat in self._tape.seats:
            if self._is_followed(seat):
                self._lines[seat.replica] = Line()
        if not self._lines:
            return
        for record in self._tape.records:
            handler = getattr(self, f"_{record['event']}", None)
            if handler is not None:
                handler(record)

    def _is_followed(self, seat: Seat) -> bool:
        table = seat.scheduler
        is_own = isinstance(table, _FAIR)
        odd = getattr(table, "skip_blocked", False) or getattr(table, "enable_lora", False)
        is_plain = seat.is_plain and not seat.is_ahead and not odd
        return is_own and is_plain and table.order == "fair" and seat.role in _OWN_QUEUE

    def _stop(self, row: int) -> None:
        """Something else has happened to the row: what its queue has charged is not known."""
        self._lines.pop(self._place.get(row, -1), None)

    def _queued(self, record: Record) -> None:
        row, replica = record["row"], record["replica"]
        if row in self._place:
            self._stop(row)
        self._place[row] = replica
        line, arrived = self._lines.get(replica), self._tape.arrived[row]
        if line is None:
            return
        tenant = arrived.get("tenant", "")
        if tenant not in line.waiting:
            floor = min((line.served[other] for other in line.waiting), default=0)
            line.served[tenant] = max(line.served.get(tenant, 0), floor)
            line.waiting[tenant] = []
        line.waiting[tenant].append((arrived["at_ns"], arrived["request"], row))

    def _lost(self, record: Record) -> None:
        self._stop(record["row"])

    _routed = _lost

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            if record.get("live"):
                self._stop(row)
                self._lines.pop(record["destination"], None)

    def _state(self, record: Record) -> None:
        self._lines.pop(record["replica"], None)

    def _tokens(self, record: Record) -> None:
        line = self._lines.get(record["replica"])
        for row in record["rows"]:
            self._got[row] += len(record["ends"])
            if line is None or row not in line.running:
                continue
            arrived = self._tape.arrived[row]
            is_prefill = self._tape.seats[record["replica"]].role == "prefill"
            if is_prefill or self._got[row] >= arrived["output"]:
                line.running.remove(row)
                line.served[arrived.get("tenant", "")] += self._got[row]

    def _ended(self, record: Record) -> None:
        if record["status"] != "completed":
            self._stop(record["row"])

    def _batch(self, record: Record) -> None:
        line = self._lines.get(record["replica"])
        if line is None:
            return
        if record.get("preempted") or "first_layer" in record:
            del self._lines[record["replica"]]
            return
        for row, before, _ in record["members"]:
            if row in line.running:
                continue
            tenant = self._tape.arrived[row].get("tenant", "")
            queue = line.waiting.get(tenant, [])
            entry = next((one for one in queue if one[2] == row), None)
            if entry is None or (before and self._got[row]):
                del self._lines[record["replica"]]
                return
            best = min(line.waiting, key=line.rank)
            if best != tenant or min(queue) != entry:
                first = min(line.waiting[best])[2]
                self._tape.say(
                    f"T5: batch {record['batch']} of replica {record['replica']} at "
                    f"{record['at_ns']} ns takes row {row} of tenant {tenant!r} before row {first} "
                    f"of tenant {best!r}, which was served less: {line.served}"
                )
                del self._lines[record["replica"]]
                return
            queue.remove(entry)
            if not queue:
                del line.waiting[tenant]
            line.running.add(row)
            line.served[tenant] += self._tape.arrived[row]["prompt"]


# --- waves: iterations of a data-parallel group begin together ------------------------------------
# Restates docs/schedulers.md and `[[replicas]] data_parallel_group`: a wave leaves when every
# member that serves has a batch, or keeps pace without one; nothing else holds it up.

_IN_WAVES: Final = (
    *("colocated", "prefill", "decode", "mutating_to_decode"),
    *("shutting_colocated", "shutting_prefill", "shutting_decode"),
)

_STOPS: Final = (
    *("pause", "freeze", "replica_crash", "replica_restart"),
    *("gpu_crash", "node_crash"),
)


class Waves:
    """All groups of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._ready: dict[int, int] = defaultdict(int)
        """When each member formed its batch, or ended the one before."""
        self._turned: dict[int, int] = {}
        """When each member changed its state last."""
        self._is_single = all(seat.stages == 1 for seat in tape.seats)

    def judge(self) -> None:
        """One wave after the other."""
        tape = self._tape
        groups: dict[str, list[int]] = defaultdict(list)
        for seat in tape.seats:
            if seat.group:
                groups[seat.group].append(seat.replica)
        # A member that stands still, or waits for KV from a lower tier, begins by itself.
        stops = any(record["kind"] in _STOPS for record in tape.by_event["fault"])
        if not groups or stops or tape.config.network.tiers:
            return
        group_of = {replica: name for name, its in groups.items() for replica in its}
        states = {seat.replica: seat.role for seat in tape.seats}
        open_: dict[str, list[Record]] = defaultdict(list)
        for record in tape.of("state", "batch", "began", "ran"):
            replica, at_ns = record["replica"], record["at_ns"]
            name = group_of.get(replica)
            if name is None:
                continue
            event = record["event"]
            if event == "began":
                wave = open_[name]
                if wave and (wave[0]["at_ns"] != at_ns or replica in _members(wave)):
                    self._wave(wave, [r for r in groups[name] if states[r] in _IN_WAVES])
                    wave.clear()
                if not wave:
                    self._leaves(at_ns, [r for r in groups[name] if states[r] in _IN_WAVES])
                wave.append(record)
                continue
            if event == "state":
                if open_[name]:
                    self._wave(open_.pop(name), [r for r in groups[name] if states[r] in _IN_WAVES])
                states[replica] = record["to"]
                self._turned[replica] = at_ns
            self._ready[replica] = at_ns
        for name, wave in open_.items():
            if wave:
                self._wave(wave, [r for r in groups[name] if states[r] in _IN_WAVES])

    def _leaves(self, at_ns: int, serving: list[int]) -> None:
        """Nothing but its last member holds a wave up."""
        due_ns = max((self._ready[replica] for replica in serving), default=at_ns)
        if self._is_single and due_ns != at_ns:
            self._tape.say(f"T2: a wave leaves at {at_ns} ns, should at {due_ns} ns")

    def _wave(self, wave: list[Record], serving: list[int]) -> None:
        """All that serve are in it."""
        at_ns, there = wave[0]["at_ns"], _members(wave)
        missing = [r for r in serving if r not in there and self._turned.get(r) != at_ns]
        if missing:
            self._tape.say(f"T2: a wave of {sorted(there)} leaves at {at_ns} ns without {missing}")


def _members(wave: list[Record]) -> set[int]:
    return {record["replica"] for record in wave}


# --- costs: what each iteration, stage and layer should have taken --------------------------------
# Restates the linear cost (docs/reference/config.md, `[latency]`): each pipeline stage takes base +
# new tokens x per token + tokens before x per context token, to the nearest nanosecond, or tokens /
# rate for a batch of prompts where a rate is given. A straggler multiplies it, a pause adds to it.
# For other backends: equal batches on equal replicas take equally long, and within the bounds that
# memory and arithmetic of the GPU set (the roofline, dense models).

_SLACK_NS: Final = 2
_LEAST: Final = 0.9
_MOST: Final = 10
_HOST_NS: Final = 100_000_000
"""What hosts, launches and collectives may add to what GPUs take by their published peaks."""
Key = tuple[int, int, int]
"""Replica, life, batch."""


class Iterations:
    """All batches of a run."""

    def __init__(self, tape: Tape, windows: Windows) -> None:
        self._tape = tape
        self._windows = windows
        self._open: dict[tuple[int, int], Record] = {}
        self._began: dict[tuple[int, int], Record] = {}
        self._layers: dict[tuple[int, int], int] = {}
        self._free_ns: dict[tuple[int, int], int] = {}
        """When each stage of a replica is free again."""
        self._seen: dict[Any, float] = {}

    def judge(self) -> None:
        """Every iteration took what it should have."""
        for record in self._tape.records:
            event = record["event"]
            if event == "batch":
                key = record["replica"], record["batch"]
                self._open[key] = record
                self._began.pop(key, None)
                self._layers.pop(key, None)
            elif event == "began":
                self._began[record["replica"], record["batch"]] = record
            elif event == "layer":
                self._layer(record)
            elif event == "ran":
                self._ran(record)
            elif event == "state" and record["to"] == "failed":
                self._forget(record["replica"])

    def _forget(self, replica: int) -> None:
        for key in [key for key in self._open if key[0] == replica]:
            del self._open[key]
        for stage in [key for key in self._free_ns if key[0] == replica]:
            del self._free_ns[stage]

    def _ran(self, ran: Record) -> None:
        tape, key = self._tape, (ran["replica"], ran["batch"])
        if key[1] < 0:  # it only keeps pace with a group, but is on the stages
            for stage, (_, end_ns) in enumerate(ran.get("stages", ())):
                self._free_ns[key[0], stage] = end_ns
            return
        formed = self._open.pop(key, None)
        if formed is None:
            tape.say(f"T2: batch {key[1]} of replica {key[0]} ended, and was never formed")
            return
        began = self._began.pop(key, None)
        layers = self._layers.pop(key, 0)
        seat = tape.seats[key[0]]
        if layers:
            if layers != seat.layers:
                tape.say(f"T2: batch {key[1]} of replica {key[0]} ran {layers} layers")
            return
        if "stages" in ran:
            self._stages(seat, formed, began, ran)
            return
        start_ns = ran["start_ns"] if began is None else began["at_ns"]
        is_relayed = "first_layer" in formed or ran["start_ns"] != formed["at_ns"]
        if is_relayed and tape.config.autoscale is None and not tape.config.commands:
            tape.say(f"T2: batch {key[1]} of replica {key[0]} began at {start_ns} ns, after a wait")
        took_ns = ran["at_ns"] - start_ns
        took_ns -= self._windows.stood_ns(seat.replica, start_ns, ran["at_ns"])
        took_ns -= 0 if began is None else began.get("wait_ns", 0)
        first = formed.get("first_layer", 0)
        self._compare(seat, formed, began, start_ns, took_ns, first)

    def _stages(self, seat: Seat, formed: Record, began: Record | None, ran: Record) -> None:
        """Stages in a row, each first in, first out, each as long as its part."""
        ready_ns = formed["at_ns"] if began is None else began["at_ns"]
        launched_ns = ready_ns
        wait_ns = 0 if began is None else began.get("wait_ns", 0)
        for stage, (start_ns, end_ns) in enumerate(ran["stages"]):
            place = (seat.replica, stage)
            due_ns = max(ready_ns, self._free_ns.get(place, 0))
            if start_ns != due_ns and not self._windows.stood_ns(seat.replica, launched_ns, end_ns):
                self._tape.say(
                    f"T2: batch {ran['batch']} of replica {seat.replica} enters stage {stage} at "
                    f"{start_ns} ns, should at {due_ns} ns"
                )
            self._free_ns[place] = ready_ns = end_ns
            took_ns = end_ns - start_ns
            took_ns -= self._windows.stood_ns(seat.replica, start_ns, end_ns)
            took_ns -= wait_ns // seat.stages + (stage < wait_ns % seat.stages)
            self._compare(seat, formed, began, launched_ns, took_ns, 0, stage)

    def _layer(self, record: Record) -> None:
        """A layer takes its part of the whole."""
        tape, key = self._tape, (record["replica"], record["batch"])
        formed = self._open.get(key)
        seat = tape.seats[key[0]]
        if formed is None:
            tape.say(f"T2: a layer of batch {key[1]} of replica {key[0]}, which is not there")
            return
        done = self._layers.get(key, 0)
        if record["layer"] != done:
            tape.say(
                f"T2: batch {key[1]} of replica {key[0]} ran layer {record['layer']} of {done}"
            )
        self._layers[key] = done + 1
        whole_ps = whole_cost_ps(seat, formed["members"], None)
        if whole_ps is None:
            return
        start_ns, end_ns = record["start_ns"], record["at_ns"]
        due_ns = whole_ps * seat.stages / 1000 / seat.layers
        due_ns *= self._windows.factor(seat.replica, start_ns)
        took_ns = end_ns - start_ns - self._windows.stood_ns(seat.replica, start_ns, end_ns)
        at_edge = self._windows.is_edge(seat.replica, start_ns)
        if abs(took_ns - max(1, due_ns)) > _SLACK_NS + 1e-6 * due_ns and not at_edge:
            tape.say(
                f"T2: layer {record['layer']} of batch {key[1]} of replica {key[0]} took "
                f"{took_ns} ns, should {due_ns:.0f} ns"
            )

    def _compare(
        self,
        seat: Seat,
        formed: Record,
        began: Record | None,
        start_ns: int,
        took_ns: int,
        first_layer: int,
        stage: int = -1,
    ) -> None:
        tape = self._tape
        chunks = None if began is None else began.get("chunks")
        whole_ps = whole_cost_ps(seat, formed["members"], chunks)
        factor = self._windows.factor(seat.replica, start_ns)
        at_edge = self._windows.is_edge(seat.replica, start_ns)
        where = f"batch {formed['batch']} of replica {seat.replica} at {start_ns} ns"
        if whole_ps is None:
            self._alike(seat, formed, took_ns, factor, stage, where, at_edge or first_layer > 0)
            return
        part_ps = whole_ps * (seat.layers - first_layer) // seat.layers
        due_ns = max(1, (part_ps + 500) // 1000)
        if stage < 0:
            due_ns *= seat.stages
        if factor != 1.0:
            due_ns = int(due_ns * factor)
        slack_ns = 0 if factor == 1.0 and not first_layer else _SLACK_NS + 1e-9 * due_ns
        if abs(took_ns - due_ns) > slack_ns and not at_edge:
            tape.say(f"T2: {where} took {took_ns} ns, should {due_ns} ns")

    def _alike(
        self,
        seat: Seat,
        formed: Record,
        took_ns: int,
        factor: float,
        stage: int,
        where: str,
        is_unsure: bool,
    ) -> None:
        """Equal batches on equal replicas take equally long, whatever the backend."""
        varies = seat.latency.jitter or not seat.latency.warm_up
        if is_unsure or not seat.is_plain or seat.group or varies:
            return
        members = sorted((before, new) for _, before, new in formed["members"])
        shape = (tuple(members), tuple(formed.get("verified", ())), stage)
        kind = (seat.served, seat.tensor_parallel, seat.stages, seat.place, repr(seat.latency))
        normal_ns = took_ns / factor
        known_ns = self._seen.setdefault((kind, repr(seat.scheduler), shape), normal_ns)
        if abs(normal_ns - known_ns) > _SLACK_NS:
            self._tape.say(
                f"T2: {where} took {took_ns} ns (slower by {factor:g}), an equal one {known_ns:.0f}"
            )
        if stage < 0:
            self._physics(seat, formed, normal_ns, where)

    def _physics(self, seat: Seat, formed: Record, took_ns: float, where: str) -> None:
        """All weights are read and all products computed: no faster, nor very much slower."""
        if not seat.layer_bytes or seat.latency.backend != "roofline":
            return
        new = sum(member[2] for member in formed["members"])
        read_ns = seat.layer_bytes / seat.memory_rate
        compute_ns = seat.layer_bytes * new / seat.flop_rate
        kept = sum(before + tokens for _, before, tokens in formed["members"])
        kv_ns = kept * seat.kv_token_bytes / seat.memory_rate
        most_ns = _MOST * (read_ns + compute_ns + kv_ns) + _HOST_NS
        if not max(read_ns, compute_ns) * _LEAST <= took_ns <= most_ns:
            self._tape.say(
                f"T2: {where} took {took_ns:.0f} ns; weights alone take {read_ns:.0f} ns to read, "
                f"{compute_ns:.0f} ns to compute"
            )


def whole_cost_ps(
    seat: Seat,
    members: list[list[int]],
    chunks: list[list[int]] | None,
) -> int | None:
    """What all layers of one stage take, in ps; None where the rule is not restated."""
    table = seat.latency
    if table.backend != "linear" or not seat.is_plain:
        return None
    new = sum(member[2] for member in members)
    context = sum(member[1] for member in members)
    for row, before, tokens in chunks or ():  # what a tier has lost is computed after all
        was = next(member for member in members if member[0] == row)
        new += tokens - was[2]
        context += before - was[1]
    singles = any(member[2] == 1 for member in members)
    if table.prefill_tokens_per_s and not singles:
        return int(new * round(1e12 / table.prefill_tokens_per_s))
    base, token, before = table.base_us, table.per_token_us, table.per_context_token_us
    return int(round(base * 1e6) + new * round(token * 1e6) + context * round(before * 1e6))
