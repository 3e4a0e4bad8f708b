"""What planners, rejecters, caches, recovery and clients may do, by their equations.

Restates docs/autoscale.md (sections of BlitzScale's planner, the pod autoscaler, host copies),
docs/faults.md (recovery) and the rules of live migration, from the figures that a plan states and
from what happened.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Final

from emu.chaos.truth.tape import Record, Tape, to_ns

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
