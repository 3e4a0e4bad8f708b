"""Schedules made with Vidur itself, reproduced request by request and batch by batch."""

import pytest

from tests.scheduling.vidur_world import CASES, load, outcome_of, play

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not CASES.is_dir(), reason="../shared/data/vidur-cases is absent"),
]

NEED = "evict_without_need"
SARATHI = (NEED, "sarathi_unsorted_victims")
EXACT = {
    "vllm_roomy": (),
    "vllm_preempt": (NEED,),
    "sarathi_chunked": ("sarathi_unsorted_victims",),
    "sarathi_preempt": SARATHI,
    "sarathi_preempt_partial_prefill": (*SARATHI, "sarathi_partial_restart"),
    "orca_blocks": (),
    "lightllm_roomy": (),
    "ft_equal_decodes": (),
    "ft_leak_as_is": ("ft_leak",),
    "ft_fixed": (),
    "ties_vllm": (),
    "global_round_robin_sarathi": ("sarathi_unsorted_victims",),
    "global_random_sarathi": ("sarathi_unsorted_victims",),
    "global_lor_sarathi": ("sarathi_unsorted_victims", "lor_waiting_only"),
    "global_round_robin_vllm": (NEED,),
    "global_lor_vllm": (NEED, "lor_waiting_only"),
    "global_lor_lowload_vllm": ("lor_waiting_only",),
    "global_lor_lowload_fixed_vllm": (),
    "pp2_vllm": (),
    "pp2_sarathi": ("sarathi_unsorted_victims",),
    "pp2_orca": (),
    "pp2_ft": (),
    "vllm_stuck_oversized": ("hopeless_head_blocks",),
    "vllm_stuck_selfevict": (NEED,),
}
SAME_TIMES_REPAIRED = [
    "sarathi_chunked",
    "global_round_robin_sarathi",
    "global_random_sarathi",
    "pp2_sarathi",
]


def assert_matches(case, world, requests):
    for number, (got, want) in enumerate(zip(world.batches, case["batches"])):
        assert {"batch": number, **got} == want
    assert len(world.batches) == len(case["batches"])
    for request, want in zip(requests, case["expected"], strict=True):
        outcome = outcome_of(world, request)
        assert outcome == {key: want[key] for key in outcome}
    assert world.restarts == [
        (r["t_us"], r["request"], r["processed_tokens"], r["prefill_was_complete"])
        for r in case["restarts"]
    ]


def test_every_schedule_file_is_played():
    files = {path.stem for path in CASES.glob("*.json")}
    assert set(EXACT) == {f for f in files if not f.startswith(("unit_", "metrics_"))}


@pytest.mark.parametrize("name", EXACT)
def test_schedule_is_reproduced(name):
    case = load(name)
    world, requests = play(case, EXACT[name])
    assert_matches(case, world, requests)
    for index, left in case["leftover"].items():
        scheduler = world.schedulers[int(index)]
        assert scheduler.blocks_used == left["allocated_blocks"]
        assert [r.request_id for r in scheduler.waiting()] == left["waiting"]


@pytest.mark.parametrize("name", SAME_TIMES_REPAIRED)
def test_sorting_victims_changes_nothing_where_nobody_is_evicted(name):
    case = load(name)
    world, requests = play(case, [n for n in EXACT[name] if n == "lor_waiting_only"])
    for request, want in zip(requests, case["expected"], strict=True):
        outcome = outcome_of(world, request)
        assert outcome == {key: want[key] for key in outcome}


@pytest.mark.parametrize("name", ["vllm_preempt", "sarathi_preempt", "global_lor_vllm"])
def test_rewritten_lengths_match_the_peer(name):
    case = load(name)
    before = {row["request"]: row["prefill"] + row["decode"] for row in case["requests"]}
    world, requests = play(case, [*EXACT[name], "restart_rewrites_lengths"])
    assert_matches(case, world, requests)
    for request, want in zip(requests, case["expected"], strict=True):
        assert request.prompt_tokens == want["final_prefill"]
        assert request.output_tokens == want["final_decode"]
        assert request.prompt_tokens + request.output_tokens == before[request.request_id]


def test_lengths_are_kept_by_default():
    case = load("vllm_preempt")
    _, requests = play(case, EXACT["vllm_preempt"])
    for request, row in zip(requests, case["requests"], strict=True):
        assert (request.prompt_tokens, request.output_tokens) == (row["prefill"], row["decode"])
        assert request.generated_tokens == row["decode"]


def test_partial_restart_repaired_is_faster():
    """The reference names 7.8 s with the defect and 5.0 s with the repair alone."""
    case = load("sarathi_preempt_partial_prefill")
    world, requests = play(case, SARATHI)
    assert 4.9e9 < world.now < 5.1e9
    assert all(r.generated_tokens == r.output_tokens for r in requests)


def test_oversized_prompt_fails_clearly_and_unblocks_the_queue():
    case = load("vllm_stuck_oversized")
    world, requests = play(case, EXACT["vllm_stuck_oversized"], fail_stuck=True)
    assert [(r.request_id, why) for r, why in world.failed] == [
        (1, "needs more than the replica's 20 KV blocks (1 kept free)")
    ]
    first = outcome_of(world, requests[0])
    assert first == {key: case["expected"][0][key] for key in first}
    assert requests[2].generated_tokens == 10
    assert "20 KV blocks" in world.schedulers[0].can_ever_hold(requests[1])
    world, requests = play(case, fail_stuck=True)
    assert [r.request_id for r, _ in world.failed] == [1]
    assert requests[2].last_token_ns < requests[0].last_token_ns, "no request waits behind it"


@pytest.mark.parametrize(
    ("faithful", "reached", "words"),
    [((NEED,), 306, "outgrew"), ((), 321, "needs more than the replica's 20 KV blocks")],
)
def test_request_that_outgrows_the_pool_fails_clearly(faithful, reached, words):
    world, requests = play(load("vllm_stuck_selfevict"), faithful, fail_stuck=True)
    ((request, why),) = world.failed
    assert request is requests[0]
    assert words in why
    assert request.reached_tokens == reached
    assert world.schedulers[0].blocks_used == 0
