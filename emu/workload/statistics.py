"""Statistics of a workload: rates over time, lengths, sessions, and how much prefixes overlap.

Streams the lines; keeps 16 bytes for each request and the hashes of distinct prefix blocks (up
to `PREFIX_BLOCKS_MAX`, after which sharing is stated for the requests seen so far).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from emu.request import Prefix
from emu.units import NS_PER_S
from emu.workload.items import Ints, Notes, prefix_of
from emu.workload.opened import Workload
from emu.workload.tools import lines_of

PREFIX_BLOCK_TOKENS: Final = 16
PREFIX_BLOCKS_MAX: Final = 4_000_000
RATE_BINS: Final = 60
_PERCENTILES: Final = (50, 90, 95, 99)


class Lengths(msgspec.Struct, frozen=True):
    """Token counts of prompts or outputs."""

    min: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: int
    total: int
    histogram: list[tuple[int, int]]
    """(smallest length, requests), each bin twice as wide as the one before."""


class Sharing(msgspec.Struct, frozen=True):
    """How much of the prompts an endless prefix cache could serve, in order of arrival."""

    requests_with_ids: int
    prompt_tokens: int
    """Of the requests with ids that were looked at."""
    shared_tokens: int
    """Those of them in whole blocks that an earlier request had as its prefix."""
    is_partial: bool
    """There were too many distinct blocks to look at all."""

    @property
    def fraction(self) -> float:
        """Shared part of the prompt tokens."""
        return self.shared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Description(msgspec.Struct, frozen=True):
    """What a workload looks like. Times in seconds of simulated time."""

    source: str
    format: str
    lines: int
    requests: int
    sessions: int
    turns_mean: float
    """Requests per session."""
    tool_s_mean: float
    """Pause between turns."""
    first_s: float
    last_s: float
    rate_per_s: float
    """Lines over the span of their arrivals; 0 when all arrive at once."""
    gap_cv: float
    """Standard deviation of the gaps over their mean: 1 for a Poisson process."""
    peak_per_s: int
    """Most arrivals within one second of the clock."""
    rate_bin_s: float
    rates_per_s: list[float]
    """Arrivals of lines in equal bins from the first to the last."""
    prompt: Lengths
    output: Lengths
    tokens_per_s: float
    """Prompt and output tokens over the span; 0 when all arrive at once."""
    tenants: list[tuple[str, int]]
    """Name and requests, most first."""
    sharing: Sharing
    notes: Notes


def describe(workload: Workload) -> Description:
    """Read a whole workload and describe it."""
    times: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    pauses_ns: list[int] = []
    turns = 0
    tenants: Counter[str] = Counter()
    prefixes = _PrefixBook()
    for line in lines_of(workload):
        times.append(line.arrival_time_ns)
        if line.sub_requests is not None:
            turns += len(line.sub_requests)
            pauses_ns.extend(turn.tool_duration_ns for turn in line.sub_requests[:-1])
        for item in line.sub_requests or (line,):
            prompts.append(item.input_toks)
            outputs.append(item.output_toks)
            tenants[line.tenant] += 1
            prefix = prefix_of(item) if workload.has_prefixes else None
            if prefix is not None:
                prefixes.add(prefix, item.input_toks)
    arrivals = np.array(times, dtype=np.int64)
    span_s = float(arrivals[-1] - arrivals[0]) / NS_PER_S
    bin_s, rates = _rates(arrivals)
    facts = workload.facts
    tokens = facts.prompt_tokens + facts.output_tokens
    return Description(
        source=workload.source,
        format=workload.format,
        lines=facts.lines,
        requests=facts.requests,
        sessions=facts.sessions,
        turns_mean=turns / facts.sessions if facts.sessions else 0.0,
        tool_s_mean=float(np.mean(pauses_ns)) / NS_PER_S if pauses_ns else 0.0,
        first_s=float(arrivals[0]) / NS_PER_S,
        last_s=float(arrivals[-1]) / NS_PER_S,
        rate_per_s=len(arrivals) / span_s if span_s else 0.0,
        gap_cv=_gap_cv(arrivals),
        peak_per_s=int(np.unique(arrivals // NS_PER_S, return_counts=True)[1].max()),
        rate_bin_s=bin_s,
        rates_per_s=rates,
        prompt=_lengths(np.array(prompts, dtype=np.int64)),
        output=_lengths(np.array(outputs, dtype=np.int64)),
        tokens_per_s=tokens / span_s if span_s else 0.0,
        tenants=sorted(tenants.items(), key=lambda item: (-item[1], item[0])),
        sharing=prefixes.sharing(),
        notes=workload.notes,
    )


def _rates(arrivals: Ints) -> tuple[float, list[float]]:
    span_ns = int(arrivals[-1] - arrivals[0])
    if not span_ns:
        return 0.0, []
    width_ns = -(-(span_ns + 1) // RATE_BINS)
    counts = np.bincount((arrivals - arrivals[0]) // width_ns, minlength=1)
    bin_s = width_ns / NS_PER_S
    return bin_s, (counts / bin_s).tolist()


def _gap_cv(arrivals: Ints) -> float:
    gaps = np.diff(arrivals)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean else 0.0


def _lengths(values: Ints) -> Lengths:
    parts = dict(zip(_PERCENTILES, np.percentile(values, _PERCENTILES).tolist(), strict=True))
    return Lengths(
        min=int(values.min()),
        mean=float(values.mean()),
        p50=parts[50],
        p90=parts[90],
        p95=parts[95],
        p99=parts[99],
        max=int(values.max()),
        total=int(values.sum()),
        histogram=_histogram(values),
    )


def _histogram(values: Ints) -> list[tuple[int, int]]:
    """(smallest length, requests), each bin twice as wide as the one before."""
    bins = np.bincount(np.frexp(values.astype(np.float64))[1] - 1)
    found = [(1 << power, count) for power, count in enumerate(bins.tolist())]
    while found and not found[0][1]:
        found.pop(0)
    return found


class _PrefixBook:
    """Hashes of all prefixes seen so far, block by block.

    A prefix hash is a running sum of mixed block hashes, each weighted by its place, so that it
    comes out of numpy at once; 64 bits make a false match improbable at these numbers.
    """

    def __init__(self) -> None:
        rng = np.random.Generator(np.random.PCG64(0x5EED))
        top = 2**64 - 1
        self._coefficients = rng.integers(0, top, PREFIX_BLOCK_TOKENS, np.uint64) | np.uint64(1)
        self._places = rng.integers(0, top, 4096, np.uint64) | np.uint64(1)
        self._seen: set[int] = set()
        self._requests = self._prompt_tokens = self._shared_tokens = 0
        self._is_partial = False

    def add(self, prefix: Prefix, prompt_tokens: int) -> None:
        """Look a prompt up, then remember it."""
        self._requests += 1
        if len(self._seen) > PREFIX_BLOCKS_MAX:
            self._is_partial = True
            return
        size, chain = self._chain(prefix, prompt_tokens)
        self._prompt_tokens += prompt_tokens
        hits = 0
        while hits < len(chain) and chain[hits] in self._seen:
            hits += 1
        self._shared_tokens += min(hits * size, prompt_tokens)
        self._seen.update(chain[hits:])

    def sharing(self) -> Sharing:
        """The result."""
        return Sharing(self._requests, self._prompt_tokens, self._shared_tokens, self._is_partial)

    def _chain(self, prefix: Prefix, prompt_tokens: int) -> tuple[int, list[int]]:
        if prefix.token_ids is None:
            # Equal ids at the same place mean equal prefixes: the id alone would do, the place
            # keeps blocks of unequal sizes apart.
            blocks = np.array(prefix.hash_ids, dtype=np.int64).astype(np.uint64)
            return prefix.hash_block_tokens, self._prefix_hashes(_mixed(blocks))
        count = min(len(prefix.token_ids), prompt_tokens) // PREFIX_BLOCK_TOKENS
        ids = prefix.token_ids[: count * PREFIX_BLOCK_TOKENS].astype(np.uint64)
        values = (ids.reshape(count, PREFIX_BLOCK_TOKENS) * self._coefficients).sum(
            axis=1, dtype=np.uint64
        )
        return PREFIX_BLOCK_TOKENS, self._prefix_hashes(_mixed(values))

    def _prefix_hashes(self, blocks: npt.NDArray[np.uint64]) -> list[int]:
        if len(blocks) > len(self._places):
            more = np.cumsum(np.resize(self._places, len(blocks)), dtype=np.uint64)
            self._places = np.concatenate((self._places, more[len(self._places) :] | np.uint64(1)))
        weighted = blocks * self._places[: len(blocks)]
        chain: list[int] = np.cumsum(weighted, dtype=np.uint64).tolist()
        return chain


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers that leaves no linear structure (one step of splitmix64).

    The constant comes first: a block of zeros must count as something.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
