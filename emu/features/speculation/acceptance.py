"""Which drafts are accepted: seeded draws by request and position, and what they amount to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from emu.features.speculation.keys import SpeculativeTable, verified_drafts
from emu.features.speculation.published import published_rates
from emu.request import Request
from emu.scheduling.parts import Drafting

_MASK: Final = (1 << 64) - 1
_BITS: Final = 53
_ONE: Final = 1 << _BITS
_SEED_STEP: Final = 0x9E3779B97F4A7C15
_STREAM_STEP: Final = 0xD1B54A32D192ED03
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB
_BLOCK: Final = 128
"""Numbers that are drawn together."""
_RATE_STREAM: Final = 1
_PROPOSAL_STREAM: Final = 2
_ACCEPT_STREAM: Final = 3

LOOKAHEAD_METHODS: Final = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafter writes KV for its drafts, for which slots are held in advance."""


def draw(seed: int, stream: int, request_id: int, position: int) -> int:
    """An even number of [0, 2**53) that depends on the arguments alone (splitmix64).

    `stream` separates the purposes of draws.
    """
    value = seed * _SEED_STEP + stream * _STREAM_STEP
    value += request_id * _MIX_A + position * _MIX_B
    value &= _MASK
    for _ in range(2):
        value = ((value ^ (value >> 30)) * _MIX_A) & _MASK
        value = ((value ^ (value >> 27)) * _MIX_B) & _MASK
        value ^= value >> 31
    return value >> (64 - _BITS)


def draws(seed: int, stream: int, request_id: int, position: int, count: int) -> list[int]:
    """What `draw` has for `count` positions in a row of this `stream` of numbers."""
    import numpy as np

    first = seed * _SEED_STEP + stream * _STREAM_STEP + request_id * _MIX_A + position * _MIX_B
    value = np.arange(count, dtype=np.uint64) * np.uint64(_MIX_B) + np.uint64(first & _MASK)
    for _ in range(2):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_A)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_B)
        value ^= value >> np.uint64(31)
    found: list[int] = (value >> np.uint64(64 - _BITS)).tolist()
    return found


def conditional_rates(table: SpeculativeTable, model_type: str = "") -> list[float]:
    """Chance of each draft to be accepted if all before it were.

    `model_type`: of the target, for the rates of its own layers where none are given.
    """
    count = table.num_speculative_tokens
    if table.acceptance_rate < 0 and not (
        table.synthetic_acceptance_rates or table.synthetic_acceptance_length
    ):
        return published_rates(model_type, table.text, count)
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

    def __init__(self, table: SpeculativeTable, seed: int, model_type: str = "") -> None:
        """`model_type`: of the target."""
        super().__init__(
            verified_drafts(table),
            lookahead_of(table),
            table.num_speculative_tokens * table.eagle_topk,
        )
        self.counts = SpeculationCounts(table.num_speculative_tokens)
        self._seed = seed
        self._limits = [round(rate * _ONE) for rate in conditional_rates(table, model_type)]
        self._mean = table.acceptance_rate
        self._spread = table.acceptance_spread
        self._tenants = {entry.tenant: entry.acceptance_rate for entry in table.tenants}
        self._proposal_limit = round(table.proposal_rate * _ONE)
        self._numbers: dict[int, tuple[int, list[int]]] = {}
        """Of running requests: a position of the output, and the numbers from there on."""

    def proposed(self, request: Request) -> int:
        """Drafts for the next step of a request that has just received a token."""
        if self._proposal_limit < _ONE:
            position = request.generated_tokens
            number = draw(self._seed, _PROPOSAL_STREAM, request.request_id, position)
            if number >= self._proposal_limit:
                return 0
        return self.tokens

    def accepted(self, request: Request, drafts: int) -> int:
        """Leading drafts of a step that are accepted; the request has the output before it.

        A tree of them has as many levels as there are limits; one draft of each can be accepted.
        """
        own = self._own_limit(request)
        drafts = min(drafts, len(self._limits))
        position, request_id = request.generated_tokens, request.request_id
        known = self._numbers.get(request_id)
        if known is None or not known[0] <= position <= known[0] + len(known[1]) - drafts:
            count = _BLOCK + drafts
            numbers = draws(self._seed, _ACCEPT_STREAM, request_id, position, count)
            known = self._numbers[request_id] = (position, numbers)
        first, numbers = known
        for index in range(drafts):
            limit = self._limits[index] if own < 0 else own
            if numbers[position - first + index] >= limit:
                return index
        return drafts

    def end(self, request: Request) -> None:
        """Its numbers are not asked for again, or drawn again."""
        self._numbers.pop(request.request_id, None)

    def clear(self) -> None:
        """The process has ended."""
        self._numbers.clear()

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
