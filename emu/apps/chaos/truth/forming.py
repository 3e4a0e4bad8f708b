"""What each batch should have been: members, tokens, what was preempted.

Follows the queue and the running requests of a replica without hits, stages or features; the rules
(`rule_of_vllm.py` and those beside it) say what is formed of them. An engine that forms batches
ahead sees a request a batch late, and what ended with the last batch keeps its place and its
blocks. After each batch the books here follow the record, so that one wrong batch is told once. A
replica is followed until something else happens to it. Where TensorRT-LLM reuses blocks, a request
may wait for a prefix that another computes: a batch that differs in such a request is not judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Final

from emu.apps.chaos.truth.book import Ask, Book, Due, Members
from emu.apps.chaos.truth.remembered import Said
from emu.apps.chaos.truth.rule_of_sglang import due_of_sglang, is_followed, wrong_in_sglang
from emu.apps.chaos.truth.rule_of_tensorrt import due_of_tensorrt
from emu.apps.chaos.truth.rule_of_vidur import VIDUR, due_of_vidur
from emu.apps.chaos.truth.rule_of_vllm import due_of_vllm
from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import FOREVER_NS, Record, Tape, keys_of
from emu.config.schema import SglangTable, TensorrtLlmTable, VllmTable

_ORDERS: Final = ("arrival", "priority", "deadline")
_HOLD_UP: Final = ("pause", "freeze")
_RULES: Final[dict[type, Callable[[Seat, Book, Ask], Due]]] = {
    VllmTable: due_of_vllm,
    TensorrtLlmTable: due_of_tensorrt,
    **dict.fromkeys(VIDUR, due_of_vidur),
}


class Forming:
    """All replicas of a run whose scheduler is restated here."""

    def __init__(self, tape: Tape, said: Mapping[int, Said] | None) -> None:
        """`said`: what each request says; None where that is not known."""
        self._tape = tape
        self._said = said
        self._got: dict[int, int] = defaultdict(int)
        self._asks = {
            order: Ask(
                self._reached, self._longest, self._prompt, self._came, partial(self._place, order)
            )
            for order in _ORDERS
        }
        self._books = {seat.replica: Book() for seat in tape.seats if self._is_followed(seat)}

    def _is_followed(self, seat: Seat) -> bool:
        table, tape = seat.scheduler, self._tape
        is_known = type(table) in _RULES or isinstance(table, SglangTable)
        if not is_known or seat.role != "colocated":
            return False
        is_odd = seat.is_hybrid or seat.passes_over or seat.stages > 1 or not seat.is_plain
        own = keys_of(table).get("eviction", "last") not in ("", "last")
        skips = keys_of(tape.config.workload).get("skip_prefill")
        shrinks = any(fault["kind"] == "kv_shrink" for fault in tape.faults)
        shares = keys_of(table).get("attention_dp_enable_balance")
        is_faithful = type(table) in VIDUR and bool(keys_of(table)["faithful"])
        is_held_up = (seat.is_ahead or shares) and seat.group
        return self._order(seat) in _ORDERS and not (
            is_odd or own or skips or shrinks or is_held_up or is_faithful
        )

    def judge(self) -> None:
        """Replay all queues."""
        if not self._books:
            return
        self._tape.replay(
            {
                "queued": self._queued,
                "ended": self._gone,
                "lost": self._gone,
                "routed": self._gone,
                "migrated": self._migrated,
                "state": self._state,
                "tokens": self._tokens,
                "ran": self._ran,
                "batch": self._batch,
            }
        )

    @cached_property
    def _sharing(self) -> set[int]:
        """Rows whose prompt may begin as another's does."""
        if self._said is None:
            return set(self._tape.arrived)
        firsts = Counter(one.ids[:1] for one in self._said.values())
        return {row for row, one in self._said.items() if one.ids and firsts[one.ids[:1]] > 1}

    # What happens.
    def _queued(self, record: Record) -> None:
        row = record["row"]
        self._gone(record)
        book = self._books.get(record["replica"])
        if book is None:
            return
        if self._tape.seats[record["replica"]].is_ahead:
            book.unseen[row] = record["at_ns"]
        else:
            self._join(record["replica"], book, row)

    def _join(self, replica: int, book: Book, row: int) -> None:
        """Behind the last one whose place is not worse."""
        seat = self._tape.seats[replica]
        order = self._order(seat)
        if isinstance(seat.scheduler, SglangTable):
            book.queue.append(row)
            return
        place, at = self._place(order, row), len(book.queue)
        while at > 0 and self._place(order, book.queue[at - 1]) > place:
            at -= 1
        book.queue.insert(at, row)

    def _order(self, seat: Seat) -> str:
        return str(keys_of(seat.scheduler).get("order", "arrival"))

    def _came(self, row: int) -> tuple[int, int]:
        arrived = self._tape.arrived[row]
        return arrived["at_ns"], arrived["request"]

    def _place(self, order: str, row: int) -> tuple[int, int, int]:
        arrived = self._tape.arrived[row]
        urgency = 0
        if order == "priority":
            urgency = arrived.get("priority", 0)
        elif order == "deadline":
            urgency = arrived.get("deadline_ns", FOREVER_NS)
        return urgency, *self._came(row)

    def _gone(self, record: Record) -> None:
        row = record["row"]
        for book in self._books.values():
            book.running.pop(row, None)
            book.unseen.pop(row, None)
            if row in book.queue:
                book.queue.remove(row)

    def _migrated(self, record: Record) -> None:
        for replica in (record["source"], record["destination"]):
            self._books.pop(replica, None)

    def _state(self, record: Record) -> None:
        self._books.pop(record["replica"], None)

    def _ran(self, record: Record) -> None:
        book = self._books.get(record["replica"])
        if book is not None:
            book.ended_ns = record["at_ns"]

    def _tokens(self, record: Record) -> None:
        book = self._books.get(record["replica"])
        for row in self._tape.completed(record, self._got):
            if book is not None and row in book.running:
                tokens = book.running.pop(row)
                if self._tape.seats[record["replica"]].is_ahead:
                    book.leaving[row] = tokens

    def _batch(self, record: Record) -> None:
        replica = record["replica"]
        book, seat = self._books.get(replica), self._tape.seats[replica]
        if book is None:
            return
        members: Members = {row: (before, new) for row, before, new in record["members"]}
        preempted = list(record.get("preempted", ()))
        is_odd = "recalls" in record or "first_layer" in record or "verified" in record
        known = [row in book.running or not before for row, (before, _) in members.items()]
        if is_odd or not all(known):  # something was found, or came from elsewhere
            del self._books[replica]
            return
        if isinstance(seat.scheduler, SglangTable):
            self._check(seat, book, record, members, preempted)
        if not isinstance(seat.scheduler, SglangTable) or self._is_whole(seat):
            due = self._due(seat, book, record["at_ns"])
            if due is None:
                del self._books[replica]
                return
            self._compare(seat, record, due, members, preempted)
        self._follow(replica, book, members, preempted)
        book.formed_ns = record["at_ns"]

    def _check(
        self, seat: Seat, book: Book, record: Record, members: Members, preempted: list[int]
    ) -> None:
        """A batch that is not formed anew keeps the rules of its engine."""
        at_ns = record["at_ns"]
        if seat.is_ahead:
            self._see(seat.replica, book, book.formed_ns)
        waiting = [*book.queue, *book.unseen]
        if any(self._tape.cut_ns.get(row) == at_ns for row in waiting):
            return  # one left at this very instant, before or after
        self._tape.count("sglang_order")
        ask = self._asks["arrival"]
        found = list(wrong_in_sglang(seat, book, ask, members, preempted, unseen=False))
        if found and book.unseen:  # an engine that was idle has looked again
            found = list(wrong_in_sglang(seat, book, ask, members, preempted, unseen=True))
        for problem in found:
            where = f"batch {record['batch']} of replica {seat.replica} at {at_ns} ns"
            self._tape.say(f"T5: {where} {problem}")

    def _is_whole(self, seat: Seat) -> bool:
        """SGLang's batches follow whole, and nothing holds a replica up."""
        return is_followed(seat) and not any(f["kind"] in _HOLD_UP for f in self._tape.faults)

    def _compare(
        self, seat: Seat, record: Record, due: Due, members: Members, preempted: list[int]
    ) -> None:
        at_ns = record["at_ns"]
        others = set(members) ^ set(due.members) | set(preempted) ^ set(due.preempted)
        if any(self._tape.cut_ns.get(row) == at_ns for row in others):
            return  # it left at this very instant, before or after
        if keys_of(seat.scheduler).get("enable_block_reuse") and others & self._sharing:
            return
        self._tape.count("formed")
        if members != due.members or preempted != due.preempted:
            self._tape.say(
                f"T5: batch {record['batch']} of replica {seat.replica} at {at_ns} ns has "
                f"{members}, preempts {preempted}; should {due.members}, {due.preempted}"
            )

    def _follow(self, replica: int, book: Book, members: Members, preempted: list[int]) -> None:
        """The books are as the batch has made them."""
        seat = self._tape.seats[replica]
        is_first = (
            isinstance(seat.scheduler, (VllmTable, *VIDUR)) and self._order(seat) == "arrival"
        )
        book.leaving.clear()
        for row in preempted:
            book.running.pop(row, None)
            if is_first:
                book.queue.insert(0, row)
            else:
                self._join(replica, book, row)
        for row, (before, new) in members.items():
            book.running[row] = before + new
            book.unseen.pop(row, None)
            if row in book.queue:
                book.queue.remove(row)

    # The rule.
    def _due(self, seat: Seat, book: Book, at_ns: int) -> Due | None:
        """What should be formed now; None where this is not restated."""
        if seat.is_ahead:
            self._see(seat.replica, book, book.formed_ns)
        ask = self._asks[self._order(seat)]
        if isinstance(seat.scheduler, SglangTable):
            return due_of_sglang(seat, book, ask, has_rested=at_ns > book.ended_ns)
        rule = _RULES[type(seat.scheduler)]
        due = rule(seat, book, ask)
        is_for_nothing = keys_of(seat.scheduler).get("length_ends_known", "on") != "on"
        if is_for_nothing and book.leaving:
            return due  # a step of those that have ended is one, too
        if not due.members and not due.preempted and seat.is_ahead:
            book.leaving.clear()
            self._see(seat.replica, book, at_ns)
            due = rule(seat, book, ask)
        return due if due.members else None

    def _see(self, replica: int, book: Book, until_ns: int) -> None:
        for row, since_ns in list(book.unseen.items()):
            if since_ns <= until_ns:
                del book.unseen[row]
                self._join(replica, book, row)

    def _reached(self, row: int) -> int:
        return int(self._tape.arrived[row]["prompt"]) + self._got[row]

    def _prompt(self, row: int) -> int:
        return int(self._tape.arrived[row]["prompt"])

    def _longest(self, row: int) -> int:
        arrived = self._tape.arrived[row]
        return int(arrived["prompt"]) + int(arrived["output"])
