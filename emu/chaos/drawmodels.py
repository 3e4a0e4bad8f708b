"""Draws of newer models and engines' features: hybrid layers, drafts, adapters, images.

A stream of its own decides, so that the rest of a world stays as it was drawn. What a world's
schedulers and backends cannot do is not drawn for it.
"""

from __future__ import annotations

from typing import Any, Final

from emu.chaos.drawfaults import Rng, Tables, chance, pick
from emu.rng import rng_stream

HYBRIDS: Final = ("openai/gpt-oss-20b", "google/gemma-2-9b", "LiquidAI/LFM2-2.6B")
"""Models with windows and with states that fit a GPU of the drawn clusters."""
VISION: Final = "Qwen/Qwen3-VL-8B"


def draw_models(seed: int, tables: Tables, lines: list[dict[str, Any]]) -> None:
    """Change a part of the worlds with the vllm scheduler on one stage."""
    rng = rng_stream(seed, "chaos models")
    groups = tables["replicas"]
    if tables["scheduler"]["policy"] != "vllm" or any("pipeline_parallel" in g for g in groups):
        return
    if any(_overrides(group) for group in groups):
        return
    is_plain = all(
        group["role"] in ("colocated", "inactive") and "data_parallel_group" not in group
        for group in groups
    )
    if is_plain and not tables["network"].get("tiers") and chance(rng, 0.25):
        _hybrid(rng, tables)
    if chance(rng, 0.35):
        _speculation(rng, tables, lines)
    if "name" in tables["model"] and tables["model"]["name"] not in HYBRIDS and chance(rng, 0.3):
        _adapters(rng, tables, lines)
    grouped = any("data_parallel_group" in group for group in groups)
    if not grouped and not tables["scheduler"].get("enable_lora"):
        _images(rng_stream(seed, "chaos images"), tables, lines)


def _overrides(group: Tables) -> bool:
    return bool(group.get("scheduler") or group.get("latency") or group.get("model"))


def _hybrid(rng: Rng, tables: Tables) -> None:
    name = pick(rng, HYBRIDS)
    if name == HYBRIDS[2] and any(group["role"] != "colocated" for group in tables["replicas"]):
        name = HYBRIDS[0]  # states are nowhere but on replicas that serve from the start
    tables["model"] = {"name": name}


def _speculation(rng: Rng, tables: Tables, lines: list[dict[str, Any]]) -> None:
    if tables["model"].get("name") == HYBRIDS[2]:
        tables["scheduler"]["prefix_caching"] = False  # states of drafts cannot be cached
    table: Tables = {
        "method": pick(rng, ("ngram", "eagle", "eagle3")),
        "num_speculative_tokens": int(pick(rng, (1, 2, 4))),
        "draft_step_us": float(pick(rng, (0.0, 500.0))),
    }
    rate = float(pick(rng, (0.0, 0.5, 0.9, 1.0)))
    if chance(rng, 0.3):
        count = table["num_speculative_tokens"]
        table["synthetic_acceptance_rates"] = [rate ** (at + 1) for at in range(count)]
    else:
        table["acceptance_rate"] = rate
        table["tenants"] = [{"tenant": "t1", "acceptance_rate": 0.7}]
    if table["method"] == "ngram":
        table["proposal_rate"] = float(pick(rng, (1.0, 0.5)))
    tables["scheduler"]["speculative_config"] = table
    for line in lines:
        if chance(rng, 0.1):
            line["acceptance_rate"] = float(pick(rng, (0.0, 0.3, 1.0)))


def _images(rng: Rng, tables: Tables, lines: list[dict[str, Any]]) -> None:
    name = tables["model"].get("name", "")
    takes = tables.get("latency", {}).get("backend", "roofline") in ("roofline", "linear")
    if not name or name in HYBRIDS or not takes or not chance(rng, 0.4):
        return
    tables["model"] = {"name": VISION}
    tables["scheduler"] |= {
        "limit_mm_per_prompt": {"image": 2},
        "max_num_encoder_input_tokens": int(pick(rng, (48, 200))),
        "encoder_cache_size": int(pick(rng, (48, 200))),
    }
    if chance(rng, 0.4):
        tables["encoders"] = {
            "count": int(pick(rng, (1, 3))),
            "gpu": pick(rng, ("", "L40S")),
            "nic_gbps": float(pick(rng, (0.0, 1.0))),
            "cache_tokens": int(pick(rng, (0, 100))),
        }
    for item in [turn for line in lines for turn in line.get("sub_requests", [line])]:
        start = 0
        for _ in range(int(rng.integers(3))):
            image = int(rng.integers(6))
            start += int(rng.integers(10))
            if start + 8 * (image + 1) > item["input_toks"]:
                break
            item.setdefault("images", []).append([image, start, 8 * (image + 1)])
            start += 8 * (image + 1)


def _adapters(rng: Rng, tables: Tables, lines: list[dict[str, Any]]) -> None:
    slots = int(pick(rng, (1, 2, 3)))
    tables["scheduler"] |= {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots + int(pick(rng, (0, 1, 4))),
    }
    if chance(rng, 0.5):
        tables["router"]["policy"] = "lora_affinity"
    for line in lines:
        if chance(rng, 0.7):
            line["adapter"] = f"a{int(rng.integers(5))}"
