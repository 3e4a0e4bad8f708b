"""Requests that move from one replica to another while they decode."""

from __future__ import annotations

from collections import defaultdict

from emu.apps.chaos.truth.tape import Record, Tape


def judge_live_moves(tape: Tape) -> None:
    """A request gets a token between two moves, and does not go to a fuller replica."""
    _judge_rounds(tape)
    tokens: dict[int, int] = defaultdict(int)
    moved: dict[int, int] = {}
    for record in tape.of("tokens", "migrated"):
        if record["event"] == "tokens":
            for row in record["rows"]:
                tokens[row] += len(record["ends"])
        elif record.get("live"):
            (row,) = record["rows"]
            tape.count("live_move")
            if moved.get(row) == tokens[row] and not tape.config.migration.drain:
                tape.say(f"T6: row {row} moves twice without a token, at {record['at_ns']} ns")
            moved[row] = tokens[row]


def _judge_rounds(tape: Tape) -> None:
    """A request that moves while it decodes stops when two blocks or fewer are left to copy.

    So of its transfers only the first and the last one may be as small as that.
    """
    moving: dict[tuple[int, int], list[Record]] = {}
    for record in tape.of("choice", "transfer", "migrated", "taken"):
        if record["event"] == "transfer" and record["kind"] != "kv":
            continue
        pair = record.get("source", -1), record.get("destination", -1)
        if record["event"] == "choice" and pair not in moving:
            moving[pair] = []
        elif record["event"] == "transfer":
            if pair in moving:
                moving[pair].append(record)
        else:
            rounds = moving.pop(pair, [])
            is_sure = record["event"] == "migrated" and record.get("live")
            if is_sure and not tape.seats[pair[0]].is_hybrid:
                _last_rounds(tape, pair[0], rounds)


def _last_rounds(tape: Tape, source: int, rounds: list[Record]) -> None:
    seat = tape.seats[source]
    least = 2 * seat.kv_token_bytes * seat.page_tokens
    for record in rounds[1:-1]:
        tape.count("rounds_of_move")
        if record["bytes"] <= least:
            tape.say(
                f"T6: transfer {record['transfer']} copies {record['bytes']} bytes of a request "
                f"that decodes on, at {record['at_ns']} ns"
            )
