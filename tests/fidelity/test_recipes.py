"""Launch scripts of one server: which one a row has by model, GPU, precision and day."""

from __future__ import annotations

import pytest

from emu.apps.fidelity.points.recipes import Recipe, recipe_of
from emu.apps.fidelity.points.table import Point, Servers

GLM, KIMI, QWEN = "zai-org/GLM-5-FP8", "moonshotai/Kimi-K2.5", "Qwen/Qwen3.5-397B-A17B"
LATE = "2026-04-21"


def recipe(
    engine: str, model: str, gpu: str, precision: str, day: str = LATE, drafts: int = 0
) -> Recipe:
    one = Servers(role="colocated", count=1, tensor_parallel=8)
    return recipe_of(
        Point(
            point_id="a",
            source="inferencex-test",
            engine=engine,
            version="",
            model=model,
            precision=precision,
            gpu=gpu,
            servers=(one,),
            drafts="unknown" if engine == "sglang" else "none",
            load="clients",
            clients=32,
            prompt_tokens=1024,
            output_tokens=1024,
            measured_on=day,
            ttft_ms=1.0,
            tpot_ms=1.0,
            output_tokens_per_s=1.0,
        ),
        drafts,
    )


@pytest.mark.parametrize(
    ("precision", "day", "chunk", "fraction", "running", "looks", "drafts"),
    [
        ("fp8", "2026-03-21", 32_768, 0.85, 32, 1, (0,)),
        ("fp8", LATE, 32_768, 0.85, 32, 1, (0, 3)),
        ("fp4", "2026-03-30", 131_072, 0.8, 32, 1, (0,)),
        ("fp4", LATE, 32_768, 0.9, 2048, 10, (0, 3)),
    ],
)
def test_glm(
    precision: str,
    day: str,
    chunk: int,
    fraction: float,
    running: int,
    looks: int,
    drafts: tuple[int, ...],
) -> None:
    found = recipe("sglang", GLM, "B200-SXM-180GB", precision, day)
    keys = found.scheduler
    assert (keys["chunked_prefill_size"], keys["mem_fraction_static"]) == (chunk, fraction)
    assert (keys["max_running_requests"], keys["scheduler_recv_interval"]) == (running, looks)
    assert (found.drafts, found.narrow_kv, found.stream_interval) == (drafts, True, 30)


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_glm_with_drafts_has_one_script_that_overlaps_them(precision: str) -> None:
    keys = recipe("sglang", GLM, "B300", precision, drafts=3).scheduler
    assert (keys["mem_fraction_static"], keys["max_running_requests"]) == (0.85, 32)
    assert keys["enable_spec_v2"]
    assert not recipe("sglang", GLM, "B300", precision).scheduler["enable_spec_v2"]


def test_glm_on_hopper_has_the_engines_own_keys_and_no_drafts() -> None:
    found = recipe("sglang", GLM, "H200-SXM-141GB", "fp8")
    assert found.scheduler["mem_fraction_static"] == 0.85
    assert "chunked_prefill_size" not in found.scheduler
    assert (found.drafts, found.narrow_kv, found.stream_interval) == ((0,), False, 1)


@pytest.mark.parametrize(
    ("precision", "chunk", "fraction", "looks", "interval"),
    [
        ("fp8", 16_384, 0.8, 10, 50),
        ("bf16", 32_768, 0.82, 30, 30),
        ("fp4", 32_768, 0.8, 30, 30),
    ],
)
def test_each_precision_on_b300_has_its_own_script(
    precision: str, chunk: int, fraction: float, looks: int, interval: int
) -> None:
    found = recipe("sglang", QWEN, "B300", precision)
    keys = found.scheduler
    assert (keys["chunked_prefill_size"], keys["mem_fraction_static"]) == (chunk, fraction)
    assert (keys["scheduler_recv_interval"], found.stream_interval) == (looks, interval)
    assert (found.version, found.drafts) == ("0.5.10", (0, 3))


@pytest.mark.parametrize(
    ("gpu", "precision", "day", "part", "tokens", "is_narrow"),
    [
        ("H200-SXM-141GB", "int4", LATE, 0.95, 0, False),
        ("B200-SXM-180GB", "int4", LATE, 0.95, 0, False),
        ("B200-SXM-180GB", "fp4", "2026-03-12", 0.9, 0, False),
        ("B200-SXM-180GB", "fp4", LATE, 0.9, 2048, True),
        ("B300", "fp4", LATE, 0.9, 0, False),
    ],
)
def test_kimi(
    gpu: str, precision: str, day: str, part: float, tokens: int, is_narrow: bool
) -> None:
    found = recipe("vllm", KIMI, gpu, precision, day)
    assert found.scheduler["gpu_memory_utilization"] == part
    assert found.scheduler.get("max_num_batched_tokens", 0) == tokens
    assert (found.narrow_kv, found.stream_interval) == (is_narrow, 20 if is_narrow else 1)
