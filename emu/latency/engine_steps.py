"""What an `EngineModel` adds to the steps and the requests of one replica.

Owns the sampler's cost, the engine's part of a step (`EngineSteps`), the API server before and
behind the engine's loop (`Intake`, `OutputStream`), and the variation of steps (`Jitter`). Pure
integer arithmetic.
"""

from __future__ import annotations

import functools
import math
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, count, cycle
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from emu.latency.base import BatchShape, Ends
from emu.latency.engine import REFERENCE_GBYTES_PER_S, EagerCalls, EngineModel, HostCosts, padded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# What choosing tokens costs: the sampler's GPU time, and what penalties make the host wait.
#
# `latency.sampling` and `latency.penalties` decide; requests without sampling parameters get those
# of the model's published generation config. Nucleus sampling (`top_p`) needs the logits in order:
# vLLM up to 0.15 sorts the whole vocabulary of every sequence at every step, later versions cut it
# with one kernel from 8 rows on.


Method = Literal["greedy", "random", "top_p"]
_BYTES_PER_LOGIT: Final = {"greedy": 10, "random": 26, "top_p": 26}
"""Traffic: widened to 32 bits and searched; softmax, noise and search besides."""
_KERNELS: Final = {"greedy": 4, "random": 10, "top_p": 10}
_KERNEL_NS: Final = 2_000
_TRITON_ROWS_MIN: Final = 8
_REACHED: Final = 0.82
"""Part of the memory bandwidth that element-wise kernels reach."""
_TABLE: Final = Path(__file__).parent.parent / "catalogue" / "sampling.toml"


class Sampling(NamedTuple):
    """How tokens are chosen."""

    method: Method
    penalties: bool


@functools.cache
def _published() -> dict[str, dict[str, object]]:
    return tomllib.loads(_TABLE.read_text("utf-8"))


def published_sampling(model: str) -> Sampling:
    """What the generation config of a model (catalogue name) implies; else the table's default."""
    table = _published()
    entry = table.get(model, table["default"])
    method = str(entry["method"])
    assert method in _KERNELS
    return Sampling(method, bool(entry.get("penalties", False)))  # type: ignore[arg-type]


def resolve_sampling(sampling: str, penalties: str, model: str) -> Sampling:
    """The configuration's words ("auto" = the model's), resolved."""
    published = published_sampling(model)
    method = published.method if sampling == "auto" else sampling
    if penalties == "auto":
        has_penalties = published.penalties and sampling == "auto"
    else:
        has_penalties = penalties == "on"
    return Sampling(method, has_penalties)  # type: ignore[arg-type]


class SamplerCost:
    """Cost of choosing tokens on one GPU for one vocabulary."""

    def __init__(
        self, engine: EngineModel, sampling: Sampling, vocab: int, gbytes_per_s: float
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._vocab = vocab
        self._gbytes_per_s = gbytes_per_s
        has_penalties = bool(sampling.penalties)
        self.penalty_ns = engine.penalty_ns if has_penalties else 0
        """What the GPU waits for the host in a step: penalties need the ids of the last one."""
        self.penalty_sequence_ns = engine.penalty_sequence_ns if has_penalties else 0
        """The same for each row."""

    def gpu_ns(self, rows: int) -> int:
        """GPU time for so many rows of logits."""
        engine, method = self._engine, self._sampling.method
        logits = rows * self._vocab
        traffic = _BYTES_PER_LOGIT[method] * logits
        total = float(_KERNELS[method] * _KERNEL_NS)
        if method == "top_p":
            rate = engine.sort_ns_per_million
            if engine.sampler == "triton" and rows >= _TRITON_ROWS_MIN:
                rate = engine.triton_ns_per_million
            # The stated rate is that of all kernels of the path together.
            total = engine.sampler_ns + (
                rate * logits / 1e6 * REFERENCE_GBYTES_PER_S / self._gbytes_per_s
            )
            traffic = 0
        if self._sampling.penalties:
            traffic += engine.penalty_logit_bytes * logits
        return round(total + traffic / (self._gbytes_per_s * _REACHED))


# --------------------------------------------------------------------------------------------------
# The engine's part of a step: the model of the engine, bound to a server's limits, a model's
# vocabulary and a GPU. Backends that know kernels (roofline) ask it for the token count at which a
# batch runs, what a step adds on the GPU, and the least time that the host lets a step take.


class EngineSteps:
    """An engine that serves one model on one kind of GPU."""

    def __init__(
        self,
        model: EngineModel,
        sampling: Sampling,
        *,
        layers: int,
        vocab: int,
        gbytes_per_s: float,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        overlapped: bool,
        fused_bytes_max: int = 0,
        eager: EagerCalls | None = None,
    ) -> None:
        """`overlapped`: steps are scheduled asynchronously (`scheduler.async_scheduling`).
        `fused_bytes_max`: the largest all-reduce that is one kernel with the norm after it.
        `eager`: what the host calls in each step; None = steps are compiled and captured.
        """
        self.model = model
        # Asked for in every step: a compiled build reads its own fields faster than a Struct's.
        self._host_step_ns = model.host_step_ns
        self._host_sequence_ns = model.host_sequence_ns
        self._host_prompt_ns = model.host_prompt_ns
        self._step_ns = model.step_ns
        self._graph_layer_ns = model.graph_layer_ns
        self.sampler = SamplerCost(model, sampling, vocab, gbytes_per_s)
        self._penalty_ns = self.sampler.penalty_ns
        self._penalty_sequence_ns = self.sampler.penalty_sequence_ns
        self.graph_limit = model.graph_limit(max_num_seqs, max_num_batched_tokens)
        self.fused_bytes_max = fused_bytes_max
        self._overlapped = overlapped
        self._launches_ns = layers * model.layer_launches * model.launch_ns
        if eager is not None:
            self._launches_ns = eager.host_ns(model.eager_call_ns, model.launch_ns)

    def tokens(self, tokens: int) -> int:
        """The count at which the token-wise layers of a batch run."""
        return padded(tokens, self.graph_limit)

    def host_costs(self) -> HostCosts:
        """The same for a backend that adds one figure for each step: GPU time beside kernels, and
        host time that is not overlapped."""
        model = self.model
        step_ns, sequence_ns = model.step_ns, 0
        if not self._overlapped:
            step_ns += model.host_step_ns
            sequence_ns = model.host_sequence_ns
        return HostCosts(
            step_ns=step_ns,
            sequence_ns=sequence_ns,
            graph_layer_ns=model.graph_layer_ns,
            launched_layer_ns=model.graph_layer_ns,
            first_use_ns=(),
        )

    def step_ns(self, layers: int) -> int:
        """GPU time of a step beside its kernels."""
        return self._step_ns + layers * self._graph_layer_ns

    def host_bounds_ns(self, shape: BatchShape) -> tuple[int, int]:
        """(what a step takes at least, however fast its kernels are; what it takes besides).

        Overlapped host work bounds a step from below; what is not overlapped comes on top.
        """
        tokens = shape.decode_count + sum(shape.prefill_new)
        if shape.verify is not None:
            tokens += shape.verify.tokens
        if shape.padded_tokens > tokens:
            tokens = shape.padded_tokens
        return self.bounds_ns(tokens, shape.sequences, len(shape.prefill_new))

    def bounds_ns(self, tokens: int, sequences: int, prompts: int) -> tuple[int, int]:
        """The same of a step of so many tokens and sequences, and chunks of prompts."""
        host_ns = self._host_step_ns + sequences * self._host_sequence_ns
        if prompts:
            host_ns += prompts * self._host_prompt_ns
        launches_ns = self._launches_ns if tokens > self.graph_limit else 0
        exposed_ns = self._penalty_ns + sequences * self._penalty_sequence_ns
        if self._overlapped:
            return host_ns + launches_ns, exposed_ns
        return launches_ns, exposed_ns + host_ns


# --------------------------------------------------------------------------------------------------
# The front end of an engine: the API server between a client and the engine's loop.
#
# Owns two queues, each with one CPU: the intake (HTTP, validation, tokenizer, hand-over) and the
# stream of output events (detokenizer, server-sent events, transport). Pure integer arithmetic on
# instants; the gateway and the replicas say what arrives when. What a client measures is the
# engine's time plus these delays.
#
# Output. A step ends with one event for each sequence that got a token. The events of a step are
# handled one after another; the next step's wait until they are done. If steps come faster than
# their events can be handled, the queue grows and tokens come later and later, while the engine
# goes on: the front end saturates. A token stands in the middle of its step's events.
#
# A leap of many steps is taken at once, and gives what stepping gives: when the CPU is free after
# step j of a run is max over k <= j of (end of step k + events of steps k to j).


class Intake:
    """What a request passes before the engines' scheduler can see it; first come, first served."""

    def __init__(
        self, models: Sequence[EngineModel], own: Mapping[int, EngineModel] | None = None
    ) -> None:
        """One API server for each of `models` (at least one); requests go to them in turn.

        `own`: of each replica that an outside router can choose, by its id. The servers behind a
        router outside are the replicas' own: one that is busy delays no other.
        """
        assert models
        self._costs = [(m.intake_ns, m.batch_wait_ns, m.prompt_token_ns) for m in models]
        self._last = len(models) - 1
        self._free_ns = [0] * len(models)
        self._next = 0
        self._last_ready_ns = 0
        self._own = {pin: Intake([model]) for pin, model in (own or {}).items()}

    def ready_ns(self, now_ns: int, prompt_tokens: int, pin: int = -1) -> int:
        """When a request that arrives now is with an engine; `pin`: with that replica's."""
        if pin >= 0 and pin in self._own:
            return self._own[pin].ready_ns(now_ns, prompt_tokens)
        at = self._next
        self._next = at + 1 if at < self._last else 0
        intake_ns, wait_ns, token_ns = self._costs[at]
        free_ns = self._free_ns[at]
        self._free_ns[at] = free_ns = (now_ns if now_ns > free_ns else free_ns) + intake_ns
        # The tokenizer's thread is another one; its order is that of arrival.
        ready_ns = free_ns + wait_ns + prompt_tokens * token_ns
        if ready_ns < self._last_ready_ns:
            return self._last_ready_ns
        self._last_ready_ns = ready_ns
        return ready_ns


class OutputStream:
    """Output events of one replica on their way to clients."""

    def __init__(self, model: EngineModel) -> None:
        self._event_ns = model.output_event_ns
        self._output_ns = model.output_ns
        self._free_ns = 0
        self.delay_ns = 0
        """Of the tokens of the last single step."""

    def step(self, end_ns: int, events: int) -> int:
        """A step ended with so many events; how much later a client has its token."""
        start_ns = self._free_ns
        if end_ns > start_ns:
            start_ns = end_ns
        work_ns = events * self._event_ns
        self._free_ns = start_ns + work_ns
        delay_ns = self.delay_ns = start_ns - end_ns + work_ns // 2 + self._output_ns
        return delay_ns

    def turns(self, ends: Sequence[int], first: int, last: int, events: Sequence[int]) -> None:
        """Steps `first` to `last` of those that end at `ends`; so many events in turn."""
        if last <= first:
            return
        at, event_ns = first % len(events), self._event_ns
        works = [number * event_ns for number in chain(events[at:], events[:at])]
        rounds, more = divmod(last - first, len(works))
        latest_ns = max(map(sub, ends[first:last], accumulate(cycle(works), initial=0)))
        free_ns = latest_ns if latest_ns > self._free_ns else self._free_ns
        self._free_ns = free_ns + rounds * sum(works) + sum(works[:more])

    def run(self, start_ns: int, ends: Ends, first: int, events: int, grows: bool) -> int:
        """Steps that end at `start_ns + ends[first:]`, each with so many events: the last delay.

        `grows`: no step after the first is shorter than the one before it.
        """
        more, work_ns = len(ends) - 1 - first, events * self._event_ns
        last_ns, free_ns = start_ns + ends[-1], self._free_ns
        if grows:  # a convex function of the step is largest at one of its ends
            begin_ns, first_ns = last_ns - more * work_ns, start_ns + ends[first]
            if begin_ns >= first_ns and begin_ns >= free_ns:  # the last step finds the CPU free
                self._free_ns = last_ns + work_ns
                return work_ns // 2 + self._output_ns
            begin_ns = max(begin_ns, first_ns)
        else:
            begin_ns = start_ns + max(map(sub, ends[first:], count(0, work_ns)))
        self._free_ns = free_ns = max(begin_ns, free_ns) + (more + 1) * work_ns
        return free_ns - work_ns - last_ns + work_ns // 2 + self._output_ns


# --------------------------------------------------------------------------------------------------
# How the steps of a real engine vary around their mean: a seeded factor for each step.
#
# Every step takes its time times a factor near one (log-normal, standard deviation `jitter_step`),
# and now and then (`straggler_part` of all steps) a pause on top, of exponential length: a
# collection of garbage, a page of memory, another process. Both are neutral in the mean: constants
# were fitted to means of real steps, which contain them. Distributions are an engine's
# (`EngineModel`), scaled from the percentiles of measured runs.
#
# Chance is counted, not drawn: step n of a replica has its factor from a hash of (seed, replica,
# n). So a leap of many steps equals stepping, a cut leap needs no rewinding, and replicas do not
# disturb each other. Values come from tables of quantiles, in integers.


_BITS: Final = 12
_QUANTILES: Final = 1 << _BITS
_SHIFT: Final = 20
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB


class Jitter:
    """The factors of one replica's steps."""

    def __init__(self, engine: EngineModel, seed: int, replica_id: int) -> None:
        self._key = zlib.crc32(f"jitter.{seed}.{replica_id}".encode()) * _GOLDEN & _MASK
        self._factors = _factors(engine.jitter_step)
        self._pauses = _pauses(engine.straggler_ns)
        self._part = round(engine.straggler_part * 2**32)
        self._mean_ns = round(engine.straggler_part * engine.straggler_ns)
        self.counted = 0
        """Steps of a pipeline, whose batches are in flight together."""

    def step(self, number: int, cost_ns: int) -> int:
        """What step `number` takes instead of `cost_ns`."""
        bits = ((number + 1) * _GOLDEN + self._key) & _MASK
        bits = ((bits ^ (bits >> 30)) * _MIX_A) & _MASK
        bits = ((bits ^ (bits >> 27)) * _MIX_B) & _MASK
        bits ^= bits >> 31
        taken = (cost_ns * int(self._factors[bits & (_QUANTILES - 1)])) >> _SHIFT
        taken -= self._mean_ns
        if (bits >> _BITS) & 0xFFFFFFFF < self._part:
            taken += int(self._pauses[bits >> (_BITS + 32) & (_QUANTILES - 1)])
        least = cost_ns >> 1
        return taken if taken > least else max(1, least)

    def run(self, number: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cumulative ends of the steps from `number` on, instead of `ends`."""
        import numpy as np

        costs = np.diff(ends, prepend=0)
        bits = np.arange(number + 1, number + 1 + len(ends), dtype=np.uint64)
        bits *= np.uint64(_GOLDEN)
        bits += np.uint64(self._key)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_A)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_B)
        bits ^= bits >> np.uint64(31)
        low = np.uint64(_QUANTILES - 1)
        taken = (costs * self._factors[(bits & low).astype(np.intp)]) >> _SHIFT
        taken -= self._mean_ns
        strays = (bits >> np.uint64(_BITS)) & np.uint64(0xFFFFFFFF) < np.uint64(self._part)
        if strays.any():
            which = (bits[strays] >> np.uint64(_BITS + 32)) & low
            taken[strays] += self._pauses[which.astype(np.intp)]
        np.maximum(taken, costs >> 1, out=taken)
        np.maximum(taken, 1, out=taken)
        found: NDArray[np.int64] = np.cumsum(taken)
        return found

    def stages(self, costs_ns: tuple[int, ...]) -> tuple[int, ...]:
        """The next batch of a pipeline: all its stages by one factor, a pause on the first."""
        self.counted += 1
        return self.spread(self.counted - 1, costs_ns)

    def spread(self, number: int, costs_ns: Sequence[int]) -> tuple[int, ...]:
        """The same of batch `number`."""
        whole = sum(costs_ns)
        taken = self.step(number, whole)
        spread = [taken * cost // whole for cost in costs_ns]
        spread[0] += taken - sum(spread)
        return tuple(spread)


@functools.cache
def _factors(deviation: float) -> NDArray[np.int64]:
    """Quantiles of the factor, mean 1, binary fixed point."""
    import statistics  # 5 ms, and few runs vary

    import numpy as np

    normal = statistics.NormalDist()
    values = [
        math.exp(deviation * normal.inv_cdf((index + 0.5) / _QUANTILES))
        for index in range(_QUANTILES)
    ]
    mean = math.fsum(values) / _QUANTILES
    return np.array([round(value / mean * (1 << _SHIFT)) for value in values], dtype=np.int64)


@functools.cache
def _pauses(mean_ns: int) -> NDArray[np.int64]:
    """Quantiles of a pause, ns."""
    import numpy as np

    values = [-math.log1p(-(index + 0.5) / _QUANTILES) for index in range(_QUANTILES)]
    mean = math.fsum(values) / _QUANTILES
    return np.array([round(value / mean * mean_ns) for value in values], dtype=np.int64)
