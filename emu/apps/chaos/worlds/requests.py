"""Draws of a plain world's requests."""

from __future__ import annotations

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick


def draw_lines(rng: Rng, requests_max: int, tables: Tables) -> list[Tables]:
    """Lines in emu's own format, with ties, sessions, cancellations and extreme lengths."""
    scheduler, has_tiers = tables["scheduler"], bool(tables["network"].get("tiers"))
    whole = scheduler["num_blocks"] * scheduler["block_size"]
    largest = whole if chance(rng, 0.3) else 0
    count = int(rng.integers(5, requests_max + 1))
    gap_ns = int(pick(rng, (0, 1_000_000, 10_000_000, 50_000_000)))
    longest = int(pick(rng, (300, 700) if has_tiers else (30, 300, 700)))
    prefixes = int(pick(rng, (3, 12))) if has_tiers or chance(rng, 0.3) else 0
    leaving, in_sessions = (0.0, 0.15, 0.4)[int(rng.integers(3))], chance(rng, 0.3)
    at_ns = 0
    lull_ns = int(pick(rng, (0, 0, 300_000_000, 3_000_000_000)))  # a second burst after a while
    lines: list[Tables] = []
    for index in range(count):
        if index == count // 2:
            at_ns += lull_ns
        if not chance(rng, 0.3):  # ties are common
            at_ns += gap_ns * int(rng.integers(0, 4))
        if in_sessions and chance(rng, 0.2):
            turns = [
                _turn(rng, longest, prefixes, largest)
                | ({} if last else {"tool_duration_ns": int(pick(rng, (0, 10_000_000)))})
                for last in (False, True)
            ]
            session = f"s{index}"
            lines.append({"session_id": session, "arrival_time_ns": at_ns, "sub_requests": turns})
            continue
        line = {"arrival_time_ns": at_ns, **_turn(rng, longest, prefixes, largest)}
        if chance(rng, leaving):
            line["cancel_after_ns"] = int(pick(rng, (0, 5_000_000, 50_000_000, 300_000_000)))
        if chance(rng, 0.2):
            line["priority"] = int(rng.integers(3))
            line["tenant"] = f"t{int(rng.integers(3))}"
        lines.append(line)
    return lines


def _turn(rng: Rng, longest: int, prefixes: int, largest: int) -> Tables:
    """`largest`: tokens that just fit into an empty replica; 0 = no such request."""
    prompt = 1 if chance(rng, 0.05) else int(rng.integers(1, longest + 1))
    output = int(pick(rng, (1, 2, 10, 40, 120)))
    if largest and chance(rng, 0.05):  # the KV of the last output token is never computed
        prompt = largest - output + 1
    turn: Tables = {"input_toks": prompt, "output_toks": output}
    if prefixes:
        group = int(rng.integers(prefixes)) * 10_000
        turn["input_tok_ids"] = [group + i for i in range(prompt)]
        turn["output_tok_ids"] = [90_000 + i for i in range(output)]
    return turn
