"""Requests with images: cost of the tower, memory, encoders of their own, what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from emu.catalogue.hf_config import from_hf_config
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.features.images.feature import FEATURE
from emu.features.images.fleet import EncoderFleet
from emu.features.images.towers import tower_costs
from emu.request import Request
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

VISION = "Qwen/Qwen3-VL-8B"


def world(folder, rows=None, replicas=1, **scheduler_keys):
    if rows is None:
        rows = [
            {
                "arrival_time_ns": n * 40_000_000,
                "input_toks": 1200,
                "output_toks": 10,
                "images": [[n % 5, 100, 1024]],
            }
            for n in range(30)
        ]
    return {
        "model": {"name": VISION},
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": replicas}],
        "replicas": [{"count": replicas}],
        "scheduler": {"limit_mm_per_prompt": {"image": 2}, **scheduler_keys},
        "latency": LINEAR,
        "workload": {"path": workload(folder / "w.jsonl", rows)},
    }


def costs(tp=1):
    tables = {
        "model": {"name": VISION},
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": tp}],
        "replicas": [{"tensor_parallel": tp}],
        "scheduler": {"limit_mm_per_prompt": {"image": 1}},
    }
    config = config_from_dict(tables)
    return tower_costs(make_plan(config).replicas[0].latency_context(config))


def test_a_large_image_takes_the_arithmetic_of_its_patches():
    """27 layers over 4,096 patches: products 3.34 TFLOP, attention 2.09 TFLOP."""
    gpu, tower = lookup_gpu("H100-SXM5-80GB"), lookup_model(VISION).tower
    assert tower.params == pytest.approx(0.411e9, rel=0.01)
    patches = 4 * 1024
    flops = 2 * tower.params * patches + 4 * patches**2 * tower.hidden * tower.layers
    ideal_ns = flops / gpu.peak_flops("bfloat16") * 1e9
    took_ns = costs().images_ns([1024])
    assert 1.2 * ideal_ns < took_ns < 3 * ideal_ns
    assert costs().images_ns([]) == 0
    assert costs().images_ns([1024, 1024]) == pytest.approx(2 * took_ns, rel=0.1)
    assert costs(tp=2).images_ns([1024]) < took_ns  # and two all-reduces a layer
    # A small image takes launches at least: 27 layers of ten kernels, 6 us each.
    assert 27 * 10 * 6_000 <= costs().images_ns([16]) < 3_000_000


def test_windows_make_most_layers_cheap():
    keys = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    config = {"model_type": "qwen2_5_vl", "vocab_size": 152064, "intermediate_size": 18944}
    config |= keys | {"num_key_value_heads": 4, "vision_config": vision}
    tower = from_hf_config(config, "qwen", "test").tower
    assert (tower.patches_per_token, tower.window_patches, tower.full_layers) == (4, 64, 4)


def test_the_step_that_reaches_an_image_is_longer_by_its_encoding(tmp_path):
    one = [{"arrival_time_ns": 0, "input_toks": 1200, "output_toks": 2}]
    plain = world(tmp_path, one)
    run_config(tmp_path / "plain", **plain)
    one[0]["images"] = [[1, 100, 1024]]
    run_config(tmp_path / "image", **world(tmp_path, one))
    without, with_image = (
        int(rows_of(tmp_path / name)[0]["ttft_ns"]) for name in ("plain", "image")
    )
    assert with_image - without == costs().images_ns([1024])
    summary = summary_of(tmp_path / "image")["images"]
    assert (summary["encoded"], summary["encoder_steps"]) == (1, 1)
    assert summary["encoder_s"] == pytest.approx((with_image - without) / 1e9)


def test_encoders_of_their_own_encode_each_image_once_for_all(tmp_path):
    tables = world(tmp_path, replicas=2, encoder_cache_size=4096)
    run_config(tmp_path / "own", **tables, encoders={"count": 2})
    run_config(tmp_path / "local", **tables)
    own, local = (summary_of(tmp_path / name) for name in ("own", "local"))
    assert own["completed"] == local["completed"] == 30
    assert own["images"]["encoded"] == 5
    assert own["images"]["cache_hits"] == 25
    assert local["images"]["encoded"] > 5


def asking(images):
    made = Request(
        request_id=1, arrival_ns=0, prompt_tokens=1, output_tokens=1, max_output_tokens=1
    )
    made.images = tuple(images)
    return made


def test_a_request_waits_for_its_image_and_for_the_link():
    took_ns = costs().images_ns([1024])
    fleet = EncoderFleet(
        costs(), 1, cache_tokens=2048, token_bytes=1000, bytes_per_s=1e9, latency_ns=7
    )
    sent_ns = 1_024_000 + 7
    assert fleet.ready_ns(50, asking([(1, 0, 1024)])) == 50 + took_ns + sent_ns
    assert fleet.ready_ns(60, asking([(1, 9, 1024)])) == 50 + took_ns + sent_ns  # under way
    assert fleet.ready_ns(60, asking([(2, 0, 1024)])) == 50 + 2 * took_ns + sent_ns
    later = 10**9
    assert fleet.ready_ns(later, asking([(2, 0, 1024)])) == later + sent_ns
    fleet.ready_ns(later, asking([(3, 0, 1024)]))  # the first one leaves
    assert fleet.ready_ns(2 * later, asking([(1, 0, 1024)])) == 2 * later + took_ns + sent_ns


def test_the_cache_takes_memory():
    def blocks(tokens):
        tables = {
            "model": {"name": VISION},
            "scheduler": {"limit_mm_per_prompt": {"image": 1}, "encoder_cache_size": tokens},
        }
        plan = make_plan(config_from_dict(tables)).replicas[0]
        return plan.num_blocks, plan.memory.kv_bytes_block_rank

    (few, size), (many, _) = blocks(10_000), blocks(110_000)
    assert (few - many) * size == pytest.approx(100_000 * 4096 * 2 * 4, rel=0.01)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"scheduler": {"encoder_cache_size": 9}}, "means nothing without limit_mm_per_prompt"),
        ({"model": {"name": "meta-llama/Llama-3.1-8B"}}, "has no vision tower"),
        ({"latency": {"backend": "astra-sim"}}, "has no cost of images"),
        ({"replicas": [{"pipeline_parallel": 2}]}, "on one pipeline stage"),
        ({"scheduler": {}, "encoders": {}}, "for every replica"),
        ({"encoders": {"gpu": "H1000"}}, "H1000"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(tables, problem):
    given = {
        "model": {"name": VISION},
        "nodes": [{"gpus": 2}],
        "scheduler": {"limit_mm_per_prompt": {"image": 1}},
    }
    with pytest.raises(InputError, match=problem) as caught:
        make_plan(config_from_dict(given | tables))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "keys", "problem"),
    [
        ([[1, 0, 10], [1, 10, 10], [1, 20, 10]], {}, "has 3 images, more than 2"),
        ([[1, 0, 600]], {"max_num_encoder_input_tokens": 500}, "has 600 tokens"),
        ([[1, 0, 10]], {"limit_mm_per_prompt": {}}, "the workload has images"),
        ([[1, 5, 10], [2, 14, 3]], {}, r"images\[1\]\[1\]: must be at least 15, not 14"),
        ([[1, 1195, 10]], {}, r"images\[0\]: ends after token 1205, but input_toks is 1200"),
        ([[1, 5]], {}, r"images\[0\]: must be \[identity, first token, tokens\]"),
        (7, {}, "images: must be a list of triples"),
    ],
)
def test_images_that_nobody_can_take_are_refused_in_one_line(tmp_path, row, keys, problem):
    rows = [{"arrival_time_ns": 0, "input_toks": 1200, "output_toks": 2, "images": row}]
    with pytest.raises(InputError, match=problem):
        run_config(tmp_path / "out", **world(tmp_path, rows, **keys))


def test_clipped_prompts_lose_images_that_do_not_fit(tmp_path):
    tables = world(tmp_path)
    tables["workload"]["max_prompt_tokens"] = 1000
    run_config(tmp_path / "out", **tables)
    assert summary_of(tmp_path / "out")["images"]["encoded"] == 0
    json.dumps(summary_of(tmp_path / "out"))


def test_drawn_worlds_have_room_for_one_image_or_for_several() -> None:
    seen: dict[str, set[Any]] = {}
    for seed in range(120):
        tables: dict[str, Any] = {
            "model": {"name": "meta-llama/Llama-3.1-8B"},
            "replicas": [{}],
            "scheduler": {},
        }
        FEATURE.draw(seed, np.random.default_rng(seed), tables, [])
        for name, keys in tables.items():
            if name in ("scheduler", "encoders"):
                for key, value in keys.items():
                    seen.setdefault(f"{name}.{key}", set()).add(str(value))
    assert seen == {
        "scheduler.limit_mm_per_prompt": {"{'image': 2}"},
        "scheduler.max_num_encoder_input_tokens": {"48", "200"},
        "scheduler.encoder_cache_size": {"48", "200"},
        "encoders.count": {"1", "3"},
        "encoders.gpu": {"", "L40S"},
        "encoders.nic_gbps": {"0.0", "1.0"},
        "encoders.cache_tokens": {"0", "100"},
    }
