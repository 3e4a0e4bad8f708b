"""LoRA adapters: slots, loads, admission, prefixes, routing, memory, cost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.config.schema import VllmTable
from emu.features.lora.slots import Adapters
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler
from tests.cluster.helpers import rows_of, run_config, summary_of, workload


def request(number, adapter="", prompt=20, output=5, ids=None):
    made = Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
        prefix=None if ids is None else Prefix(np.array(ids, dtype=np.int64)),
    )
    made.adapter = adapter
    return made


def scheduler(slots=2, host=4, blocks=1000, caching=False, **keys):
    limits = ReplicaLimits(
        num_blocks=blocks, block_size=16, max_model_tokens=10_000, prefix_caching=caching
    )
    return VllmScheduler(VllmTable(**keys), limits, parts=[Adapters(slots, host)])


def drive(engine, requests):
    for one in requests:
        engine.enqueue(one, 0)
    now_ns, batches = 0, []
    while (batch := engine.schedule(now_ns)) is not None:
        batches.append(batch)
        now_ns += 1
        assert engine.recount() == []
        engine.complete(batch, 1, now_ns, 1)
        assert engine.recount() == []
    return batches


def test_a_request_whose_adapter_has_no_slot_is_passed_by():
    engine = scheduler(slots=1)
    first, other, same, plain = (
        request(1, "a"),
        request(2, "b"),
        request(3, "a"),
        request(4),
    )
    batches = drive(engine, [first, other, same, plain])
    opening = [chunk.request.request_id for chunk in batches[0].chunks]
    assert opening == [1, 3, 4]
    assert other.generated_tokens == other.output_tokens
    assert engine.parts[0].cold_loads == 2


def test_the_adapter_that_was_used_longest_ago_leaves_its_slot():
    book = Adapters(2, 4)
    assert [book.take([name]) for name in "aba"] == [(1, 0), (1, 0), (0, 0)]
    assert book.take(["c"]) == (1, 0)  # in the slot of b
    assert book.take(["a"]) == (0, 0)
    assert book.take(["b"]) == (0, 1)  # in the slot of c
    assert book.take(["a", "c"]) == (0, 1)  # b leaves: the step needs a


def test_the_copy_that_was_used_longest_ago_leaves_the_host_and_its_slot():
    book = Adapters(2, 2)
    for name in "aba":
        book.take([name])
    assert book.take(["c"]) == (1, 0)
    assert book.take(["a"]) == (0, 0)
    assert book.take(["b"]) == (1, 0)


def test_the_host_keeps_what_has_left_the_gpu():
    book = Adapters(1, 2)
    assert book.take(["a"]) == (1, 0)
    assert book.take(["a"]) == (0, 0)
    assert book.take(["b"]) == (1, 0)
    assert book.take(["a"]) == (0, 1)  # its slot was taken, its copy was not
    assert book.take(["c"]) == (1, 0)  # "b" leaves the host: used longest ago
    assert book.take(["b"]) == (1, 0)
    assert (book.cold_loads, book.host_loads, book.hits) == (4, 1, 1)


def test_the_batch_says_what_its_adapters_cost():
    engine = scheduler()
    batches = drive(engine, [request(1, "a", 30), request(2, "b", 10), request(3, prompt=50)])
    (lora,) = batches[0].shape.works
    assert (lora.adapters, lora.tokens, lora.cold_loads, lora.host_loads) == (2, 40, 2, 0)
    lora = batches[1].shape.works[0]
    assert (lora.adapters, lora.tokens, lora.cold_loads) == (2, 2, 0)


def test_prefixes_are_not_shared_between_adapters():
    engine = scheduler(caching=True, max_num_seqs=1)
    ids = list(range(1, 70))
    requests = [request(n, name, 64, 5, ids) for n, name in enumerate(("a", "b", "a", ""))]
    drive(engine, requests)
    assert [one.prefix_hit_tokens for one in requests] == [0, 0, 48, 0]


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_kept_in_crowded_random_worlds(seed):
    rng = random.Random(seed)
    engine = scheduler(
        slots=rng.choice((1, 2, 3)),
        host=4,
        blocks=rng.choice((16, 40)),
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice((24, 64)),
    )
    requests = [
        request(
            n, rng.choice(("", "a", "b", "c", "d", "e")), rng.randint(1, 100), rng.randint(1, 40)
        )
        for n in range(30)
    ]
    drive(engine, requests)
    assert all(one.generated_tokens == one.output_tokens for one in requests)
    assert engine.blocks_used == 0


def world(folder, slots=2, replicas=1, policy="load", **scheduler_keys):
    rng = random.Random(3)
    rows = [
        {
            "arrival_time_ns": n * 60_000_000,
            "input_toks": 100,
            "output_toks": 20,
            "adapter": rng.choice(("a", "b", "c", "d")),
        }
        for n in range(80)
    ]
    return {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": replicas}],
        "replicas": [{"count": replicas}],
        "router": {"policy": policy},
        "scheduler": {
            "enable_lora": True,
            "max_loras": slots,
            "max_cpu_loras": 8,
            **scheduler_keys,
        },
        "workload": {"path": workload(folder / "w.jsonl", rows)},
    }


def test_loads_make_the_batch_wait_and_affinity_saves_them(tmp_path):
    seen = {}
    for policy in ("load", "lora_affinity"):
        run_config(tmp_path / policy, **world(tmp_path, slots=1, replicas=4, policy=policy))
        summary = summary_of(tmp_path / policy)
        assert summary["completed"] == 80
        seen[policy] = summary["adapters"], summary["mean_ttft_ms"]
    load, affinity = seen["load"][0], seen["lora_affinity"][0]
    assert affinity["cold_loads"] + affinity["host_loads"] < load["cold_loads"] + load["host_loads"]
    assert seen["lora_affinity"][1] < seen["load"][1]


def test_leaps_make_no_difference_to_the_bytes(tmp_path):
    for leap in (True, False):
        run_config(tmp_path / str(leap), **world(tmp_path, leap=leap))
    first, second = ((tmp_path / name / "requests.csv").read_bytes() for name in ("True", "False"))
    assert first == second
    assert len(rows_of(tmp_path / "True")) == 80


def test_slots_take_memory_whatever_is_loaded(tmp_path):
    """Llama-3.1-8B, rank 16, all seven matrices: 83.9 MB a slot."""
    plain = world(tmp_path, slots=4)
    config = config_from_dict(plain)
    with_slots = make_plan(config).replicas[0]
    plain["scheduler"] = {}
    without = make_plan(config_from_dict(plain)).replicas[0]
    lost = (without.num_blocks - with_slots.num_blocks) * without.memory.kv_bytes_block_rank
    assert lost == pytest.approx(4 * 83.886e6, rel=0.01)
