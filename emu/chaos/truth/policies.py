"""What routers, rejecters, caches, recovery and clients may do, by their equations."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Final

from emu.chaos.truth import Record, Tape, to_ns

# --- routing: in turn, or to the replica with the least to do -------------------------------------
# Restates `[router]` of docs/reference/config.md for the policies that need no random numbers and
# no look into a cache. The loads are counted here, from what was queued, began, was preempted,
# ended and moved.

_TAKES: Final = ("colocated", "prefill")
_WEIGHTS: Final = {"load": (4, 1), "least_outstanding": (1, 1)}
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
        if router.policy not in ("round_robin", *_WEIGHTS) or router.signal_delay_ms:
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
        policy = self._tape.config.router.policy
        where = f"row {row} goes to replica {replica} at {record['at_ns']} ns"
        if self._turned_ns == record["at_ns"] or replica not in open_:
            pass  # what took prompts at that moment is not told
        elif policy == "round_robin" and len(open_) > 1:
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

    def _least(self, policy: str, replica: int, open_: list[int], where: str) -> None:
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

_GROWS: Final = ("vllm", "sarathi", "vllm_v0")
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
        other = any(seat.is_hybrid or seat.scheduler.policy not in _GROWS for seat in tape.seats)
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
        if not (table.executor == "serverless" or table.multicast == "none"):
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
