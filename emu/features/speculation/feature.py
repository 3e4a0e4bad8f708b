"""Speculative decoding: drafts of several tokens, verified together in one step.

Acceptance is given by the configuration, by a tenant or by a request, never derived. Each output
position of a request has one number of its own, a hash of (seed, request, position): its draft is
accepted if the number is below the rate of the draft's position in its step, and all drafts
before it were accepted. The position of a rejected draft is filled by the recovered token of the
same step, so that no number is used twice; nor does it depend on batches, preemptions or the
order of requests. Expected tokens of a step with conditional rates a_1..a_k: 1 + a_1 + a_1 a_2 +
...

The target's backend costs the verification itself (`BatchShape.verify`). A drafter of layers
passes first over all tokens of the step, because it keeps KV of its own for every token, and then
k - 1 times over one token of each sequence that gets drafts, each pass with its rows of logits.
N-grams are looked up on the host and cost what the configuration says. Launch gaps between passes
are not modeled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from emu.catalogue.drafts import Draft
from emu.catalogue.model import ModelSpec
from emu.config.features import keys_of
from emu.config.schema import Config, SchedulerTable, SglangTable, TensorrtLlmTable, VllmTable
from emu.errors import InputError
from emu.features.base import Door, Feature, Figures, OwnPolicy, Place, Served, Tables, parts_of
from emu.features.modes import (
    CACHED_STATES,
    MOVED_STATES,
    NO_DRAFTS,
    OTHER_BACKEND,
    OUTSIDE,
    Conflict,
    Seat,
)
from emu.features.speculation.acceptance import (
    Speculation,
    SpeculationCounts,
    conditional_rates,
    expected_tokens,
    lookahead_of,
)
from emu.features.speculation.drafters import DraftPart, draft_of, stops_paying_at
from emu.features.speculation.keys import (
    KEY,
    Keys,
    SpeculativeTable,
    check_keys,
    verified_drafts,
)
from emu.features.speculation.passes import DraftPricer
from emu.latency.added import AddedBackend
from emu.latency.base import LatencyBackend
from emu.latency.context import PassPart
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part

if TYPE_CHECKING:
    import numpy as np


_STATES: Final = "LiquidAI/LFM2-2.6B"
"""A drawn model with states."""


class Speculative(Feature):
    """See the module's head."""

    name = "speculative decoding"
    key = KEY
    summary = "Steps verify drafts of several tokens; how many are accepted is given."
    guide = "lab/speculation.md"
    keys = ((VllmTable, Keys), (SglangTable, Keys), (TensorrtLlmTable, Keys))
    section = "speculation"
    files = (
        "configs/speculation.toml",
        "tests/corpus/seed-2770.toml",
        "tests/corpus/seed-3034.toml",
        "tests/cluster/test_state_slots.py",
        "benchmarks/mtp.py",
        "benchmarks/vllm_blocks.py",
    )
    forbids = ((STEPS_BY_THE_RULE, Speculation.forbids_cohort),)
    conflicts = (
        Conflict(
            NO_DRAFTS,
            KEY,
            "policy {policy} has no speculative decoding; vllm, sglang and tensorrt-llm have",
        ),
        Conflict(
            OTHER_BACKEND,
            "latency.backend",
            "{backend} cannot cost drafts; roofline and linear can",
        ),
        Conflict(
            OUTSIDE, KEY, "weights or attention outside the GPU cannot be combined with drafts"
        ),
        Conflict(
            MOVED_STATES,
            KEY,
            "the states of {model} are handed over between replicas, which no engine does beside"
            " drafts",
        ),
        Conflict(
            CACHED_STATES,
            "scheduler.prefix_caching",
            "the states of {model} cannot be cached beside drafts; set it to false",
        ),
    )
    example: ClassVar[Mapping[str, object]] = {
        "scheduler": {
            "speculative_config": {
                "method": "eagle3",
                "num_speculative_tokens": 2,
                "acceptance_rate": 0.7,
            }
        }
    }

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether steps verify drafts."""
        return keys_of(scheduler, Keys).speculative_config is not None

    def check(self, seat: Seat, others: Sequence[str]) -> None:
        """Keys do not contradict each other, and the drafter goes with its target."""
        super().check(seat, others)
        table = _table(seat.scheduler)
        check_keys(table, seat)

    def check_fleet(self, config: Config, places: Sequence[Place], source: str) -> None:
        """KV that moves between replicas has the same layers on both sides, the drafter's too."""
        first = places[0]
        for place in places:
            moves = any(one.role != "colocated" for one in (first, place))
            alike = place.model == first.model and place.kv_dtype == first.kv_dtype
            if moves and alike and place.kv_bytes_per_token != first.kv_bytes_per_token:
                problem = "replicas that exchange KV need the same drafter (its layers have KV too)"
                raise InputError(source, None, f"replicas.{place.group}.{KEY}", problem)

    def layers(
        self, scheduler: SchedulerTable, model: ModelSpec, tp: int, source: str
    ) -> Draft | None:
        """The drafter's, which has weights and KV beside the target's; n-grams have none."""
        return draft_of(_table(scheduler), model, tp, source)

    def more_tokens(self, scheduler: SchedulerTable) -> int:
        """Drafts."""
        return verified_drafts(_table(scheduler))

    def draft_method(self, scheduler: SchedulerTable) -> str:
        """Where drafts come from."""
        return _table(scheduler).method

    def slots_ahead(self, scheduler: SchedulerTable, *, is_ahead: bool) -> int:
        """Drafts, of two steps where batches are formed ahead, and what the drafter holds."""
        table = _table(scheduler)
        if isinstance(scheduler, SglangTable):
            made = table.num_speculative_tokens * table.eagle_topk
            tokens = max(made, 1 + verified_drafts(table)) * (2 if is_ahead else 1)
            # A tree is made behind the last page that is begun, and in whole pages.
            return tokens + (2 * scheduler.block_size if table.eagle_topk > 1 else 0)
        return lookahead_of(table) + table.num_speculative_tokens * (2 if is_ahead else 1)

    def pass_part(self, place: Place, config: Config) -> PassPart:
        """The drafter's passes."""
        return DraftPart(_table(place.scheduler), place.draft)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """Which drafts are accepted; the seed of the run decides."""
        return Speculation(_table(place.scheduler), config.seed, place.model.model_type)

    def facts(self, place: Place, config: Config) -> dict[str, str]:
        """Drafts, what they add, and what they bring."""
        table, draft = _table(place.scheduler), place.draft
        drafts = table.num_speculative_tokens
        tokens = expected_tokens(conditional_rates(table, place.model.model_type))
        facts = {"drafts": f"{table.method}, {drafts} a step; {tokens:.2f} tokens a step expected"}
        if draft is not None:
            weights = draft.weight_bytes(place.dtype) / 1e9
            token = draft.kv_bytes_token(place.kv_dtype) / 1024
            facts["drafter per GPU"] = f"{weights:.2f} GB, KV {token:g} KiB a token (counted above)"
        return facts

    def figures(self, replicas: Sequence[Served], doors: Sequence[Door]) -> Tables:
        """What became of drafts on all replicas.

        The batch from which it stops paying is that of the first replica that speculates, at the
        mean context and acceptance of the run.
        """
        counts = SpeculationCounts(0)
        for part in parts_of(replicas, Speculation):
            counts.add(part.counts)
        drafts = max(1, counts.drafts)
        first = next(r for r in replicas if any(True for _ in parts_of([r], Speculation)))
        scheduler = first.scheduler.table
        table = _table(scheduler)
        limit = 0
        if counts.drafts:
            limit = stops_paying_at(
                _without_drafts(first.latency),
                first.latency,
                verified_drafts(table),
                1 + counts.accepted_tokens / drafts,
                counts.context_tokens // drafts,
                scheduler.requests_max,
            )
        return {
            "method": table.method,
            "num_drafts": counts.drafts,
            "num_draft_tokens": counts.draft_tokens,
            "num_accepted_tokens": counts.accepted_tokens,
            "acceptance_rate": round(counts.accepted_tokens / max(1, counts.draft_tokens), 6),
            "mean_acceptance_length": round(1 + counts.accepted_tokens / drafts, 6),
            "acceptance_rate_per_position": [
                round(count / drafts, 6) for count in counts.accepted_per_position
            ],
            "mean_context_tokens": round(counts.context_tokens / drafts, 3),
            "stops_paying_at_batch": limit or None,
        }

    def line(self, figures: Figures, number: Callable[[float], str]) -> tuple[str, str]:
        """Acceptance, tokens of a step, and where speculation stops paying."""
        limit = figures["stops_paying_at_batch"]
        pays = "pays at any batch" if limit is None else f"stops paying at a batch of {limit}"
        accepted, length = figures["acceptance_rate"], figures["mean_acceptance_length"]
        return "Drafts", f"{accepted:.1%} accepted, {number(length)} tokens a step, {pays}"

    def draw_shared(self, rng: np.random.Generator, tables: Tables) -> None:
        """Drafts of the model's own layers, at published rates."""
        tables["scheduler"]["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": (1, 3)[int(rng.integers(2))],
            "text": ("mixed", "math", "code", "story")[int(rng.integers(4))],
        }

    def draw_narrow(self, rng: np.random.Generator, tables: Tables) -> None:
        """A pipeline, for the method that goes with one."""
        is_on = "speculative_config" in tables["scheduler"]
        if is_on and self.spans_stages(tables) and rng.random() < 0.5:
            tables["replicas"][0]["pipeline_parallel"] = 2
            tables["nodes"][0]["gpus"] = 4
            tables["scheduler"]["async_scheduling"] = "off"

    def spans_stages(self, tables: Tables) -> bool:
        """vLLM drafts so with EAGLE-3 alone."""
        return bool(tables["scheduler"]["speculative_config"]["method"] == "eagle3")

    def draw_engine(self, rng: np.random.Generator, tables: Tables) -> None:
        """Drafts; those of SGLang are a tree in a part of the worlds."""
        scheduler = tables["scheduler"]
        table: Tables = {
            "method": ("ngram", "eagle", "eagle3")[int(rng.integers(3))],
            "num_speculative_tokens": (1, 2, 5)[int(rng.integers(3))],
            "acceptance_rate": (0.0, 0.5, 0.9, 1.0)[int(rng.integers(4))],
            "draft_step_us": (0.0, 500.0)[int(rng.integers(2))],
        }
        is_tree = rng.random() < 0.4 and table["method"] != "ngram"
        if "enable_mixed_chunk" in scheduler:
            scheduler["enable_mixed_chunk"] = False
            if is_tree and table["num_speculative_tokens"] > 1:
                table |= {"eagle_topk": 4, "num_draft_tokens": 8}
        else:
            scheduler["max_batch_size"] = scheduler["max_batch_size"] or 64
        scheduler["speculative_config"] = table

    def draw(
        self, seed: int, rng: np.random.Generator, tables: Tables, lines: list[Tables]
    ) -> None:
        """One world in three of those that can."""
        if not rng.random() < 0.35:
            return
        if tables["model"].get("name") == _STATES:
            tables["scheduler"]["prefix_caching"] = False  # states of drafts cannot be cached
        table: Tables = {
            "method": ("ngram", "eagle", "eagle3")[int(rng.integers(3))],
            "num_speculative_tokens": (1, 2, 4)[int(rng.integers(3))],
            "draft_step_us": (0.0, 500.0)[int(rng.integers(2))],
        }
        rate = (0.0, 0.5, 0.9, 1.0)[int(rng.integers(4))]
        if rng.random() < 0.6:
            count = table["num_speculative_tokens"]
            table["synthetic_acceptance_rates"] = [rate ** (at + 1) for at in range(count)]
        else:
            table["acceptance_rate"] = rate
            table["tenants"] = [{"tenant": "t1", "acceptance_rate": 0.7}]
        if table["method"] == "ngram":
            table["proposal_rate"] = (1.0, 0.5)[int(rng.integers(2))]
        tables["scheduler"]["speculative_config"] = table
        for line in lines:
            if rng.random() < 0.1:
                line["acceptance_rate"] = (0.0, 0.3, 1.0)[int(rng.integers(3))]

    def draw_costs(self, rng: np.random.Generator, tables: Tables) -> None:
        """A drafter whose passes take what its layers do."""
        method = ("eagle", "eagle3", "draft_model")[int(rng.integers(3))]
        table: Tables = {
            "method": method,
            "num_speculative_tokens": (1, 2, 4)[int(rng.integers(3))],
            "acceptance_rate": (0.3, 0.8)[int(rng.integers(2))],
        }
        if method == "draft_model":
            table["model"] = "meta-llama/Llama-3.2-1B"
            table["draft_tensor_parallel_size"] = int(rng.integers(2))
        tables["scheduler"]["speculative_config"] = table

    def vary(self, rng: np.random.Generator, tables: Tables, lines: list[Tables]) -> None:
        """Other drafters, and other ways to say how many drafts are accepted."""
        drafts = tables["scheduler"].get("speculative_config")
        if drafts is None:
            return
        is_plain = tables["model"]["name"] == "meta-llama/Llama-3.1-8B"
        if drafts["method"] == "eagle" and is_plain and rng.random() < 0.8:
            drafts |= {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B"}
            drafts["draft_tensor_parallel_size"] = (0, 1, 1)[int(rng.integers(3))]
        if "acceptance_rate" in drafts:
            if rng.random() < 0.3:
                drafts["acceptance_spread"] = 0.3
            elif rng.random() < 0.2:
                for key in ("acceptance_rate", "tenants"):
                    drafts.pop(key, None)
                drafts["synthetic_acceptance_length"] = 1.0 + drafts["num_speculative_tokens"] * 0.6
                for line in lines:
                    line.pop("acceptance_rate", None)

    def keeps_model(self, tables: Tables, *, of_fleet: bool = False) -> bool:
        """A drafter goes with its target."""
        drafts = tables["scheduler"].get("speculative_config")
        return drafts is not None and (of_fleet or bool(drafts.get("model")))


def _table(scheduler: SchedulerTable) -> SpeculativeTable:
    table = keys_of(scheduler, Keys).speculative_config
    assert table is not None
    return table


def _without_drafts(backend: LatencyBackend) -> LatencyBackend:
    """A backend as it would be if it did not draft: what is added to that adds nothing here."""
    while isinstance(backend, AddedBackend):
        is_drafting, backend = backend.pricer.component == DraftPricer.component, backend.inner
        if is_drafting:
            break
    return backend


FEATURE: Final = Speculative()
