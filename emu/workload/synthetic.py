"""A workload made from distributions: arrivals, lengths, sessions, tenants, prefixes, images.

Each purpose has its own random stream, and lines are made a block at a time, so that a million
requests cost little memory and a second pass repeats the first. Token ids are given (as runs)
only where tokens are shared: in sessions whose context grows, and in groups with a common prefix.
A shared prefix comes in front of the drawn prompt and adds to its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from emu.config.schema import ArrivalsTable, ImagesTable, SyntheticTable
from emu.errors import InputError
from emu.rng import rng_stream
from emu.units import NS_PER_S, s_to_ns
from emu.workload.arrivals import NEVER_NS, arrival_stream
from emu.workload.items import TOKENS_MAX, Block, Ints, Line, Notes, Turn
from emu.workload.lengths import length_sampler
from emu.workload.source import Source

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


class SyntheticSource(Source):
    """The lines of a `[workload.synthetic]` table, in order of arrival."""

    name = "synthetic"
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
