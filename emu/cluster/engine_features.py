"""Speculative decoding of a replica, resolved from its configuration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.catalogue.sizes import Draft, eagle_draft, model_draft, mtp_draft
from emu.config.schema import (
    LatencyTable,
    ReplicaTable,
    SchedulerTable,
    SpeculativeTable,
    VllmTable,
)
from emu.errors import InputError

Wrong: TypeAlias = "Callable[[str, str], NoReturn]"
"""(key, problem): refuses the configuration."""


def _refusing(source: str) -> Wrong:
    def wrong(key: str, problem: str) -> NoReturn:
        raise InputError(source, None, key, problem)

    return wrong


# --------------------------------------------------------------------------------------------------
# Speculative decoding of a replica, resolved from its configuration: checks, drafter, memory.
#
# Pure: reads the catalogue. What a scheduler or a backend cannot do is refused here, in one line.

BACKENDS = ("roofline", "linear")
"""Backends that know verification."""


def speculative_table(scheduler: SchedulerTable) -> SpeculativeTable | None:
    """The table of a scheduler that speculates."""
    return scheduler.speculative_config if isinstance(scheduler, VllmTable) else None


def check_speculation(
    drafts: SpeculativeTable,
    scheduler: SchedulerTable,
    latency: LatencyTable,
    replica: ReplicaTable,
    source: str,
) -> None:
    """Refuse what does not go together. InputError names the key."""
    here = "scheduler.speculative_config"
    wrong = _refusing(source)
    if scheduler.policy != "vllm":
        wrong(here, f"policy {scheduler.policy!r} has no speculative decoding; vllm has")
    if replica.pipeline_parallel > 1:
        wrong("replicas.pipeline_parallel", "speculative decoding runs on one pipeline stage")
    if latency.backend not in BACKENDS:
        known = " and ".join(BACKENDS)
        wrong("latency.backend", f"{latency.backend!r} cannot cost drafts; {known} can")
    if replica.placement is not None or latency.attention_offload:
        wrong(here, "weights or attention outside the GPU cannot be combined with drafts")
    _check_acceptance(drafts, here, wrong)
    method, count = drafts.method, drafts.num_speculative_tokens
    if drafts.model and method in ("ngram", "mtp"):
        wrong(f"{here}.model", f"method {method!r} has no model of its own")
    if not drafts.model and method == "draft_model":
        wrong(f"{here}.model", "missing; method 'draft_model' drafts with it")
    if drafts.draft_tensor_parallel_size not in (0, 1, replica.tensor_parallel):
        wrong(
            f"{here}.draft_tensor_parallel_size",
            f"expected 1 or the target's {replica.tensor_parallel}, "
            f"got {drafts.draft_tensor_parallel_size}",
        )
    if drafts.draft_tensor_parallel_size and method != "draft_model":
        wrong(f"{here}.draft_tensor_parallel_size", "only method 'draft_model' has it")
    if drafts.proposal_rate < 1 and method != "ngram":
        wrong(f"{here}.proposal_rate", "only method 'ngram' may find no drafts")
    if drafts.draft_step_us < 0 and drafts.draft_step_us != -1:
        wrong(f"{here}.draft_step_us", f"expected a number >= 0, or -1, got {drafts.draft_step_us}")
    if latency.backend == "linear" and method != "ngram" and drafts.draft_step_us < 0:
        wrong(f"{here}.draft_step_us", "missing; the linear backend knows no drafter's layers")
    if scheduler.tokens_max < 1 + count:
        wrong(
            f"{here}.num_speculative_tokens",
            "a step of one sequence exceeds max_num_batched_tokens",
        )


def _check_acceptance(drafts: SpeculativeTable, here: str, wrong: Wrong) -> None:
    count = drafts.num_speculative_tokens
    rates, length = drafts.synthetic_acceptance_rates, drafts.synthetic_acceptance_length
    if 0 > drafts.acceptance_rate != -1:
        wrong(f"{here}.acceptance_rate", f"expected 0 to 1, or -1, got {drafts.acceptance_rate}")
    given = [drafts.acceptance_rate >= 0, bool(rates), length > 0]
    if sum(given) != 1:
        wrong(
            here,
            "expected one of acceptance_rate, synthetic_acceptance_rates and "
            f"synthetic_acceptance_length, got {sum(given)} of them",
        )
    if rates and len(rates) != count:
        wrong(f"{here}.synthetic_acceptance_rates", f"expected {count} rates, got {len(rates)}")
    if any(later > rate for rate, later in itertools.pairwise(rates)):
        wrong(f"{here}.synthetic_acceptance_rates", "expected rates that do not rise")
    if length and not 1 <= length <= count + 1:
        wrong(f"{here}.synthetic_acceptance_length", f"expected 1 to {count + 1}, got {length:g}")
    if drafts.acceptance_spread and drafts.acceptance_rate < 0:
        wrong(f"{here}.acceptance_spread", "needs acceptance_rate")
    names = [entry.tenant for entry in drafts.tenants]
    for index, name in enumerate(names):
        if name in names[:index]:
            wrong(f"{here}.tenants.{index}.tenant", f"{name!r} is listed twice")


def draft_of(drafts: SpeculativeTable, target: ModelSpec, tp: int, source: str) -> Draft | None:
    """The drafter's layers; None for n-grams, which have none."""
    here = "scheduler.speculative_config"
    own = _own_model(drafts.model, source, f"{here}.model") if drafts.model else None
    if drafts.method == "mtp":
        if not target.mtp_layers:
            problem = f"{target.name} has no layers for multi-token prediction"
            raise InputError(source, None, f"{here}.method", problem)
        return mtp_draft(target, tp)
    if drafts.method == "draft_model":
        assert own is not None
        if own.is_hybrid or own.special_layers:
            problem = f"{own.name} has unlike layers, which emu does not draft with"
            raise InputError(source, None, f"{here}.model", problem)
        if own.vocab != target.vocab:
            problem = f"{own.name} has {own.vocab} tokens, {target.name} has {target.vocab}"
            raise InputError(source, None, f"{here}.model", problem)
        return model_draft(own, drafts.draft_tensor_parallel_size or tp)
    if drafts.method in ("eagle", "eagle3"):
        return eagle_draft(target, own, 3 if drafts.method == "eagle3" else 2, tp)
    return None


def _own_model(name: str, source: str, field: str) -> ModelSpec:
    if name.endswith(".json") or ("/" in name and Path(name).exists()):
        return model_from_file(Path(name))
    return lookup_model(name, source, field)


def with_draft_layers(target: ModelSpec, draft: Draft) -> ModelSpec:
    """The target with the drafter's layers behind its own, as far as KV is concerned."""
    layers = [target.layer(index) for index in range(target.layers)]
    layers += [draft.spec.layer(index) for index in range(draft.spec.layers)]
    return msgspec.structs.replace(target, layers=len(layers), special_layers=tuple(layers))
