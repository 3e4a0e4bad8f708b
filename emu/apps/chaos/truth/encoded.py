"""Encoders before a cluster: what one request has sent is not ready for another before it is made.

Restates `[encoders]` of docs/reference/config.md for encoders that keep all they have made, and
replicas without front ends: a request that shares an image with an earlier one, all of whose images
were new, is at its replica no sooner than that was, but for the way of that one's embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape, keys_of

_ELEMENTS: Final = 8
"""Times the width of a model that the embedding of a token has at most, in 16 bits."""


def judge_encoded(tape: Tape, lines: Sequence[Record]) -> None:
    """All requests of a run, in the order in which they came."""
    config = tape.config
    table = keys_of(config).get("encoders")
    if table is None or keys_of(table)["cache_tokens"] or any(seat.front for seat in tape.seats):
        return
    if tape.faults or any("sub_requests" in line or "cancel_after_ns" in line for line in lines):
        return
    keys, gbps = keys_of(config.workload), keys_of(table)["nic_gbps"]
    if any(keys.get(key) for key in ("start_s", "concurrency", "max_in_flight")):
        return
    gbps = gbps or min(node.nic_gbps for node in config.nodes)
    queued: dict[int, int] = {}
    for record in tape.by_event["queued"]:
        queued.setdefault(record["row"], record["at_ns"])
    made_ns: dict[int, float] = {}
    for row, arrived in sorted(tape.arrived.items(), key=lambda one: one[1]["at_ns"]):
        if arrived["request"] >= len(lines) or row not in queued:
            return
        images = lines[arrived["request"]].get("images", ())
        names: list[int] = [image for image, _, _ in images]
        due_ns = max((made_ns[name] for name in names if name in made_ns), default=0.0)
        tape.count("encoded")
        if queued[row] < due_ns:
            tape.say(f"T3: row {row} has images at {queued[row]} ns that are made at {due_ns:.0f}")
        tokens = sum(count for _, _, count in images)
        way_ns = tokens * _ELEMENTS * 2 * tape.seats[0].hidden * 8 / gbps
        if not any(name in made_ns for name in names):
            way_ns += max(1000 * node.nic_latency_us for node in config.nodes)
            made_ns |= dict.fromkeys(names, queued[row] - way_ns)
        else:
            made_ns |= {name: 0.0 for name in names if name not in made_ns}
