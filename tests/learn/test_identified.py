"""What the probe's designed steps identify: whether their constants hold for steps of other kinds.

Steps are asked of the backend, not emulated: single prompts and decodes without and with history
teach, large batches of decodes and decodes beside prompts judge.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from emu.apps.shared.posterior import most_probable
from emu.cluster.backends import make_latency
from emu.cluster.plan import make_plan
from emu.config.load import config_from_text
from emu.engines.registry import BUNDLES, engine_text
from emu.latency import posterior
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.corrected import CorrectedBackend
from emu.latency.engine import EngineModel
from emu.latency.posterior import PARAMETERS, Floats, known_engine, with_values
from tests.learn.hidden import workload
from tests.learn.test_probe import HIDDEN, SERVER, mean_step_ms

STEPS = 6
"""Parameters of steps; the other two are of the front end."""


def step(decodes: int, history: int, *prompts: int) -> BatchShape:
    return BatchShape(
        prefill_new=list(prompts),
        prefill_context=[0] * len(prompts),
        decode_count=decodes,
        decode_context_sum=decodes * history,
        decode_context_max=history,
        decode_context_min=history,
        sequences=decodes + len(prompts),
    )


LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TAUGHT = [step(0, 0, length) for length in (16, 128, 512, 1024, 2048)]
TAUGHT += [step(count, history) for count in LADDER for history in (60, 200)]
TAUGHT += [step(count, 2300) for count in (4, 16)]
DECODES = [step(count, history) for count in (64, 128, 200, 256) for history in (400, 900)]
MIXED = [step(count, 700, new) for count in (64, 128, 200, 255) for new in (200, 700, 1500)]


def backend(engine: str, more: str = "") -> LatencyBackend:
    text = SERVER.format(engine=engine, more=more) + "[workload.synthetic]\nrequests = 1\n"
    config = config_from_text(text, "c", (), Path())
    return make_latency(make_plan(config).replicas[0].latency_context(config))


def times(of: LatencyBackend, steps: list[BatchShape]) -> Floats:
    return np.array([of.iteration_ns(one) for one in steps], dtype=np.float64)


class Pair(NamedTuple):
    """A hidden server and what the designed steps tell of it."""

    hidden: str
    """Its configuration, without a workload."""
    learned: EngineModel


def taught(place: Path, seed: int) -> Pair:
    rng = np.random.default_rng(seed)
    intake, event = int(rng.integers(500_000, 8_000_000)), int(rng.integers(10_000, 100_000))
    text = HIDDEN.format(
        step=int(rng.integers(0, 2_000_000)),
        host=int(rng.integers(300_000, 4_000_000)),
        sequence=int(rng.integers(0, 40_000)),
        sort=int(rng.integers(30_000, 300_000)),
        intake=intake,
        event=event,
    )
    (place / "hidden.toml").write_text(text)
    more = (
        f"compute_efficiency = {rng.uniform(0.55, 0.95):.3f}\n"
        f"memory_efficiency = {rng.uniform(0.6, 0.95):.3f}"
    )
    hidden = backend(str(place / "hidden.toml"), more)
    plain, engine = backend(""), BUNDLES["vllm-0.15"].model
    model, gpu = "Qwen/Qwen2.5-7B-Instruct", "H100-SXM5-80GB"
    prior = known_engine(engine, "", gpu, model, "roofline").posterior
    measured = times(hidden, TAUGHT)
    errors = np.array([0.03 if one.prefill_new else 0.012 for one in TAUGHT])
    here = np.array(prior.mean)
    for _ in range(6):
        now = times(CorrectedBackend(plain, with_values(engine, here)), TAUGHT)
        slopes = np.zeros((len(TAUGHT), len(PARAMETERS)))
        for index, parameter in enumerate(PARAMETERS[:STEPS]):
            moved = here.copy()
            moved[index] += parameter.step
            there = times(CorrectedBackend(plain, with_values(engine, moved)), TAUGHT)
            slopes[:, index] = np.log(there / now) / parameter.step
        found = most_probable(
            np.log(measured / now),
            errors,
            slopes,
            here,
            np.array(prior.mean),
            prior.matrix,
            4.0,
        )
        here = found.values
    here[STEPS:] = intake, event
    config = SERVER.format(engine=place / "hidden.toml", more=more)
    return Pair(config, with_values(engine, here))


@pytest.mark.parametrize("seed", range(1, 9))
def test_designed_steps_tell_those_of_a_crowded_server(tmp_path: Path, seed: int) -> None:
    pair = taught(tmp_path, seed)
    learned = CorrectedBackend(backend(""), pair.learned)
    more = pair.hidden.partition("[latency]\n")[2].partition("[output]")[0]
    hidden = backend(str(tmp_path / "hidden.toml"), more)
    off = [100 * (times(learned, kind) / times(hidden, kind) - 1) for kind in (DECODES, MIXED)]
    assert np.abs(off[0]).max() < 3.5
    # A prompt's cost beside decodes is no common factor: small chunks go one way, large the other.
    assert np.abs(off[1]).max() < 4
    assert abs(off[1].mean()) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_of_crowded_and_of_overloaded_servers_follow(tmp_path: Path, seed: int) -> None:
    """Not just below the limit (32 a second): there 2 % of a step are 10 % of those in flight."""
    pair = taught(tmp_path, seed)
    (tmp_path / "learned.toml").write_text(engine_text(pair.learned, "vllm-0.15"))
    learned = SERVER.format(engine=tmp_path / "learned.toml", more="")
    for rate in (12, 24, 48):
        text = workload(rate, 20, seed=rate, prompt=(50, 1500))
        before = mean_step_ms(tmp_path, pair.hidden, text)
        assert mean_step_ms(tmp_path, learned, text) == pytest.approx(before, rel=0.03), rate


def test_every_prior_that_is_shipped_is_a_distribution() -> None:
    """A run reads this file without checking its numbers."""
    path = Path(posterior.__file__).with_name("prior.toml")
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    of_gpus = [table[which] for table in found["gpus"] for which in ("posterior", "other")]
    assert len(of_gpus) >= 2
    for table in (found["generic"], *of_gpus):
        msgspec.convert(table, posterior.Posterior).check(str(path))
