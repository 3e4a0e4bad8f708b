"""The posterior and the prior from many runs, on made evidence."""

from __future__ import annotations

import numpy as np
import pytest

from emu.apps.shared.population import RunEvidence, population
from emu.apps.shared.posterior import SCALES, most_probable, noise_factor
from emu.engines.registry import BUNDLES
from emu.latency.posterior import NAMES, PARAMETERS, draws, known_engine, prior_of, values_of

SIZE = len(NAMES)
HERE = values_of(BUNDLES["vllm-0.15"].model)
RNG = np.random.default_rng(7)


def test_precise_observations_outweigh_the_prior() -> None:
    truth = np.zeros(SIZE)
    truth[0], truth[3] = 0.4, 3e6
    slopes = RNG.standard_normal((60, SIZE)) / SCALES * 0.1
    prior = np.diag((0.1 * SCALES) ** 2)
    found = most_probable(slopes @ truth, np.full(60, 0.002), slopes, HERE, HERE, prior)
    # Forty and sixty standard deviations of the prior away: it gives way.
    assert (found.values - HERE) / SCALES == pytest.approx(truth / SCALES, abs=0.05)
    assert found.distance > 20


def test_what_was_not_observed_stays_at_the_prior() -> None:
    mean = HERE + SCALES * 0.3
    slopes = np.zeros((4, SIZE))
    slopes[:, 0] = 1.0
    found = most_probable(
        np.full(4, 0.05),
        np.full(4, 0.01),
        slopes,
        HERE,
        mean,
        np.diag((0.2 * SCALES) ** 2),
    )
    assert found.values[1:] == pytest.approx(mean[1:])
    assert found.covariance[1:, 1:].diagonal() ** 0.5 == pytest.approx(0.2 * SCALES[1:], rel=0.02)
    assert found.values[0] - 1 == pytest.approx(0.05, abs=0.004)


def test_one_wild_observation_moves_little() -> None:
    slopes = np.zeros((9, SIZE))
    slopes[:, 0] = 1.0
    residuals = np.full(9, 0.02)
    residuals[4] = 0.9
    found = most_probable(
        residuals,
        np.full(9, 0.01),
        slopes,
        HERE,
        HERE,
        np.diag(SCALES**2),
    )
    assert found.values[0] - 1 == pytest.approx(0.02, abs=0.006)


def test_no_constant_leaves_its_bounds_or_its_reach() -> None:
    slopes = np.zeros((6, SIZE))
    slopes[:, 0] = 1.0
    slopes[:, 6] = 1 / SCALES[6]
    given = (np.full(6, -9.0), np.full(6, 0.01), slopes, HERE, HERE, np.diag(SCALES**2))
    found = most_probable(*given)
    assert found.values[0] == pytest.approx(PARAMETERS[0].least)
    assert found.values[6] == pytest.approx(PARAMETERS[6].least)
    assert most_probable(*given, 0.5).values[0] == pytest.approx(1 - 0.5 * SCALES[0])


def made_runs(count: int, shift: np.ndarray, spread: np.ndarray) -> list[RunEvidence]:
    runs = []
    for _ in range(count):
        slopes = RNG.standard_normal((6, SIZE)) / SCALES * 0.1
        own = shift + spread * RNG.standard_normal(SIZE)
        noise = np.array([0.03, 0.01] * 3) * RNG.standard_normal(6)
        runs.append(RunEvidence(slopes @ own + noise, slopes, np.array([0, 1] * 3)))
    return runs


def test_population_finds_shift_spread_and_noise() -> None:
    shift, spread = SCALES * 0.5, SCALES * 0.3
    found = population(made_runs(120, shift, spread))
    assert found.shift / SCALES == pytest.approx(np.full(SIZE, 0.5), abs=0.15)
    assert found.spread / SCALES == pytest.approx(np.full(SIZE, 0.3), abs=0.12)
    assert found.noise == pytest.approx([0.03, 0.01], rel=0.35)


def test_intervals_of_the_population_hold_as_often_as_they_say() -> None:
    shift, spread = SCALES * 0.5, SCALES * 0.3
    found = population(made_runs(60, shift, spread))
    inside = []
    for run in made_runs(200, shift, spread):
        middle = run.slopes @ found.shift
        wide = np.einsum("ij,jk,ik->i", run.slopes, found.covariance, run.slopes)
        z = (run.residuals - middle) / np.sqrt(wide + found.noise[run.metrics] ** 2)
        inside += (np.abs(z) < 1.645).tolist()
    assert 0.8 < np.mean(inside) < 0.95


def test_draws_have_the_mean_and_spread_of_what_they_are_drawn_from() -> None:
    known = prior_of(BUNDLES["vllm-0.15"].model, "H100-SXM5-80GB", "Qwen/Qwen2.5-7B")
    engines = draws(known, 4000, np.random.default_rng(1))
    values = np.array([values_of(engine) for engine in engines])
    spread = known.posterior.matrix.diagonal() ** 0.5
    wide = values.std(axis=0)
    for index, parameter in enumerate(PARAMETERS[3:5], start=3):
        assert wide[index] == pytest.approx(spread[index], rel=0.1), parameter.name
        center = known.posterior.mean[index]
        assert values[:, index].mean() == pytest.approx(center, abs=0.1 * spread[index])


def test_a_gpu_without_measured_runs_has_the_generic_prior() -> None:
    engine = BUNDLES["vllm-0.15"].model
    mine = prior_of(engine, "H100-SXM5-80GB", "Qwen/Qwen2.5-7B")
    other = known_engine(engine, "", "L40S", "Qwen/Qwen2.5-7B", "roofline")
    assert "none on L40S" in other.source
    assert other.posterior.mean == values_of(engine).tolist()
    assert mine.posterior.mean != other.posterior.mean
    assert other.posterior.covariance[0][0] > mine.posterior.covariance[0][0]
    new = prior_of(engine, "H100-SXM5-80GB", "Qwen/Qwen2.5-0.5B")
    assert "of other models on H100" in new.source
    for index, shift in enumerate(np.array(mine.posterior.mean) - values_of(engine)):
        assert abs(new.posterior.mean[index] - values_of(engine)[index]) <= abs(shift) + 1e-9


def test_one_load_moves_the_engine_little_unless_it_insists() -> None:
    """A difference of 1 % at one load is mostly its own, one of 30 % the server's."""
    prior = np.diag((0.15 * SCALES) ** 2)
    slopes = np.zeros((1, SIZE))
    slopes[0, 0] = 1.0

    def followed(residual: float, loads: int) -> float:
        errors = noise_factor(loads) * np.full(loads, 0.008)
        off = np.full(loads, residual)
        found = most_probable(off, errors, slopes.repeat(loads, axis=0), HERE, HERE, prior)
        return float(found.values[0] - HERE[0]) / residual

    assert 0.2 < followed(0.01, 1) < 0.5
    assert followed(0.3, 1) > 0.9
    assert followed(0.01, 30) > 0.9
