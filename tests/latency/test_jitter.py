"""Variation of steps: counted, neutral in the mean, the same in leaps and steps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from emu.config.load import config_from_text
from emu.engines.registry import BUNDLES
from emu.errors import InputError
from emu.latency.ends import packed, unpacked
from emu.latency.jitter import Jitter
from emu.runs.runner import adjust, execute

ENGINE = BUNDLES["vllm-0.15"].model
STEP_NS = 10_000_000


def taken(jitter: Jitter, count: int) -> np.ndarray:
    ends = np.arange(1, count + 1, dtype=np.int64) * STEP_NS
    return np.diff(unpacked(jitter.run(0, packed(ends))), prepend=0)


def test_a_run_of_steps_equals_steps_one_by_one() -> None:
    jitter = Jitter(msgspec.structs.replace(ENGINE, straggler_part=0.05), 42, 3)
    ends = np.cumsum(np.random.default_rng(0).integers(1, 10**8, 3000))
    costs = np.diff(ends, prepend=0).tolist()
    one_by_one = [jitter.step(17 + index, cost) for index, cost in enumerate(costs)]
    assert np.diff(jitter.run(17, packed(ends)), prepend=0).tolist() == one_by_one


def test_the_mean_stays_and_the_spread_is_the_engines() -> None:
    engine = msgspec.structs.replace(ENGINE, jitter_step=0.05, straggler_part=0.0)
    costs = taken(Jitter(engine, 1, 0), 200_000)
    assert costs.mean() == pytest.approx(STEP_NS, rel=5e-4)
    assert np.log(costs).std() == pytest.approx(0.05, rel=0.01)
    engine = msgspec.structs.replace(
        ENGINE, jitter_step=0.0, straggler_part=0.004, straggler_ns=20_000_000
    )
    costs = taken(Jitter(engine, 1, 0), 200_000)
    assert costs.mean() == pytest.approx(STEP_NS, rel=2e-3)
    assert (costs > STEP_NS).mean() == pytest.approx(0.004, rel=0.1)


def test_replicas_and_seeds_vary_apart() -> None:
    columns = [taken(Jitter(ENGINE, seed, replica), 500) for seed in (1, 2) for replica in (0, 1)]
    for index, one in enumerate(columns):
        for other in columns[index + 1 :]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.3


CONFIG = """
seed = {seed}
[model]
name = "Qwen/Qwen2.5-0.5B"
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = 2
[[replicas]]
count = 2
[workload.synthetic]
requests = 300
[workload.synthetic.arrivals]
rate_per_s = 60
[scheduler]
leap = {leap}
[latency]
jitter = {jitter}
[output]
report = false
"""


def rows(place: Path, name: str, **words: object) -> bytes:
    text = CONFIG.format(**words)
    config = adjust(config_from_text(text, "c", (), place), seed=None, output=place / name)
    execute(config, "c", report=False)
    return (place / name / "requests.csv").read_bytes()


def test_leaps_change_nothing_with_jitter(tmp_path: Path) -> None:
    leaping = rows(tmp_path, "a", seed=5, leap="true", jitter="true")
    assert leaping == rows(tmp_path, "b", seed=5, leap="false", jitter="true")
    assert leaping != rows(tmp_path, "c", seed=6, leap="true", jitter="true")
    assert leaping != rows(tmp_path, "d", seed=5, leap="true", jitter="false")


def test_jitter_needs_an_engine(tmp_path: Path) -> None:
    text = CONFIG.format(seed=1, leap="true", jitter='true\n[engine]\nname = "none"')
    config = adjust(config_from_text(text, "c", (), tmp_path), seed=None, output=tmp_path / "x")
    with pytest.raises(InputError, match=r"latency\.jitter"):
        execute(config, "c", report=False)
