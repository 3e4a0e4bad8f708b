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

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NoReturn, final

import msgspec
from msgspec import Meta, field

from emu.catalogue.drafts import Draft, eagle_draft, model_draft, mtp_draft
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.config.features import keys_of
from emu.config.schema import Config, RooflineTable, SchedulerTable, VllmTable
from emu.config.tables import Count0, Fraction, NonNegative, Table, doc
from emu.errors import InputError
from emu.features.base import Door, Feature, OwnPolicy, Place, Served, Tables, parts_of
from emu.features.modes import (
    CACHED_STATES,
    OTHER_BACKEND,
    OTHER_SCHEDULER,
    OUTSIDE,
    STAGES,
    Conflict,
    Seat,
)
from emu.latency.base import BatchShape, LatencyBackend, Verify
from emu.latency.context import LatencyContext, PassPart, make_roofline
from emu.latency.parts import AddedBackend, Pricer
from emu.latency.roofline import RooflineBackend
from emu.request import Request
from emu.scheduling.parts import STEPS_BY_THE_RULE, Drafting, Part
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    import numpy as np

_KEY: Final = "scheduler.speculative_config"
_STATES: Final = "LiquidAI/LFM2-2.6B"
"""A drawn model with states."""


# --- configuration --------------------------------------------------------------------------------
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
        SpeculativeTable | None, doc("Speculative decoding (docs/speculation.md); absent: none.")
    ] = None


Wrong = Callable[[str, str], NoReturn]
"""(key, problem): refuses the configuration."""


def _check_keys(drafts: SpeculativeTable, seat: Seat) -> None:
    """Refuse keys that contradict each other. InputError names the key."""
    here, wrong = _KEY, seat.wrong
    scheduler, latency, replica = seat.scheduler, seat.latency, seat.table
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


# --- which drafts are accepted --------------------------------------------------------------------
_MASK: Final = (1 << 64) - 1
_BITS: Final = 53
_ONE: Final = 1 << _BITS
_RATE_STREAM: Final = 1
_PROPOSAL_STREAM: Final = 2
_ACCEPT_STREAM: Final = 3

LOOKAHEAD_METHODS: Final = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafter writes KV for its drafts, for which slots are held in advance."""


def draw(seed: int, stream: int, request_id: int, position: int) -> int:
    """An even number of [0, 2**53) that depends on the arguments alone (splitmix64).

    `stream` separates the purposes of draws.
    """
    value = seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03
    value += request_id * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB
    value &= _MASK
    for _ in range(2):
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> (64 - _BITS)


def conditional_rates(table: SpeculativeTable) -> list[float]:
    """Chance of each draft to be accepted if all before it were."""
    count = table.num_speculative_tokens
    if table.synthetic_acceptance_rates:
        before, rates = 1.0, []
        for rate in table.synthetic_acceptance_rates:
            rates.append(rate / before if before else 0.0)
            before = rate
        return rates
    if table.synthetic_acceptance_length:
        # Minimum variance, as in vLLM: certain drafts, one by chance, the rest never.
        drafts = table.synthetic_acceptance_length - 1.0
        return [min(1.0, max(0.0, drafts - position)) for position in range(count)]
    return [table.acceptance_rate] * count


def expected_tokens(rates: Sequence[float]) -> float:
    """Mean tokens of a step with these conditional rates."""
    total, chance = 1.0, 1.0
    for rate in rates:
        chance *= rate
        total += chance
    return total


@final
class SpeculationCounts:
    """What became of drafts, as vLLM's counters count it."""

    drafts: int
    """Verifications: a sequence in a step with drafts."""
    draft_tokens: int
    accepted_tokens: int
    """Drafts accepted, those beyond the end of an output included."""
    accepted_per_position: list[int]
    context_tokens: int
    """Sum of the contexts at verifications."""

    __slots__ = (
        "accepted_per_position",
        "accepted_tokens",
        "context_tokens",
        "draft_tokens",
        "drafts",
    )

    def __init__(self, positions: int) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_position = [0] * positions
        self.context_tokens = 0

    def add(self, other: SpeculationCounts) -> None:
        """Sum of two replicas' counts."""
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.context_tokens += other.context_tokens
        missing = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for position, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += count


def lookahead_of(table: SpeculativeTable) -> int:
    """Slots held beyond those of a step, for the drafter's KV."""
    return table.num_speculative_tokens if table.method in LOOKAHEAD_METHODS else 0


@final
class Speculation(Drafting):
    """Drafts of one replica: how many, and how many of them are accepted."""

    forbids_cohort = "members of a batch advance by different numbers of tokens"

    def __init__(self, table: SpeculativeTable, seed: int) -> None:
        super().__init__(table.num_speculative_tokens, lookahead_of(table))
        self.counts = SpeculationCounts(self.tokens)
        self._seed = seed
        self._limits = [round(rate * _ONE) for rate in conditional_rates(table)]
        self._mean = table.acceptance_rate
        self._spread = table.acceptance_spread
        self._tenants = {entry.tenant: entry.acceptance_rate for entry in table.tenants}
        self._proposal_limit = round(table.proposal_rate * _ONE)

    def proposed(self, request: Request) -> int:
        """Drafts for the next step of a request that has just received a token."""
        if self._proposal_limit < _ONE:
            position = request.generated_tokens
            number = draw(self._seed, _PROPOSAL_STREAM, request.request_id, position)
            if number >= self._proposal_limit:
                return 0
        return self.tokens

    def accepted(self, request: Request, drafts: int) -> int:
        """Leading drafts of a step that are accepted; the request has the output before it."""
        own = self._own_limit(request)
        position, request_id = request.generated_tokens, request.request_id
        for index in range(drafts):
            limit = self._limits[index] if own < 0 else own
            if draw(self._seed, _ACCEPT_STREAM, request_id, position + index) >= limit:
                return index
        return drafts

    def count(self, drafts: int, accepted: int, context_tokens: int) -> None:
        """A verification of a sequence with so much context has ended."""
        counts = self.counts
        counts.drafts += 1
        counts.draft_tokens += drafts
        counts.accepted_tokens += accepted
        counts.context_tokens += context_tokens
        for position in range(accepted):
            counts.accepted_per_position[position] += 1

    def _own_limit(self, request: Request) -> int:
        """The rate of this request's drafts at any position, of 2**53; -1 = as configured."""
        rate = request.acceptance_rate
        if rate < 0.0:
            rate = self._tenants.get(request.tenant, -1.0)
        if rate < 0.0:
            if not self._spread:
                return -1
            number = draw(self._seed, _RATE_STREAM, request.request_id, 0)
            rate = self._mean + self._spread * (2.0 * number / _ONE - 1.0)
        return round(min(1.0, max(0.0, rate)) * _ONE)


# --- the drafter ----------------------------------------------------------------------------------
def draft_of(drafts: SpeculativeTable, target: ModelSpec, tp: int, source: str) -> Draft | None:
    """The drafter's layers; None for n-grams, which have none."""
    here = _KEY
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


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about drafting on one kind of replica."""

    tokens: int
    """Drafts of a sequence for each step."""
    step_ns: int
    """Of all drafting in a step; -1 = the passes of `passes`."""


class DraftPart(msgspec.Struct, frozen=True):
    """How a replica drafts: what its pricer is made from."""

    table: SpeculativeTable
    draft: Draft | None
    """The drafter's layers, if it has any."""

    def pricer(self, context: LatencyContext) -> Pricer:
        """The drafter's passes on such a replica, or what the configuration says of them."""
        engine = context.engine
        if engine is not None and engine.is_corrected:
            problem = f"its corrections know no drafts ({_KEY})"
            raise InputError(context.source, None, "engine.learned", problem)
        drafts = self.table
        step_ns = round(drafts.draft_step_us * 1000) if drafts.draft_step_us >= 0 else -1
        passes = None
        if step_ns < 0 and self.draft is None:
            step_ns = 0  # n-grams are looked up beside the GPU's work
        if step_ns < 0 and self.draft is not None:
            passes = RooflinePasses(self.draft, _roofline_of(context, self.draft))
        plan = DraftPlan(tokens=drafts.num_speculative_tokens, step_ns=step_ns)
        return DraftPricer(plan, passes)


def _roofline_of(context: LatencyContext, draft: Draft) -> RooflineBackend:
    """The kernels of a drafter's pass; the engine's part of the step is the target's."""
    table = context.table
    assert isinstance(table, RooflineTable)
    alone = msgspec.structs.replace(
        context,
        model=draft.spec,
        tensor_parallel=draft.tensor_parallel,
        expert_parallel=min(context.expert_parallel, draft.tensor_parallel),
        table=msgspec.structs.replace(table, host_overhead=False),
        engine=None,
        parts=(),
    )
    return make_roofline(alone, table, has_engine=False)


class DraftPricer:
    """Prices the drafter's passes behind each step."""

    component = "draft"

    def __init__(self, plan: DraftPlan, passes: RooflinePasses | None = None) -> None:
        """`passes` None: drafting costs `plan.step_ns`."""
        assert passes is not None or plan.step_ns >= 0
        self.plan = plan
        self._passes = passes

    def added_ns(self, shape: BatchShape) -> int:
        """Drafting after a step of this shape; 0 where the shape has no speculation."""
        verify = shape.verify
        if verify is None:
            return 0
        if self.plan.step_ns >= 0 or self._passes is None:
            return self.plan.step_ns if verify.drafting else 0
        total = self._passes.pass_ns(shape)
        if verify.drafting:
            for number in range(1, self.plan.tokens):
                total += self._passes.pass_ns(_one_token_each(verify, number))
        return total


def _one_token_each(verify: Verify, number: int) -> BatchShape:
    """The drafter's pass `number` (from 0) after the first: a decode of each sequence."""
    count = verify.drafting
    context = verify.drafting_context_sum + count * number
    mean = context // count
    return BatchShape(
        decode_count=count,
        decode_context_sum=context,
        decode_context_max=mean,
        decode_context_min=mean,
        sequences=count,
    )


def uniform_step(count: int, context_tokens: int, drafts: int) -> BatchShape:
    """A step of `count` equal sequences; `drafts` 0 = plain decoding."""
    shape = BatchShape(sequences=count)
    if not drafts:
        shape.decode_count = count
        shape.decode_context_sum = count * context_tokens
        shape.decode_context_max = shape.decode_context_min = context_tokens
        return shape
    tokens = count * (1 + drafts)
    context = count * context_tokens
    shape.verify = Verify(count, tokens, context, count, context + tokens)
    return shape


def stops_paying_at(
    plain: LatencyBackend,
    speculative: LatencyBackend,
    drafts: int,
    tokens_per_step: float,
    context_tokens: int,
    batch_max: int,
) -> int:
    """The smallest batch in which decoding with drafts brings fewer tokens a second; 0 = none.

    `tokens_per_step`: mean tokens of a sequence in a step. Batches up to `batch_max` are looked at.
    """
    for count in range(1, batch_max + 1):
        plain_ns = plain.iteration_ns(uniform_step(count, context_tokens, 0))
        with_drafts_ns = speculative.iteration_ns(uniform_step(count, context_tokens, drafts))
        if with_drafts_ns > tokens_per_step * plain_ns:
            return count
    return 0


class RooflinePasses:
    """A drafter's pass by the roofline: its layers, the projection in front of them, its logits."""

    def __init__(self, draft: Draft, backend: RooflineBackend) -> None:
        """`backend`: the drafter's layers as a model of their own, kernels alone."""
        self._backend = backend
        hidden = draft.spec.hidden
        self._inputs = ceil_div(draft.input_params, hidden * draft.tensor_parallel)
        self._hidden = hidden

    def pass_ns(self, shape: BatchShape) -> int:
        """One pass over the tokens of a batch; logits of the last token of each sequence only."""
        own = BatchShape(
            shape.prefill_new,
            shape.prefill_context,
            shape.decode_count,
            shape.decode_context_sum,
            shape.decode_context_max,
            shape.decode_context_min,
            shape.sequences,
        )
        verify = own.verify = shape.verify
        if verify is not None:  # unlike the target, it needs no logits of the drafts
            own.sequences -= verify.tokens - verify.count
        total = self._backend.iteration_ns(own)
        if self._inputs:
            costs = self._backend.costs
            tokens = max(1, shape.new_tokens)
            seconds = costs.ops.gemm_s(tokens, self._inputs, self._hidden, costs.plain)
            total += round(seconds * NS_PER_S)
        return total


# --- the feature ----------------------------------------------------------------------------------
class Speculative(Feature):
    """See the module's head."""

    name = "speculative decoding"
    key = _KEY
    summary = "Steps verify drafts of several tokens; how many are accepted is given."
    guide = "speculation.md"
    keys = ((VllmTable, Keys),)
    section = "speculation"
    files = (
        "configs/speculation.toml",
        "tests/corpus/seed-2770.toml",
        "tests/corpus/seed-3034.toml",
        "benchmarks/vllm_blocks.py",
    )
    forbids = ((STEPS_BY_THE_RULE, Speculation.forbids_cohort),)
    conflicts = (
        Conflict(OTHER_SCHEDULER, _KEY, "policy {policy} has no speculative decoding; vllm has"),
        Conflict(
            STAGES, "replicas.pipeline_parallel", "speculative decoding runs on one pipeline stage"
        ),
        Conflict(
            OTHER_BACKEND,
            "latency.backend",
            "{backend} cannot cost drafts; roofline and linear can",
        ),
        Conflict(
            OUTSIDE, _KEY, "weights or attention outside the GPU cannot be combined with drafts"
        ),
        Conflict(
            CACHED_STATES,
            "scheduler.prefix_caching",
            "the states of {model} cannot be cached beside drafts; set it to false",
        ),
    )
    example: ClassVar[Mapping[str, Any]] = {
        "scheduler": {
            "speculative_config": {
                "method": "eagle",
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
        _check_keys(table, seat)

    def check_fleet(self, config: Config, places: Sequence[Place], source: str) -> None:
        """KV that moves between replicas has the same layers on both sides, the drafter's too."""
        first = places[0]
        for place in places:
            moves = any(one.role != "colocated" for one in (first, place))
            alike = place.model == first.model and place.kv_dtype == first.kv_dtype
            if moves and alike and place.kv_bytes_per_token != first.kv_bytes_per_token:
                problem = "replicas that exchange KV need the same drafter (its layers have KV too)"
                raise InputError(source, None, f"replicas.{place.group}.{_KEY}", problem)

    def layers(
        self, scheduler: SchedulerTable, model: ModelSpec, tp: int, source: str
    ) -> Draft | None:
        """The drafter's, which has weights and KV beside the target's; n-grams have none."""
        return draft_of(_table(scheduler), model, tp, source)

    def more_tokens(self, scheduler: SchedulerTable) -> int:
        """Drafts."""
        return _table(scheduler).num_speculative_tokens

    def slots_ahead(self, scheduler: SchedulerTable, *, is_ahead: bool) -> int:
        """Drafts, of two steps where batches are formed ahead, and what the drafter holds."""
        table = _table(scheduler)
        return lookahead_of(table) + table.num_speculative_tokens * (2 if is_ahead else 1)

    def pass_part(self, place: Place, config: Config) -> PassPart:
        """The drafter's passes."""
        return DraftPart(_table(place.scheduler), place.draft)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """Which drafts are accepted; the seed of the run decides."""
        return Speculation(_table(place.scheduler), config.seed)

    # --- results ------------------------------------------------------------------------------
    def facts(self, place: Place, config: Config) -> dict[str, str]:
        """Drafts, what they add, and what they bring."""
        table, draft = _table(place.scheduler), place.draft
        drafts, tokens = table.num_speculative_tokens, expected_tokens(conditional_rates(table))
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
                table.num_speculative_tokens,
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

    def line(self, figures: Mapping[str, Any], number: Callable[[float], str]) -> tuple[str, str]:
        """Acceptance, tokens of a step, and where speculation stops paying."""
        limit = figures["stops_paying_at_batch"]
        pays = "pays at any batch" if limit is None else f"stops paying at a batch of {limit}"
        accepted, length = figures["acceptance_rate"], figures["mean_acceptance_length"]
        return "Drafts", f"{accepted:.1%} accepted, {number(length)} tokens a step, {pays}"

    # --- random worlds ------------------------------------------------------------------------
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
        if rng.random() < 0.3:
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
