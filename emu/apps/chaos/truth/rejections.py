"""KV rejection, from the figures that each decision states."""

from __future__ import annotations

from emu.apps.chaos.truth.tape import Tape


def judge_rejections(tape: Tape) -> None:
    """Far fuller than the mean is rejected, but never all that have room; else it is open."""
    table = tape.config.kv_reject
    closed: set[int] = set()
    for record in tape.of("noted", "uses"):
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
        tape.count("kv_rejection")
        if now - hot:
            tape.say(f"T6: {where} replicas {sorted(now - hot)} are rejected, not hot")
        tape.count("kv_rejection")
        if now - closed or (closed & group) - now:
            tape.say(f"T6: {where} {sorted(now)} are rejected, {sorted(closed)} told of")
        if hot - now:
            _may_be_open(tape, hot - now, record["at_ns"])


def _may_be_open(tape: Tape, replicas: set[int], at_ns: int) -> None:
    """A hot replica is open only while something else holds its lock: KV on its way there."""
    for replica in replicas:
        is_busy = tape.config.faults or any(
            record["destination"] == replica and record["kind"] == "kv" and record["at_ns"] <= at_ns
            for record in tape.by_event["transfer"]
            if "destination" in record
        )
        tape.count("hot_is_closed")
        if not is_busy:
            tape.say(f"T6: replica {replica} is hot at {at_ns} ns, and takes KV")
