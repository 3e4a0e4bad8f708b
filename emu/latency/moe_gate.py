"""Which experts a batch's tokens go to, and what that means for each expert-parallel rank.

Owns the gate policies: `balanced`, `round_robin`, `random`, `skewed`, or a user's class by its
import path. A gate is pure: the routing is a function of the number of tokens and, for gates that
draw, of a key that the caller derives from the batch, so that the same batch is always routed the
same way and one routing serves all layers.

Expert e lives on rank min(e * ranks // experts, ranks - 1). Does not know times
(`profile_tables.ExpertTable`) and sends nothing over a network.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from emu.config.names import EXPERT_ROUTING
from emu.config.own import make_own
from emu.errors import InputError
from emu.rng import rng_stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_KEY: Final = "latency.expert_routing"
_KNOWN_MAX: Final = 1024
"""Routings that a gate keeps."""


class GateShape(msgspec.Struct, frozen=True):
    """What a gate is built for."""

    experts: int
    per_token: int
    """Experts that each token visits."""
    ranks: int = 1
    """Ranks that share the experts."""
    seed: int = 42

    @property
    def top_k(self) -> int:
        """Experts per token, never more than there are."""
        return min(self.per_token, self.experts)

    def owner(self, expert: int) -> int:
        """The rank that holds an expert."""
        return min(expert * self.ranks // self.experts, self.ranks - 1)


class Routing(msgspec.Struct, frozen=True):
    """Where the tokens of one batch go."""

    rank_tokens: tuple[int, ...]
    """Tokens that each rank computes; a token counts once on a rank."""
    rank_experts: tuple[int, ...]
    """Experts that are used on each rank."""
    expert_tokens: tuple[int, ...]
    """Tokens that each expert computes."""


class Gate(Protocol):
    """A gate policy. A user's class takes a `GateShape` as its only argument."""

    draws: bool
    """True: the routing depends on the batch key and not only on the number of tokens."""

    def route(self, tokens: int, batch_key: int) -> Routing:
        """Route `tokens` >= 1 tokens."""
        ...


def make_gate(
    policy: str,
    shape: GateShape,
    *,
    faithful: bool = False,
    own: Mapping[str, object] | None = None,
) -> Gate:
    """The gate of a name (`EXPERT_ROUTING`) or of `package.module:Class`.

    `faithful` reproduces two habits of LLMServingSim: `random` draws every batch afresh with
    Python's `Random(42)`, and `round_robin` sends every token to the first experts. `own`: keys of
    the table of a class of one's own.
    """
    if policy == "balanced":
        return BalancedGate(shape)
    if policy == "round_robin":
        return RoundRobinGate(shape, stuck=faithful)
    if policy == "random":
        return ReplayedRandomGate(shape) if faithful else RandomGate(shape)
    if policy == "skewed":
        return SkewedGate(shape)
    if ":" not in policy:
        known = ", ".join(EXPERT_ROUTING)
        problem = f"{policy!r} is none of {known}, package.module:Class"
        raise InputError("config", None, _KEY, problem)
    return _own_gate(policy, shape, own or {})


def _own_gate(path: str, shape: GateShape, own: Mapping[str, object]) -> Gate:
    """A user's gate, which routes one token as a gate must. Raises InputError."""
    gate: Gate = make_own(path, _KEY, own, shape)
    found: object = gate.route(1, 0)
    if not isinstance(found, Routing):
        problem = f"{path}.route gave {found!r} instead of a Routing"
        raise InputError("config", None, _KEY, problem)
    for name, values, wanted in (
        ("rank_tokens", found.rank_tokens, shape.ranks),
        ("rank_experts", found.rank_experts, shape.ranks),
        ("expert_tokens", found.expert_tokens, shape.experts),
    ):
        count = len(values)
        if count != wanted:
            problem = f"{path}.route gave {count} {name} instead of {wanted}"
            raise InputError("config", None, _KEY, problem)
    return gate


def _kept(known: dict[int, Routing], tokens: int, routing: Routing) -> Routing:
    """The routing of so many tokens, which is kept."""
    if len(known) >= _KNOWN_MAX:
        known.clear()
    known[tokens] = routing
    return routing


def _by_rank(shape: GateShape, values: Iterable[int]) -> tuple[int, ...]:
    """Sum values that belong to experts over the experts of each rank."""
    sums = [0] * shape.ranks
    for expert, value in enumerate(values):
        sums[shape.owner(expert)] += value
    return tuple(sums)


def _routing_of_choices(shape: GateShape, chosen: NDArray[np.int64]) -> Routing:
    """Count a table of choices: one row per token, distinct experts in a row."""
    import numpy as np

    owners = np.minimum(chosen * shape.ranks // shape.experts, shape.ranks - 1)
    visits = np.zeros((len(chosen), shape.ranks), dtype=bool)
    visits[np.arange(len(chosen))[:, None], owners] = True
    loads = np.bincount(chosen.ravel(), minlength=shape.experts)
    return Routing(
        rank_tokens=tuple(visits.sum(axis=0).tolist()),
        rank_experts=_by_rank(shape, (loads > 0).astype(int).tolist()),
        expert_tokens=tuple(loads.tolist()),
    )


class BalancedGate:
    """Expected values of an even spread: every rank and every expert gets the same.

    Rounding is to the nearest, half to even, as in the reference (semantics, section 12).
    """

    draws = False

    def __init__(self, shape: GateShape) -> None:
        self._shape = shape

    def route(self, tokens: int, batch_key: int) -> Routing:
        """Tokens per rank: those with at least one of their experts there."""
        shape = self._shape
        ranks, top_k = shape.ranks, shape.top_k
        activated = min(round(tokens * top_k / ranks), shape.experts // ranks)
        missed = ((ranks - 1) / ranks) ** top_k
        on_rank = tokens if ranks <= 1 else round(tokens * (1 - missed))
        each, more = divmod(tokens * top_k, shape.experts)
        return Routing(
            rank_tokens=(on_rank,) * ranks,
            rank_experts=(activated,) * ranks,
            expert_tokens=tuple(each + (expert < more) for expert in range(shape.experts)),
        )


class RoundRobinGate:
    """Token i visits the experts that follow those of token i - 1, around the circle.

    `stuck` keeps all tokens on the first experts: the most uneven load there is, and what
    LLMServingSim's policy of this name does.
    """

    draws = False

    def __init__(self, shape: GateShape, *, stuck: bool = False) -> None:
        self._shape = shape
        self._stuck = stuck
        self._known: dict[int, Routing] = {}

    def route(self, tokens: int, batch_key: int) -> Routing:
        """Exact counts, token by token."""
        found = self._known.get(tokens)
        if found is None:
            found = _kept(self._known, tokens, self._routing(tokens))
        return found

    def _routing(self, tokens: int) -> Routing:
        import numpy as np

        shape = self._shape
        first = np.zeros(tokens, dtype=np.int64) if self._stuck else np.arange(tokens) * shape.top_k
        chosen = (first[:, None] + np.arange(shape.top_k)) % shape.experts
        return _routing_of_choices(shape, chosen)


class RandomGate:
    """Each token visits distinct experts drawn evenly; one stream per (tokens, variant).

    Batches of equal size share `VARIANTS` routings, which are kept: a long run draws each once.
    """

    draws = True
    VARIANTS: Final = 32

    def __init__(self, shape: GateShape) -> None:
        self._shape = shape
        self._known: dict[tuple[int, int], Routing] = {}

    def route(self, tokens: int, batch_key: int) -> Routing:
        """The routing that belongs to the batch key."""
        import numpy as np

        variant = batch_key % self.VARIANTS
        routing = self._known.get((tokens, variant))
        if routing is None:
            shape = self._shape
            rng = rng_stream(shape.seed, f"moe-gate/{tokens}/{variant}")
            scores = rng.random((tokens, shape.experts))
            chosen = np.argsort(scores, axis=1, kind="stable")[:, : shape.top_k]
            routing = self._known[tokens, variant] = _routing_of_choices(shape, chosen)
        return routing


class ReplayedRandomGate:
    """The draws of LLMServingSim: `Random(42).sample` for token after token, anew every batch."""

    draws = False

    def __init__(self, shape: GateShape) -> None:
        self._shape = shape
        self._known: dict[int, Routing] = {}

    def route(self, tokens: int, batch_key: int) -> Routing:
        """The same for every batch of the same size, since every batch starts the draws anew."""
        found = self._known.get(tokens)
        if found is None:
            found = _kept(self._known, tokens, self._routing(tokens))
        return found

    def _routing(self, tokens: int) -> Routing:
        import numpy as np

        shape = self._shape
        rng = random.Random(42)
        rows = [rng.sample(range(shape.experts), shape.top_k) for _ in range(tokens)]
        return _routing_of_choices(shape, np.array(rows, dtype=np.int64))


class SkewedGate:
    """Expected values when popularity falls as 1 / place, places dealt to experts at random.

    A token visits expert e with probability min(1, c / place(e)), where c makes the expected
    number of visits equal to the experts per token.
    """

    draws = False

    def __init__(self, shape: GateShape) -> None:
        self._shape = shape
        places = rng_stream(shape.seed, "moe-gate/popularity").permutation(shape.experts) + 1
        self._visited = _visit_probabilities([1 / int(place) for place in places], shape.top_k)
        self._known: dict[int, Routing] = {}

    def route(self, tokens: int, batch_key: int) -> Routing:
        """Rounded expectations, at least one token and one expert where any is likely."""
        found = self._known.get(tokens)
        if found is None:
            found = _kept(self._known, tokens, self._routing(tokens))
        return found

    def _routing(self, tokens: int) -> Routing:
        shape = self._shape
        missed_by_rank = [1.0] * shape.ranks
        used_by_rank = [0.0] * shape.ranks
        for expert, visited in enumerate(self._visited):
            rank = shape.owner(expert)
            missed_by_rank[rank] *= 1 - visited
            used_by_rank[rank] += 1 - (1 - visited) ** tokens
        return Routing(
            rank_tokens=tuple(round(tokens * (1 - missed)) for missed in missed_by_rank),
            rank_experts=tuple(max(1, round(used)) for used in used_by_rank),
            expert_tokens=_rounded_to_sum(
                [tokens * visited for visited in self._visited], tokens * shape.top_k
            ),
        )


def _visit_probabilities(weights: list[float], visits: int) -> list[float]:
    """min(1, c * weight) with c such that the sum is `visits`."""
    certain = 0
    order = sorted(range(len(weights)), key=lambda expert: -weights[expert])
    rest = math.fsum(weights)
    # The heaviest are certain as long as their share of what remains exceeds one visit.
    while certain < visits and weights[order[certain]] * (visits - certain) >= rest:
        rest -= weights[order[certain]]
        certain += 1
    scale = (visits - certain) / rest if certain < visits else 0.0
    probabilities = [0.0] * len(weights)
    for place, expert in enumerate(order):
        probabilities[expert] = 1.0 if place < certain else min(1.0, scale * weights[expert])
    return probabilities


def _rounded_to_sum(values: list[float], total: int) -> tuple[int, ...]:
    """Integers next to the values whose sum is `total` (largest remainders, then lowest index)."""
    floors = [int(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (floors[i] - values[i], i))
    for i in by_remainder[: max(0, total - sum(floors))]:
        floors[i] += 1
    return tuple(floors)
