"""A workload made from distributions: arrivals, lengths, sessions, tenants, prefixes, images.

Each purpose has its own random stream, and lines are made a block at a time, so that a million
requests cost little memory and a second pass repeats the first. Token ids are given (as runs)
only where tokens are shared: in sessions whose context grows, and in groups with a common prefix.
A shared prefix comes in front of the drawn prompt and adds to its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from emu.config.schema import ArrivalsTable, ImagesTable, LengthsTable, SyntheticTable
from emu.errors import InputError
from emu.rng import rng_stream
from emu.units import NS_PER_S, s_to_ns
from emu.workload.items import TOKENS_MAX, Block, Ints, Line, Notes, Turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# --------------------------------------------------------------------------------------------------
# Arrival processes, in chunks: exact in law (no cut tails), in integer ns, cheap in numpy.
#
# Time-varying rates are drawn by inversion: unit-exponential steps in expected arrivals, mapped
# back to time by the inverse of the cumulative rate. A stream gives the same times however its
# caller slices it only if the slices are the same; every pass over a workload uses equal slices.

Floats: TypeAlias = "npt.NDArray[np.float64]"

NEVER_NS = 2**62
"""In place of arrivals that a process that ends would never make."""


class GapStream:
    """Independent gaps; each is rounded to ns, so sums are exact."""

    def __init__(self, draw_s: Callable[[int], Floats]) -> None:
        self._draw_s = draw_s
        self._now_ns = 0

    def take(self, count: int) -> Ints:
        """The next arrivals, in ns."""
        import numpy as np

        gaps = np.rint(self._draw_s(count) * NS_PER_S).astype(np.int64)
        times: Ints = np.cumsum(gaps) + self._now_ns
        if count:
            self._now_ns = int(times[-1])
        return times


class EvenStream:
    """Arrivals at 0, gap, 2 gap ...; a gap of 0 puts all at 0."""

    def __init__(self, gap_ns: float) -> None:
        self._gap_ns = gap_ns
        self._done = 0

    def take(self, count: int) -> Ints:
        """The next arrivals, in ns."""
        import numpy as np

        index = np.arange(self._done, self._done + count, dtype=np.int64)
        self._done += count
        times: Ints = np.rint(index * self._gap_ns).astype(np.int64)
        return times


class InvertedStream:
    """A Poisson process with a rate that changes in time."""

    def __init__(self, rng: np.random.Generator, to_time_s: Callable[[Floats], Floats]) -> None:
        self._rng = rng
        self._to_time_s = to_time_s
        self._expected = 0.0

    def take(self, count: int) -> Ints:
        """The next arrivals, in ns."""
        import numpy as np

        steps = np.cumsum(self._rng.standard_exponential(count)) + self._expected
        if count:
            self._expected = float(steps[-1])
        times = np.minimum(self._to_time_s(steps) * NS_PER_S, float(NEVER_NS))
        return np.rint(times).astype(np.int64)


def arrival_stream(
    table: ArrivalsTable, seed: int, config_source: str
) -> GapStream | EvenStream | InvertedStream:
    """The process that the table describes, from the start. Raises InputError."""
    rng = rng_stream(seed, "workload.arrivals")
    rate = table.rate_per_s
    if table.process == "poisson":
        return GapStream(lambda count: rng.standard_exponential(count) / rate)
    if table.process == "gamma":
        shape = 1 / table.cv**2
        return GapStream(lambda count: rng.standard_gamma(shape, count) / (rate * shape))
    if table.process == "constant":
        return EvenStream(NS_PER_S / rate)
    if table.process == "all_at_once":
        return EvenStream(0.0)
    if table.process == "burst":
        return InvertedStream(rng, _invert_bursts(table, config_source))
    return InvertedStream(rng, _invert_points(table.points, config_source))


def _invert_bursts(table: ArrivalsTable, config_source: str) -> Callable[[Floats], Floats]:
    """Each period starts with a burst at its own rate; the rest has the base rate."""
    import numpy as np

    length_s, every_s = table.burst_length_s, table.burst_every_s
    if length_s >= every_s:
        problem = f"must be less than burst_every_s ({every_s:g}), not {length_s:g}"
        raise InputError(config_source, None, "workload.synthetic.arrivals.burst_length_s", problem)
    in_burst = table.burst_rate_per_s * length_s
    in_period = in_burst + table.rate_per_s * (every_s - length_s)

    def to_time_s(expected: Floats) -> Floats:
        period = np.floor(expected / in_period)
        rest = expected - period * in_period
        inside = np.where(
            rest < in_burst,
            rest / table.burst_rate_per_s,
            length_s + (rest - in_burst) / table.rate_per_s,
        )
        times: Floats = period * every_s + np.minimum(inside, every_s)
        return times

    return to_time_s


def _invert_points(points: list[list[float]], config_source: str) -> Callable[[Floats], Floats]:
    """Rates linear between the points, constant before the first and after the last."""
    import numpy as np

    times, rates = _check_points(points, config_source)
    steps = np.diff(times)
    slopes = np.diff(rates) / steps if len(steps) else np.zeros(0)
    reached = np.concatenate(([0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * steps)))
    slopes = np.append(slopes, 0.0)

    def to_time_s(expected: Floats) -> Floats:
        at = np.searchsorted(reached, expected, side="right") - 1
        left = expected - reached[at]
        rate = rates[at]
        # The root of left = rate t + slope t^2 / 2 without cancellation. Rate 0 forever: never.
        root = rate + np.sqrt(np.maximum(rate * rate + 2 * slopes[at] * left, 0.0))
        inside = np.where(left > 0, math.inf, 0.0)
        np.divide(2 * left, root, out=inside, where=root > 0)
        return times[at] + inside

    return to_time_s


def _check_points(points: list[list[float]], config_source: str) -> tuple[Floats, Floats]:
    import numpy as np

    field = "workload.synthetic.arrivals.points"
    if not points:
        raise InputError(config_source, None, field, "piecewise needs at least one point")
    for index, point in enumerate(points):
        here = f"{field}[{index}]"
        if len(point) != 2 or not all(map(math.isfinite, point)):
            raise InputError(config_source, None, here, "must be a pair [second, rate]")
        if point[1] < 0 or point[0] < 0:
            raise InputError(config_source, None, here, "second and rate must be at least 0")
        if index and point[0] <= points[index - 1][0]:
            raise InputError(config_source, None, here, "must be later than the point before")
    if not any(rate for _, rate in points):
        raise InputError(config_source, None, field, "must have a rate above 0")
    table = np.array(points, dtype=np.float64)
    if table[0, 0] > 0:
        table = np.vstack(([0.0, table[0, 1]], table))
    return table[:, 0], table[:, 1]


# --------------------------------------------------------------------------------------------------
# Lengths of prompts and outputs: samplers over whole numbers in [min, max].

_ZIPF_RANGE_MAX: Final = 1 << 24


class Sampler(Protocol):
    """A source of lengths."""

    def take(self, count: int) -> Ints:
        """The next `count` lengths, in tokens."""


class _Fixed:
    def __init__(self, value: int) -> None:
        self._value = value

    def take(self, count: int) -> Ints:
        import numpy as np

        return np.full(count, self._value, dtype=np.int64)


class _Uniform:
    def __init__(self, rng: np.random.Generator, low: int, high: int) -> None:
        self._rng, self._low, self._high = rng, low, high

    def take(self, count: int) -> Ints:
        import numpy as np

        return self._rng.integers(self._low, self._high, count, dtype=np.int64, endpoint=True)


class _LogNormal:
    def __init__(self, rng: np.random.Generator, table: LengthsTable) -> None:
        self._rng, self._table = rng, table

    def take(self, count: int) -> Ints:
        import numpy as np

        table = self._table
        # The exponent is bounded so that a wild sigma gives the largest length, not infinity.
        power = np.minimum(self._rng.standard_normal(count) * table.sigma, 600.0)
        values = np.rint(np.minimum(table.median * np.exp(power), float(table.max)))
        return np.clip(values.astype(np.int64), table.min, table.max)


class _Zipf:
    """P(length) falls with (rank)^-theta, the smallest length having rank 1.

    The cumulative weights are a table, so the law is exact and the same everywhere.
    """

    def __init__(self, rng: np.random.Generator, table: LengthsTable) -> None:
        import numpy as np

        self._rng = rng
        self._low = table.min
        ranks = np.arange(1, table.max - table.min + 2, dtype=np.float64)
        self._reached = np.cumsum(ranks**-table.theta)

    def take(self, count: int) -> Ints:
        import numpy as np

        drawn = self._rng.random(count) * self._reached[-1]
        ranks = np.searchsorted(self._reached, drawn, side="right")
        lengths: Ints = np.minimum(ranks, len(self._reached) - 1).astype(np.int64)
        return lengths + self._low


class _Trace:
    """Lengths of randomly drawn rows of a file. Two samplers of one file draw the same rows."""

    def __init__(self, rng: np.random.Generator, lengths: Ints) -> None:
        self._rng, self._lengths = rng, lengths

    def take(self, count: int) -> Ints:
        return self._lengths[self._rng.integers(0, len(self._lengths), count)]


def length_sampler(
    table: LengthsTable, *, is_prompt: bool, base_dir: Path, seed: int, config_source: str
) -> Sampler:
    """The sampler of prompts or outputs. Raises InputError."""
    import numpy as np

    name = "prompt" if is_prompt else "output"
    key = f"workload.synthetic.{name}"
    if table.distribution == "fixed":
        return _Fixed(table.value)
    if table.min > table.max:
        problem = f"must be at most {key}.max ({table.max}), not {table.min}"
        raise InputError(config_source, None, f"{key}.min", problem)
    if table.distribution == "trace":
        if not table.path:
            raise InputError(config_source, None, f"{key}.path", "needed for distribution 'trace'")
        column = _column_of_file(base_dir / table.path, table.path, is_prompt=is_prompt)
        rng = rng_stream(seed, f"workload.trace_rows:{table.path}")
        return _Trace(rng, np.clip(column, table.min, table.max))
    rng = rng_stream(seed, f"workload.{name}")
    if table.distribution == "uniform":
        return _Uniform(rng, table.min, table.max)
    if table.distribution == "lognormal":
        return _LogNormal(rng, table)
    if table.max - table.min >= _ZIPF_RANGE_MAX:
        problem = f"zipf takes ranges of at most {_ZIPF_RANGE_MAX} lengths"
        raise InputError(config_source, None, f"{key}.max", problem)
    return _Zipf(rng, table)


def _column_of_file(path: Path, source: str, *, is_prompt: bool) -> Ints:
    """The lengths of all requests of a workload file (8 bytes each)."""
    import numpy as np

    parts: list[Ints] = []
    from emu.workload.detect import open_source  # most lengths come from no file

    for block in open_source(path, source, "auto", None).blocks(Notes()):
        if block.details is None:
            parts.append(block.prompt_tokens if is_prompt else block.output_tokens)
            continue
        items = [item for line in block.details for item in line.sub_requests or (line,)]
        values = (item.input_toks if is_prompt else item.output_toks for item in items)
        parts.append(np.fromiter(values, np.int64, len(items)))
    lengths = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    if not len(lengths):
        raise InputError(source, 1, "$", "no usable row to draw lengths from")
    return lengths


# --------------------------------------------------------------------------------------------------
# Requests


if TYPE_CHECKING:
    pass


_BLOCK_REQUESTS: Final = 8192
_IMAGE_IDS: Final = 1 << 50
"""Ids of tokens that stand for images."""


REQUESTS_MAX: Final = 10_000_000
"""So many requests take hours to emulate; more are a slip, and would be read forever."""
TURNS_MAX: Final = 2_000_000
"""The same for turns of sessions, which are objects and not columns."""


def _highest_rate_per_s(table: ArrivalsTable) -> float:
    """A bound on the rate of arrivals of a process."""
    if table.process == "burst":
        return max(table.rate_per_s, table.burst_rate_per_s)
    if table.process == "piecewise":
        return max((point[1] for point in table.points if len(point) == 2), default=0.0)
    return table.rate_per_s


class SyntheticSource:
    """The lines of a `[workload.synthetic]` table, in order of arrival."""

    name = "synthetic"
    is_absolute = False
    has_arrivals = True
    prompt_field = "workload.synthetic.prompt"
    is_small = True

    def __init__(
        self, table: SyntheticTable, base_dir: Path, seed: int, config_source: str
    ) -> None:
        """Raises InputError if the table contradicts itself."""
        self._table = table
        self._base_dir = base_dir
        self._seed = seed
        self._config_source = config_source
        self._check()

    def _check(self) -> None:
        table = self._table
        key = "workload.synthetic"
        if table.sessions.turns_min > table.sessions.turns_max:
            problem = f"must be at most turns_max ({table.sessions.turns_max})"
            field = f"{key}.sessions.turns_min"
            raise self._error(field, f"{problem}, not {table.sessions.turns_min}")
        if table.images is not None and table.sessions.turns_max > 1:
            raise self._error(f"{key}.images", "means nothing in sessions of several turns")
        if table.prefix_groups and not table.prefix_tokens:
            raise self._error(f"{key}.prefix_tokens", "must be above 0 with prefix_groups")
        if table.duration_s and table.arrivals.process == "all_at_once":
            raise self._error(f"{key}.duration_s", "all_at_once needs a number of requests instead")
        turns = (table.sessions.turns_min + table.sessions.turns_max) / 2
        turns *= (3 + table.sessions.branches) / 4  # every second is (1 + branches) / 2 requests
        expected = table.requests * turns
        if table.duration_s:
            expected = table.duration_s * _highest_rate_per_s(table.arrivals) * turns
        most = REQUESTS_MAX if table.sessions.turns_max == 1 else TURNS_MAX
        if expected > most:
            name = "duration_s" if table.duration_s else "requests"
            problem = f"about {expected:,.0f} requests with their turns, more than {most:,}"
            raise self._error(f"{key}.{name}", problem)
        arrival_stream(table.arrivals, self._seed, self._config_source)

    def _error(self, field: str, problem: str) -> InputError:
        return InputError(self._config_source, None, field, problem)

    def rows_at(self, offsets: Ints) -> Iterator[Block]:
        """Never asked for: the lines are made in order of arrival."""
        raise AssertionError("a synthetic workload is never out of order")

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All lines; the same at every call."""
        import numpy as np

        table = self._table
        arrivals = arrival_stream(table.arrivals, self._seed, self._config_source)
        dealer = _Dealer(table, self._base_dir, self._seed, self._config_source)
        most = table.sessions.turns_max * (1 + table.sessions.branches) // 2
        rows = max(1, _BLOCK_REQUESTS // most)
        end_ns = s_to_ns(table.duration_s) if table.duration_s else NEVER_NS
        left = None if table.duration_s else table.requests
        while left is None or left > 0:
            count = rows if left is None else min(rows, left)
            times = arrivals.take(count)
            kept = int(np.searchsorted(times, end_ns))
            block = dealer.deal(times[:kept])
            if kept:
                yield block
            if kept < count:
                if left is not None:
                    notes.warn("the arrival rate ends at 0: fewer requests than asked for")
                return
            left = None if left is None else left - count


class _Dealer:
    """Gives lines their lengths, turns, tenants and ids."""

    def __init__(self, table: SyntheticTable, base_dir: Path, seed: int, config: str) -> None:
        import numpy as np

        self._table = table
        self._config_source = config
        self._prompt = length_sampler(
            table.prompt, is_prompt=True, base_dir=base_dir, seed=seed, config_source=config
        )
        self._output = length_sampler(
            table.output, is_prompt=False, base_dir=base_dir, seed=seed, config_source=config
        )
        self._turns = rng_stream(seed, "workload.turns")
        self._branches = rng_stream(seed, "workload.branches")
        self._tools = rng_stream(seed, "workload.tools")
        self._tenants = rng_stream(seed, "workload.tenants")
        self._groups = rng_stream(seed, "workload.prefix_groups")
        self._images = rng_stream(seed, "workload.images")
        self._next_image = 0
        self._adapters = rng_stream(seed, "workload.adapters")
        shares = 1.0 / np.arange(1, table.adapters + 1)
        self._adapter_shares = shares / shares.sum() if table.adapters else shares
        self._next_token_id = table.prefix_groups * table.prefix_tokens

    def deal(self, arrivals: Ints) -> Block:
        """One line for each arrival."""
        import numpy as np

        table, count = self._table, len(arrivals)
        zeros = np.zeros(count, dtype=np.int64)
        is_flat = table.sessions.turns_max == 1
        is_plain = not (table.prefix_groups or table.adapters or table.images)
        if is_flat and table.tenants == 1 and is_plain:
            prompt, output = self._prompt.take(count), self._output.take(count)
            return Block(arrivals, prompt, output, zeros, zeros)
        tenants = [""] * count
        if table.tenants > 1:
            dealt = self._tenants.integers(0, table.tenants, count).tolist()
            tenants = [f"tenant-{index}" for index in dealt]
        groups = [-1] * count
        if table.prefix_groups:
            groups = self._groups.integers(0, table.prefix_groups, count).tolist()
        times = arrivals.tolist()
        lines = self._flat(times, groups) if is_flat else self._sessions(times, groups)
        for line, tenant in zip(lines, tenants, strict=True):
            line.tenant = tenant
        if table.adapters:
            named = self._adapters.choice(table.adapters, count, p=self._adapter_shares)
            for line, number in zip(lines, named.tolist(), strict=True):
                line.adapter = f"adapter-{number + 1}"
        firsts = [line.sub_requests[0] if line.sub_requests else line for line in lines]
        return Block(
            arrivals,
            np.fromiter((first.input_toks for first in firsts), np.int64, count),
            np.fromiter((first.output_toks for first in firsts), np.int64, count),
            zeros,
            zeros,
            lines,
        )

    def _flat(self, times: list[int], groups: list[int]) -> list[Line]:
        prompts = self._prompt.take(len(times)).tolist()
        outputs = self._output.take(len(times)).tolist()
        lines = []
        for time, group, prompt, output in zip(times, groups, prompts, outputs, strict=True):
            line = Line(time, prompt, output)
            if self._table.images is not None:
                self._illustrate(line, self._table.images, group)
            elif group >= 0:
                self._share(line, group, prompt + output)
                self._next_token_id += prompt + output
            lines.append(line)
        return lines

    def _sessions(self, times: list[int], groups: list[int]) -> list[Line]:
        import numpy as np

        table = self._table.sessions
        turns = self._turns.integers(
            table.turns_min, table.turns_max, len(times), endpoint=True
        ).tolist()
        if table.branches > 1:
            return self._graphs(times, groups, turns)
        total = sum(turns)
        prompts = iter(self._prompt.take(total).tolist())
        outputs = iter(self._output.take(total).tolist())
        pauses_s = self._tools.standard_exponential(total) * table.tool_s
        pauses = iter(np.rint(pauses_s * NS_PER_S).astype(np.int64).tolist())
        lines = []
        for time, group, count in zip(times, groups, turns, strict=True):
            items = [Turn(next(prompts), next(outputs), next(pauses)) for _ in range(count)]
            items[-1].tool_duration_ns = 0
            self._give_context(items, group)
            lines.append(Line(time, sub_requests=items))
        return lines

    def _graphs(self, times: list[int], groups: list[int], stages: list[int]) -> list[Line]:
        """Sessions whose every second turn is several requests at once."""
        import numpy as np

        table = self._table.sessions
        each = [
            [1 if at % 2 == 0 else 0 for at in range(count)] for count in stages
        ]  # 0: to be drawn
        drawn = iter(
            self._branches.integers(
                1, table.branches, sum(count // 2 for count in stages), endpoint=True
            ).tolist()
        )
        widths = [[width or next(drawn) for width in session] for session in each]
        total = sum(map(sum, widths))
        prompts = iter(self._prompt.take(total).tolist())
        outputs = iter(self._output.take(total).tolist())
        pauses_s = self._tools.standard_exponential(total) * table.tool_s
        pauses = iter(np.rint(pauses_s * NS_PER_S).astype(np.int64).tolist())
        lines = []
        for time, group, session in zip(times, groups, widths, strict=True):
            items = [
                [Turn(next(prompts), next(outputs), next(pauses)) for _ in range(width)]
                for width in session
            ]
            for turn in items[-1]:
                turn.tool_duration_ns = 0
            self._join(items)
            self._give_contexts(items, group)
            lines.append(Line(time, sub_requests=[turn for stage in items for turn in stage]))
        return lines

    def _join(self, stages: list[list[Turn]]) -> None:
        """Each turn waits for all of the stage before its own."""
        first = 0
        for before, stage in pairwise(stages):
            waits = list(range(first, first + len(before)))
            first += len(before)
            for turn in stage:
                turn.after = waits
        if len(stages) > 1 and len(stages[1]) == 1:
            stages[1][0].after = None  # the chain that it is by default

    def _give_contexts(self, stages: list[list[Turn]], group: int) -> None:
        """Each prompt starts with the group's prefix and, if shared, with what was said before.

        Requests at once see the same context; the turn after them reads what they answered as new
        text, since it stands elsewhere.
        """
        shared = self._table.sessions.shared_context
        context: list[tuple[int, int]] = []
        if group >= 0:
            context.append((group * self._table.prefix_tokens, self._table.prefix_tokens))
        for stage in stages:
            known = sum(count for _, count in context)
            said: list[tuple[int, int]] = []
            for turn in stage:
                new = turn.input_toks + turn.output_toks
                own = (self._next_token_id, new)
                self._next_token_id += new
                if shared or group >= 0:
                    turn.input_toks += known
                    self._check_length(turn)
                    turn.tok_id_ranges = [*context, own]
                said.append(own)
                if len(stage) > 1:
                    said[-1] = (self._next_token_id, turn.output_toks)
                    self._next_token_id += turn.output_toks
            if shared:
                context += said

    def _give_context(self, turns: list[Turn], group: int) -> None:
        """Each prompt starts with the group's prefix and, if shared, with all earlier turns."""
        shared = self._table.sessions.shared_context
        context = 0
        for turn in turns:
            new = turn.input_toks + turn.output_toks
            if shared:
                turn.input_toks += context
                context += new
                self._share(turn, group, context)
            elif group >= 0:
                self._share(turn, group, new)
                self._next_token_id += new
        if shared:
            self._next_token_id += context

    def _illustrate(self, line: Line, table: ImagesTable, group: int) -> None:
        """Images behind the group's prefix, and ids: equal images have equal tokens."""
        own = line.input_toks + line.output_toks
        runs = [(self._next_token_id, own)]
        self._next_token_id += own
        start = 0
        if group >= 0:
            start = self._table.prefix_tokens
            runs.insert(0, (group * start, start))
        if self._images.random() < table.share:
            line.images = []
            for at in range(table.count):
                image = self._next_image
                if table.distinct:
                    image = int(self._images.integers(table.distinct))
                self._next_image += 1
                line.images.append((image, start + at * table.tokens, table.tokens))
                runs.insert(-1, (_IMAGE_IDS + image * table.tokens, table.tokens))
            line.input_toks += table.count * table.tokens
        line.input_toks += start
        self._check_length(line)
        line.tok_id_ranges = runs

    def _check_length(self, item: Line | Turn) -> None:
        if item.input_toks > TOKENS_MAX:
            problem = f"a prompt with its context has more than {TOKENS_MAX} tokens"
            raise InputError(self._config_source, None, "workload.synthetic.sessions", problem)

    def _share(self, item: Line | Turn, group: int, own: int) -> None:
        """Ids of a request: the group's prefix (if any), then `own` tokens from the counter."""
        runs = [(self._next_token_id, own)]
        if group >= 0:
            size = self._table.prefix_tokens
            runs.insert(0, (group * size, size))
            item.input_toks += size
        self._check_length(item)
        item.tok_id_ranges = runs
