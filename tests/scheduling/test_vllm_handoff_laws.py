"""Leaping is stepping while KV comes and goes (reserve, activate, detach, adopt, release)."""

from __future__ import annotations

import random

import pytest

from emu.scheduling.base import ReplicaLimits
from emu.scheduling.fcfs import FcfsScheduler
from emu.scheduling.vllm import VllmScheduler
from tests.scheduling.handoff_world import Replica
from tests.scheduling.tables import policy_of, table_for

KINDS = ["enqueue", "reserve", "reserve", "activate", "activate", "unreserve", "detach", "detach"]
KINDS += ["release", "adopt", "cancel"]


def operations(rng):
    span = rng.choice([20_000, 100_000, 400_000])
    longest = rng.choice([8, 40])
    return [
        (rng.randrange(span), rng.choice(KINDS), rng.randint(1, longest), rng.randint(1, longest))
        for _ in range(rng.randint(2, 60))
    ] + [(span + 10**6, "drain", 1, 1)]


def replica(kind, seed, leap):
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    table = table_for(
        policy_of(kind),
        block_size=size,
        max_num_seqs=rng.choice([2, 5, 256]),
        max_num_batched_tokens=rng.choice([16, 2048]),
        reserve_full_sequence=rng.random() < 0.7,
        skip_blocked=rng.random() < 0.2,
    )
    limits = ReplicaLimits(
        num_blocks=-(-90 // size) + rng.randint(0, 200 // size),
        block_size=size,
        max_model_tokens=10_000,
        prefix_caching=rng.random() < 0.4,
        leap=leap,
    )
    return Replica(kind(table, limits), operations(rng), leap)


@pytest.mark.parametrize("kind", [VllmScheduler, FcfsScheduler])
def test_leaping_is_stepping_while_kv_moves(kind):
    leaps = 0
    for seed in range(150):
        stepped, leaped = replica(kind, seed, False), replica(kind, seed, True)
        assert stepped.run() == leaped.run(), f"{seed=}"
        leaps += leaped.leaps
    assert leaps > 100
