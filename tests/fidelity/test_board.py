"""The board: what readers make of runs, what a fit finds, what the command prints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from emu.apps.fidelity.board import Answer, answers, find_runs, rows_of, tasks_of
from emu.apps.fidelity.fit import CONSTANTS, SIGMAS, Sensitivity, solve
from emu.apps.fidelity.inferenceperf import build_inference_perf
from emu.apps.fidelity.runs import Figures, MeasuredRun
from emu.apps.fidelity.summary import summarize
from emu.cli import call
from emu.engines.registry import BUNDLES
from emu.errors import InputError
from tests.shared_data import SHARED, needs_shared

LATENCIES = {"mean": 30.0, "p99": 60.0}


def entry(name: str, model: str = "Qwen/Qwen2.5-0.5B", **changes: Any) -> dict[str, Any]:
    stage = {
        "rate_per_s": 4,
        "duration_s": 10,
        "ttft_ms": LATENCIES,
        "e2e_ms": {"mean": 130.0, "p99": 200.0},
    }
    return {
        "id": name,
        "engine": "vLLM 0.15.1",
        "gpu": "H100-SXM5-80GB",
        "model": model,
        "dtype": "bfloat16",
        "tensor_parallel": 1,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": None,
        "gpu_memory_utilization": 0.9,
        "workload": "general",
        "system_tokens": 32,
        "question_tokens": 64,
        "output_tokens": 11,
        "groups": 2,
        "prompts_per_group": 3,
        "stages": [stage, stage | {"rate_per_s": 8}],
        "peers_error_percent": {"other": {"e2e_mean": 7.0, "ttft_mean": -20.0}},
    } | changes


def directory(place: Path, *entries: dict[str, Any]) -> Path:
    (place / "runs.json").write_text(json.dumps(list(entries)))
    return place


def test_a_load_is_rebuilt_as_its_generator_makes_it(tmp_path: Path) -> None:
    run = find_runs(directory(tmp_path, entry("a")))[0]
    case = build_inference_perf(run, 1, 1.0)
    lines = [json.loads(line) for line in case.workload.splitlines()]
    assert case.counts == (40, 80)
    assert case == build_inference_perf(run, 1, 1.0)
    assert case.workload != build_inference_perf(run, 2, 1.0).workload
    arrivals = [line["arrival_time_ns"] / 1e9 for line in lines]
    assert arrivals[39] == pytest.approx(10)  # gaps sum to the stage's duration
    assert arrivals[-1] == pytest.approx(10 + 30 + 10)
    gaps = np.diff(arrivals[:40])
    assert gaps.std() > 0.5 * gaps.mean()  # not at constant distance
    # Six prompts in one order that repeats, and restarts with the stage.
    prompts = [line["tok_id_ranges"][1][0] for line in lines]
    assert prompts[:6] == prompts[6:12] == prompts[40:46]
    assert len(set(prompts)) == 6
    systems = {line["tok_id_ranges"][0][0] for line in lines}
    assert len(systems) == 2
    assert all(line["cancel_after_ns"] == 300 * 10**9 for line in lines)
    assert '[engine]\nname = "vllm"\nversion = "0.15"' in case.config


def test_a_part_of_a_load_is_its_beginning(tmp_path: Path) -> None:
    run = find_runs(directory(tmp_path, entry("a")))[0]
    whole, part = build_inference_perf(run, 1, 1.0), build_inference_perf(run, 1, 0.25)
    assert part.counts == (10, 20)
    assert part.workload.splitlines()[:10] == whole.workload.splitlines()[:10]


def test_what_failed_was_overloaded(tmp_path: Path) -> None:
    stage = entry("a")["stages"][0]
    stages = [stage | {"failed": 3}, stage | {"ttft_ms": {"mean": 2500.0, "p99": 3e4}}, stage]
    run = find_runs(directory(tmp_path, entry("a", stages=stages)))[0]
    assert [stage.is_overloaded for stage in run.stages] == [True, True, False]
    assert run.stages[0].regime == "overloaded"


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "not valid JSON"), ("{}", "expected a list"), ('[{"id": "x"}]', "lacks")],
)
def test_a_broken_record_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(InputError, match=problem):
        find_runs(tmp_path)


def test_a_directory_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no measured run found"):
        find_runs(tmp_path)


def test_the_board_of_two_small_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory(tmp_path, entry("first"), entry("second"))
    assert call(["fidelity", str(tmp_path), "-j", "1", "--seeds", "2", "--json"]) == 0
    board = json.loads(capsys.readouterr().out)
    assert [row["run_id"] for row in board["rows"]] == ["first", "first", "second", "second"]
    row = board["rows"][0]
    for metric, measured in row["measured"].items():
        error = 100 * (row["emulated"][metric] - measured) / measured
        assert row["error_percent"][metric] == pytest.approx(error)
    assert row["verdict_right"]
    assert row["spread"]["e2e"] > 0  # two seeds
    assert board["summary"]["peers"]["other"] == {"e2e": 7.0, "ttft": 20.0, "runs": 2.0}
    assert call(["fidelity", str(tmp_path), "-j", "1", "--seeds", "1", "--only", "second"]) == 0
    assert "wrong verdicts: none" in capsys.readouterr().out


def test_leaving_out_needs_two_groups(tmp_path: Path) -> None:
    directory(tmp_path, entry("only"))
    with pytest.raises(InputError, match="all runs have the same gpu"):
        call(["fidelity", str(tmp_path), "-j", "1", "--leave-out", "gpu", "--json"])


def test_a_fit_finds_the_constants_that_made_the_figures(tmp_path: Path) -> None:
    """Relative errors that are linear in the constants, one host that is 15 % off left aside."""
    names = [f"run{number}" for number in range(12)]
    runs = find_runs(directory(tmp_path, *(entry(name) for name in names)))
    base = BUNDLES["vllm-0.15"].model
    rng = np.random.default_rng(1)
    truth = np.array([150_000.0, 2_000.0, 30_000.0, 600_000.0, -20_000.0])
    scale = np.array([prior for _, prior in CONSTANTS.values()])
    jacobian = {
        (name, stage, metric): rng.normal(size=len(CONSTANTS)) * 0.3 / scale
        for name, stage, metric in itertools.product(names, (0, 1), SIGMAS)
    }
    rows = []
    for row in rows_of(runs, _same(runs)):
        stage = 0 if row.stage == "4/s" else 1
        figures = {
            metric: getattr(row.measured, metric)
            * np.exp(-float(jacobian[row.run_id, stage, metric] @ truth))
            * (1.15 if row.run_id == "run3" else 1.0)
            for metric in SIGMAS
        }
        rows.append(
            msgspec.structs.replace(row, emulated=msgspec.structs.replace(row.measured, **figures))
        )
    found = solve(runs, rows, base, Sensitivity(jacobian))
    for at, name in enumerate(CONSTANTS):
        change = getattr(found.engine, name) - getattr(base, name)
        assert abs(change - truth[at]) < 4 * found.errors[name] + 1, name


def test_runs_of_one_model_say_once_how_long_steps_are(tmp_path: Path) -> None:
    """Eight of its runs are 8 % slow, one run of each of three other models is right."""
    others = ("Llama-3.1-8B", "Llama-2-7B", "Mistral-7B-v0.1")
    found = find_runs(
        directory(
            tmp_path,
            *(entry(f"run{number}") for number in range(8)),
            *(entry(f"other{number}", model) for number, model in enumerate(others)),
        )
    )
    rows = []
    for row in rows_of(found, _same(found)):
        slow = 1.08 if row.run_id.startswith("run") else 1.0
        figures = {metric: getattr(row.measured, metric) / slow for metric in SIGMAS}
        rows.append(
            msgspec.structs.replace(row, emulated=msgspec.structs.replace(row.measured, **figures))
        )
    step = np.array([1e-6 if name == "step_ns" else 0.0 for name in CONSTANTS])  # 0.1 % a us
    jacobian = {
        (run.run_id, stage, metric): step
        for run, stage, metric in itertools.product(found, (0, 1), SIGMAS)
    }
    base = BUNDLES["vllm-0.15"].model
    change = solve(found, rows, base, Sensitivity(jacobian)).engine.step_ns - base.step_ns
    assert 0.01 < 1e-6 * change < 0.035  # not 0.06, the mean of stages


def _same(runs: list[MeasuredRun]) -> list[Answer]:
    """Answers that are the measured figures."""
    return [Answer(run.run_id, 1, 0, [stage.measured for stage in run.stages]) for run in runs]


def test_medians_leave_out_what_was_overloaded(tmp_path: Path) -> None:
    stage = entry("a")["stages"][0]
    runs = find_runs(directory(tmp_path, entry("a", stages=[stage, stage | {"failed": 1}])))
    rows = rows_of(runs, _same(runs))
    worse = Figures(60.0, 20.0, 260.0, 120.0, 400.0)
    rows = [rows[0], msgspec.structs.replace(rows[1], emulated=worse)]
    found = summarize(rows)
    assert found.overall.stages == 1
    assert found.overall.median["e2e"] == 0
    assert found.wrong_verdicts == ["a 4/s"]


@needs_shared
@pytest.mark.shared
@pytest.mark.slow
def test_some_published_runs_are_as_close_as_the_page_says() -> None:
    """One run of each GPU and kind, one seed."""
    wanted = ("64-qwen2", "57-codellama", "18-llama-3-1", "55-llama", "40-codellama")
    runs = [r for r in find_runs(SHARED / "vllm-runs") if r.run_id.startswith(wanted)]
    assert len(runs) == len(wanted)
    found = summarize(rows_of(runs, list(answers(tasks_of(runs, 1), 1))))
    assert not found.wrong_verdicts
    assert found.overall.median["e2e"] < 5
    assert abs(found.overall.worst["e2e"]) < 12
    assert found.overall.median["ttft"] < 9


def test_runs_that_cannot_be_emulated_are_listed_and_the_others_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = {
        "rate_per_s": 2,
        "duration_s": 2,
        "ttft_ms": LATENCIES,
        "e2e_ms": {"mean": 130.0, "p99": 200.0},
    }
    short = {"stages": [stage]}
    place = directory(
        tmp_path,
        entry("unknown-model", "acme/nothing-7B", **short),
        entry("good", **short),
        entry("unknown-engine", engine="vLLM 0.3.0", **short),
        entry("unknown-gpu", gpu="ZX81", **short),
    )
    assert call(["fidelity", str(place), "--json", "-j", "1", "--seeds", "1"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert {row["run_id"] for row in document["rows"]} == {"good"}
    left_out = {run["run_id"]: run["reason"] for run in document["left_out"]}
    assert set(left_out) == {"unknown-model", "unknown-engine", "unknown-gpu"}
    assert "unknown model 'acme/nothing-7B'" in left_out["unknown-model"]
    assert "unknown GPU 'ZX81'" in left_out["unknown-gpu"]
    assert 'vllm "0.3" is not modeled' in left_out["unknown-engine"]
    for name in left_out:
        assert f"left out: {name}: " in err


def test_a_directory_of_unknown_models_alone_is_refused(tmp_path: Path) -> None:
    place = directory(tmp_path, entry("a", "acme/nothing-7B"))
    with pytest.raises(InputError, match="unknown model 'acme/nothing-7B'"):
        call(["fidelity", str(place)])
