"""Planners: what they saw and wanted at each look, and what their plans may do.

Restates docs/autoscale.md: BlitzScale's intervals from replicas, blocks, tokens and rates; the
pod autoscaler's ratio, tolerance and windows; the steps in which a demand is met; the time of
spares. Looks that order nothing are judged like all others: a planner that should have acted is
found.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape, keys_of, to_ns
from emu.config.schema import BlitzTable, HpaTable

_PREFILL: Final = ("prefill", "aus_prefill", "loading_prefill")
_LIVE: Final = ("new_prefill", "refractory_prefill")
_DECODE: Final = ("decode", "loading_decode", "mutating_to_decode", "aus_decode")
_SHUTTING: Final = ("shutting_prefill", "shutting_decode", "shutting_colocated", "shutting_null")
_BACK: Final = ("shutting_prefill", "shutting_decode")
"""Of these the least loaded come back first."""
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
        self._ends_ns: list[int] = []
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
        looked_ns = {look["at_ns"] for look in self._tape.by_event["look"]}
        for plan in self._tape.by_event["plan"]:
            self._tape.count("looks")
            if plan["at_ns"] not in looked_ns:
                self._tape.say(f"T6: a plan at {plan['at_ns']} ns, when no planner looked: {plan}")
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
            self._tape.count("plan")
            for problem in problems:
                self._tape.say(f"T6: at {look['at_ns']} ns {problem}")
        if not table.is_static and not isinstance(table, HpaTable):
            self._spares(table, seats, looks)

    def _floors(self, look: Record, least: int, count: int) -> set[int]:
        """Replicas that stay without any load: one, or none if all may go."""
        if least:
            return {1}
        if count and self._is_sure_of_last and not look["outstanding"]:
            self._tape.count("idle")
            if look["at_ns"] - self._last_end_ns(look["at_ns"]) < self._idle_ns:
                return {1}
        if not count and not look["outstanding"] and not self._is_late:
            return {0}
        return {1} if look["outstanding"] and not self._is_late else {0, 1}

    @property
    def _is_sure_of_last(self) -> bool:
        """One model only, whose planner sees what is."""
        return not (self._is_late or self._tape.config.models)

    @property
    def _idle_ns(self) -> int:
        table = self._tape.config.autoscale
        return 0 if table is None else to_ns(keys_of(table).get("idle_s") or 0.0)

    def _last_end_ns(self, at_ns: int) -> int:
        """When the last request before an instant ended; the start of the run without any."""
        if not self._ends_ns:
            self._ends_ns = sorted(record["at_ns"] for record in self._tape.by_event["ended"])
        place = bisect_left(self._ends_ns, at_ns)
        return self._ends_ns[place - 1] if place else -self._idle_ns

    @property
    def _is_late(self) -> bool:
        table = self._tape.config.autoscale
        return self._is_blind or (table is not None and table.metrics_delay_ms > 0)

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

    def _steps(
        self, table: Any, seats: Sequence[Seat], views: Sequence[Seen], look: Record
    ) -> Iterator[str]:
        """No more comes than is wanted, what shuts comes back first, the least loaded go."""
        taken = _taken(look["actions"], {view.replica: view.state for view in views})
        yield from taken.problems
        if len(taken.touched) != len(set(taken.touched)):
            yield f"a replica stands twice in {look['actions']}"
        yield from _come_back_first(taken, views)
        yield from _gains(table, taken, views, look)
        if not (table.is_static or table.loads_alone or isinstance(table, HpaTable)):
            yield from self._shut(table, views, look, taken.shut, taken.touched)

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
                tape.count("spare")
                if view.replica in expired and age_ns < ttl_ns and not evicts:
                    tape.say(f"T6: {where}, loses its weights before its time")
                is_over = is_free and age_ns >= ttl_ns and not evicts
                tape.count("spare")
                if is_over and view.replica not in expired | reused:
                    tape.say(f"T6: {where}, keeps its weights")
                if view.state in _SHUTTING and not self._forgets:
                    since = [a for a, b in began[view.replica] if a <= look["at_ns"] <= b]
                    tape.count("spare")
                    if view.shut_ns >= 0 and view.shut_ns not in since:
                        tape.say(f"T6: {where}, it shut at {since}")
        if self._is_blind or table.blocking or tape.config.models:
            return
        at = [look["at_ns"] for look in looks]
        for replica, spans in began.items():
            for since_ns, until_ns in spans:
                due_ns = max(since_ns + ttl_ns, _spare_since(tape.states[replica], since_ns))
                late_ns = due_ns + 2 * tick_ns + 1
                tape.count("spare")
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


class _Taken:
    """What the actions of one look do to replicas."""

    def __init__(self) -> None:
        self.gains: Counter[str] = Counter()
        """Replicas that come, by role; revived and mutated ones by themselves too."""
        self.spare = 0
        """Replicas that may come beside the wanted ones."""
        self.shut: list[int] = []
        self.touched: list[int] = []
        self.revived: list[int] = []
        self.problems: list[str] = []


def _taken(actions: Iterable[str], state_of: Mapping[int, str]) -> _Taken:
    taken = _Taken()
    for action in actions:
        word, _, rest = action.partition(" ")
        if word == "load":
            _load(taken, action, rest, state_of)
            continue
        replica_id = int(rest.split()[0])
        taken.touched.append(replica_id)
        before = state_of.get(replica_id, "inactive")
        if word == "revive":
            taken.gains[before.removeprefix("shutting_")] += 1
            taken.gains[f"revived {before.removeprefix('shutting_')}"] += 1
            taken.revived.append(replica_id)
        elif word == "reuse":
            taken.gains[rest.split()[-1]] += 1
        elif word == "mutate":
            taken.gains["decode"] += 1
            taken.gains["mutated"] += 1
        elif word == "shut":
            taken.shut.append(replica_id)
    return taken


def _load(taken: _Taken, action: str, rest: str, state_of: Mapping[int, str]) -> None:
    if rest.startswith("tanz"):  # whole columns: fewer than a column too many
        taken.spare += rest.partition(" -> ")[0].count(",")
    for replica, role in _TARGET.findall(rest):
        taken.gains["prefill" if role == "new_prefill" else role] += 1
        taken.touched.append(int(replica))
        state = state_of.get(int(replica), "inactive")
        if state != "inactive":
            taken.problems.append(f"{action}: replica {replica} is {state}")


def _come_back_first(taken: _Taken, views: Sequence[Seen]) -> Iterator[str]:
    """The replicas that come back are those with the fewest blocks in use of all that shut."""
    for view in views:
        again = [v for v in views if v.replica in taken.revived and v.state == view.state]
        is_left = view.state in _BACK and view.replica not in taken.touched
        if is_left and any((view.used, view.replica) < (v.used, v.replica) for v in again):
            yield f"replica {view.replica} stays away, and fuller ones come back: {taken.revived}"


def _gains(table: Any, taken: _Taken, views: Sequence[Seen], look: Record) -> Iterator[str]:
    """No more replicas come than are wanted, and those that shut are revived before."""
    prefill, decode, colocated = look["wanted"]
    gains = taken.gains
    for role, demand, gain in (
        ("prefill", prefill, gains["prefill"] - gains["mutated"]),
        ("decode", decode, gains["decode"]),
        ("colocated", colocated, gains["colocated"]),
    ):
        if gain > max(0, demand) + taken.spare:
            yield f"{gain} {role} replicas come, {demand:+d} are wanted: {look['actions']}"
        closing = sum(view.state == f"shutting_{role}" for view in views)
        is_revived = not (table.is_static or table.loads_alone) or role == "colocated"
        due = min(closing, max(0, demand))
        if is_revived and not isinstance(table, HpaTable) and gains[f"revived {role}"] != due:
            yield f"{gains[f'revived {role}']} {role} replicas are revived, should {due}"
