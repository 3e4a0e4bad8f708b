"""What one replica does by arithmetic: times of single passes, loads it can carry. Runs nothing.

    pace = pace_of(config)                  # of a configuration with one replica of each role
    pace.obstacle(objectives, loads)        # why no cluster of such replicas can meet; ""
    pace.split(objectives, loads)           # replicas of each role, as real numbers

The times are those of the latency backend that the runs use, so a pass takes in a run what it takes
here. Two kinds of statement follow. A request alone on a replica is a lower bound of its TTFT, TPOT
and E2E in any run: an objective below it is impossible. What a replica carries when it never waits
is an estimate, where a search begins.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from emu.apps.plan.question import Objective
from emu.cluster.backends import make_latency
from emu.cluster.plan import ReplicaPlan, make_plan
from emu.config.schema import Config
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.corrected import CorrectedBackend
from emu.report.table import number
from emu.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from emu.latency.engine import EngineModel

_BUSY_MAX: Final = 0.95
"""Part of its time that a replica can be kept busy, as an estimate."""
_HALVINGS: Final = 30


class Loads(msgspec.Struct, frozen=True):
    """The traffic in numbers."""

    prompts: npt.NDArray[np.int64]
    """Lengths of prompts, ascending."""
    outputs: npt.NDArray[np.int64]
    """Lengths of outputs, ascending."""
    rate_per_s: float
    span_s: float
    """From the first arrival to the last."""
    is_shared: bool
    """Some prompts have prefixes in common, or are not known before the run."""

    @property
    def prompt(self) -> int:
        """Mean tokens of a prompt."""
        return max(1, round(float(self.prompts.mean()))) if len(self.prompts) else 1

    @property
    def output(self) -> int:
        """Mean tokens of an output."""
        return max(1, round(float(self.outputs.mean()))) if len(self.outputs) else 1


def at_quantile(lengths: npt.NDArray[np.int64], at: str) -> int:
    """A length that a part `at` (`p95`) of the requests does not exceed, rounded down."""
    if not len(lengths):
        return 1
    return int(lengths[max(0, math.floor((len(lengths) - 1) * int(at[1:]) / 100))])


class Pace:
    """One kind of replica."""

    def __init__(self, replica: ReplicaPlan, backend: LatencyBackend) -> None:
        self._backend = backend
        self._chunk = max(1, replica.scheduler.tokens_max)
        self.requests_max = replica.scheduler.requests_max
        self.kv_tokens = replica.num_blocks * replica.scheduler.block_size
        self.drafts = replica.draft is not None or bool(replica.features)
        """Steps may give more than a token, so that they bound nothing."""

    def with_engine(self, engine: EngineModel) -> Pace:
        """The same with other constants of the engine."""
        other = copy.copy(self)
        inner = (
            self._backend.inner if isinstance(self._backend, CorrectedBackend) else self._backend
        )
        other._backend = CorrectedBackend(inner, engine)
        return other

    def prompt_ns(self, tokens: int) -> int:
        """One prompt, alone on the replica."""
        total = done = 0
        while done < tokens:
            new = min(self._chunk, tokens - done)
            shape = BatchShape(prefill_new=[new], prefill_context=[done], sequences=1)
            total += self._backend.iteration_ns(shape)
            done += new
        return total

    def prompt_share_ns(self, tokens: int) -> float:
        """One of many prompts of that length, in full batches."""
        if tokens >= self._chunk:
            return float(self.prompt_ns(tokens))
        count = max(1, self._chunk // tokens)
        shape = BatchShape(
            prefill_new=[tokens] * count, prefill_context=[0] * count, sequences=count
        )
        return self._backend.iteration_ns(shape) / count

    def step_ns(self, requests: int, history: int) -> int:
        """A step of so many decodes with `history` tokens before each."""
        shape = BatchShape(
            decode_count=requests,
            decode_context_sum=requests * history,
            decode_context_max=history,
            decode_context_min=history,
            sequences=requests,
        )
        return self._backend.iteration_ns(shape)

    def obstacle(self, objectives: Sequence[Objective], loads: Loads) -> str:
        """Why a request alone misses an objective; empty if it does not."""
        for one in objectives:
            told, alone_ns = "", 0
            if one.metric == "ttft" and not loads.is_shared:
                tokens = at_quantile(loads.prompts, one.at)
                told, alone_ns = f"a prompt of {tokens:,} tokens", self.prompt_ns(tokens)
            elif one.metric == "tpot" and not self.drafts and loads.output > 1:
                least = int(loads.prompts[0]) if len(loads.prompts) else 1
                told, alone_ns = "a step of one request", self.step_ns(1, least)
            elif one.metric == "e2e" and not self.drafts:
                tokens = at_quantile(loads.outputs, one.at)
                told, alone_ns = (
                    f"an output of {tokens:,} tokens",
                    (tokens - 1) * self.step_ns(1, 1),
                )
            if alone_ns > one.limit_ms * NS_PER_MS:
                limit = f"{one.label} <= {one.limit_ms:g} ms"
                return f"{told} alone takes {number(alone_ns / NS_PER_MS)} ms ({limit})"
        return ""

    def split(self, objectives: Sequence[Objective], loads: Loads) -> tuple[float, float]:
        """Replicas that prefill and that decode, where nothing waits."""
        prompt_s = self.prompt_share_ns(loads.prompt) / NS_PER_S
        step_ms = step_limit_ms(objectives, loads)
        history = loads.prompt + loads.output // 2
        most = self._most_at_once(loads)
        batch = _largest(most, lambda n: self.step_ns(n, history) <= step_ms * NS_PER_MS)
        step_s = self.step_ns(batch, history) / NS_PER_S
        return (
            loads.rate_per_s * prompt_s / _BUSY_MAX,
            loads.rate_per_s * loads.output * step_s / batch,
        )

    def colocated(self, objectives: Sequence[Objective], loads: Loads) -> float:
        """Replicas that do both, where nothing waits: prompts make every step longer."""
        prompt_s = self.prompt_share_ns(loads.prompt) / NS_PER_S
        step_ms = step_limit_ms(objectives, loads)
        history = loads.prompt + loads.output // 2
        most = self._most_at_once(loads)

        def is_carried(batch: int) -> bool:
            # `batch` decodes at once are rate x output x step of requests; prompts take their part.
            step_s = self.step_ns(batch, history) / NS_PER_S
            whole_s = step_s + batch / loads.output * prompt_s
            return whole_s * 1000 <= step_ms

        batch = _largest(most, is_carried)
        whole_s = self.step_ns(batch, history) / NS_PER_S + batch / loads.output * prompt_s
        return loads.rate_per_s * loads.output * whole_s / batch / _BUSY_MAX

    def _most_at_once(self, loads: Loads) -> int:
        """Requests that a replica's KV and scheduler hold."""
        return max(1, min(self.requests_max, self.kv_tokens // (loads.prompt + loads.output)))


def step_limit_ms(objectives: Sequence[Objective], loads: Loads) -> float:
    """The longest mean step that objectives on TPOT and E2E allow; infinite without them."""
    limits = [one.limit_ms for one in objectives if one.metric == "tpot"]
    limits += [one.limit_ms / loads.output for one in objectives if one.metric == "e2e"]
    return min(limits, default=math.inf)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, if those below it do; at least 1."""
    low, high = 1, most
    for _ in range(_HALVINGS):
        if low >= high:
            break
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def pace_of(config: Config, source: str, group: int = 0) -> Pace | None:
    """The pace of the replicas of a group; None: a real process says what a pass takes.

    Raises InputError for a configuration that cannot run.
    """
    plan = make_plan(config, source)
    replica = next(one for one in plan.replicas if one.group == group)
    backend = make_latency(replica.latency_context(plan.config))
    return None if backend.foreign else Pace(replica, backend)
