"""The keys of speculative decoding in a file, and what is wrong with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Final, Literal, NoReturn

from msgspec import Meta, field

from emu.config.kinds import engine_with
from emu.config.schema import SchedulerTable, SglangTable, TensorrtLlmTable
from emu.config.tables import Count0, Fraction, NonNegative, Table, doc
from emu.features.modes import (
    Seat,
)

KEY: Final = "scheduler.speculative_config"
_WITHOUT_STAGES: Final = ("0.11", "0.15")
"""Of vLLM; the newest that is known stands for those that came after it."""


class TenantAcceptance(Table, kw_only=True, frozen=True):
    """How many drafts of one tenant's requests are accepted."""

    tenant: Annotated[str, doc("Tenant of the workload.")]
    acceptance_rate: Annotated[Fraction, doc("As speculative_config.acceptance_rate.")]


class SpeculativeTable(Table, kw_only=True, frozen=True):
    """Speculative decoding, with vLLM's keys. What share of drafts is accepted is given."""

    method: Annotated[
        Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"], doc("Where drafts come from.")
    ]
    num_speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=64)], doc("Drafts of a sequence for each step.")
    ]
    eagle_topk: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        doc(
            "sglang: candidates of each draft; above 1 they form a tree of num_speculative_tokens "
            "levels."
        ),
    ] = 1
    num_draft_tokens: Annotated[
        Count0,
        doc("sglang with a tree: tokens of a sequence that a step verifies, its last one too."),
    ] = 0
    model: Annotated[
        str,
        doc(
            "draft_model: its name or config.json. eagle: a head with layers of its own; empty = "
            "one layer like the target's."
        ),
    ] = ""
    draft_tensor_parallel_size: Annotated[
        Count0, doc("draft_model: 1, or that of the target (0).")
    ] = 0
    acceptance_rate: Annotated[
        float,
        Meta(ge=-1, le=1),
        doc("Chance that a draft is accepted if those before it were; -1 = not given."),
    ] = -1.0
    text: Annotated[
        Literal["mixed", "math", "code", "story"],
        doc("mtp without a rate: what is written; rates are those published for it."),
    ] = "mixed"
    acceptance_spread: Annotated[
        Fraction,
        doc("acceptance_rate of a request lies within this of the mean, evenly distributed."),
    ] = 0.0
    synthetic_acceptance_rates: Annotated[
        list[Fraction],
        doc("By position: chance that this draft and all before it are accepted (as in vLLM)."),
    ] = field(default_factory=list)
    synthetic_acceptance_length: Annotated[
        NonNegative,
        doc("Mean tokens of a step, 1 to num_speculative_tokens + 1 (as in vLLM); 0 = not given."),
    ] = 0.0
    tenants: Annotated[
        list[TenantAcceptance], doc("acceptance_rate by tenant; a workload may give it by request.")
    ] = field(default_factory=list)
    proposal_rate: Annotated[
        Fraction, doc("ngram: chance that a step finds drafts for a sequence.")
    ] = 1.0
    draft_step_us: Annotated[
        float,
        doc(
            "Cost of drafting, for each step in us; -1 = from the draft's layers (roofline; "
            "ngram: none)."
        ),
    ] = -1.0


class Keys(Table, kw_only=True, frozen=True):
    """What [scheduler] says."""

    speculative_config: Annotated[
        SpeculativeTable | None,
        doc("Speculative decoding (docs/lab/speculation.md); absent: none."),
    ] = None


def verified_drafts(drafts: SpeculativeTable) -> int:
    """Drafts of a sequence that a step verifies: those of a tree, or as many as it has levels."""
    if drafts.eagle_topk > 1:
        return drafts.num_draft_tokens - 1
    return drafts.num_speculative_tokens


Wrong = Callable[[str, str], NoReturn]
"""(key, problem): refuses the configuration."""


def check_keys(drafts: SpeculativeTable, seat: Seat) -> None:
    """Refuse keys that contradict each other. InputError names the key."""
    here, wrong = KEY, seat.wrong
    scheduler, latency, replica = seat.scheduler, seat.latency, seat.table
    _check_acceptance(drafts, here, wrong)
    _check_tree(drafts, scheduler, here, wrong)
    method = drafts.method
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
    if replica.pipeline_parallel > 1:
        _check_stages(drafts, seat)
    _check_step(drafts, scheduler, here, wrong)


def _check_stages(drafts: SpeculativeTable, seat: Seat) -> None:
    """vLLM drafts in pipelines with EAGLE-3 alone (pull request 50514, August 2026; multi-token
    prediction fails there: issue 49355)."""
    if drafts.method != "eagle3":
        problem = f"in vLLM eagle3 alone drafts in a pipeline, not {drafts.method}"
        seat.wrong("replicas.pipeline_parallel", problem)
    version = engine_with(seat.config.engine, seat.table.engine).version
    if version in _WITHOUT_STAGES:
        problem = f"vLLM {version} has no drafts in pipelines; later ones have, with eagle3"
        seat.wrong("engine.version", problem)


def _check_step(
    drafts: SpeculativeTable, scheduler: SchedulerTable, here: str, wrong: Wrong
) -> None:
    """A step has room for the drafts of its sequences."""
    count = drafts.num_speculative_tokens
    if isinstance(scheduler, TensorrtLlmTable):
        tokens = scheduler.requests_max * (1 + count)
        if tokens > scheduler.tokens_max:
            problem = f"{scheduler.requests_max} requests verify {tokens} tokens in a step"
            wrong("scheduler.max_num_tokens", f"{problem}, more than {scheduler.tokens_max}")
    elif not isinstance(scheduler, SglangTable) and scheduler.tokens_max < 1 + count:
        wrong(
            f"{here}.num_speculative_tokens",
            "a step of one sequence exceeds max_num_batched_tokens",
        )


def _check_tree(
    drafts: SpeculativeTable, scheduler: SchedulerTable, here: str, wrong: Wrong
) -> None:
    """Only SGLang verifies trees, and mixes no prompts with drafts."""
    is_sglang = isinstance(scheduler, SglangTable)
    if isinstance(scheduler, SglangTable) and scheduler.enable_mixed_chunk:
        wrong("scheduler.enable_mixed_chunk", "SGLang turns it off beside drafts; set it to false")
    if drafts.eagle_topk == 1:
        if drafts.num_draft_tokens:
            wrong(f"{here}.num_draft_tokens", "needs a tree: eagle_topk above 1")
        return
    if not is_sglang or drafts.method not in ("eagle", "eagle3", "mtp"):
        wrong(f"{here}.eagle_topk", "trees need policy sglang and method eagle, eagle3 or mtp")
    levels, topk = drafts.num_speculative_tokens, drafts.eagle_topk
    most = 1 + topk + (levels - 1) * topk * topk
    if not levels + 1 <= drafts.num_draft_tokens <= most:
        problem = f"expected {levels + 1} to {most}, got {drafts.num_draft_tokens}"
        wrong(f"{here}.num_draft_tokens", problem)


def _check_acceptance(drafts: SpeculativeTable, here: str, wrong: Wrong) -> None:
    count = drafts.num_speculative_tokens
    rates, length = drafts.synthetic_acceptance_rates, drafts.synthetic_acceptance_length
    if 0 > drafts.acceptance_rate != -1:
        wrong(f"{here}.acceptance_rate", f"expected 0 to 1, or -1, got {drafts.acceptance_rate}")
    given = [drafts.acceptance_rate >= 0, bool(rates), length > 0]
    is_published = drafts.method == "mtp" and not sum(given)
    if drafts.text != "mixed" and not is_published:
        wrong(f"{here}.text", "only method 'mtp' without rates of its own reads it")
    if sum(given) != 1 and not is_published:
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
    _check_tenants(drafts, here, wrong)


def _check_tenants(drafts: SpeculativeTable, here: str, wrong: Wrong) -> None:
    names = [entry.tenant for entry in drafts.tenants]
    for index, name in enumerate(names):
        if name in names[:index]:
            wrong(f"{here}.tenants.{index}.tenant", f"{name!r} is listed twice")
