"""Launch scripts of prefill and decode apart: which one a row has, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.apps.fidelity.points.apart import as_launched, launches_of
from emu.apps.fidelity.points.cases import Job, configuration
from emu.apps.fidelity.points.recipes import recipe_of
from emu.apps.fidelity.points.table import Point, Servers
from emu.cluster.plan import make_plan
from emu.config.load import config_from_text

NO_CONFIGS = Path("nowhere")


def point(
    engine: str,
    gpu: str,
    precision: str,
    clients: int,
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
    tokens: tuple[int, int] = (1024, 1024),
    measured_on: str = "2026-02-08",
) -> Point:
    """Servers as (count, ranks of tensors, ranks of attention); experts are on all ranks."""
    roles = zip(("prefill", "decode"), (prefill, decode), strict=True)
    servers = tuple(
        Servers(
            role=role,  # type: ignore[arg-type]
            count=count,
            tensor_parallel=tp,
            data_parallel=dp,
            expert_parallel=tp * dp,
        )
        for role, (count, tp, dp) in roles
    )
    return Point(
        point_id="a",
        source="inferencex-test",
        engine=engine,
        version="0.5.8" if engine == "sglang" else "0.8.1",
        model="deepseek-ai/DeepSeek-R1",
        precision=precision,
        gpu=gpu,
        servers=servers,
        drafts="unknown",
        load="clients",
        clients=clients,
        prompt_tokens=tokens[0],
        output_tokens=tokens[1],
        measured_on=measured_on,
        ttft_ms=1.0,
        tpot_ms=1.0,
        output_tokens_per_s=1.0,
    )


WIDE = point("sglang", "GB200", "fp4", 2048, (4, 1, 4), (1, 1, 32))
PLACES = point("tensorrt-llm", "GB300", "fp8", 36, (1, 1, 4), (4, 8, 1), (1024, 8192))


def test_a_file_is_chosen_by_servers_and_clients() -> None:
    (launch,) = launches_of(WIDE)
    assert launch.clients == (512, 2048, 4096, 8192)
    assert (launch.decode.copies, launch.decode.exchange, launch.prefill.pool) == (
        32,
        "deepep",
        131072,
    )
    assert recipe_of(WIDE).drafts == (0,), "no file with drafts names so many clients"
    roles = recipe_of(WIDE).roles
    assert roles["decode"].engine == {
        "all2all": "deepep",
        "redundant_experts": 32,
        "eplb_algorithm": "trivial",
    }
    assert roles["prefill"].engine == {}, "collectives"
    assert roles["prefill"].scheduler["num_blocks"] == 2048


def test_tensorrt_llm_has_the_places_and_the_kernels_of_its_file() -> None:
    roles = recipe_of(PLACES).roles
    assert roles["decode"].scheduler["max_batch_size"] == 8, "32 places for 36 clients"
    assert roles["prefill"].scheduler["disable_overlap_scheduler"]
    random = {"expert_popularity": "lognormal:2"}
    assert roles["prefill"].engine == {"version": "1.1"} | random, "DeepGEMM, which gathers"
    assert roles["decode"].engine == {}, "one rank of attention"


def test_experts_split_over_all_ranks_and_older_engines_exchange_nothing() -> None:
    split = point("tensorrt-llm", "B200-SXM-180GB", "fp8", 128, (1, 1, 8), (4, 8, 1), (8192, 1024))
    assert recipe_of(split).roles["prefill"].engine == {"expert_popularity": "lognormal:1.5"}
    old = point("tensorrt-llm", "GB300", "fp8", 36, (1, 1, 4), (4, 8, 1), (1024, 8192), "2025-12")
    engine = recipe_of(old).roles["prefill"].engine
    assert engine == {"version": "1.1", "expert_popularity": "lognormal:2"}


def test_other_clients_have_the_file_for_the_nearest_load_of_each_kind() -> None:
    near = point("sglang", "GB300", "fp8", 900, (2, 1, 8), (1, 1, 32))
    assert [(one.drafts, 1024 in one.clients) for one in launches_of(near)] == [
        (0, True),
        (1, True),
    ]
    more = point("sglang", "GB300", "fp8", 900, (7, 1, 8), (1, 1, 32))
    assert {one.drafts for one in launches_of(more)} == {0, 1}, "servers alike but for their number"


def test_what_no_file_is_for_has_none() -> None:
    assert launches_of(point("sglang", "GB200", "fp4", 8, (1, 3, 1), (1, 3, 1))) == []
    assert launches_of(point("vllm", "GB200", "fp4", 8, (4, 1, 4), (1, 1, 32))) == []


@pytest.mark.parametrize(
    "one",
    [
        WIDE,
        PLACES,
        point("sglang", "B200-SXM-180GB", "fp8", 160, (1, 1, 8), (1, 1, 8), (8192, 1024)),
        point("tensorrt-llm", "H100-SXM5-80GB", "fp8", 9, (1, 1, 16), (3, 16, 1), (8192, 1024)),
        point("tensorrt-llm", "GB200", "fp4", 4096, (10, 1, 4), (1, 1, 16), (8192, 1024)),
    ],
)
def test_its_keys_are_those_of_a_cluster(one: Point) -> None:
    for drafts in recipe_of(one).drafts:
        text = configuration(Job(one, NO_CONFIGS, drafts=drafts))
        plan = make_plan(config_from_text(text, "point"), "point")
        roles = {replica.role: replica for replica in plan.replicas}
        for role, keys in recipe_of(one, drafts).roles.items():
            if "max_batch_size" in keys.scheduler:
                assert roles[role].scheduler.requests_max == keys.scheduler["max_batch_size"]


def test_a_file_that_was_changed_is_for_days_before() -> None:
    both = ((1, 1, 8), (1, 1, 8), (8192, 1024))
    before = launches_of(point("sglang", "B200", "fp8", 128, *both, "2026-02-07"))[0]
    assert (before.prefill.step, before.prefill.requests, before.until) == (
        4096,
        128,
        "2026-03-12",
    )
    after = launches_of(point("sglang", "B200", "fp8", 160, *both, "2026-03-18"))[0]
    assert (after.prefill.step, after.prefill.requests, after.since) == (8192, 1, "2026-03-12")


def test_ranks_that_no_file_has_are_those_of_the_files() -> None:
    keys = ("tensorrt-llm", "H200", "fp8", 192)
    said = point(*keys, (2, 1, 8), (3, 1, 8), (8192, 1024), "2026-02-14")
    twin = point(*keys, (2, 8, 1), (3, 1, 8), (8192, 1024), "2026-02-14")
    assert as_launched(said) == as_launched(twin) == twin
    other = point("tensorrt-llm", "H200", "fp8", 191, (2, 1, 8), (3, 1, 8), (8192, 1024))
    assert as_launched(other) == other, "no file names its clients"
    assert as_launched(WIDE) == WIDE


def test_kernels_that_gather_tokens_exchange_none() -> None:
    wide = point("tensorrt-llm", "GB200", "fp8", 2048, (1, 1, 8), (1, 1, 32), (1024, 8192))
    random = {"expert_popularity": "lognormal:2"}
    assert recipe_of(wide).roles["prefill"].engine == {"version": "1.1"} | random
    narrow = point("tensorrt-llm", "GB200", "fp4", 2048, (1, 1, 4), (1, 1, 32), (1024, 8192))
    assert recipe_of(narrow).roles["prefill"].engine == {"all2all": "mnnvl"} | random


def test_prompts_of_random_ids_favor_experts_without_a_file_too() -> None:
    none = point("tensorrt-llm", "GB200", "fp4", 256, (4, 1, 4), (1, 1, 48))
    assert not launches_of(none)
    assert recipe_of(none).roles["prefill"].engine == {"expert_popularity": "lognormal:2"}
    alone = point("tensorrt-llm", "GB200", "fp4", 6, (1, 4, 1), (3, 8, 1), (8192, 1024), "2025-12")
    assert recipe_of(alone).roles["prefill"].engine == {}, "one rank of attention"
