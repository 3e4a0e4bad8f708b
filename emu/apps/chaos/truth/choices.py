"""Which requests a scheduler took, how much of each, in which order, and what was evicted.

Restates docs/lab/schedulers.md as limits and orders that hold for every batch, whatever memory
allows: budgets and places; tokens computed one after the other; prompts cut only by the budget;
prefix hits in whole blocks; all that runs takes part; first come, first served (or priority, or
deadline); the request admitted last is preempted first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import msgspec

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import FOREVER_NS, Record, Tape, keys_of
from emu.config.schema import (
    FasterTransformerTable,
    FcfsTable,
    LightLlmTable,
    OrcaTable,
    PagedTable,
    SarathiTable,
    SglangTable,
    TensorrtLlmTable,
    VllmTable,
    VllmV0Table,
)

_WHOLE: Final = (FcfsTable, OrcaTable, VllmV0Table, FasterTransformerTable, LightLlmTable)
"""Policies that compute a prompt in one piece."""
FAIR: Final = (VllmTable, SarathiTable, OrcaTable, VllmV0Table, FasterTransformerTable)
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
    front: list[int] = []
    """Rows that were preempted and wait at the front of the queue, the first of them first."""
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
        self._rereads: set[int] = set()
        """Of these, rows that have got no token since they were preempted."""
        self._hopeless = {r["row"] for r in tape.by_event["ended"] if r["status"] == "failed"}
        """Rows that fail: one that can never be held blocks none behind it."""
        self._shrinks = any(fault["kind"] == "kv_shrink" for fault in tape.faults)
        self._moved: set[int] = set()
        """Rows whose KV came from another replica."""

    def judge(self) -> None:
        """Replay the history."""
        self._tape.replay(
            {
                "queued": self._queued,
                "ended": self._ended,
                "lost": self._lost,
                "routed": self._lost,
                "migrated": self._migrated,
                "state": self._state,
                "tokens": self._tokens,
                "batch": self._batch,
            }
        )

    def _queued(self, record: Record) -> None:
        self._leave(record["row"])
        self._desks[record["replica"]].waiting[record["row"]] = record["at_ns"]

    def _leave(self, row: int) -> None:
        for desk in self._desks.values():
            desk.waiting.pop(row, None)
            if row in desk.front:
                desk.front.remove(row)
            if desk.computed.pop(row, None) is not None:
                desk.admitted.remove(row)

    def _ended(self, record: Record) -> None:
        self._gone.add(record["row"])
        self._leave(record["row"])

    def _lost(self, record: Record) -> None:
        self._returned.add(record["row"])
        self._leave(record["row"])

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            self._moved.add(row)
            self._leave(row)

    def _state(self, record: Record) -> None:
        if record["to"] in ("failed", "inactive"):
            self._desks.pop(record["replica"], None)

    def _tokens(self, record: Record) -> None:
        self._rereads.difference_update(record["rows"])
        for row in record["rows"]:
            self._got[row] += len(record["ends"])

    def _batch(self, record: Record) -> None:
        seat = self._tape.seats[record["replica"]]
        desk = self._desks[record["replica"]]
        table, members = seat.scheduler, record["members"]
        where = f"batch {record['batch']} of replica {seat.replica} at {record['at_ns']} ns"
        is_own = not isinstance(table, (*_WHOLE, VllmTable, SarathiTable))
        if isinstance(table, (SglangTable, TensorrtLlmTable)):
            # Reserves, orders and victims are held against other sources (tests/scheduling).
            self._rounds(seat, record, where)
            self._packs(seat, record, where)
            for row in record.get("preempted", ()):
                self._returned.add(row)
                self._rereads.add(row)
                self._leave(row)
        if not is_own and "first_layer" not in record:
            self._limits(seat, record, where)
            self._victims(seat, desk, record, where)
            self._front(seat, desk, record, where)
            for row in record.get("preempted", ()):
                self._returned.add(row)
                self._leave(row)
                desk.front.insert(0, row)
            self._order(seat, desk, record, where)
            self._watermark(seat, desk, record, where)
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
            self._tape.count("budget")
            if count > limit:
                self._tape.say(f"T5: {where} has {count}, {name} is {limit}")
        if isinstance(table, _WHOLE):
            for row, before, tokens in members:
                reached = self._tape.arrived[row]["prompt"] + self._got[row]
                self._tape.count("budget")
                if before + tokens != reached and not self._is_late(row, before, tokens):
                    self._tape.say(f"T5: {where} reads {tokens} tokens of row {row} from {before}")

    def _rounds(self, seat: Seat, record: Record, where: str) -> None:
        """SGLang's batches: prompts without decodes, or decodes; within limits."""
        table, members = seat.scheduler, record["members"]
        if not isinstance(table, SglangTable):
            return
        self._tape.count("sglang_rounds")
        if len(members) > table.requests_max:
            count = f"{len(members)}, max_running_requests is {table.requests_max}"
            self._tape.say(f"T5: {where} has {count}")
        decodes = [
            row
            for row, before, new in members
            if (new == 1 or not seat.is_plain)
            and before >= self._tape.arrived[row]["prompt"]
            and self._got[row]
            and row not in self._rereads
        ]
        prompts = [member for member in members if member[0] not in decodes]
        new = sum(member[2] for member in prompts)
        self._tape.count("sglang_rounds")
        if table.chunk_tokens and new > table.chunk_tokens:
            self._tape.say(f"T5: {where} has {new}, chunked_prefill_size is {table.chunk_tokens}")
        if prompts and decodes and not table.enable_mixed_chunk and seat.role == "colocated":
            recomputed = [member for member in prompts if self._got[member[0]]]
            self._tape.count("sglang_rounds")
            if not recomputed and len(prompts) < len(members):
                self._tape.say(f"T5: {where} mixes prompts and decodes: {prompts}, {decodes}")

    def _packs(self, seat: Seat, record: Record, where: str) -> None:
        """TensorRT-LLM's batches: within limits, contexts whole unless they are cut to blocks, and
        none paused for blocks that were kept for it."""
        table, members = seat.scheduler, record["members"]
        if not isinstance(table, TensorrtLlmTable):
            return
        limits = {
            "max_batch_size": (len(members), table.requests_max),
            "max_num_tokens": (sum(member[2] for member in members), table.tokens_max),
        }
        for name, (count, limit) in limits.items():
            if count > limit:
                self._tape.say(f"T5: {where} has {count}, {name} is {limit}")
        for row, before, new in members:
            end, prompt = before + new, self._tape.arrived[row]["prompt"]
            if end >= prompt or row in self._moved:
                continue
            if not table.enable_chunked_prefill or end % table.block_size:
                self._tape.say(f"T5: {where} reads {new} tokens of row {row} from {before} on")
        keeps = table.capacity_scheduler_policy != "MAX_UTILIZATION"
        if keeps and record.get("preempted") and not self._tape.config.faults:
            self._tape.say(f"T5: {where} pauses {record['preempted']}")

    def _is_late(self, row: int, before: int, tokens: int) -> bool:
        """With stages a decode may be formed before the token that it follows is told."""
        return tokens == 1 and before >= self._tape.arrived[row]["prompt"]

    def _cut(self, seat: Seat, record: Record, new: int, where: str) -> None:
        """A piece of a prompt is shorter than what is left only for want of budget."""
        table = seat.scheduler
        threshold = keys_of(table).get("long_prefill_token_threshold")
        if threshold or not seat.is_plain or new >= table.tokens_max:
            return
        if seat.is_hybrid:
            return
        for row, before, tokens in record["members"]:
            self._tape.count("cut")
            if before + tokens < self._tape.arrived[row]["prompt"]:
                self._tape.say(
                    f"T5: {where} reads {tokens} tokens of row {row} from {before} on, with "
                    f"{table.tokens_max - new} tokens of the budget left"
                )

    def _progress(
        self, seat: Seat, desk: Desk, row: int, before: int, new: int, where: str
    ) -> None:
        """Tokens are computed one after the other, none twice but after a loss."""
        self._tape.count("progress")
        if new <= 0:
            self._tape.say(f"T5: {where} computes {new} tokens of row {row}")
        if row in self._gone:
            self._tape.say(f"T5: {where} has row {row}, which has ended")
        known = desk.computed.get(row)
        if known is None:
            prompt = self._tape.arrived[row]["prompt"]
            reached = prompt + self._got[row]
            block = seat.scheduler.hit_tokens
            is_hit = before and row not in self._moved
            is_hit = is_hit and not self._got[row]  # else it decodes on where it was
            if keys_of(self._tape.config.workload).get("skip_prefill"):
                is_hit = False  # all of the prompt but its last token is there
            if is_hit:
                self._tape.count("prefix_hit")
            if is_hit and (before % block or before >= reached):
                self._tape.say(f"T5: {where} finds {before} tokens of row {row} of {reached}")
            if is_hit and not seat.scheduler.caches_prefixes:
                self._tape.say(f"T5: {where} begins row {row} at token {before}")
            desk.admitted.append(row)
        elif not seat.is_plain:
            pass  # drafts that are refused are computed again
        elif before < known and before % seat.scheduler.hit_tokens == 0:
            self._returned.add(row)  # it was preempted when no batch could be formed
            desk.admitted.remove(row)
            desk.admitted.append(row)
        elif known != before:
            self._tape.say(f"T5: {where} computes row {row} from {before}, had {known}")
        desk.computed[row] = before + new
        desk.waiting.pop(row, None)

    def _order(self, seat: Seat, desk: Desk, record: Record, where: str) -> None:
        """No request is admitted while one with a better place waits."""
        table = seat.scheduler
        if seat.passes_over:
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
            self._tape.count("order")
            if best < self._place(table.order, row, places[row]):
                self._tape.say(f"T5: {where} takes row {row} before row {first}")

    def _watermark(self, seat: Seat, desk: Desk, record: Record, where: str) -> None:
        """What begins has blocks for all that it has reached, and leaves the watermark free.

        Blocks are counted from below: those of prompts and of tokens that were computed.
        """
        table = seat.scheduler
        if not isinstance(table, PagedTable) or seat.role != "colocated" or self._shrinks:
            return
        began = [m[0] for m in record["members"] if m[0] not in desk.computed]
        if not began or any(row in self._moved for row in began):
            return
        tokens = {row: self._tape.arrived[row]["prompt"] + self._got[row] for row in began}
        for row, computed in desk.computed.items():
            tokens[row] = max(computed, self._tape.arrived[row]["prompt"])
        held = sum(-(-count // table.block_size) for count in tokens.values())
        free = int(table.watermark_blocks_fraction * seat.blocks)
        self._tape.count("watermark")
        if held > seat.blocks - free:
            self._tape.say(f"T5: {where} holds {held} blocks of {seat.blocks}, {free} stay free")

    def _follows(self, row: int, other: int) -> bool:
        """It arrived later; one that a crash sent here may be older than what waits at the head."""
        return self._came_ns(row) > self._came_ns(other)

    def _front(self, seat: Seat, desk: Desk, record: Record, where: str) -> None:
        """What was preempted goes on before all that arrived later, the last preempted first."""
        table = seat.scheduler
        if not isinstance(table, VllmTable) or table.order != "arrival" or seat.passes_over:
            return
        left = [row for row in desk.front if row not in self._hopeless]
        for row, before, _ in record["members"]:
            if left and row == left[0]:
                self._tape.count("front")
                left.pop(0)
                desk.front.remove(row)
            elif left and row not in desk.computed and not before and self._follows(row, left[0]):
                self._tape.count("front")
                self._tape.say(f"T5: {where} begins row {row}, and preempted row {left[0]} waits")

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
        self._tape.count("take_part")
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
        own = keys_of(table).get("eviction", "last") not in ("", "last")
        if not isinstance(table, VllmTable) or not preempted or own or seat.stages > 1:
            return
        there = {m[0] for m in record["members"]}
        order = [row for row in desk.admitted if row not in self._moved]
        for place, row in enumerate(order):
            if row in preempted:
                younger = [r for r in order[place + 1 :] if r in there and r not in preempted]
                self._tape.count("victims")
                if younger:
                    self._tape.say(f"T5: {where} preempts row {row}, and keeps row {younger[0]}")
