"""Draws of engine, arrivals and sampling: intervals, sources, comparison draw by draw."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emu.apps.sweeps import draws, seeds
from emu.apps.sweeps.draws import engines_of, numbers_of, run_draws
from emu.cli import call
from emu.config.load import load_config
from emu.errors import InputError
from emu.report.drawn import compare_draws, interval_of, read_draws
from emu.runs.options import RunOptions
from emu.runs.run_json import Origin
from emu.runs.runner import adjust

CONFIG = """
[model]
name = "Qwen/Qwen2.5-0.5B"
[[nodes]]
gpu = "{gpu}"
[[replicas]]
{workload}
[output]
report = false
"""
DRAWN = """
[workload.synthetic]
requests = 40
[workload.synthetic.arrivals]
rate_per_s = 20
"""


def config_file(place: Path, gpu: str = "H100-SXM5-80GB", workload: str = DRAWN) -> Path:
    path = place / "c.toml"
    path.write_text(CONFIG.format(gpu=gpu, workload=workload))
    return path


def test_pairs_differ_in_one_source_in_turn() -> None:
    numbers = numbers_of(8, ["engine", "arrivals", "sampling"])
    unlike = [
        [a != b for a, b in zip(numbers[i], numbers[i + 1], strict=True)] for i in (0, 2, 4, 6)
    ]
    assert unlike == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
        [True, False, False],
    ]
    assert numbers_of(4, ["engine"])[1] == [1, 0, 0]


def test_shares_are_those_of_the_sources() -> None:
    """engine with variance 4, arrivals with 1: 80 and 20 per cent."""
    rng = np.random.default_rng(3)
    varied = ["engine", "arrivals", "sampling"]
    numbers = numbers_of(6000, varied)
    engine, arrivals = 2 * rng.standard_normal(6000), rng.standard_normal(6000)
    values = {i: 100 + engine[e] + arrivals[a] for i, (e, a, _) in enumerate(numbers)}
    found = interval_of(values, numbers, varied)
    assert found.shares == pytest.approx({"engine": 0.8, "arrivals": 0.2, "sampling": 0}, abs=0.03)
    assert (found.low, found.high) == pytest.approx(
        (100 - 1.645 * 5**0.5, 100 + 1.645 * 5**0.5), abs=0.25
    )


def test_a_run_with_draws_keeps_the_run_and_adds_intervals(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    words = ["run", str(path), "-q", "-j", "1"]
    assert call([*words, "-o", str(tmp_path / "plain")]) == 0
    assert call([*words, "-o", str(tmp_path / "drawn"), "--draws", "6"]) == 0
    assert (tmp_path / "plain" / "requests.csv").read_bytes() == (
        tmp_path / "drawn" / "requests.csv"
    ).read_bytes()
    found = read_draws(tmp_path / "drawn")
    assert found.count == 6
    assert found.varied == ["engine", "arrivals", "sampling"]
    assert "measured runs of other models on H100" in found.engines[0]
    ttft = found.figures["mean_ttft_ms"]
    assert ttft.low < ttft.median < ttft.high
    assert sum(ttft.shares.values()) == pytest.approx(1)
    assert ttft.shares["sampling"] == 0  # nothing is drawn in the run itself
    call([*words, "-o", str(tmp_path / "two"), "--draws", "6", "-j", "2"])
    assert (tmp_path / "two" / "draws.json").read_bytes() == (
        tmp_path / "drawn" / "draws.json"
    ).read_bytes()


def test_jitter_is_sampled(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    setting = ["--set", "latency.jitter=true", "workload.seed=3"]
    call(["run", str(path), "-q", "-j", "1", "-o", str(tmp_path / "a"), "--draws", "6", *setting])
    assert read_draws(tmp_path / "a").figures["mean_tpot_ms"].shares["sampling"] > 0


def test_a_recorded_workload_is_not_drawn(tmp_path: Path) -> None:
    row = {"arrival_time_ns": 0, "input_toks": 20, "output_toks": 4}
    (tmp_path / "w.jsonl").write_text(json.dumps(row) + "\n")
    path = config_file(tmp_path, workload='[workload]\npath = "w.jsonl"')
    config = adjust(load_config(path), seed=None, output=tmp_path / "run")
    found = run_draws(
        config, "c", RunOptions(draws=2, jobs=1, quiet=True), report=False, origin=Origin("emu")
    )
    assert found.varied == ["engine", "sampling"]


def test_a_slower_server_is_worse_in_every_draw(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    for name, extra in (("a", []), ("b", ["--set", "latency.compute_efficiency=0.2"])):
        words = ["run", str(path), "-q", "-j", "1", "-o", str(tmp_path / name), "--draws", "4"]
        call([*words, *extra])
    odds = {row.name: row.better for row in compare_draws([tmp_path / "a", tmp_path / "b"])}
    assert odds["TTFT mean, ms"] == [0.0]
    call([*words, "-o", str(tmp_path / "c"), "--seed", "9"])
    with pytest.raises(InputError, match="other draws"):
        compare_draws([tmp_path / "a", tmp_path / "c"])


def test_a_sweep_draws_at_each_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file(tmp_path)
    text = 'base = "c.toml"\n[grid]\n"latency.compute_efficiency" = [0.6, 0.2]\n'
    (tmp_path / "s.toml").write_text(text)
    words = ["sweep", str(tmp_path / "s.toml"), "-j", "1", "--draws", "4"]
    assert call([*words, "-o", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "90 % intervals of 4 draws at each point" in shown
    with (tmp_path / "out" / "results.csv").open() as file:
        first, second = csv.DictReader(file)
    for row in (first, second):
        assert float(row["mean_ttft_ms.low"]) < float(row["mean_ttft_ms"])
        assert float(row["mean_ttft_ms"]) < float(row["mean_ttft_ms.high"])
        assert "engine" in row["mean_ttft_ms.from"]
    assert float(first["mean_ttft_ms.better"]) == 0.5  # than itself
    assert float(second["mean_ttft_ms.better"]) == 0.0
    points = json.loads((tmp_path / "out" / "sweep.json").read_text())["draws"]["points"]
    # A point has the draws that `emu run` gives its configuration.
    run = ["run", str(tmp_path / "c.toml"), "-q", "-j", "1", "--draws", "4"]
    call([*run, "--set", "latency.compute_efficiency=0.2", "-o", str(tmp_path / "one")])
    alone = json.loads((tmp_path / "one" / "draws.json").read_text())["figures"]
    assert points[1]["mean_ttft_ms"] == alone["mean_ttft_ms"]
    assert "(mean over points)" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("draws = 1\n[grid]\nseed = [1]", "an interval needs 2 draws"),
        ("draws = 4\nseeds = [1]\n[grid]\nseed = [1]", "leave out seeds"),
        (
            'draws = 4\n[search]\nkey = "replicas.0.count"\nmin = 1\nmax = 4\n'
            'meet = ["p99_ttft_ms < 9"]',
            "not with",
        ),
    ],
)
def test_a_sweep_that_cannot_draw_is_refused(tmp_path: Path, more: str, problem: str) -> None:
    config_file(tmp_path)
    (tmp_path / "s.toml").write_text(f'base = "c.toml"\n{more}\n')
    with pytest.raises(InputError, match=problem):
        call(["sweep", str(tmp_path / "s.toml"), "-j", "1"])


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    with pytest.raises(InputError, match="2 draws"):
        call(["run", str(path), "--draws", "1"])
    with pytest.raises(InputError, match="leave out --seeds"):
        call(["run", str(path), "--draws", "4", "--seeds", "3"])
    config = load_config(path, ["engine.name=none"])
    with pytest.raises(InputError, match="need an engine"):
        engines_of(config, "c")


def test_a_run_says_how_well_its_engine_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {}
    for gpu in ("H100-SXM5-80GB", "L40S"):
        call(["run", str(config_file(tmp_path, gpu)), "-o", str(tmp_path / gpu)])
        out = capsys.readouterr().out
        lines[gpu] = next(
            line for line in out.splitlines() if line.startswith("engine: vllm-0.19; mean TTFT")
        )
    assert "prior of" in lines["H100-SXM5-80GB"]
    assert "none on L40S" in lines["L40S"]


# --- going on where it was ------------------------------------------------------------------------
def stopping(call: Callable[[Any], Any], after: int) -> Callable[[Any], Any]:
    """The call, until an interrupt comes in place of the result `after`."""
    done: list[int] = []

    def limited(task: Any) -> Any:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(1)
        return call(task)

    return limited


@pytest.mark.parametrize(
    ("name", "option", "result"),
    [("run_draw", "--draws", "draws.json"), ("run_one", "--seeds", "seeds.json")],
)
def test_interrupted_draws_and_seeds_go_on_where_they_were(
    name: str,
    option: str,
    result: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = config_file(tmp_path)
    words = ["run", str(path), "-q", "-j", "1", option, "4", "-o"]
    call([*words, str(tmp_path / "whole")])
    module = draws if option == "--draws" else seeds
    real = getattr(module, name)
    monkeypatch.setattr(module, name, stopping(real, 3))
    with pytest.raises(KeyboardInterrupt):
        call([*words, str(tmp_path / "again")])
    assert len(list((tmp_path / "again" / "points").iterdir())) == 3
    monkeypatch.setattr(module, name, stopping(real, 1))  # one is left
    call([*words, str(tmp_path / "again")])
    assert (tmp_path / "again" / result).read_bytes() == (tmp_path / "whole" / result).read_bytes()
    assert not (tmp_path / "again" / "points").exists()


def test_ray_gives_the_same_draws_and_seeds(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    path = config_file(tmp_path)
    for option, result in (("--draws", "draws.json"), ("--seeds", "seeds.json")):
        for place, more in (("here", []), ("ray", ["--ray", "local"])):
            words = ["run", str(path), "-q", "-j", "1", option, "4"]
            call([*words, "-o", str(tmp_path / place / option), *more])
        here, ray = (tmp_path / place / option / result for place in ("here", "ray"))
        assert here.read_bytes() == ray.read_bytes()
