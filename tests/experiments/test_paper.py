"""`emu experiment paper`: what its figures are made of. The runs themselves take minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.apps.experiments.loads import loads
from emu.apps.experiments.measure import Figures
from emu.apps.experiments.paper import Headlines, paper
from emu.apps.experiments.papercases import CODE, Case, denser, other_parts, run_case
from emu.apps.experiments.papercauses import DENSEST, Change, Waits
from emu.apps.experiments.paperfrontier import Frontier
from emu.apps.experiments.runner import Runner
from emu.errors import InputError


def run(ttfts_ms: list[float], tbts_ms: list[float], gpu_s: float = 1.0) -> Figures:
    numbers = dict.fromkeys(
        (name for name, kind in Figures.__annotations__.items() if kind in ("int", "float")), 0
    )
    return Figures(
        **numbers
        | {
            "gpu_s": gpu_s,
            "ttft_ms_mean": sum(ttfts_ms) / len(ttfts_ms),
            "loads": {},
            "directory": Path(),
            "ttfts_ms": ttfts_ms,
            "tpots_ms": tbts_ms,
            "tbts_ms": tbts_ms,
        }
    )


def test_the_least_gpu_time_is_sought_among_runs_that_meet_the_objective_as_often() -> None:
    full = run([100.0] * 100, [10.0] * 100, gpu_s=10.0)
    wide = run([100.0] * 90 + [900.0] * 10, [10.0] * 100, gpu_s=4.0)
    middle = run([100.0] * 99 + [900.0], [10.0] * 100, gpu_s=6.0)
    tight = run([100.0] * 100, [10.0] * 100, gpu_s=7.0)
    points = [((0.5, 0.7), wide), ((0.3, 0.45), middle), ((0.1, 0.2), tight)]
    limits = {"5x": (500.0, 50.0), "10x": (1000.0, 50.0)}
    found = Frontier(full, {"blitzscale": points}, limits)
    assert found.least("5x") == points[1]
    assert found.least("10x") == points[0]
    assert found.least("5x", points=0.0) == points[2]


def test_a_frontier_without_such_a_run_names_its_tightest_bounds() -> None:
    full, slow = run([100.0], [10.0]), run([900.0], [10.0])
    found = Frontier(full, {"blitzscale": [((0.5, 0.7), slow)]}, {"5x": (500.0, 50.0)})
    assert found.least("5x") == ((0.5, 0.7), slow)


def test_a_row_beside_the_paper_shows_its_cause_switched() -> None:
    """Of a table of 20 rows: what is near the paper, what is with its cause switched."""
    slow, quick = run([1000.0] * 100, [10.0] * 100, 5.0), run([200.0] * 100, [10.0] * 100, 10.0)
    full = run([100.0] * 100, [10.0] * 100, gpu_s=10.0)
    runs = {"blitzscale": quick, "allcache": slow, "serverlessllm": slow}
    systems = {**runs, "full": full, "half": slow}
    pairings = ("azure_code_8b", "azure_conv_24b", "burstgpt_72b")
    everything = dict.fromkeys(pairings, systems)
    limits = {"5x": (150.0, 50.0), "7.2x": (500.0, 50.0)}
    bounded = Frontier(full, {"blitzscale": [((0.5, 0.7), quick)]}, limits)
    waits = Waits("", [run([1.0], [10.0]), run([1.0], [100.0]), run([1.0], [11.0])])
    others = {
        "half as dense": Change(-0.3, -0.7, 0.0, 0.0),
        DENSEST: Change(-0.25, -0.5, -0.05, -0.01),
    }
    shown = Headlines(everything, bounded, [waits, waits], others).shown()
    head, *rows = shown.table
    assert len(rows) == 20 and {len(row) for row in rows} == {len(head)}
    cells = {row[0]: row[3:6] for row in rows}
    assert cells["TTFT, 72B, against ServerlessLLM"] == ["yes", "", ""]
    no, text, then = cells["TTFT, 72B, against AllCache"]
    assert (no, then) == ("no", "yes") and text.startswith("-25.0% with traffic 3 times denser")
    assert cells["TBT, 8B, against AllCache"][1:] == [
        "-90.0% with two GPUs on a NIC, 3 times denser",
        "yes",
    ]
    assert cells["TBT, 8B, against ServerlessLLM"][2] == "no"
    assert cells["5x SLO met, 24B, minus full DistServe (points)"][0] == "no"
    assert cells["5x SLO met, 24B, minus full DistServe (points)"][2] == "yes"
    near = sum(row[3] == "yes" for row in rows)
    then = sum(row[3] == "no" and row[5] == "yes" for row in rows)
    assert f"{near} of 20 within 25 %, {then} more with their cause switched" in shown.title


def test_tbt_is_compared_by_mean_and_by_tail() -> None:
    waits = Waits("", [run([1.0], [10.0] * 99 + [20.0]), run([1.0], [20.0] * 99 + [200.0])])
    assert waits.change(1) == pytest.approx(10.1 / 21.8 - 1)
    assert waits.change(1, is_tail=True) < waits.change(1)


def write_trace(folder: Path) -> None:
    """One request a second for 40 minutes, but ten a second in minutes 10 to 15 and 30."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second in range(2400):
        many = 10 if 600 <= second < 900 else 5 if 1800 <= second < 1860 else 1
        for part in range(many):
            minute, rest = divmod(second, 60)
            lines.append(f"2023-11-16 18:{minute:02}:{rest:02}.{part:07},1000,10")
    (folder / CODE.trace).write_text("\n".join(lines) + "\n")


def test_other_parts_of_a_trace_do_not_touch_the_densest(tmp_path: Path) -> None:
    write_trace(tmp_path)
    runner = Runner(Path("configs/experiments"), tmp_path, lambda _: None, 1, tmp_path)
    parts = other_parts(runner, CODE, 3)
    assert len(parts) == 3
    assert parts[0][0] in range(1560, 1861, 60)
    assert all(not 300 < start < 900 for start, _ in parts)
    traffic = {"path": str(tmp_path / CODE.trace), "start_s": 600, "upscale": 2, "limit": 6000}
    assert denser(traffic, 3) == {**traffic, "upscale": 3, "limit": 9000}
    assert denser(traffic, 1, parts[0])["limit"] == parts[0][1]


def test_runs_that_differ_in_one_thing_have_directories_of_their_own(tmp_path: Path) -> None:
    told: list[str] = []
    runner = Runner(Path("configs/experiments"), tmp_path, told.append, 1, tmp_path)
    write_trace(tmp_path)
    traffic = {"path": str(tmp_path / CODE.trace), "start_s": 0, "upscale": 1, "limit": 20}
    run_case(runner, CODE, traffic, "full")
    run_case(runner, CODE, {**traffic, "start_s": 60}, "full")
    run_case(runner, CODE, traffic, "full", nodes={"nic_gbps": 50})
    run_case(runner, CODE, traffic, "full", keys={"seed": 1})
    run_case(runner, CODE, traffic, "full")
    assert len(told) == len(set(told)) == 4


def test_without_traces_it_says_which(tmp_path: Path) -> None:
    runner = Runner(Path("configs/experiments"), tmp_path, lambda _: None)
    for experiment in (paper, loads):
        with pytest.raises(InputError, match="Azure's traces"):
            next(experiment(runner, "AB"))


def test_each_cause_of_a_slow_load_is_a_row_beside_the_released_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def once(_runner: Runner, _case: Case, _traffic: object, system: str, **given: Any) -> Figures:
        asked.append((system, tuple(given["keys"])))
        return run([100.0 if system == "blitzscale" else 200.0], [10.0])

    monkeypatch.setattr("emu.apps.experiments.loads.run_case", once)
    monkeypatch.setattr("emu.apps.experiments.loads.find_traffic", lambda *_: (None, "drawn"))
    runner = Runner(Path("configs/experiments"), tmp_path, lambda _: None, 1, tmp_path)
    code, burst = loads(runner, "AB")
    assert code.title.startswith("azure_code_8b") and burst.title.startswith("burstgpt_72b")
    head, *rows = code.table
    assert len(rows) == 6 and {len(row) for row in rows} == {len(head)}
    assert rows[0][head.index("TTFT against allcache")] == "-50%"
    assert asked[0] == ("blitzscale", ())
    switched = {key for _, keys in asked for key in keys}
    assert switched == {
        *("autoscale.cold_start_s", "autoscale.pin_gib_per_s"),
        *("latency.step_overhead_us", "autoscale.faithful"),
    }
