"""Gate policies: exact balanced rule, counts that add up, draws that repeat."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.config.names import EXPERT_ROUTING
from emu.errors import InputError
from emu.latency.moe_gate import GateShape, Routing, make_gate

SMALL = settings(max_examples=60, deadline=None)
QWEN = {"experts": 128, "per_token": 8}


@pytest.mark.parametrize(
    ("ranks", "tokens", "on_rank", "used"),
    [
        (2, 512, 510, 64),
        (4, 512, 461, 32),
        (2, 2, 2, 8),
        (1, 5, 5, 40),
        (1, 512, 512, 128),
        (2, 1, 1, 4),
    ],
)
def test_balanced_rule(ranks, tokens, on_rank, used):
    routing = make_gate("balanced", GateShape(**QWEN, ranks=ranks)).route(tokens, 0)
    assert routing.rank_tokens == (on_rank,) * ranks
    assert routing.rank_experts == (used,) * ranks


def test_balanced_rounds_halves_to_even():
    gate = make_gate("balanced", GateShape(experts=8, per_token=1, ranks=2))
    # 1, 3 and 5 tokens: 0.5, 1.5 and 2.5 pairs for each rank.
    assert [gate.route(t, 0).rank_experts[0] for t in (1, 3, 5)] == [0, 2, 2]
    assert [gate.route(t, 0).rank_tokens[0] for t in (1, 3, 5)] == [0, 2, 2]


def test_balanced_loads_differ_by_one_at_most():
    routing = make_gate("balanced", GateShape(experts=6, per_token=2)).route(4, 0)
    assert routing.expert_tokens == (2, 2, 1, 1, 1, 1)


def test_round_robin_goes_around():
    gate = make_gate("round_robin", GateShape(experts=4, per_token=2, ranks=2))
    assert gate.route(3, 0) == Routing((2, 1), (2, 2), (2, 2, 1, 1))
    stuck = make_gate("round_robin", GateShape(experts=4, per_token=2, ranks=2), faithful=True)
    assert stuck.route(3, 0) == Routing((3, 0), (2, 0), (3, 3, 0, 0))


def test_faithful_random_replays_python_samples():
    gate = make_gate("random", GateShape(experts=16, per_token=3, ranks=4), faithful=True)
    rng = random.Random(42)
    samples = [rng.sample(range(16), 3) for _ in range(7)]
    expected = [sum(e in sample for sample in samples) for e in range(16)]
    routing = gate.route(7, 123)
    assert list(routing.expert_tokens) == expected
    assert routing.rank_tokens == tuple(
        sum(any(e // 4 == rank for e in sample) for sample in samples) for rank in range(4)
    )
    assert routing.rank_experts == tuple(
        sum(count > 0 for count in expected[4 * rank : 4 * rank + 4]) for rank in range(4)
    )
    assert gate.route(7, 5) == routing


def test_random_repeats_for_a_batch_and_varies_between_batches():
    shape = GateShape(**QWEN, ranks=4, seed=7)
    first, second = make_gate("random", shape), make_gate("random", shape)
    routings = [first.route(20, key) for key in range(6)]
    assert [second.route(20, key) for key in reversed(range(6))] == routings[::-1]
    assert len({routing.expert_tokens for routing in routings}) == 6
    other_seed = make_gate("random", GateShape(**QWEN, ranks=4, seed=8))
    assert other_seed.route(20, 0) != routings[0]


def test_skewed_loads_are_skewed_and_spread_by_the_seed():
    shape = GateShape(**QWEN, ranks=4)
    routing = make_gate("skewed", shape).route(256, 0)
    loads = sorted(routing.expert_tokens, reverse=True)
    assert loads[0] == 256, "the most popular expert sees every token"
    assert loads[0] > 10 * loads[64]
    assert len(set(routing.rank_tokens)) > 1 or len(set(routing.rank_experts)) > 1
    assert make_gate("skewed", shape).route(256, 9) == routing


def test_skewed_to_all_experts_is_certain():
    routing = make_gate("skewed", GateShape(experts=4, per_token=4, ranks=2)).route(10, 0)
    assert routing == Routing((10, 10), (2, 2), (10, 10, 10, 10))


@SMALL
@given(
    st.sampled_from(EXPERT_ROUTING),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 200),
    st.integers(0, 10**6),
)
def test_counts_add_up(policy, faithful, experts, per_token, ranks, tokens, key):
    shape = GateShape(experts=experts, per_token=per_token, ranks=min(ranks, experts))
    routing = make_gate(policy, shape, faithful=faithful).route(tokens, key)
    assert len(routing.expert_tokens) == experts
    assert sum(routing.expert_tokens) == tokens * shape.top_k
    assert len(routing.rank_tokens) == len(routing.rank_experts) == shape.ranks
    assert all(0 <= count <= tokens for count in routing.rank_tokens + routing.expert_tokens)
    on_rank = [sum(shape.owner(e) == rank for e in range(experts)) for rank in range(shape.ranks)]
    # The balanced rule counts on an equal share of experts, rounded down.
    assert all(used <= most for used, most in zip(routing.rank_experts, on_rank))


class FirstExpertOnly:
    """A user's gate: everything to expert 0."""

    draws = False

    def __init__(self, shape: GateShape) -> None:
        self.shape = shape

    def route(self, tokens: int, batch_key: int) -> Routing:
        idle = (0,) * (self.shape.ranks - 1)
        return Routing((tokens, *idle), (1, *idle), (tokens,) + (0,) * (self.shape.experts - 1))


class Silent:
    def __init__(self, shape: GateShape) -> None:
        pass

    def route(self, tokens: int, batch_key: int) -> object:
        return 3


class Three(Silent):
    draws = False


class Small(FirstExpertOnly):
    def __init__(self, shape: GateShape) -> None:
        super().__init__(GateShape(experts=4, per_token=1))


def test_a_gate_by_import_path():
    gate = make_gate(
        "tests.latency.test_moe_gate:FirstExpertOnly", GateShape(experts=4, per_token=1, ranks=2)
    )
    assert gate.route(9, 0) == Routing((9, 0), (1, 0), (9, 0, 0, 0))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("balance", "'balance' is none of balanced, round_robin, random, skewed, package.module"),
        ("no_such_module:Gate", "cannot import 'no_such_module'"),
        (f"{__name__}:Absent", f"module '{__name__}' has no 'Absent'"),
        (":Gate", "cannot import ''"),
        (f"{__name__}:Silent", "lacks draws"),
        (f"{__name__}:Three", "Three.route gave 3 instead of a Routing"),
        (f"{__name__}:Small", "Small.route gave 4 expert_tokens instead of 128"),
    ],
)
def test_unknown_gates_are_refused(path, problem):
    with pytest.raises(InputError) as caught:
        make_gate(path, GateShape(**QWEN))
    assert problem in str(caught.value)
