"""What planners, rejecters, caches, recovery and clients may do, by their equations.

Restates docs/autoscale.md (sections of BlitzScale's planner, the pod autoscaler, host copies),
docs/faults.md (recovery) and the rules of live migration, from the figures that a plan states and
from what happened.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from emu.chaos.truth.tape import Record, Tape, to_ns

_CHANGE: Final = re.compile(r"(prefill|decode|colocated) ([+-]\d+)")
_FIGURE: Final = re.compile(r"(\w+)=([-+.\de]+)")
_LOADS: Final = ("loading_prefill", "loading_decode", "loading_colocated", "new_prefill")
_WITHOUT: Final = ("inactive", "failed")


class Policies:
    """All decisions of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def judge(self) -> None:
        """One after the other."""
        self._plans()
        self._rejections()
        self._returns()
        self._loads()
        self._clients()
        self._moves()
        self._host_copies()

    # --- planners -----------------------------------------------------------------------------
    def _plans(self) -> None:
        table = self._tape.config.autoscale
        if table is None or self._tape.config.models:
            return  # with several models a plan does not say which it is for
        for record in self._tape.by_event["plan"]:
            head = record["text"].split("; ")[0]
            changes = {role: int(change) for role, change in _CHANGE.findall(head)}
            figures = {name: float(value) for name, value in _FIGURE.findall(head)}
            problems: Iterator[str] = iter(())
            if table.planner in ("blitz", "paper") and "P" in figures:
                problems = self._blitz(table, changes, figures)
            elif table.planner == "hpa" and "wanted" in figures:
                problems = self._pods(table, changes, figures)
            for problem in problems:
                self._tape.say(f"T6: at {record['at_ns']} ns {problem}: {head}")

    def _blitz(
        self, table: Any, changes: dict[str, int], figures: dict[str, float]
    ) -> Iterator[str]:
        """Intervals from tokens, blocks and rates; up to the middle, down by one."""
        for role, count, least, most, low, high in (
            ("prefill", "P", table.min_prefill, table.max_prefill, "P_min", "P_max"),
            ("decode", "D", table.min_decode, table.max_decode, "D_min", "D_max"),
        ):
            now, bottom, top = (int(figures[name]) for name in (count, low, high))
            wanted = now
            if bottom > now:
                wanted = (bottom + top + 1) // 2
            elif top < now:
                wanted = now - 1
            # Whether the last one may go depends on what is in the system.
            due = {min(max(floor, wanted), most) for floor in (least, max(least, 1))}
            if changes[role] not in {value - now for value in due} and wanted <= most >= now:
                yield f"{role} {changes[role]:+d}, should be one of {sorted(due)}"
        if self._has_losses() or "kv_equation" in table.faithful:
            return
        seat = self._tape.seats[0]
        blocks = max(other.blocks for other in self._tape.seats)
        kv = figures["K_tokens"]
        rate = max(1.0, table.tokens_transferred_per_s or self._transfer_rate())
        kv_low = kv / (table.migration_upper_s * rate)
        kv_high = kv / (table.migration_lower_s * rate)
        used = figures["B_blocks"]
        low_d = max(_up(used / (table.decode_upper * blocks)), _up(kv_low))
        high_d = max(_up(used / (table.decode_lower * blocks)), _up(kv_high), low_d)
        for name, exact in (("D_min", low_d), ("D_max", high_d)):
            if abs(figures[name] - exact) > 1e-5 * max(used, kv) / blocks + 1e-9:
                yield f"{name} is {figures[name]:g}, should be {exact}"
        prefill = table.tokens_prefilled_per_s or self._prefill_rate(seat)
        if prefill is None:
            return
        queued = figures["W_tokens"]
        low_p = max(_up(queued / (table.prefill_upper_s * prefill)), _up(kv_low))
        high_p = max(_up(queued / (table.prefill_lower_s * prefill)), _up(kv_high), low_p)
        for name, exact in (("P_min", low_p), ("P_max", high_p)):
            if abs(figures[name] - exact) > 1e-5 * queued / prefill + 1e-9:
                yield f"{name} is {figures[name]:g}, should be {exact}"

    def _has_losses(self) -> bool:
        return any(fault.kind == "kv_shrink" for fault in self._tape.config.faults)

    def _transfer_rate(self) -> float:
        """KV tokens a second into the first replica, through all of its NICs."""
        nodes = [node for node in self._tape.config.nodes for _ in range(node.count)]
        seat = self._tape.seats[0]
        node = nodes[seat.machine]
        rate: float = max(1, round(node.nic_gbps * 1e9 / 8)) * len(seat.gpus) / seat.kv_token_bytes
        return rate

    def _prefill_rate(self, seat: Any) -> float | None:
        """Tokens a second of one prompt of 2,048 tokens."""
        table = seat.latency
        if table.backend != "linear":
            return None
        tokens = min(2048, seat.max_tokens)
        if table.prefill_tokens_per_s:
            took_us = tokens * 1e6 / table.prefill_tokens_per_s
        else:
            took_us = table.base_us + tokens * table.per_token_us
        return float(tokens / (took_us * seat.stages / 1e6))

    def _pods(
        self, table: Any, changes: dict[str, int], figures: dict[str, float]
    ) -> Iterator[str]:
        """ceil(load / target) outside a tolerance of a tenth; windows only make it smaller."""
        ready, loading = int(figures["ready"]), int(figures["loading"])
        total, load = ready + loading, figures["load"]
        target = table.target_value
        if table.metric == "kv_utilization":
            target = table.target_utilization
        if not ready:
            wanted = max(total, 1 if load > 0 else 0)
        else:
            wanted = math.ceil(load / target - 1e-6)
            ratio = load / (ready * target)
            if abs(ratio - 1) <= 0.1 or (ratio > 1 and load / (total * target) <= 1.1):
                wanted = total
        due = {min(max(wanted, table.min_replicas, floor), table.max_replicas) for floor in (0, 1)}
        near = ready and min(
            abs(load / (n * target) - r) for n in (ready, total) for r in (0.9, 1.1)
        )
        if int(figures["wanted"]) not in due and not (ready and near < 1e-4):
            yield f"{figures['wanted']:g} replicas are wanted, should be {sorted(due)}"
        change = changes.get("colocated", 0)
        if change > 0 and total + change > figures["wanted"]:
            yield f"up to {total + change}, {figures['wanted']:g} are wanted"
        if change < 0 and total + change < figures["wanted"]:
            yield f"down to {total + change}, {figures['wanted']:g} are wanted"
        is_eager = change > 0 and not table.scale_up_stabilization_s
        if is_eager and total + change < figures["wanted"]:
            yield f"up to {total + change} only, {figures['wanted']:g} are wanted"

    # --- KV rejection -------------------------------------------------------------------------
    def _rejections(self) -> None:
        """Some decode replica is always open; a rejected one is told of once, and opened later."""
        decoding = {seat.replica for seat in self._tape.seats if seat.role == "decode"}
        closed: set[int] = set()
        for record in self._tape.of("state", "noted"):
            if record["event"] == "state":
                (decoding.add if record["to"] == "decode" else decoding.discard)(record["replica"])
            elif record["kind"] == "kv_rejected":
                closed.add(int(record["target"].split()[-1]))
                if decoding and decoding <= closed:
                    self._tape.say(f"T6: no decode replica takes KV after {record['at_ns']} ns")
            elif record["kind"] == "kv_accepted":
                closed.discard(int(record["target"].split()[-1]))

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
        deadline_ns = to_ns(tape.config.recovery.load_deadline_s)
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


def _up(quotient: float) -> int:
    """The next whole number, but for rounding."""
    return math.ceil(quotient - 1e-9)
