"""Synthetic workloads: the laws that the processes promise, determinism, shared tokens."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from emu.config.schema import (
    ArrivalsTable,
    LengthsTable,
    SessionsTable,
    SyntheticTable,
    WorkloadTable,
)
from emu.errors import InputError
from emu.workload import open_workload
from emu.workload.arrivals import arrival_stream
from emu.workload.lengths import length_sampler
from tests.workload.helpers_workload import follower, open_synthetic, rows

FIXED = LengthsTable(distribution="fixed", value=10)


def arrivals_s(count: int, **keys) -> np.ndarray:
    return arrival_stream(ArrivalsTable(**keys), 3, "c").take(count) / 1e9


def test_poisson_has_its_rate_and_an_uncut_tail():
    gaps = np.diff(arrivals_s(200_000, rate_per_s=2.0))
    assert abs(gaps.mean() - 0.5) < 0.005
    assert abs(gaps.std() / gaps.mean() - 1) < 0.01
    assert abs((gaps > 1.5).mean() - np.exp(-3)) < 0.003  # a generator cut at 3 / rate has none


@pytest.mark.parametrize("cv", [0.5, 2.0])
def test_gamma_has_its_rate_and_variation(cv):
    gaps = np.diff(arrivals_s(200_000, process="gamma", rate_per_s=4.0, cv=cv))
    assert abs(gaps.mean() - 0.25) < 0.005
    assert abs(gaps.std() / gaps.mean() - cv) < 0.03 * cv


def test_constant_and_all_at_once():
    assert arrivals_s(4, process="constant", rate_per_s=3.0).tolist() == [
        0.0,
        0.333333333,
        0.666666667,
        1.0,
    ]
    assert arrivals_s(3, process="all_at_once").tolist() == [0.0, 0.0, 0.0]


def test_bursts_have_both_rates():
    times = arrivals_s(
        60_000,
        process="burst",
        rate_per_s=2.0,
        burst_rate_per_s=50.0,
        burst_every_s=10.0,
        burst_length_s=2.0,
    )
    assert (np.diff(times) >= 0).all()
    phase = times % 10
    periods = times[-1] / 10
    assert abs((phase < 2).sum() / (2 * periods) - 50) < 1
    assert abs((phase >= 2).sum() / (8 * periods) - 2) < 0.15
    assert abs((phase >= 6).sum() / (4 * periods) - 2) < 0.15  # also a long time after a burst


def test_piecewise_follows_its_points():
    points = [[0.0, 0.0], [10.0, 100.0], [20.0, 100.0], [30.0, 0.0], [40.0, 50.0]]
    times = arrivals_s(20_000, process="piecewise", points=points)
    assert (np.diff(times) >= 0).all()
    counts = np.histogram(times, [0, 5, 10, 20, 30, 40, 140])[0]
    expected = [125, 375, 1000, 500, 250, 5000]
    for count, mean in zip(counts, expected):
        assert abs(count - mean) < 5 * mean**0.5


def test_piecewise_that_ends_gives_fewer_and_says_so():
    arrivals = ArrivalsTable(process="piecewise", points=[[0.0, 10.0], [10.0, 0.0]])
    workload = open_synthetic(SyntheticTable(requests=1000, arrivals=arrivals, prompt=FIXED))
    assert 20 < workload.count < 90
    assert workload.notes.warnings == ["the arrival rate ends at 0: fewer requests than asked for"]


def test_duration_ends_the_workload():
    table = SyntheticTable(duration_s=50.0, arrivals=ArrivalsTable(rate_per_s=20.0), prompt=FIXED)
    times = [row[1] for row in rows(open_synthetic(table))]
    assert 850 < len(times) < 1150
    assert 49 * 10**9 < times[-1] < 50 * 10**9


def sample(count: int, seed: int = 3, **keys) -> np.ndarray:
    sampler = length_sampler(
        LengthsTable(**keys), is_prompt=True, base_dir=Path(), seed=seed, config_source="c"
    )
    return sampler.take(count)


def test_lengths_follow_their_laws():
    assert set(sample(10, distribution="fixed", value=7).tolist()) == {7}
    uniform = sample(100_000, distribution="uniform", min=3, max=6)
    assert np.allclose(np.bincount(uniform)[3:] / 1e5, 0.25, atol=0.01)
    normal = sample(100_000, distribution="lognormal", median=500.0, sigma=0.5, max=100_000)
    assert abs(np.median(normal) - 500) < 6
    assert abs(np.log(normal).std() - 0.5) < 0.01
    cut = sample(10_000, distribution="lognormal", median=500.0, sigma=300.0, min=9, max=99)
    assert (cut.min(), cut.max()) == (9, 99)


@pytest.mark.parametrize("theta", [0.6, 1.0, 2.5])
def test_zipf_is_exact_for_every_exponent(theta):
    drawn = sample(200_000, distribution="zipf", min=5, max=14, theta=theta)
    weights = np.arange(1, 11) ** -theta
    assert (drawn.min(), drawn.max()) == (5, 14)
    assert np.allclose(np.bincount(drawn)[5:] / 2e5, weights / weights.sum(), atol=0.005)


def test_trace_lengths_keep_their_pairs(tmp_path):
    with (tmp_path / "t.csv").open("w") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        file.writelines(f"{index},{index + 1},{2 * index + 2}\n" for index in range(50))
    lengths = LengthsTable(distribution="trace", path="t.csv")
    table = SyntheticTable(requests=500, prompt=lengths, output=lengths)
    workload = open_workload(WorkloadTable(synthetic=table), base_dir=tmp_path, seed=1)
    drawn = [(row[2], row[3]) for row in rows(workload)]
    assert all(output == 2 * prompt for prompt, output in drawn)
    assert len(set(drawn)) > 40


def test_same_seed_same_workload_other_seed_another():
    table = SyntheticTable(requests=20_000)
    assert rows(open_synthetic(table, seed=5)) == rows(open_synthetic(table, seed=5))
    assert rows(open_synthetic(table, seed=5)) != rows(open_synthetic(table, seed=6))


def test_a_change_of_one_purpose_leaves_the_others_untouched():
    plain = rows(open_synthetic(SyntheticTable(requests=300)))
    other = rows(open_synthetic(SyntheticTable(requests=300, prompt=FIXED, tenants=4)))
    assert [row[1] for row in plain] == [row[1] for row in other]
    assert [row[3] for row in plain] == [row[3] for row in other]
    grouped = rows(open_synthetic(SyntheticTable(requests=300, prefix_groups=2, prefix_tokens=8)))
    assert [row[2] + 8 for row in plain] == [row[2] for row in grouped]


def test_sessions_share_their_growing_context():
    sessions = SessionsTable(turns_min=3, turns_max=3, tool_s=2.0)
    table = SyntheticTable(
        requests=50, prompt=FIXED, output=FIXED, sessions=sessions, prefix_groups=2, prefix_tokens=5
    )
    workload = open_synthetic(table)
    assert (workload.count, workload.facts.sessions, workload.has_prefixes) == (150, 50, True)
    seen: dict[int, int] = {}
    pauses = []
    for first in workload.releases():
        second = follower(workload, first, first.arrival_ns + 1000)
        third = follower(workload, second, second.arrival_ns + 1000)
        assert follower(workload, third, third.arrival_ns + 1000) is None
        pauses.append(second.arrival_ns - first.arrival_ns - 1000)
        assert [r.prompt_tokens for r in (first, second, third)] == [15, 35, 55]
        whole = third.prefix.token_ids
        for request in (first, second, third):
            ids = request.prefix.token_ids
            assert len(ids) == request.prompt_tokens + request.output_tokens
            assert (whole[: len(ids)] == ids).all()
        assert int(whole[0]) in (0, 5)  # the two groups
        for token in whole[5:].tolist():
            assert seen.setdefault(token, first.request_id) == first.request_id
    assert 1.2 < np.mean(pauses) / 1e9 < 3
    assert workload.open_sessions == 0


def test_sessions_without_shared_context_have_no_ids():
    sessions = SessionsTable(turns_min=1, turns_max=4, shared_context=False)
    workload = open_synthetic(SyntheticTable(requests=200, prompt=FIXED, sessions=sessions))
    assert not workload.has_prefixes
    assert 200 < workload.count < 800
    assert all(request.prefix is None for request in workload.releases())


def test_adapters_are_named_by_popularity_and_change_nothing_else():
    plain = rows(open_synthetic(SyntheticTable(requests=3000)))
    workload = open_synthetic(SyntheticTable(requests=3000, adapters=3))
    assert rows(workload) == plain
    counts = Counter(request.adapter for request in workload.releases())
    assert sorted(counts) == ["adapter-1", "adapter-2", "adapter-3"]
    for number, share in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        assert counts[f"adapter-{number}"] == pytest.approx(3000 * share, rel=0.1)


def test_tenants_are_dealt_evenly():
    workload = open_synthetic(SyntheticTable(requests=3000, tenants=3))
    names = [request.tenant for request in workload.releases()]
    assert sorted(set(names)) == ["tenant-0", "tenant-1", "tenant-2"]
    assert min(names.count(name) for name in set(names)) > 900


BAD_TABLES = [
    ({"arrivals": ArrivalsTable(process="piecewise")}, "arrivals.points: piecewise needs at least one point"),
    ({"arrivals": ArrivalsTable(process="piecewise", points=[[0.0, 1.0], [0.0, 2.0]])}, "arrivals.points[1]: must be later than the point before"),
    ({"arrivals": ArrivalsTable(process="piecewise", points=[[0.0]])}, "arrivals.points[0]: must be a pair [second, rate]"),
    ({"arrivals": ArrivalsTable(process="piecewise", points=[[0.0, -1.0]])}, "arrivals.points[0]: second and rate must be at least 0"),
    ({"arrivals": ArrivalsTable(process="piecewise", points=[[0.0, 0.0]])}, "arrivals.points: must have a rate above 0"),
    ({"arrivals": ArrivalsTable(process="burst", burst_length_s=60.0)}, "arrivals.burst_length_s: must be less than burst_every_s (60), not 60"),
    ({"arrivals": ArrivalsTable(process="all_at_once"), "duration_s": 5.0}, "duration_s: all_at_once needs a number of requests instead"),
    ({"sessions": SessionsTable(turns_min=3, turns_max=2)}, "sessions.turns_min: must be at most turns_max (2), not 3"),
    ({"prefix_groups": 3}, "prefix_tokens: must be above 0 with prefix_groups"),
    ({"prompt": LengthsTable(min=9, max=8)}, "prompt.min: must be at most workload.synthetic.prompt.max (8), not 9"),
    ({"output": LengthsTable(distribution="trace")}, "output.path: needed for distribution 'trace'"),
    ({"output": LengthsTable(distribution="zipf", max=2**30)}, "output.max: zipf takes ranges of at most 16777216 lengths"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "problem"), BAD_TABLES)
def test_contradictions_are_named_exactly(keys, problem):
    with pytest.raises(InputError) as caught:
        open_synthetic(SyntheticTable(**keys))
    assert str(caught.value) == f"config: workload.synthetic.{problem}"


def test_oversized_synthetic_request_names_the_table():
    with pytest.raises(InputError) as caught:
        open_synthetic(SyntheticTable(prompt=FIXED), holds=lambda p, o: "only tiny ones")
    assert str(caught.value).startswith("config: workload.synthetic.prompt: a request of 10 + ")


def test_a_request_costs_less_than_three_microseconds():
    begin = time.process_time()
    workload = open_synthetic(SyntheticTable(requests=100_000), holds=lambda p, o: "")
    count = sum(1 for _ in workload.releases())
    assert count == 100_000
    assert (time.process_time() - begin) / count < 3e-6
