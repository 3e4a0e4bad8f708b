"""What features of an engine need in its scheduler: adapters, images, drafts. Pure.

Owns the slots of LoRA adapters, the encoder's budget and cache, and which drafts are accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, final

from emu.request import Request

if TYPE_CHECKING:
    from emu.config.schema import SpeculativeTable


# --------------------------------------------------------------------------------------------------
# LoRA adapters of one replica: which are on the GPU, which in host memory, which are in use.
#
# Owns the slots. Rules of vLLM: at most `slots` different adapters among the running requests; an
# adapter that a step needs and that has no slot takes that of the least recently used one that no
# member of the step needs; the host keeps `host_slots` copies, the least recently used leaves, with
# its slot. An adapter is loaded in the step that first runs it, and the whole batch waits. Pure.
#
# Invariants: adapters with a slot have a copy on the host; those in use are at most `slots`.


@final
class Adapters:
    """Slots of a replica's adapters."""

    slots: int
    host_slots: int
    cold_loads: int
    """Loads from the disk so far."""
    host_loads: int
    """Loads from host memory."""
    hits: int
    """Members of steps, once for each step and adapter, that had a slot already."""

    __slots__ = (
        "_host",
        "_in_use",
        "_on_gpu",
        "cold_loads",
        "hits",
        "host_loads",
        "host_slots",
        "slots",
    )

    def __init__(self, slots: int, host_slots: int) -> None:
        assert 0 < slots <= host_slots
        self.slots = slots
        self.host_slots = host_slots
        self.cold_loads = self.host_loads = self.hits = 0
        self._in_use: dict[str, int] = {}
        """Running requests by adapter."""
        self._on_gpu: dict[str, None] = {}
        """Adapters with a slot, the least recently used first."""
        self._host: dict[str, None] = {}

    # --- running requests -------------------------------------------------------------------
    def can_run(self, request: Request) -> bool:
        """Whether the request may join the running ones."""
        adapter = request.adapter
        return not adapter or adapter in self._in_use or len(self._in_use) < self.slots

    def begin(self, request: Request) -> None:
        """The request runs."""
        if request.adapter:
            self._in_use[request.adapter] = self._in_use.get(request.adapter, 0) + 1
            assert len(self._in_use) <= self.slots

    def end(self, request: Request) -> None:
        """The request runs no more."""
        if request.adapter:
            left = self._in_use[request.adapter] - 1
            if left:
                self._in_use[request.adapter] = left
            else:
                del self._in_use[request.adapter]

    # --- steps ------------------------------------------------------------------------------
    def take(self, needed: Iterable[str]) -> tuple[int, int]:
        """A step needs these adapters, each named once: loads from the disk, and from the host."""
        names = list(needed)
        cold = warm = 0
        for adapter in names:
            if adapter in self._on_gpu:
                self.hits += 1
            elif adapter in self._host:
                warm += 1
            else:
                cold += 1
            self._host.pop(adapter, None)
            self._host[adapter] = None
            if len(self._host) > self.host_slots:
                self._on_gpu.pop(self._leaves_host(names), None)
            if adapter not in self._on_gpu and len(self._on_gpu) >= self.slots:
                del self._on_gpu[next(name for name in self._on_gpu if name not in names)]
            self._on_gpu.pop(adapter, None)
            self._on_gpu[adapter] = None
        self.cold_loads += cold
        self.host_loads += warm
        return cold, warm

    def _leaves_host(self, names: list[str]) -> str:
        oldest = next(name for name in self._host if name not in names)
        del self._host[oldest]
        return oldest

    def clear(self) -> None:
        """The process has ended: nothing is loaded."""
        self._on_gpu.clear()
        self._host.clear()

    # --- seeing -----------------------------------------------------------------------------
    def holds(self, adapter: str) -> bool:
        """Whether a request with this adapter would find it here."""
        return adapter in self._on_gpu or adapter in self._in_use

    def recount(self, running: Iterable[Request]) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        counted: dict[str, int] = {}
        for request in running:
            if request.adapter:
                counted[request.adapter] = counted.get(request.adapter, 0) + 1
        problems = []
        if counted != self._in_use:
            problems.append(f"adapters in use {self._in_use}, counted {counted}")
        if len(self._on_gpu) > self.slots or len(self._host) > self.host_slots:
            problems.append(
                f"{len(self._on_gpu)} adapters in {self.slots} slots, "
                f"{len(self._host)} of {self.host_slots} on the host"
            )
        if any(adapter not in self._host for adapter in self._on_gpu):
            problems.append("an adapter has a slot without a copy on the host")
        return problems


# --------------------------------------------------------------------------------------------------
# Images of a replica's requests: what a step encodes, and what the encoder cache holds.
#
# Rules of vLLM (`_try_schedule_encoder_inputs`, `EncoderCacheManager`): an image is encoded whole
# in the step whose chunk reaches its first token. Where the step's budget or the cache has no room
# for it, the chunk ends before the image, or the request waits. Outputs are kept by the image's
# identity and referenced by requests until their tokens have been computed; an output without a
# reference stays until room is needed, and leaves oldest first. Counts are tokens of the prompt.
# Pure.
#
# Invariants: cached and free tokens add up to the cache; outputs without a reference can be
# evicted.


@final
class EncoderCache:
    """Budget and cache of one replica's encoder."""

    budget_tokens: int
    cache_tokens: int
    encoded_images: int
    encoded_tokens: int
    hits: int
    """Images of requests that were found encoded."""
    steps: dict[tuple[int, ...], int]
    """How often steps encoded such images (tokens of each)."""

    __slots__ = (
        "_evictable",
        "_free",
        "_held",
        "_left",
        "_plan",
        "_plan_of",
        "_size",
        "_step",
        "_users",
        "budget_tokens",
        "cache_tokens",
        "encoded_images",
        "encoded_tokens",
        "hits",
        "steps",
    )

    def __init__(self, budget_tokens: int, cache_tokens: int) -> None:
        """`budget_tokens` of a step; `cache_tokens` in all."""
        self.budget_tokens = budget_tokens
        self.cache_tokens = cache_tokens
        self.encoded_images = self.encoded_tokens = self.hits = 0
        self.steps = {}
        self._left = budget_tokens
        self._step: list[int] = []
        """Tokens of each image that this step encodes."""
        self._free = cache_tokens
        self._size: dict[int, int] = {}
        """Tokens of each image in the cache."""
        self._users: dict[int, int] = {}
        """References to each of them."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Those without a reference, the one that lost its last reference first at the front."""
        self._held: dict[int, tuple[Request, dict[int, None]]] = {}
        """By request: which of its images it holds a reference to (positions in `images`)."""
        self._plan: list[int] = []
        """What the request looked at last would have encoded."""
        self._plan_of = -1

    def begin_step(self, running: Iterable[Request]) -> None:
        """A step is formed: images whose tokens all were in earlier ones are given up.

        `running`: requests in order of admission, in which images come to be evictable.
        """
        self._left, self._step = self.budget_tokens, []
        for request in running if self._held else ():
            held = self._held.get(request.request_id)
            for at in () if held is None else sorted(held[1]):
                _, start, tokens = request.images[at]
                if start + tokens <= request.computed_tokens:
                    self._give_up(request, self._held[request.request_id][1], at)

    def fit(self, request: Request, had_tokens: int, new_tokens: int) -> int:
        """How many of the new tokens of a request can be computed, as far as images go.

        Takes references to images that are in the cache. What is to be encoded is remembered for
        `commit`.
        """
        self._plan, self._plan_of = [], request.request_id
        planned: dict[int, int] = {}
        mine = self._mine(request)
        end = had_tokens + new_tokens
        for at, (image, start, tokens) in enumerate(request.images):
            if start + tokens <= had_tokens or at in mine:
                continue
            if start >= end:
                break
            if image in planned:
                self._plan.append(at)  # twice in one request: encoded once
                continue
            if image in self._size:
                self._hold(mine, at, image)
                self.hits += 1
                continue
            room = tokens + sum(planned.values())
            if room > self._left or not self._make_room(room):
                return max(0, start - had_tokens)
            planned[image] = tokens
            self._plan.append(at)
        return new_tokens

    def commit(self, request: Request) -> None:
        """The step takes the tokens that `fit` allowed: their images are encoded in it."""
        if request.request_id != self._plan_of:
            return
        mine = self._mine(request)
        for at in self._plan:
            image, _, tokens = request.images[at]
            if image not in self._size:
                self._size[image], self._users[image] = tokens, 0
                self._free -= tokens
                self._left -= tokens
                self._step.append(tokens)
                self.encoded_images += 1
                self.encoded_tokens += tokens
                mine[at] = None
                self._users[image] = 1
            else:
                self._hold(mine, at, image)
                self.hits += 1
        self._plan, self._plan_of = [], -1

    def step_images(self) -> list[int]:
        """The step is formed: tokens of each image that it encodes, in order."""
        if self._step:
            key = tuple(self._step)
            self.steps[key] = self.steps.get(key, 0) + 1
        return self._step

    def free(self, request: Request) -> None:
        """The request is here no more, or starts again: its references go."""
        held = self._held.get(request.request_id)
        if held is not None:
            for at in list(held[1]):
                self._give_up(request, held[1], at)
        self._held.pop(request.request_id, None)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._free = self.cache_tokens
        self._size.clear()
        self._users.clear()
        self._evictable.clear()
        self._held.clear()
        self._plan, self._plan_of = [], -1

    def too_large(self, request: Request) -> str:
        """Empty, or why an image of the request can never be encoded."""
        most = max((tokens for _, _, tokens in request.images), default=0)
        limit = min(self.budget_tokens, self.cache_tokens)
        return f"has an image of {most} tokens, more than {limit}" if most > limit else ""

    def recount(self, present: Iterable[Request]) -> list[str]:
        """Problems found by counting from scratch; `present`: requests that may hold images."""
        counted: dict[int, int] = {}
        here = {request.request_id for request in present}
        problems = [
            f"request {number} holds images and is not here"
            for number in self._held
            if number not in here
        ]
        for request, mine in self._held.values():
            for at in mine:
                image = request.images[at][0]
                counted[image] = counted.get(image, 0) + 1
        if counted != {image: count for image, count in self._users.items() if count}:
            problems.append(f"references to images {self._users}, counted {counted}")
        if self._free + sum(self._size.values()) != self.cache_tokens:
            problems.append(f"{self._free} tokens of the encoder cache are free, and {self._size}")
        if sorted(self._evictable) != sorted(i for i, count in self._users.items() if not count):
            problems.append("the images that can be evicted are not those without a reference")
        return problems

    # --- inside -----------------------------------------------------------------------------
    def _mine(self, request: Request) -> dict[int, None]:
        held = self._held.get(request.request_id)
        if held is None:
            held = self._held[request.request_id] = (request, {})
        return held[1]

    def _hold(self, mine: dict[int, None], at: int, image: int) -> None:
        if not self._users[image]:
            del self._evictable[image]
        mine[at] = None
        self._users[image] += 1

    def _give_up(self, request: Request, mine: dict[int, None], at: int) -> None:
        image = request.images[at][0]
        del mine[at]
        self._users[image] -= 1
        if not self._users[image]:
            self._evictable[image] = None
        if not mine:
            del self._held[request.request_id]

    def _make_room(self, tokens: int) -> bool:
        """Evict until so many tokens are free; nothing leaves if that cannot be."""
        if tokens <= self._free:
            return True
        if tokens > self._free + sum(self._size[image] for image in self._evictable):
            return False
        while tokens > self._free:
            image, _ = self._evictable.popitem(last=False)
            self._free += self._size.pop(image)
            del self._users[image]
        return True


# --------------------------------------------------------------------------------------------------
# Which drafts of speculative decoding are accepted, and the counts of it. Pure.
#
# Acceptance is given by the configuration, by a tenant or by a request, never derived. Each output
# position of a request has one number of its own, a hash of (seed, request, position): its draft is
# accepted if the number is below the rate of the draft's position in its step, and all drafts
# before it were accepted. The position of a rejected draft is filled by the recovered token of the
# same step, so that no number is used twice; nor does it depend on batches, preemptions or the
# order of requests. Expected tokens of a step with conditional rates a_1..a_k: 1 + a_1 + a_1 a_2 +
# ...


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


@final
class Speculation:
    """Drafts of one replica: how many, and how many of them are accepted."""

    tokens: int
    """Drafts of a sequence for each step."""
    lookahead_tokens: int
    """Slots held beyond those of a step, for the drafter's KV."""
    counts: SpeculationCounts

    __slots__ = (
        "_limits",
        "_mean",
        "_proposal_limit",
        "_seed",
        "_spread",
        "_tenants",
        "counts",
        "lookahead_tokens",
        "tokens",
    )

    def __init__(self, table: SpeculativeTable, seed: int) -> None:
        self.tokens = table.num_speculative_tokens
        self.lookahead_tokens = self.tokens if table.method in LOOKAHEAD_METHODS else 0
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
