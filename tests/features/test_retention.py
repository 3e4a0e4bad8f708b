"""KV that stays between the turns of a session: what is evicted when, against a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.kv.free_list import FreeList
from emu.kv.radix import Run
from tests.cluster.helpers import LINEAR, rows_of, run_config, workload


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_taken_as_a_list_sorted_by_the_rule_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ttl_ns = int(rng.integers(1, 60))
    free = FreeList(ttl_ns)
    runs = [Run(at, at + 1, 0, base=0) for at in range(80)]  # with names: they do not become one
    plain: list[Run] = list(runs)
    kept: list[tuple[int, int, Run]] = []  # (priority, until, block), in order of keeping
    for run in runs:
        free.append(run)
    held: list[Run] = []
    now_ns = 0
    for _ in range(300):
        now_ns += int(rng.integers(0, 4))
        free.expire(now_ns)
        over = [entry for entry in kept if entry[1] <= now_ns]
        kept = [entry for entry in kept if entry[1] > now_ns]
        plain += [run for _, _, run in sorted(over, key=lambda entry: entry[1])]
        order = plain + [entry[2] for entry in sorted(kept, key=lambda entry: -entry[0])]
        assert free.order() == order, f"{seed=}"
        draw = rng.random()
        if draw < 0.4 and held:
            count = int(rng.integers(1, len(held) + 1))
            chosen = [held[index] for index in rng.permutation(len(held))[:count]]
            held = [run for run in held if run not in chosen]
            if rng.random() < 0.6:
                priority = int(rng.integers(0, 3))
                free.keep(chosen, priority)
                kept += [(priority, now_ns + ttl_ns, run) for run in chosen]
            else:
                for run in chosen:
                    free.append(run)
                plain += chosen
            continue
        count = min(int(rng.integers(0, 12)), len(order))
        if draw < 0.55:  # found in the cache
            chosen = [order[index] for index in rng.permutation(len(order))[: count // 2]]
        else:
            chosen = order[:count]
        for run in chosen:
            if draw >= 0.55:
                assert free.head() is run, f"{seed=}"
            free.remove(run)
        plain = [run for run in plain if run not in chosen]
        kept = [entry for entry in kept if entry[2] not in chosen]
        held += chosen


def mixed(path: Path) -> str:
    """Sessions of five turns with pauses of 2 s, and as much again that is asked only once."""
    lines: list[dict[str, Any]] = []
    fresh = 0
    for index in range(12):
        turns = []
        for number in range(1, 6):
            length = 200 * number
            ids = [[fresh, length + 8]]
            turns.append({"input_toks": length, "output_toks": 8, "tok_id_ranges": ids})
            turns[-1]["tool_duration_ns"] = 2 * 10**9
        fresh += 1008
        lines.append({"arrival_time_ns": index * 10**9, "sub_requests": turns})
    for index in range(60):
        line = {"arrival_time_ns": index * 3 * 10**8, "input_toks": 2000, "output_toks": 8}
        lines.append({**line, "tok_id_ranges": [[fresh, 2008]]})
        fresh += 2008
    return workload(path, lines)


def hits(directory: Path, retain_s: float, **more: Any) -> float:
    """Prompt tokens of the sessions that were found in the cache."""
    run_config(
        directory / "run",
        model={"name": "meta-llama/Llama-3.1-8B"},
        nodes=[{"gpu": "A100-80GB", "gpus": 1}],
        scheduler={"block_size": 16, "num_blocks": 600, "retain_s": retain_s, **more},
        latency={**LINEAR, "per_context_token_us": 0},
        workload={"path": mixed(directory / "w.jsonl")},
    )
    rows = [row for row in rows_of(directory / "run") if row["session_id"]]
    assert len(rows) == 60
    assert {row["status"] for row in rows} == {"completed"}
    return sum(int(row["npu_cache_hit"]) for row in rows) / (12 * 3000)


def test_kept_blocks_are_found_by_the_next_turn(tmp_path: Path) -> None:
    found = {}
    for retain_s in (0.0, 0.5, 30.0):
        folder = tmp_path / f"{retain_s}"
        folder.mkdir()
        found[retain_s] = hits(folder, retain_s)
    assert found[30.0] > 1.5 * found[0.0]
    assert found[0.5] < found[30.0]  # the pauses are longer
    runs = []
    for leap in (True, False):
        folder = tmp_path / f"leap {leap}"
        folder.mkdir()
        hits(folder, 2.0, leap=leap)
        runs.append((folder / "run" / "requests.csv").read_bytes())
    assert runs[0] == runs[1]


def test_what_cannot_keep_blocks_says_so(tmp_path: Path) -> None:
    off = {"scheduler": {"retain_s": 5.0, "prefix_caching": False}}
    with pytest.raises(InputError, match=r"scheduler\.retain_s: keeps blocks for a prefix cache"):
        config_from_dict(off)
    roles = [{"role": "prefill"}, {"role": "decode"}]
    with pytest.raises(InputError, match=r"scheduler\.retain_s: expected colocated"):
        config_from_dict(
            {"scheduler": {"retain_s": 5.0}, "replicas": roles, "nodes": [{"gpus": 2}]}
        )
    with pytest.raises(InputError, match=r"scheduler\.retain_s: .*layers that keep"):
        run_config(
            tmp_path,
            model={"name": "google/gemma-2-9b"},
            scheduler={"retain_s": 5.0},
            latency=LINEAR,
        )
