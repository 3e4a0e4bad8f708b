"""Workloads of the runs in `original_runs.csv`: random, but the same wherever they are made."""

import random

from emu.workload.items import Line, Turn

PLANS = {
    # name: (requests, seed, prompt, output, mean gap in ns, every second one is a session)
    "syn": (24, 1, (5, 700), (1, 30), 20_000_000, False),
    "burst": (24, 2, (100, 1500), (1, 40), 1_000_000, False),
    "sess": (8, 3, (30, 400), (2, 20), 60_000_000, True),
    "sparse": (5, 4, (5, 300), (1, 6), 900_000_000, False),
    "tiny": (6, 5, (1, 40), (1, 8), 5_000_000, False),
    "block": (10, 6, (256, 256), (1, 12), 9_000_000, False),
}


def workload(name):
    """Prompts share none, half or all of a common text."""
    count, seed, prompt, output, gap_ns, has_sessions = PLANS[name]
    draw = random.Random(seed)
    common = [draw.randrange(50) for _ in range(4096)]

    def item():
        new, made = draw.randint(*prompt), draw.randint(*output)
        shared = draw.choice([0, new // 2, new])
        own = [draw.randrange(100_000) for _ in range(new - shared)]
        tokens = common[:shared] + own
        return tokens, [draw.randrange(100_000) for _ in range(made)]

    now, lines = 0, []
    for number in range(count):
        now += int(draw.expovariate(1 / gap_ns))
        if not (has_sessions and number % 2):
            tokens, made = item()
            lines.append(
                Line(
                    arrival_time_ns=now, input_toks=len(tokens), output_toks=len(made),
                    input_tok_ids=tokens, output_tok_ids=made,
                )
            )  # fmt: skip
            continue
        turns, history = [], []
        for _ in range(3):
            tokens, made = item()
            tokens = history + tokens
            history = tokens + made
            turns.append(
                Turn(
                    input_toks=len(tokens), output_toks=len(made), input_tok_ids=tokens,
                    output_tok_ids=made, tool_duration_ns=draw.randrange(50_000_000),
                )
            )  # fmt: skip
        lines.append(Line(arrival_time_ns=now, session_id=f"s{number}", sub_requests=turns))
    return lines
