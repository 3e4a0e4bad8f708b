"""What routers, rejecters, caches, recovery, clients and planners may do, by their equations."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from emu.apps.chaos.truth import Record, Seat, Tape, to_ns
from emu.config.schema import (
    BlitzTable,
    CarriedTable,
    HpaTable,
    LeastOutstandingTable,
    LoadTable,
    RoundRobinTable,
    RouterTable,
    SarathiTable,
    VllmTable,
    VllmV0Table,
)

# --- routing: in turn, or to the replica with the least to do -------------------------------------
# Restates `[router]` of docs/reference/config.md for the policies that need no random numbers and
# no look into a cache. The loads are counted here, from what was queued, began, was preempted,
# ended and moved.

_TAKES: Final = ("colocated", "prefill")
_WEIGHTS: Final = {LoadTable: (4, 1), LeastOutstandingTable: (1, 1)}
"""Of a request that waits, and of one that runs."""


class Routing:
    """All choices of the routers of one run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._states = {seat.replica: seat.role for seat in tape.seats}
        self._waiting: dict[int, set[int]] = defaultdict(set)
        self._running: dict[int, set[int]] = defaultdict(set)
        self._last: dict[str, int] = {}
        """The replica that came last in its turn, by model."""
        self._queued_rows: set[int] = set()
        self._turned_ns = -1
        """When a replica changed its state last."""

    def judge(self) -> None:
        """Replay where requests were."""
        router = self._tape.config.router
        if type(router) not in (RoundRobinTable, *_WEIGHTS) or router.signal_delay_ms:
            return
        for record in self._tape.records:
            handler = getattr(self, f"_{record['event']}", None)
            if handler is not None:
                handler(record)

    # --- where requests are -------------------------------------------------------------------
    def _state(self, record: Record) -> None:
        replica = record["replica"]
        self._states[replica] = record["to"]
        self._turned_ns = record["at_ns"]
        if record["to"] in ("failed", "inactive"):
            self._waiting[replica].clear()
            self._running[replica].clear()

    def _ended(self, record: Record) -> None:
        if record["row"] not in self._queued_rows:
            self._last.clear()  # a replica that refuses a request has had its turn
        self._leave(record["row"])

    def _lost(self, record: Record) -> None:
        self._leave(record["row"])

    _routed = _lost

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            self._leave(row)
            self._running[record["destination"]].add(row)

    def _leave(self, row: int) -> None:
        for its in (self._waiting, self._running):
            for rows in its.values():
                rows.discard(row)

    def _batch(self, record: Record) -> None:
        replica = record["replica"]
        for row, _, _ in record["members"]:
            self._waiting[replica].discard(row)
            self._running[replica].add(row)
        for row in record.get("preempted", ()):
            self._running[replica].discard(row)
            self._waiting[replica].add(row)

    def _tokens(self, record: Record) -> None:
        replica = record["replica"]
        if "prefill" in self._states[replica]:
            for row in record["rows"]:  # its prompt is done, and its KV waits to leave
                self._running[replica].discard(row)

    # --- choices ------------------------------------------------------------------------------
    def _queued(self, record: Record) -> None:
        replica, row = record["replica"], record["row"]
        served = self._tape.seats[replica].served
        open_ = [
            seat.replica
            for seat in self._tape.seats
            if seat.served == served and self._states[seat.replica] in _TAKES
        ]
        policy = type(self._tape.config.router)
        where = f"row {row} goes to replica {replica} at {record['at_ns']} ns"
        if self._turned_ns == record["at_ns"] or replica not in open_:
            pass  # what took prompts at that moment is not told
        elif policy is RoundRobinTable and len(open_) > 1:
            last = self._last.get(served, -1)
            due = min((other for other in open_ if other > last), default=open_[0])
            if replica != due and served in self._last:
                self._tape.say(f"T5: {where}, it is the turn of {due}")
        elif policy in _WEIGHTS:
            self._least(policy, replica, open_, where)
        if len(open_) > 1:
            self._last[served] = replica
        self._leave(row)
        self._queued_rows.add(row)
        self._waiting[replica].add(row)

    def _least(self, policy: type[RouterTable], replica: int, open_: list[int], where: str) -> None:
        each, running = _WEIGHTS[policy]
        loads = {
            other: each * len(self._waiting[other]) + running * len(self._running[other])
            for other in open_
        }
        best = min(open_, key=lambda other: (loads[other], other))
        if replica != best:
            self._tape.say(f"T5: {where}, {best} has the least to do: {loads}")


# --- handover: which decode replica gets the KV of prompts that have ended ------------------------
# Restates `router.decode_policy` of docs/reference/config.md: of the open replicas with room the
# one with the lowest id (`first_free`), or with the fewest blocks in use (`least_used`).

_GROWS: Final = (VllmTable, SarathiTable, VllmV0Table)
"""Policies that reserve what there is; the others reserve what there may be."""


class Handover:
    """All destinations that were taken in a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._got: dict[int, int] = defaultdict(int)

    def judge(self) -> None:
        """One after the other."""
        tape = self._tape
        policy = tape.config.router.decode_policy
        if policy == "auto":
            policy = "least_used" if tape.config.autoscale is None else "first_free"
        # Destinations that failed are tried last, those that refuse are passed over.
        failed = any(
            record["how"] not in ("arrived", "stopped") for record in tape.by_event["transfer_over"]
        )
        refused = any(fault.kind == "destination_refuses" for fault in tape.config.faults)
        other = any(seat.is_hybrid or not isinstance(seat.scheduler, _GROWS) for seat in tape.seats)
        if policy not in ("first_free", "least_used") or failed or refused or other:
            return
        for record in tape.of("tokens", "taken"):
            if record["event"] == "taken":
                self._taken(record, policy)
                continue
            for row in record["rows"]:
                self._got[row] += len(record["ends"])

    def _taken(self, record: Record, policy: str) -> None:
        tape, destination = self._tape, record["destination"]
        if "pinned" in record:
            return  # an outside router has named it
        roomy: list[tuple[int, int]] = []
        for replica, used, blocks in record["uses"]:
            block = tape.seats[replica].scheduler.block_size
            reached = [
                tape.arrived[row]["prompt"] + max(1, self._got[row]) for row in record["rows"]
            ]
            if sum(-(-tokens // block) for tokens in reached) <= blocks - used:
                roomy.append((0 if policy == "first_free" else used, replica))
        due = min(roomy, default=(0, -1))[1]
        if destination != due:
            tape.say(
                f"T5: rows {record['rows']} go from replica {record['source']} to {destination} at "
                f"{record['at_ns']} ns, should to {due} ({policy}): {record['uses']}"
            )


# --- rejection, recovery, clients, live moves, host copies ----------------------------------------
# Restates docs/autoscale.md (sections of BlitzScale's planner, the pod autoscaler, host copies),
# docs/faults.md (recovery) and the rules of live migration, from the figures that a plan states and
# from what happened.

_LOADS: Final = ("loading_prefill", "loading_decode", "loading_colocated", "new_prefill")
_WITHOUT: Final = ("inactive", "failed")


class Policies:
    """All decisions of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def judge(self) -> None:
        """One after the other."""
        self._rejections()
        self._choices()
        self._returns()
        self._loads()
        self._clients()
        self._moves()
        self._host_copies()

    # --- KV rejection -------------------------------------------------------------------------
    def _rejections(self) -> None:
        """Far fuller than the mean is rejected, but never all that have room; else it is open."""
        table = self._tape.config.kv_reject
        closed: set[int] = set()
        for record in self._tape.of("noted", "uses"):
            if record["event"] == "noted":
                if record["kind"] == "kv_rejected":
                    closed.add(int(record["target"].split()[-1]))
                elif record["kind"] == "kv_accepted":
                    closed.discard(int(record["target"].split()[-1]))
                continue
            assert table is not None
            uses = record["uses"]
            total = sum(used for _, used, _ in uses)
            hot = {
                replica
                for replica, used, blocks in uses
                if used * len(uses) > table.factor * total and used > table.min_use * blocks
            }
            roomy = [use for use in uses if use[1] < use[2]]
            if roomy and all(use[0] in hot for use in roomy):
                hot.discard(min(roomy, key=lambda use: (use[1], use[0]))[0])
            now, group = set(record["rejected"]), {replica for replica, _, _ in uses}
            where = f"at {record['at_ns']} ns"
            if now - hot:
                self._tape.say(f"T6: {where} replicas {sorted(now - hot)} are rejected, not hot")
            if now - closed or (closed & group) - now:
                self._tape.say(f"T6: {where} {sorted(now)} are rejected, {sorted(closed)} told of")
            if hot - now:
                self._may_be_open(hot - now, record["at_ns"])

    def _may_be_open(self, replicas: set[int], at_ns: int) -> None:
        """A hot replica is open only while something else holds its lock: KV on its way there."""
        tape = self._tape
        for replica in replicas:
            is_busy = tape.config.faults or any(
                record["destination"] == replica
                and record["kind"] == "kv"
                and record["at_ns"] <= at_ns
                for record in tape.by_event["transfer"]
                if "destination" in record
            )
            if not is_busy:
                tape.say(f"T6: replica {replica} is hot at {at_ns} ns, and takes KV")

    # --- rebalancing --------------------------------------------------------------------------
    def _choices(self) -> None:
        """A move goes from the fuller to the emptier, by more than the gap."""
        tape, table = self._tape, self._tape.config.migration
        tokens: dict[int, int] = defaultdict(int)
        for record in tape.of("tokens", "choice"):
            if record["event"] == "tokens":
                for row in record["rows"]:
                    tokens[row] += len(record["ends"])
                continue
            row = record["row"]
            (used, blocks), (other_used, other_blocks) = record["uses"]
            block = tape.seats[record["destination"]].scheduler.block_size
            # The KV of the newest token is computed over there.
            least = -(-(tape.arrived[row]["prompt"] + max(0, tokens[row] - 1)) // block)
            where = f"row {row} from {record['source']} to {record['destination']}"
            if used / blocks - other_used / other_blocks <= table.rebalance_gap:
                tape.say(f"T6: {where} at {record['at_ns']} ns: the gap is {record['uses']}")
            elif (other_used + least) / other_blocks >= used / blocks:
                tape.say(f"T6: {where} at {record['at_ns']} ns only swaps {record['uses']}")

    # --- recovery -----------------------------------------------------------------------------
    def _returns(self) -> None:
        """A dead replica is back exactly when its fault or `[recovery]` says so."""
        tape, table = self._tape, self._tape.config.recovery
        lasting = {
            to_ns(duration_s)
            for fault in tape.config.faults
            if fault.kind.endswith(("crash", "restart"))
            and (duration_s := getattr(fault, "duration_s", None)) is not None
        }
        ends = {
            record["at_ns"]
            for record in tape.by_event["fault_over"]
            if record["kind"] in ("gpu_crash", "node_crash")
        }
        waits = lasting | ({to_ns(table.restart_s)} if table.replace else set())
        for replica, changes in tape.states.items():
            for (since_ns, state), (until_ns, after) in pairwise(changes):
                if state != "failed":
                    continue
                if after != "inactive":
                    tape.say(f"T6: replica {replica} is {after} after it failed")
                elif until_ns - since_ns not in waits and until_ns not in ends:
                    took_ns = until_ns - since_ns
                    tape.say(f"T6: replica {replica} is back after {took_ns} ns, not {waits}")
            since_ns, state = changes[-1]
            if state == "failed" and table.replace and not ends and not lasting:
                late_ns = since_ns + to_ns(table.restart_s)
                downed = any(f.kind in ("gpu_crash", "node_crash") for f in tape.config.faults)
                if late_ns < tape.end_ns and not downed:
                    tape.say(f"T6: replica {replica} was to be back at {late_ns} ns")

    def _loads(self) -> None:
        """No load outlives its deadline; a copy of the machine's own begins after a cold start."""
        tape = self._tape
        table, faults = tape.config.recovery, tape.config.faults
        deadline_s = table.load_deadline_s or (120.0 if faults else 0.0)
        deadline_ns = to_ns(deadline_s)
        autoscale = tape.config.autoscale
        cold_ns = 0 if autoscale is None else to_ns(autoscale.cold_start_s)
        begins: dict[int, list[int]] = defaultdict(list)
        for record in tape.by_event["transfer"]:
            if record["kind"] == "weights" and record.get("source") == -1:
                begins[record["destination"]].append(record["at_ns"])
        for replica, changes in tape.states.items():
            if tape.seats[replica].role not in ("inactive",) and autoscale is None:
                cold = 0
            else:
                cold = cold_ns
            for place, (since_ns, state) in enumerate(changes):
                if state not in _LOADS or (place and changes[place - 1][1] in _LOADS):
                    continue
                until_ns = changes[place + 1][0] if place + 1 < len(changes) else tape.end_ns
                if deadline_ns and until_ns - since_ns > deadline_ns and autoscale is not None:
                    tape.say(f"T6: replica {replica} loads from {since_ns} to {until_ns} ns")
                own = [at for at in begins[replica] if since_ns <= at < until_ns]
                if own and autoscale is not None and own[0] - since_ns != cold:
                    tape.say(
                        f"T6: the load of replica {replica} at {since_ns} ns begins at {own[0]} ns"
                    )

    # --- clients ------------------------------------------------------------------------------
    def _clients(self) -> None:
        """A client that was refused asks again after a pause that doubles each time."""
        tape, table = self._tape, self._tape.config.recovery
        arrivals: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, record in tape.arrived.items():
            arrivals[record["request"]].append((record["at_ns"], row))
        tries: dict[int, int] = defaultdict(int)
        # Starts after a loss count as tries, too, but not in the history.
        lost = {tape.arrived[record["row"]]["request"] for record in tape.by_event["lost"]}
        for record in tape.by_event["ended"]:
            request = tape.arrived[record["row"]]["request"]
            if record["status"] != "rejected" or request in lost:
                continue
            tries[request] += 1
            done = tries[request]
            if done > table.client_retries or len(arrivals[request]) < 1:
                if len(arrivals[request]) > table.client_retries + 1:
                    tape.say(f"T6: request {request} is sent {len(arrivals[request])} times")
                continue
            due_ns = record["at_ns"] + round(table.client_backoff_ms * 2 ** (done - 1) * 1e6)
            later = [at for at, _ in arrivals[request] if at > record["at_ns"]]
            if due_ns < tape.end_ns and due_ns not in later:
                tape.say(f"T6: the client of request {request} was to ask again at {due_ns} ns")

    # --- live migration -----------------------------------------------------------------------
    def _moves(self) -> None:
        """A request gets a token between two moves, and does not go to a fuller replica."""
        tape = self._tape
        tokens: dict[int, int] = defaultdict(int)
        moved: dict[int, int] = {}
        for record in tape.of("tokens", "migrated"):
            if record["event"] == "tokens":
                for row in record["rows"]:
                    tokens[row] += len(record["ends"])
            elif record.get("live"):
                (row,) = record["rows"]
                if moved.get(row) == tokens[row] and not tape.config.migration.drain:
                    tape.say(f"T6: row {row} moves twice without a token, at {record['at_ns']} ns")
                moved[row] = tokens[row]

    # --- host copies --------------------------------------------------------------------------
    def _host_copies(self) -> None:
        """Weights come from a machine's memory while it has them, and from its disk after that."""
        tape, table = self._tape, self._tape.config.autoscale
        if table is None or table.loader != "cache" or table.faithful or tape.config.models:
            return
        stays = isinstance(table, CarriedTable) and table.multicast == "none"
        if not (table.loads_alone or stays):
            return
        lost = ("host_cache_lost", "host_cache_stale", "node_crash")
        if table.host_cache_gib or any(fault.kind in lost for fault in tape.config.faults):
            return
        ttl_ns = to_ns(table.host_cache_ttl_s)
        users: dict[int, set[int]] = defaultdict(set)
        touched: dict[int, int] = {}
        for seat in tape.seats:
            if seat.role != "inactive":
                users[seat.machine].add(seat.replica)
                touched[seat.machine] = 0
        ordered: dict[int, tuple[int, bool, bool]] = {}
        for record in tape.of("state", "transfer", "noted"):
            at_ns = record["at_ns"]
            if record["event"] == "state":
                seat = tape.seats[record["replica"]]
                if record["to"] in _WITHOUT:
                    if seat.replica in users[seat.machine]:
                        users[seat.machine].discard(seat.replica)
                        touched[seat.machine] = at_ns
                elif record["from"] == "inactive" and record["to"] in _LOADS:
                    since_ns = touched.get(seat.machine, -1 - ttl_ns)
                    holds = bool(users[seat.machine]) or at_ns - since_ns < ttl_ns
                    is_edge = since_ns == at_ns
                    if record["writer"] == "planner":
                        ordered[seat.replica] = (at_ns, holds, is_edge)
            elif record["event"] == "noted":
                if record["kind"] == "loaded":
                    seat = tape.seats[int(record["target"].split()[-1])]
                    users[seat.machine].add(seat.replica)
                    touched[seat.machine] = at_ns
            elif record["kind"] == "weights" and record.get("source") == -1:
                self._source(record, ordered)

    def _source(self, record: Record, ordered: dict[int, tuple[int, bool, bool]]) -> None:
        found = ordered.pop(record["destination"], None)
        if found is None:
            return
        at_ns, holds, is_edge = found
        link = record["parts"][0][0][0]
        is_disk = ".ssd." in link
        if is_disk == holds and not is_edge:
            where = "the disk" if is_disk else "memory"
            self._tape.say(
                f"T6: replica {record['destination']} loads from {where} after {at_ns} ns, its "
                f"machine {'has' if holds else 'does not have'} the weights"
            )


# --- planners: what they saw and wanted at each look, and what their plans may do -----------------
# Restates docs/autoscale.md: BlitzScale's intervals from replicas, blocks, tokens and rates; the
# pod autoscaler's ratio, tolerance and windows; the steps in which a demand is met; the time of
# spares. Looks that order nothing are judged like all others: a planner that should have acted is
# found.

_PREFILL: Final = ("prefill", "aus_prefill", "loading_prefill")
_LIVE: Final = ("new_prefill", "refractory_prefill")
_DECODE: Final = ("decode", "loading_decode", "mutating_to_decode", "aus_decode")
_SHUTTING: Final = ("shutting_prefill", "shutting_decode", "shutting_colocated", "shutting_null")
_TARGET: Final = re.compile(r"(\d+):(\w+)")
_TOLERANCE: Final = 0.1
_NEAR: Final = 1e-6
_BLIND: Final = ("metrics_delayed", "metrics_frozen", "metrics_lost", "planner_restart")


class Seen(msgspec.Struct):
    """One replica as the planner saw it. `used` counts blocks."""

    replica: int
    state: str
    used: int
    blocks: int
    shut_ns: int
    is_closed: bool
    is_unmarked: bool


class Planners:
    """All looks of all planners of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        kinds = {fault.kind for fault in tape.config.faults}
        self._forgets = "planner_restart" in kinds
        self._is_blind = not kinds.isdisjoint(_BLIND)
        self._restarts = deque(
            record["at_ns"]
            for record in tape.by_event["fault"]
            if record["kind"] == "planner_restart"
        )

    def judge(self) -> None:
        """Each planner by itself."""
        config = self._tape.config
        if config.autoscale is None:
            return
        names = [model.label for model in config.models]
        for place, name in enumerate(names or [""]):
            table: Any = config.autoscale
            if names:
                own = config.models[place].autoscale
                if "preset" in own or "planner" in own:
                    continue
                table = msgspec.structs.replace(table, **own)
            called = f"planner of {name}" if len(names) > 1 else "planner"
            looks = [r for r in self._tape.by_event["look"] if r["planner"] == called]
            seats = [s for s in self._tape.seats if not names or s.served == name]
            self._of_one(table, seats, looks)

    def _of_one(self, table: Any, seats: Sequence[Seat], looks: Sequence[Record]) -> None:
        wanted: list[tuple[int, int]] = []
        for look in looks:
            views = [Seen(*view) for view in look["replicas"]]
            problems: list[str] = []
            if isinstance(table, BlitzTable) and "P" in look["figures"]:
                problems += self._blitz(table, seats, views, look)
            elif isinstance(table, HpaTable) and "wanted" in look["figures"]:
                problems += self._pods(table, views, look, wanted)
            if not table.is_static:
                problems += self._steps(table, seats, views, look)
            for problem in problems:
                self._tape.say(f"T6: at {look['at_ns']} ns {problem}")
        if not table.is_static and not isinstance(table, HpaTable):
            self._spares(table, seats, looks)

    def _floors(self, look: Record, least: int, count: int) -> set[int]:
        """Replicas that stay without any load: one, or none if all may go."""
        if least:
            return {1}
        if not count and not look["outstanding"] and not self._is_late:
            return {0}
        return {1} if look["outstanding"] and not self._is_late else {0, 1}

    @property
    def _is_late(self) -> bool:
        table = self._tape.config.autoscale
        return self._is_blind or (table is not None and table.metrics_delay_ms > 0)

    # --- BlitzScale ---------------------------------------------------------------------------
    def _blitz(
        self, table: Any, seats: Sequence[Seat], views: Sequence[Seen], look: Record
    ) -> Iterator[str]:
        """Intervals from tokens, blocks and rates; up to the middle, down by one."""
        figures, seat = look["figures"], seats[0]
        states = Counter(view.state for view in views)
        used: Counter[str] = Counter()
        for view in views:
            used[view.state] += view.used
        block = seat.scheduler.block_size
        kv = block * (used["prefill"] + used["aus_prefill"])
        blocks_used = sum(used[state] for state in (*_PREFILL, *_DECODE))
        due: dict[str, float] = {
            "P": sum(states[state] for state in (*_PREFILL, *_LIVE, "old_prefill")),
            "D": sum(states[state] for state in _DECODE),
            "W_tokens": look["waiting_tokens"] + block * sum(used[state] for state in _LIVE),
            "K_tokens": kv,
            "B_blocks": blocks_used,
        }
        if "kv_equation" not in table.faithful:
            due |= self._intervals(table, seats, views, due)
        for name, exact in due.items():
            if figures[name] != exact:
                yield f"{name} is {figures[name]:g}, should be {exact:g}"
        for role, place, least, most in (
            ("prefill", 0, table.min_prefill, table.max_prefill),
            ("decode", 1, table.min_decode, table.max_decode),
        ):
            change, count = look["wanted"][place], role[0].upper()
            low, high = f"{count}_min", f"{count}_max"
            now, bottom, top = (int(figures[name]) for name in (count, low, high))
            target = now
            if bottom > now:
                target = (bottom + top + 1) // 2
            elif top < now:
                target = now - 1
            allowed = {
                min(max(floor, target, least), most) - now
                for floor in self._floors(look, least, now)
            }
            if change not in allowed:
                yield f"{role} {change:+d} of {now}, should be {sorted(allowed)}"

    def _intervals(
        self,
        table: Any,
        seats: Sequence[Seat],
        views: Sequence[Seen],
        due: Mapping[str, float],
    ) -> dict[str, float]:
        shown = {view.replica for view in views}
        blocks = max(
            [view.blocks for view in views]
            + [seat.blocks for seat in seats if seat.replica not in shown]
        )
        kv, used, queued = due["K_tokens"], due["B_blocks"], due["W_tokens"]
        rate = max(1.0, table.tokens_transferred_per_s or self._transfer_rate(seats[0]))
        low = _up(kv / (table.migration_upper_s * rate))
        high = _up(kv / (table.migration_lower_s * rate))
        least = max(_up(used / (table.decode_upper * blocks)), low)
        found: dict[str, float] = {
            "D_min": least,
            "D_max": max(_up(used / (table.decode_lower * blocks)), high, least),
        }
        prefill = table.tokens_prefilled_per_s or _prefill_rate(seats[0])
        if prefill:
            least = max(_up(queued / (table.prefill_upper_s * prefill)), low)
            found["P_min"] = least
            found["P_max"] = max(_up(queued / (table.prefill_lower_s * prefill)), high, least)
        return found

    def _transfer_rate(self, seat: Seat) -> float:
        """KV tokens a second into a replica, through all of its NICs."""
        nodes = [node for node in self._tape.config.nodes for _ in range(node.count)]
        rate: float = max(1, round(nodes[seat.machine].nic_gbps * 1e9 / 8))
        return rate * len(seat.gpus) / seat.kv_token_bytes

    # --- the pod autoscaler -------------------------------------------------------------------
    def _pods(
        self,
        table: Any,
        views: Sequence[Seen],
        look: Record,
        notes: list[tuple[int, int]],
    ) -> Iterator[str]:
        """ceil(load / target) outside a tolerance of a tenth, then both windows.

        A planner that starts has the present number in both.
        """
        figures, at_ns = look["figures"], look["at_ns"]
        serving = [view for view in views if view.state == "colocated"]
        ready = len(serving)
        loading = sum(view.state == "loading_colocated" for view in views)
        target, load = table.target_value, float(look["outstanding"])
        if table.metric == "kv_utilization":
            target = table.target_utilization
            load = sum(view.used / view.blocks for view in serving)
        elif table.metric == "queue":
            load = float(look["waiting"])
        for name, exact in (("ready", ready), ("loading", loading), ("load", load)):
            if abs(figures[name] - exact) > _NEAR:
                yield f"{name} is {figures[name]:g}, should be {exact:g}"
        total = ready + loading
        if not ready:
            due = {max(total, 1 if load > 0 else 0)}
        else:
            due = {math.ceil(load / target + e) for e in (-_NEAR, -1e-9)}
            by_ready, by_total = load / (ready * target), load / (total * target)
            inside = abs(by_ready - 1) <= _TOLERANCE or (
                by_ready > 1 and by_total <= 1 + _TOLERANCE
            )
            if min(abs(abs(by_ready - 1) - _TOLERANCE), abs(by_total - 1.1)) < _NEAR:
                due.add(total)
            elif inside:
                due = {total}
        allowed = {
            min(max(number, table.min_replicas, floor), table.max_replicas)
            for number in due
            for floor in self._floors(look, table.min_replicas, total)
        }
        wanted = int(figures["wanted"])
        if wanted not in allowed:
            yield f"{wanted} replicas are wanted, should be {sorted(allowed)}"
        while self._restarts and self._restarts[0] <= at_ns:
            self._restarts.popleft()
            notes.clear()
        if not notes:  # the present number is the recommendation before the first one
            floor = max(self._floors(look, table.min_replicas, total))
            present = min(max(total, table.min_replicas, floor), table.max_replicas)
            notes.append((at_ns - 1, present))
        notes.append((at_ns, wanted))
        up_ns = to_ns(table.scale_up_stabilization_s)
        down_ns = to_ns(table.scale_down_stabilization_s)
        lowest = min(number for since_ns, number in notes if since_ns >= at_ns - up_ns)
        highest = max(number for since_ns, number in notes if since_ns >= at_ns - down_ns)
        kept = max(lowest, min(total, highest))
        if look["wanted"][2] != kept - total:
            yield f"colocated {look['wanted'][2]:+d} of {total}, the windows say {kept - total:+d}"

    # --- plans --------------------------------------------------------------------------------
    def _steps(
        self, table: Any, seats: Sequence[Seat], views: Sequence[Seen], look: Record
    ) -> Iterator[str]:
        """No more comes than is wanted, what shuts comes back first, the least loaded go."""
        prefill, decode, colocated = look["wanted"]
        state_of = {view.replica: view.state for view in views}
        gains: Counter[str] = Counter()
        spare = 0
        shut: list[int] = []
        touched: list[int] = []
        for action in look["actions"]:
            word, _, rest = action.partition(" ")
            if word == "load":
                if rest.startswith("tanz"):  # whole columns: fewer than a column too many
                    spare += rest.partition(" -> ")[0].count(",")
                for replica, role in _TARGET.findall(rest):
                    gains["prefill" if role == "new_prefill" else role] += 1
                    touched.append(int(replica))
                    if state_of.get(int(replica), "inactive") != "inactive":
                        yield f"{action}: replica {replica} is {state_of[int(replica)]}"
                continue
            replica_id = int(rest.split()[0])
            touched.append(replica_id)
            before = state_of.get(replica_id, "inactive")
            if word == "revive":
                gains[before.removeprefix("shutting_")] += 1
                gains[f"revived {before.removeprefix('shutting_')}"] += 1
            elif word == "reuse":
                gains[rest.split()[-1]] += 1
            elif word == "mutate":
                gains["decode"] += 1
                gains["mutated"] += 1
            elif word == "shut":
                shut.append(replica_id)
        if len(touched) != len(set(touched)):
            yield f"a replica stands twice in {look['actions']}"
        for role, demand, gain in (
            ("prefill", prefill, gains["prefill"] - gains["mutated"]),
            ("decode", decode, gains["decode"]),
            ("colocated", colocated, gains["colocated"]),
        ):
            if gain > max(0, demand) + spare:
                yield f"{gain} {role} replicas come, {demand:+d} are wanted: {look['actions']}"
            closing = sum(view.state == f"shutting_{role}" for view in views)
            is_revived = not (table.is_static or table.loads_alone) or role == "colocated"
            due = min(closing, max(0, demand))
            if is_revived and not isinstance(table, HpaTable) and gains[f"revived {role}"] != due:
                yield f"{gains[f'revived {role}']} {role} replicas are revived, should {due}"
        if not (table.is_static or table.loads_alone or isinstance(table, HpaTable)):
            yield from self._shut(table, views, look, shut, touched)

    def _shut(
        self,
        table: Any,
        views: Sequence[Seen],
        look: Record,
        shut: Sequence[int],
        touched: Sequence[int],
    ) -> Iterator[str]:
        """One of a kind a tick, the one with the fewest blocks in use."""
        seen = {view.replica: view for view in views}
        for role, demand in (("prefill", look["wanted"][0]), ("decode", look["wanted"][1])):
            its = [seen[replica] for replica in shut if seen[replica].state == role]
            most = "shut_most_loaded" in table.faithful and role == "decode"
            if len(its) > 1 or (its and demand >= 0 and not most):
                yield f"{len(its)} {role} replicas shut, {demand:+d} are wanted"
            for one in its:
                others = [v for v in views if v.state == role and v.replica not in touched]
                if not most and any(
                    (other.used, other.replica) < (one.used, one.replica) for other in others
                ):
                    yield f"replica {one.replica} shuts, which is not the least loaded"

    # --- spares -------------------------------------------------------------------------------
    def _spares(self, table: Any, seats: Sequence[Seat], looks: Sequence[Record]) -> None:
        """A spare loses its weights when its time is up, not before, and the planner looks then."""
        tape = self._tape
        ttl_ns, tick_ns = to_ns(table.spare_ttl_ms / 1e3), to_ns(table.tick_ms / 1e3)
        began = {seat.replica: _closings(tape.states.get(seat.replica, ())) for seat in seats}
        for look in looks:
            expired = {int(a.split()[1]) for a in look["actions"] if a.startswith("expire")}
            reused = {int(a.split()[1]) for a in look["actions"] if a.startswith("reuse")}
            for view in (Seen(*view) for view in look["replicas"]):
                age_ns = look["at_ns"] - view.shut_ns
                is_free = view.state == "shutting_null" and view.is_closed and view.is_unmarked
                where = f"spare {view.replica} at {look['at_ns']} ns, {age_ns} ns after it shut"
                evicts = "evict_spares" in table.faithful
                if view.replica in expired and age_ns < ttl_ns and not evicts:
                    tape.say(f"T6: {where}, loses its weights before its time")
                is_over = is_free and age_ns >= ttl_ns and not evicts
                if is_over and view.replica not in expired | reused:
                    tape.say(f"T6: {where}, keeps its weights")
                if view.state in _SHUTTING and not self._forgets:
                    since = [a for a, b in began[view.replica] if a <= look["at_ns"] <= b]
                    if view.shut_ns >= 0 and view.shut_ns not in since:
                        tape.say(f"T6: {where}, it shut at {since}")
        if self._is_blind or table.blocking or tape.config.models:
            return
        at = [look["at_ns"] for look in looks]
        for replica, spans in began.items():
            for since_ns, until_ns in spans:
                due_ns = max(since_ns + ttl_ns, _spare_since(tape.states[replica], since_ns))
                late_ns = due_ns + 2 * tick_ns + 1
                if late_ns < min(until_ns, tape.end_ns) and not any(
                    due_ns <= look_ns <= late_ns for look_ns in at
                ):
                    tape.say(
                        f"T6: no planner looks when the time of spare {replica} is up, {due_ns} ns"
                    )


def _closings(changes: Sequence[tuple[int, str]]) -> list[tuple[int, int]]:
    """When a replica began to shut, and when that was over."""
    found: list[tuple[int, int]] = []
    since_ns = -1
    for at_ns, state in changes:
        if state in _SHUTTING and since_ns < 0:
            since_ns = at_ns
        elif state not in _SHUTTING and since_ns >= 0:
            found.append((since_ns, at_ns))
            since_ns = -1
    if since_ns >= 0:
        found.append((since_ns, 1 << 62))
    return found


def _spare_since(changes: Sequence[tuple[int, str]], since_ns: int) -> int:
    """When it had nothing more to do, after it began to shut."""
    return min(
        (at_ns for at_ns, state in changes if state == "shutting_null" and at_ns >= since_ns),
        default=1 << 62,
    )


def _prefill_rate(seat: Seat) -> float:
    """Tokens a second of one prompt of 2,048 tokens; 0 = the rule is not restated."""
    table = seat.latency
    if table.backend != "linear" or not seat.is_plain:
        return 0.0
    tokens = min(2048, seat.max_tokens)
    if table.prefill_tokens_per_s:
        token_ps = round(1e12 / table.prefill_tokens_per_s)
        stage_ps = tokens * token_ps
    else:
        stage_ps = round(table.base_us * 1e6) + tokens * round(table.per_token_us * 1e6)
    took_s: float = max(1, (stage_ps + 500) // 1000) * seat.stages / 1e9
    return tokens / took_s


def _up(quotient: float) -> int:
    """The next whole number, but for rounding."""
    return math.ceil(quotient - 1e-9)
