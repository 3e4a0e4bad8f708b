"""Known constants come back from measurements that emu itself made."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from emu.apps.calibrate import (
    Constants,
    Fit,
    calibrate,
    ends_apart,
    gain_of,
    least_squares,
    snippet,
)
from emu.cli import main
from emu.cluster.cluster import Cluster
from emu.config.load import load_config
from emu.errors import InputError
from emu.report.rundata import read_run
from emu.runs.runner import execute

TRUTH = Constants(0.62, 0.71, 1_500.0)

CONFIG = """\
[[nodes]]
gpu = "H100"
gpus = 1
[[replicas]]
[workload.synthetic]
requests = 64
arrivals = { process = "piecewise", points = [[0, 1.0], [5, 1.0], [6, 30.0], [20, 30.0]] }
prompt = { median = 2500.0, sigma = 1.2, max = 12000 }
output = { median = 80.0, sigma = 0.8, max = 400 }
[output]
timeseries_interval_ms = 0
report = false
"""


def measure(folder: Path, constants: Constants) -> tuple[Path, Path]:
    """A config, and what a server with these constants would have recorded."""
    file = folder / "cluster.toml"
    file.write_text(CONFIG)
    overrides = [
        f"latency.compute_efficiency={constants.compute_efficiency}",
        f"latency.memory_efficiency={constants.memory_efficiency}",
        f"latency.step_overhead_us={constants.step_overhead_us}",
        f"output.dir={folder}/truth",
    ]
    execute(load_config(file, overrides=overrides), str(file), report=False)
    run = read_run(folder / "truth")
    columns = ("request_id", "prompt_toks", "decode_toks", "arrival_ns", "ttft_ns", "latency_ns")
    lines = []
    for request_id, prompt, output, arrival, ttft, latency in zip(
        *(run.completed(name).tolist() for name in columns), strict=True
    ):
        times = [(1e9 + t) / 1e9 for t in (arrival, arrival + ttft, arrival + latency)]
        lines.append(
            json.dumps(
                {
                    "request_id": f"bench-{request_id}",
                    "input_toks": prompt,
                    "output_toks": output,
                    "arrival_time": times[0],
                    "queued_ts": times[0],
                    "first_token_ts": times[1],
                    "last_token_ts": times[2],
                }
            )
        )
    measured = folder / "requests.jsonl"
    measured.write_text("\n".join(lines) + "\n")
    return file, measured


@pytest.mark.slow
def test_known_constants_are_recovered(tmp_path: Path, capsys, monkeypatch):
    file, measured = measure(tmp_path, TRUTH)
    kept = []

    def keep(*given):
        kept.append(calibrate(*given))
        return kept[0]

    monkeypatch.setattr("emu.apps.calibrate.calibrate", keep)
    assert main(["calibrate", str(file), "--measured", str(measured)]) == 0
    (found,) = kept
    fit = found.fit.constants
    assert fit.compute_efficiency == pytest.approx(TRUTH.compute_efficiency, rel=0.01)
    assert fit.memory_efficiency == pytest.approx(TRUTH.memory_efficiency, rel=0.01)
    assert fit.step_overhead_us == pytest.approx(TRUTH.step_overhead_us, rel=0.05)
    assert (found.fitted_requests, found.held_out) == (32, 32)
    for before, _, after, single in found.errors.values():
        assert abs(after) < 0.3 < abs(before)
        assert single < 0.5
    printed = capsys.readouterr().out
    assert "Held-out half" in printed
    assert printed.endswith(snippet(fit))


def test_least_squares_on_a_smooth_model():
    """Times that are sums of terms with one constant each: the fit is exact."""
    work = np.random.default_rng(1).uniform(1, 9, size=(60, 3))

    def emulate(c: Constants):
        ttft = work[:, 0] / c.compute_efficiency + 0.1 * work[:, 1] / c.memory_efficiency
        tpot = work[:, 1] / c.memory_efficiency + c.step_overhead_us / 1000
        return {"TTFT": ttft, "TPOT": tpot, "E2E": ttft + work[:, 2] * tpot}

    fit = least_squares(emulate, emulate(TRUTH), np.ones(60, dtype=bool), Constants())
    assert fit.constants.logarithms() == pytest.approx(TRUTH.logarithms(), abs=1e-3)
    assert (fit.spread < 1e-3).all()


def test_the_stated_uncertainty_covers_the_truth():
    """60 measurements with 5 % of noise: the truth is within two of what is stated, nearly always.

    Stated is what `calibrate` states: the standard error, or half the difference of the halves.
    """
    halves = [np.arange(120) % 2 == half for half in (0, 1)]
    distances = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        work = rng.uniform(1, 9, size=(120, 3))

        def emulate(c: Constants, work=work):
            ttft = work[:, 0] / c.compute_efficiency + 0.1 * work[:, 1] / c.memory_efficiency
            tpot = work[:, 1] / c.memory_efficiency + c.step_overhead_us / 1000
            return {"TTFT": ttft, "TPOT": tpot, "E2E": ttft + work[:, 2] * tpot}

        true = emulate(TRUTH)
        first, each = rng.lognormal(0, 0.05, 120), rng.lognormal(0, 0.05, 120)
        ttft, tpot = true["TTFT"] * first, true["TPOT"] * each
        base = {"TTFT": ttft, "TPOT": tpot, "E2E": ttft + work[:, 2] * tpot}
        one, two = (least_squares(emulate, base, half, Constants()) for half in halves)
        at, other = one.constants.logarithms(), two.constants.logarithms()
        stated = np.maximum(one.spread, np.abs(at - other) / 2)
        distances.append(np.abs(at - TRUTH.logarithms()) / stated)
    within_one, within_two = ((np.array(distances) < n).mean(axis=0) for n in (1, 2))
    assert (within_one > 0.5).all(), within_one
    assert (within_two > 0.85).all(), within_two


def test_constants_stay_within_bounds():
    def emulate(c: Constants):
        return {name: np.full(20, 1 / c.compute_efficiency) for name in ("TTFT", "TPOT", "E2E")}

    base = {name: np.full(20, 0.25) for name in ("TTFT", "TPOT", "E2E")}  # four times the peak
    fit = least_squares(emulate, base, np.ones(20, dtype=bool), Constants())
    assert fit.constants.compute_efficiency == pytest.approx(1.0)


def test_what_does_not_fit_is_said(tmp_path: Path):
    file, measured = measure(tmp_path, Constants())
    with pytest.raises(InputError, match=r"replicas use linear$"):
        calibrate(load_config(file, overrides=["latency.backend=linear"]), measured, str(file))
    # A replica that names no backend has that of [latency].
    file.write_text(CONFIG.replace("[[replicas]]", "[[replicas]]\nlatency = { base_us = 5.0 }"))
    with pytest.raises(InputError, match=r"replicas use linear$"):
        calibrate(load_config(file, overrides=["latency.backend=linear"]), measured, str(file))
    file.write_text(CONFIG)
    with pytest.raises(InputError, match="is it the same workload"):
        settings = ["workload.synthetic.requests=20"]
        calibrate(load_config(file, overrides=settings), measured, str(file))
    measured.write_text(measured.read_text().splitlines()[0])
    with pytest.raises(InputError, match="a fit needs 8 or more"):
        calibrate(load_config(file), measured, str(file))


def test_finished_worlds_do_not_pile_up(tmp_path: Path) -> None:
    """A fit takes hundreds of runs; each must leave nothing but its figures."""
    file, measured = measure(tmp_path, Constants())
    said: list[tuple[str, int]] = []
    before = [one for one in gc.get_objects() if isinstance(one, Cluster)]  # of other tests

    class Enough(Exception):
        pass

    def report(phase: str, runs: int) -> None:
        said.append((phase, runs))
        if runs == 3:
            found = [one for one in gc.get_objects() if isinstance(one, Cluster)]
            assert len(found) <= len(before)
            raise Enough

    with pytest.raises(Enough):
        calibrate(load_config(file), measured, str(file), report)
    assert said == [("descent 1 of 3", runs) for runs in range(4)]


@pytest.mark.parametrize(("configured", "is_gain"), [(TRUTH, False), (Constants(), True)])
def test_a_fit_that_follows_noise_is_no_gain(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    configured: Constants,
    is_gain: bool,
) -> None:
    """Where the configuration is what made the measurement nothing is better, and that is said."""
    rng = np.random.default_rng(3)
    work = rng.uniform(1, 9, size=(64, 3))

    def times(c: Constants) -> dict[str, np.ndarray]:
        ttft = work[:, 0] / c.compute_efficiency + 0.1 * work[:, 1] / c.memory_efficiency
        tpot = work[:, 1] / c.memory_efficiency + c.step_overhead_us / 1000
        return {"TTFT": ttft, "TPOT": tpot, "E2E": ttft + 9 * tpot}

    true = times(TRUTH)
    first = true["TTFT"] * rng.lognormal(0, 0.15, 64) / 1e3
    last = first + 9 * true["TPOT"] * rng.lognormal(0, 0.15, 64) / 1e3
    rows = [
        {"output_toks": 10, "arrival_time": 5.0, "queued_ts": 5.0}
        | {"first_token_ts": 5 + first[i], "last_token_ts": 5 + last[i]}
        for i in range(64)
    ]
    measured = tmp_path / "requests.jsonl"
    measured.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("emu.apps.calibrate._emulate", lambda *given: times(given[2] or configured))
    file = tmp_path / "cluster.toml"
    file.write_text(CONFIG + snippet(configured))
    assert main(["calibrate", str(file), "--measured", str(measured)]) == 0
    printed = capsys.readouterr().out
    assert ("Nothing was gained" in printed) is not is_gain
    assert printed.endswith(snippet(configured)) is not is_gain


def test_ends_that_are_as_close_widen_the_uncertainty():
    def end(compute: float, deviation: float) -> Fit:
        return Fit(Constants(compute, 0.8, 1000.0), np.zeros(3), np.eye(3), deviation, 1)

    fits = [end(0.8, 0.02), end(0.9, 0.024), end(0.4, 0.2)]  # the last one got stuck
    assert ends_apart(fits, end(0.82, 0.01)) == pytest.approx([np.log(0.9 / 0.8) / 2, 0, 0])
    assert (ends_apart(fits[:1], end(0.8, 0.02)) == 0).all()


def test_what_a_gain_is():
    """Off by 10 % before; after by 0 or 20 %, evenly or only in the mean."""
    base = {name: np.full(40, 100.0) for name in ("TTFT", "TPOT", "E2E")}
    every = np.ones(40, dtype=bool)

    def times(*factors: float):
        return {name: np.resize(100.0 * np.exp(np.array(factors)), 40) for name in base}

    (before, after), error = gain_of(times(0.1), times(-0.02), base, every)
    assert (before, after, error) == pytest.approx((0.1, 0.02, 0))
    (before, after), error = gain_of(times(0.1, -0.1), times(0.18, 0.0), base, every)
    assert (before, after) == pytest.approx((0.1, 0.09))
    assert error == pytest.approx(0.09 / 39**0.5)  # 1 % is gained, give or take 1.4 %


def test_constants_of_single_replicas_are_not_fitted_over(tmp_path: Path):
    file, measured = measure(tmp_path, Constants())
    file.write_text(
        CONFIG.replace("[[replicas]]", "[[replicas]]\nlatency = { step_overhead_us = 9 }")
    )
    with pytest.raises(InputError, match="one set is fitted for all"):
        calibrate(load_config(file), measured, str(file))
