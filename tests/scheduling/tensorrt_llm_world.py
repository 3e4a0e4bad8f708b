"""Random programs for TensorRT-LLM's scheduler; `tests/scheduling/sglang_world.py` runs them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from msgspec.structs import replace

from emu.config.schema import TensorrtLlmTable
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.tensorrt_llm.scheduler import TensorrtLlmScheduler
from tests.scheduling.sglang_world import Program, Spec


@dataclass
class TensorrtLlmProgram(Program):
    def scheduler(self, *, leap: bool) -> TensorrtLlmScheduler:
        limits = ReplicaLimits(
            num_blocks=self.num_blocks,
            block_size=self.page,
            max_model_tokens=10**6,
            prefix_caching=self.has_tokens,
            leap=leap,
        )
        limits.forms_ahead = self.ahead
        return TensorrtLlmScheduler(self.table, limits)


def random_program(seed: int) -> TensorrtLlmProgram:
    rng = random.Random(seed)
    block = rng.choice((4, 16, 32))
    tokens = rng.choice((256, 600, 1024, 4096))
    budget = rng.choice((128, 256, 8192))
    table = TensorrtLlmTable(
        capacity_scheduler_policy=rng.choice(
            ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION", "STATIC_BATCH")
        ),
        max_batch_size=rng.choice((2, 4, 8, 64)),
        max_num_tokens=budget,
        enable_chunked_prefill=rng.random() < 0.6,
        context_chunking_policy=rng.choice(("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")),
        tokens_per_block=block,
        block_size=block,
        enable_block_reuse=rng.random() < 0.8,
        enable_partial_reuse=rng.random() < 0.8,
        copy_on_partial_reuse=rng.random() < 0.8,
        length_ends_known=rng.choice(("on", "off")),
    )
    waits = random.Random(f"waits {seed}")  # of its own, so that other programs stay
    if waits.random() < 0.3:
        table = replace(
            table,
            batch_wait_timeout_iters=waits.choice((1, 3, 10)),
            batch_wait_max_tokens_ratio=waits.choice((0.1, 0.5, 1.0)),
        )
    span = rng.choice((1, 20_000, 200_000))
    is_tight = rng.random() < 0.4
    """Short prompts and long outputs: with MAX_UTILIZATION, requests are paused."""
    specs = []
    for _ in range(rng.randint(1, 24)):
        prompt = rng.randint(1, rng.choice((8, 60, tokens // 3)))
        most = rng.randint(1, rng.choice((4, 40, tokens // 2)))
        if is_tight:
            prompt, most = rng.randint(1, 40), rng.randint(tokens // 8, tokens // 3)
        specs.append(
            Spec(
                arrival=rng.randrange(1 if is_tight else span),
                prompt=prompt,
                output=rng.choice((most, rng.randint(1, most))),
                output_max=most,
                family=rng.randrange(3),
                shared=rng.choice((0, 40, 1000)),
                cancel_at=rng.randrange(2 * span) if rng.random() < 0.1 else -1,
            )
        )
    return TensorrtLlmProgram(
        table,
        max(1, tokens // block),
        block,
        ahead=rng.random() < 0.6,
        has_tokens=rng.random() < 0.7,
        specs=sorted(specs, key=lambda one: one.arrival),
        cuts=[rng.randrange(4 * span + 1) for _ in range(rng.randrange(4))],
    )
