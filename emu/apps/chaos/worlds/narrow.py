"""Scenes of pressed worlds: one scheduler under pressure, clients that come back, KV that leaves.

Each is narrow: it draws the keys that its rules read, and leaves the rest as it is.
"""

from __future__ import annotations

from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.models import draw_engine_states
from emu.config.engine_words import ENGINES
from emu.config.schema import (
    LoadTable,
    PrefixAwareTable,
    RooflineTable,
    RoundRobinTable,
    SglangTable,
    TensorrtLlmTable,
    VllmTable,
)
from emu.config.tables import tag_of
from emu.features.base import Feature
from emu.features.registry import all_features


def small_world(rng: Rng, seed: int, replicas_max: int) -> Tables:
    """Two machines and a few replicas without roles, whose steps cost what three figures say."""
    return {
        "seed": seed,
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"count": 2, "gpus": 2, "gpu": "A100-SXM4-80GB", "host_memory_gib": 64.0}],
        "replicas": [{"role": "colocated", "count": int(rng.integers(1, replicas_max + 1))}],
        "latency": {
            "backend": "linear",
            "base_us": float(pick(rng, (1000.0, 5000.0))),
            "per_token_us": float(pick(rng, (0.0, 50.0))),
            "per_context_token_us": float(pick(rng, (0.0, 1.0))),
        },
        "router": {"policy": pick(rng, (tag_of(LoadTable), tag_of(RoundRobinTable)))},
        "workload": {"oversized": "reject"},
        "network": {},
    }


def burst(rng: Rng, count: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> list[Tables]:
    """So many requests within a short while, some at the same instant."""
    at_ns = 0
    lines: list[Tables] = []
    for _ in range(count):
        if not chance(rng, 0.3):
            at_ns += int(pick(rng, (1000, 1_000_000, 20_000_000)))
        lines.append(
            {
                "arrival_time_ns": at_ns,
                "input_toks": int(rng.integers(*prompts)),
                "output_toks": int(rng.integers(*outputs)),
            }
        )
    return lines


def later_half(rng: Rng, lines: list[Tables]) -> None:
    """Each of the second half of the lines comes a tenth of a second later, or nearly a whole."""
    for line in lines[len(lines) // 2 :]:
        line["arrival_time_ns"] += int(pick(rng, (100_000_000, 900_000_000)))


def share_prefixes(rng: Rng, lines: list[Tables]) -> None:
    """Prompts of a few kinds begin alike."""
    for line in lines:
        first = int(rng.integers(3)) * 10_000
        line["input_tok_ids"] = [first + at for at in range(line["input_toks"])]
        line["output_tok_ids"] = [90_000 + at for at in range(line["output_toks"])]


def pieces(rng: Rng, tables: Tables) -> list[Tables]:
    """vLLM with little memory and a small budget, whose prompts are cut in all ways."""
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": int(pick(rng, (4, 16))),
        "num_blocks": int(rng.integers(30, 60)),
        "max_num_seqs": int(pick(rng, (6, 16))),
        "max_num_batched_tokens": int(pick(rng, (32, 64, 512))),
        "long_prefill_token_threshold": int(pick(rng, (0, 8, 20))),
        "reserve_full_sequence": chance(rng, 0.5),
        "order": pick(rng, ("arrival", "priority", "deadline")),
        "async_scheduling": pick(rng, ("off", "on")),
        "prefix_caching": False,
    }
    lines = burst(rng, int(rng.integers(20, 40)), (10, 100), (10, 60))
    for line in lines:
        line["priority"] = int(rng.integers(3))
        if chance(rng, 0.6):
            line["deadline_ns"] = int(pick(rng, (0, 50_000_000, 2_000_000_000)))
    return lines


def sglang(rng: Rng, tables: Tables) -> list[Tables]:
    """SGLang with little memory."""
    tables["engine"] = {"name": "sglang", "version": pick(rng, ENGINES["sglang"].versions)}
    shares = chance(rng, 0.3)
    tables["scheduler"] = {
        "policy": tag_of(SglangTable),
        "page_size": int(pick(rng, (1, 1, 4))),
        "max_running_requests": int(pick(rng, (4, 16))),
        "chunked_prefill_size": int(pick(rng, (-1, 64, 256))),
        "max_prefill_tokens": int(pick(rng, (200, 16_384))),
        "schedule_conservativeness": float(pick(rng, (0.05, 0.3, 1.0))),
        "schedule_policy": pick(rng, ("fcfs", "fcfs", "lof")),
        "enable_mixed_chunk": chance(rng, 0.2),
        "disable_radix_cache": not shares,
        "disable_overlap_schedule": chance(rng, 0.5),
    }
    tables["scheduler"]["num_blocks"] = (
        int(rng.integers(400, 900)) // tables["scheduler"]["page_size"]
    )
    lines = burst(rng, int(rng.integers(15, 40)), (10, 100), (20, 150))
    if shares:
        tables["scheduler"]["schedule_policy"] = pick(rng, ("lpm", "dfs-weight"))
        share_prefixes(rng, lines)
    else:
        draw_engine_states(int(tables["seed"]), tables)
    return lines


def tensorrt_llm(rng: Rng, tables: Tables) -> list[Tables]:
    """TensorRT-LLM with little memory."""
    name = tag_of(TensorrtLlmTable)
    tables["engine"] = {"name": name, "version": pick(rng, ENGINES[name].versions)}
    shares = chance(rng, 0.3)
    tables["scheduler"] = {
        "policy": name,
        "tokens_per_block": int(pick(rng, (4, 16))),
        "num_blocks": int(rng.integers(30, 60)),
        "max_batch_size": int(pick(rng, (4, 16))),
        "max_num_tokens": int(pick(rng, (64, 128, 512))),
        "capacity_scheduler_policy": pick(rng, ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT")),
        "enable_chunked_prefill": True,
        "context_chunking_policy": pick(rng, ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")),
        "disable_overlap_scheduler": chance(rng, 0.5),
        "enable_block_reuse": shares,
    }
    is_wide = tables["scheduler"]["tokens_per_block"] == 16  # prompts of several steps
    prompts = (50, 300) if is_wide else (10, 100)
    lines = burst(rng, int(rng.integers(15, 40)), prompts, (10, 80))
    if shares:
        share_prefixes(rng, lines)
    else:
        draw_engine_states(int(tables["seed"]), tables)
    if chance(rng, 0.3):
        waits_for_prompts(rng, tables)
    return lines


def waits_for_prompts(rng: Rng, tables: Tables) -> None:
    """TensorRT-LLM's prompts wait for more of them, so long and up to so many."""
    tables["scheduler"] |= {
        "batch_wait_timeout_iters": int(pick(rng, (1, 5, 20))),
        "batch_wait_max_tokens_ratio": float(pick(rng, (0.1, 0.5, 0.9))),
    }


def varied(rng: Rng, tables: Tables) -> list[Tables]:
    """Steps that vary, on one stage or two, for long enough that their middle is known."""
    tables["replicas"] = [{"role": "colocated", "pipeline_parallel": int(pick(rng, (1, 2)))}]
    tables["latency"] |= {"jitter": True, "base_us": 1000.0, "per_token_us": 10.0}
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 2000, "max_num_seqs": 16}
    return burst(rng, int(rng.integers(10, 20)), (5, 200), (40, 200))


def served(rng: Rng, tables: Tables) -> list[Tables]:
    """More requests at once than API servers take in their stride."""
    tables["replicas"][0]["count"] = int(rng.integers(1, 4))
    tables["latency"] = {"backend": tag_of(RooflineTable)}
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 4000, "max_num_seqs": 256}
    if chance(rng, 0.5):
        tables["latency"]["prompt_token_us"] = 100.0
    if chance(rng, 0.5):
        tables["engine"] = {"stream_interval": int(pick(rng, (2, 10, 50)))}
    return burst(rng, int(rng.integers(40, 100)), (5, 400), (2, 40))


def turns(rng: Rng, tables: Tables) -> list[Tables]:
    """Sessions that come back to a small prefix cache, each turn with all that was said before."""
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": 4,
        "num_blocks": int(rng.integers(120, 260)),
        "max_num_seqs": 8,
        "prefix_caching": True,
    }
    for feature in all_features():
        feature.draw_cached(rng, tables)
    lines: list[Tables] = []
    for index, line in enumerate(burst(rng, int(rng.integers(6, 15)), (10, 120), (5, 40))):
        first, prompt, output = index * 10_000, line["input_toks"], line["output_toks"]
        asked: list[Tables] = []
        for at in range(int(rng.integers(2, 5))):
            said = prompt + at * (output + 12)
            asked.append(
                {
                    "input_toks": said,
                    "output_toks": output,
                    "input_tok_ids": [first + i for i in range(said)],
                    "output_tok_ids": [first + said + i for i in range(output)],
                    "tool_duration_ns": int(pick(rng, (0, 20_000_000, 400_000_000))),
                }
            )
        asked[-1]["tool_duration_ns"] = 0
        lines.append(
            {
                "arrival_time_ns": line["arrival_time_ns"],
                "session_id": f"turns{index}",
                "priority": int(rng.integers(3)),
                "sub_requests": asked,
            }
        )
    return lines


def cached(rng: Rng, tables: Tables) -> list[Tables]:
    """Prompts that begin alike, and small caches and tiers that cannot hold them all.

    Some end with a block and come again whole; some are long after the others have come between.
    """
    block = int(pick(rng, (4, 16)))
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": block,
        "num_blocks": int(rng.integers(30, 80)),
        "max_num_seqs": int(pick(rng, (1, 3, 8))),
        "max_num_batched_tokens": int(pick(rng, (64, 512))),
        "async_scheduling": pick(rng, ("off", "off", "on")),
        "prefix_caching": True,
    }
    tables["router"] = {"policy": pick(rng, (tag_of(PrefixAwareTable), "round_robin", "load"))}
    if chance(rng, 0.5):
        tables["model"]["max_model_tokens"] = 4096
        tables["network"] = {
            "tiers": pick(rng, (["cpu"], ["cpu", "cxl"])),
            "tier_block_tokens": 2 * block,
            "tier_shared": chance(rng, 0.3),
            "cpu_tier_gib": float(pick(rng, (0.02, 0.1))),
        }
        tables["nodes"][0]["cxl_gib"] = float(pick(rng, (0.05, 1.0)))
    kinds = int(pick(rng, (3, 10)))
    lines = burst(rng, int(rng.integers(20, 50)), (1, 12), (1, 30))
    for index, line in enumerate(lines):
        line["arrival_time_ns"] += index * int(pick(rng, (0, 5_000_000, 60_000_000)))
        line["input_toks"] = line["input_toks"] * block + int(pick(rng, (0, 0, 1, block - 1)))
        first = int(rng.integers(kinds)) * 10_000
        line["input_tok_ids"] = [first + at for at in range(line["input_toks"])]
        own = first + line["input_toks"] if chance(rng, 0.5) else 500_000 + index * 1000
        line["output_tok_ids"] = [own + at for at in range(line["output_toks"])]
    return by_arrival(lines)


def featured(rng: Rng, tables: Tables) -> list[Tables]:
    """One feature alone, in steps of many sequences."""
    return one_feature(rng, tables, pick(rng, all_features()))


def one_feature(rng: Rng, tables: Tables, feature: Feature) -> list[Tables]:
    """The same of a feature that is given, as far as it is drawn for such worlds."""
    tables["replicas"][0]["count"] = int(rng.integers(1, 3))
    if chance(rng, 0.6):
        tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": int(pick(rng, (200, 4000))),
        "max_num_seqs": int(pick(rng, (2, 4, 32))),
        "max_num_batched_tokens": int(pick(rng, (64, 512))),
        "async_scheduling": pick(rng, ("off", "on")),
        "prefix_caching": False,
    }
    lines = burst(rng, int(rng.integers(20, 40)), (5, 300), (10, 80))
    for line in lines:
        line["tenant"] = f"t{int(rng.integers(3))}"
    for _ in range(40):  # each is on in a part of the worlds, guided decoding in a tenth
        before = str((tables, lines))
        feature.draw(int(rng.integers(1 << 30)), rng, tables, lines)
        if str((tables, lines)) != before:
            break
    feature.draw_narrow(rng, tables)
    return lines


def crowd(rng: Rng, tables: Tables) -> list[Tables]:
    """Clients that are refused and ask again, have deadlines and patience, and talk in turns."""
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": 2000,
        "max_num_seqs": 4,
        "order": pick(rng, ("arrival", "deadline")),
    }
    tables["router"] |= {
        "max_outstanding": int(pick(rng, (4, 8))),
        "signal_delay_ms": float(pick(rng, (0.0, 15.0))),
    }
    tables["recovery"] = {"client_retries": 3, "client_backoff_ms": 40.0}
    lines: list[Tables] = burst(rng, int(rng.integers(20, 40)), (5, 200), (5, 40))
    for index, line in enumerate(lines):
        if chance(rng, 0.4):
            line["deadline_ns"] = int(pick(rng, (5_000_000, 500_000_000)))
        if chance(rng, 0.3):
            line["cancel_after_ns"] = int(pick(rng, (30_000_000, 200_000_000)))
        elif chance(rng, 0.3):
            _branches(rng, index, line)
    return lines


def _branches(rng: Rng, index: int, line: Tables) -> None:
    """The request becomes a session: two turns at once, and one that waits for both."""
    prompt, output = line.pop("input_toks"), line.pop("output_toks")
    line.pop("deadline_ns", None)
    turns: list[Tables] = [
        {
            "input_toks": prompt,
            "output_toks": 1 + at * output // 2,
            "tool_duration_ns": int(pick(rng, (0, 30_000_000, 300_000_000))),
        }
        for at in range(4)
    ]
    turns[1]["after"] = turns[2]["after"] = [0]
    turns[3] |= {"after": [1, 2], "tool_duration_ns": 0}
    line |= {"session_id": f"branches{index}", "sub_requests": turns}


def leaving(rng: Rng, tables: Tables) -> list[Tables]:
    """KV that leaves slowly, and may not arrive."""
    tables["replicas"] = [
        {"role": "prefill", "count": int(rng.integers(1, 3))},
        {"role": "decode", "count": int(rng.integers(2, 4))},
    ]
    tables["nodes"][0] |= {"count": 3, "nic_gbps": float(pick(rng, (1.0, 10.0)))}
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": 16,
        "num_blocks": int(pick(rng, (60, 400))),
        "max_num_batched_tokens": 256,
    }
    tables["network"] = {
        "kv_transfer": pick(rng, ("blocking", "layerwise")),
        "connector_us": float(pick(rng, (0.0, 500.0))),
        "connector_block_us": float(pick(rng, (0.0, 100.0))),
        "first_token": pick(rng, ("prefill", "decode")),
    }
    tables["recovery"] = {"lease_ms": float(pick(rng, (0.0, 30.0, 100.0))), "client_retries": 0}
    if chance(rng, 0.5):
        tables["faults"] = [
            {
                "kind": "transfer_broken",
                "at_s": 0.02,
                "part": 0.5,
                "probability": 0.4,
                "duration_s": 0.3,
            }
        ]
    return burst(rng, int(rng.integers(15, 30)), (20, 300), (2, 40))
