"""Drafts in SGLang's and TensorRT-LLM's schedulers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from emu.cluster.plan import ReplicaPlan, make_plan
from emu.config.load import config_from_dict
from emu.config.schema import SglangTable, TensorrtLlmTable
from emu.errors import InputError
from emu.features.speculation.acceptance import Speculation
from emu.request import Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.sglang.scheduler import SglangScheduler
from emu.scheduling.tensorrt_llm.scheduler import TensorrtLlmScheduler
from tests.cluster.helpers import run_config, summary_of
from tests.features.test_speculation import drafts, drive, request

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance_rate": 0.7}
TREE = {**EAGLE, "num_speculative_tokens": 5, "eagle_topk": 4, "num_draft_tokens": 8}
ROLES = [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]
SGLANG = {"policy": "sglang"}
TENSORRT = {"policy": "tensorrt-llm", "max_batch_size": 64}
PREFIXES = 3


def world(scheduler: dict[str, Any], version: str = "", **tables: Any) -> dict[str, Any]:
    name = scheduler["policy"]
    return {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4}],
        "engine": {"name": name, **({"version": version} if version else {})},
        "scheduler": {"speculative_config": EAGLE, **scheduler},
        "workload": {
            "synthetic": {
                "requests": 60,
                "arrivals": {"rate_per_s": 20.0},
                "prompt": {"distribution": "uniform", "min": 20, "max": 600},
                "output": {"distribution": "uniform", "min": 1, "max": 120},
                "prefix_groups": 4,
                "prefix_tokens": 64,
            }
        },
        **tables,
    }


def planned(scheduler: dict[str, Any], version: str = "", **tables: Any) -> ReplicaPlan:
    return make_plan(config_from_dict(world(scheduler, version, **tables))).replicas[0]


def sglang(
    speculative: Any, *, blocks: int = 1000, page: int = 1, ahead: bool = False, **keys: Any
) -> SglangScheduler:
    table = SglangTable(
        page_size=page,
        block_size=page,
        full_stops_chunks="off",
        page_overhead="on" if ahead else "off",
        **keys,
    )
    return SglangScheduler(table, limits(blocks, page, ahead), parts=part(speculative))


def tensorrt(
    speculative: Any, *, blocks: int = 100, ahead: bool = False, **keys: Any
) -> TensorrtLlmScheduler:
    table = TensorrtLlmTable(
        **{"enable_chunked_prefill": True, "tokens_per_block": 16, "block_size": 16, **keys}
    )
    return TensorrtLlmScheduler(table, limits(blocks, 16, ahead), parts=part(speculative))


def part(speculative: Any) -> list[Speculation]:
    return [] if speculative is None else [Speculation(speculative, 7)]


def limits(blocks: int, size: int, ahead: bool) -> ReplicaLimits:
    return ReplicaLimits(
        num_blocks=blocks,
        block_size=size,
        max_model_tokens=10**6,
        prefix_caching=True,
        forms_ahead=ahead,
    )


# --- whole runs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheduler", "tables"),
    [
        (SGLANG, {}),
        ({**SGLANG, "speculative_config": TREE}, {}),
        ({**SGLANG, "page_size": 16, "num_blocks": 110}, {}),
        (SGLANG, {"replicas": ROLES}),
        (TENSORRT, {}),
        ({**TENSORRT, "num_blocks": 60, "capacity_scheduler_policy": "MAX_UTILIZATION"}, {}),
        (TENSORRT, {"replicas": ROLES}),
        (TENSORRT, {"replicas": [{"count": 2, "data_parallel_group": "g"}]}),
    ],
)
def test_leaps_make_no_difference_to_the_bytes(
    tmp_path: Path, scheduler: dict[str, Any], tables: dict[str, Any]
) -> None:
    seen = []
    for leap in (True, False):
        run_config(tmp_path / str(leap), **world({**scheduler, "leap": leap}, **tables))
        rows = (tmp_path / str(leap) / "requests.csv").read_bytes()
        summary = summary_of(tmp_path / str(leap))
        seen.append((rows, summary["speculation"], summary["mean_itl_ms"]))
    assert seen[0] == seen[1]
    assert summary_of(tmp_path / "True")["completed"] == 60
    # 0.7 of each draft, if those before it: 2.53 tokens of three, 2.94 of a tree of five levels.
    length = 2.94 if scheduler.get("speculative_config") is TREE else 2.53
    assert seen[0][1]["mean_acceptance_length"] == pytest.approx(length, abs=0.25)


@pytest.mark.parametrize("scheduler", [SGLANG, TENSORRT], ids=["sglang", "tensorrt-llm"])
def test_decodes_are_faster(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    run_config(tmp_path / "with", **world(scheduler))
    plain = world(scheduler)
    del plain["scheduler"]["speculative_config"]
    run_config(tmp_path / "without", **plain)
    drafted, alone = summary_of(tmp_path / "with"), summary_of(tmp_path / "without")
    assert drafted["total_output_tokens"] == alone["total_output_tokens"]
    assert drafted["mean_tpot_ms"] < 0.75 * alone["mean_tpot_ms"]


# --- what engines do beside drafts ------------------------------------------------------------
def test_sglang_runs_48_requests_and_overlaps_from_its_second_version_on() -> None:
    old, new = planned(SGLANG, "0.5.9"), planned(SGLANG, "0.5.14")
    assert old.scheduler.requests_max == new.scheduler.requests_max == 48
    assert planned({**SGLANG, "max_running_requests": 100}).scheduler.requests_max == 100
    assert (old.schedules_ahead, new.schedules_ahead) == (False, True)
    plain = {**SGLANG, "speculative_config": None}
    assert planned(plain, "0.5.9").schedules_ahead
    # 2 GiB less for KV, and an 80 GB GPU has a part of 0.02 less.
    fractions = [one.scheduler.gpu_memory_utilization for one in (planned(plain, "0.5.9"), old)]
    assert fractions[0] - fractions[1] == pytest.approx(2048 / 81_559, abs=0.001)


def test_sglang_asks_for_the_pages_of_all_drafts() -> None:
    # 100 pages of one token: 2 x 40 are used, a decode of three drafts asks for four each.
    engine = sglang(drafts(3, 0.0), blocks=100, schedule_conservativeness=0.001)
    for number in range(2):
        engine.enqueue(request(number, prompt=40, output=15), 0)
    now_ns, taken = 0, []
    while (batch := engine.schedule(now_ns)) is not None and not taken:
        now_ns += 1
        taken = batch.preempted
        engine.complete(batch, 1, now_ns, 1)
    # The last of the batch goes as soon as 8 pages are not free.
    assert [one.request_id for one in taken] == [1]
    assert taken[0].generated_tokens <= 8


def test_a_tree_is_verified_whole_and_brings_a_token_a_level() -> None:
    table = drafts(5, 1.0, eagle_topk=4, num_draft_tokens=8)
    engine = sglang(table)
    engine.enqueue(request(1, prompt=10, output=13), 0)
    engine.complete(engine.schedule(0), 1, 1, 1)
    batch = engine.schedule(1)
    assert batch.shape.verify.tokens == 8
    assert len(list(engine.token_receivers(batch))) == 6
    engine.complete(batch, 1, 2, 1)
    batch = engine.schedule(2)
    assert batch.shape.verify.context_sum == 16  # prompt, first token and five drafts of eight
    assert [one.request_id for one in engine.complete(batch, 1, 3, 1).finished] == [1]


def test_tensorrt_llm_keeps_blocks_for_drafts_and_counts_their_tokens() -> None:
    # 16 + 16 tokens fill two blocks of 16; with a draft of the last step there are three.
    one = request(1, prompt=16, output=16)
    assert tensorrt(drafts(1, 0.5), blocks=2).can_ever_hold(one)
    assert not tensorrt(drafts(1, 0.5), blocks=3).can_ever_hold(one)
    engine = tensorrt(drafts(3, 0.0), max_num_tokens=32, max_batch_size=4)
    for number in range(3):
        engine.enqueue(request(number, prompt=16, output=40), 0)
    engine.complete(engine.schedule(0), 1, 1, 1)  # two prompts
    batch = engine.schedule(1)
    # Two generations of four tokens leave 24: a unit of 16.
    assert batch.shape.verify.tokens == 8
    assert batch.shape.prefill_new == [16]


@pytest.mark.parametrize(
    ("scheduler", "problem"),
    [
        ({**SGLANG, "enable_mixed_chunk": True}, "turns it off beside drafts"),
        ({**SGLANG, "speculative_config": {**TREE, "num_draft_tokens": 5}}, "expected 6 to 69"),
        ({**TENSORRT, "speculative_config": TREE}, "trees need policy sglang"),
        ({**SGLANG, "speculative_config": {**EAGLE, "num_draft_tokens": 4}}, "needs a tree"),
        ({**TENSORRT, "max_num_tokens": 100}, "verify 256 tokens in a step"),
    ],
)
def test_contradictions_are_refused(scheduler: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        planned(scheduler)


# --- books ------------------------------------------------------------------------------------
def crowd(rng: random.Random, *, caches: bool) -> list[Request]:
    made = []
    for number in range(25):
        prompt, output = rng.randint(1, 150), rng.randint(1, 60)
        shared, family = min(prompt, 80), rng.randrange(PREFIXES) * 1000
        ids = [family + at for at in range(shared)]
        ids += [10_000 * (number + 1) + at for at in range(prompt + output - shared)]
        made.append(request(number, prompt, output, ids if caches else None))
    return made


def crowded(engine: Any, requests: list[Request]) -> None:
    def check() -> None:
        assert engine.recount() == []

    drive(engine, requests, check=check)
    assert [one.generated_tokens for one in requests] == [one.output_tokens for one in requests]
    assert engine.blocks_used == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_sglangs_books_are_kept_in_crowded_worlds(seed: int, ahead: bool) -> None:
    rng = random.Random(f"{seed} {ahead}")
    page, caches, count = rng.choice((1, 16)), rng.random() < 0.6, rng.choice((1, 2, 5))
    tree = {"eagle_topk": 4, "num_draft_tokens": 8} if count > 1 and rng.random() < 0.5 else {}
    table = drafts(count, rng.choice((0.0, 0.5, 0.9)), "mtp", **tree)
    engine = sglang(
        table,
        blocks=640 // page,
        page=page,
        ahead=ahead,
        max_running_requests=rng.choice((4, 16)),
        chunked_prefill_size=rng.choice((-1, 64, 512)),
        disable_radix_cache=not caches,
        schedule_conservativeness=rng.choice((0.05, 1.0)),
    )
    crowded(engine, crowd(rng, caches=caches))


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_tensorrt_llms_books_are_kept_in_crowded_worlds(
    seed: int, ahead: bool, policy: str
) -> None:
    rng = random.Random(f"{seed} {ahead} {policy}")
    caches = rng.random() < 0.6
    engine = tensorrt(
        drafts(rng.choice((1, 2, 5)), rng.choice((0.0, 0.5, 0.9)), "mtp"),
        blocks=rng.choice((40, 60)),
        ahead=ahead,
        max_batch_size=rng.choice((4, 16)),
        max_num_tokens=rng.choice((256, 1000)),
        enable_block_reuse=caches,
        capacity_scheduler_policy=policy,
        length_ends_known="on",
    )
    crowded(engine, crowd(rng, caches=caches))


def test_a_context_that_gives_way_to_an_earlier_request_computes_nothing_more() -> None:
    rng = random.Random(8)
    engine = tensorrt(
        None,
        blocks=40,
        max_batch_size=16,
        max_num_tokens=256,
        capacity_scheduler_policy="MAX_UTILIZATION",
    )
    crowded(engine, crowd(rng, caches=True))
