"""What the `[workload]` table does to lines after they were read: select, clip, judge the size.

Order: arrivals for formats without any, `start_s`, `limit`, `max_prompt_tokens` and
`max_output_tokens`, then `oversized`. A `Shaper` goes through the lines once, in the order of the
file; a second pass needs a fresh one. Times are still those of the file here:
`emu/workload/timebase.py` makes them arrivals.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from emu.errors import InputError
from emu.workload.items import Block, Holds, Ints, Notes, clip_item

OVERSIZED: Final = "larger than any replica can hold"


class ArrivalStream(Protocol):
    """Arrival times for lines that have none."""

    def take(self, count: int) -> Ints:
        """The next `count` arrivals, in ns."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the table that select and change lines."""

    source: str
    prompt_field: str
    limit: int = 0
    """Lines to read; 0 = all."""
    start_ns: int = 0
    """Lines before this time of the file are left out."""
    upscale: int = 1
    """So many lines arrive at each time."""
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    oversized: str = "error"
    holds: Holds | None = None


class Shaper:
    """Applies the rules to the blocks of one pass."""

    def __init__(self, rules: Rules, notes: Notes, arrivals: ArrivalStream | None = None) -> None:
        self._rules = rules
        self._notes = notes
        self._arrivals = arrivals
        self._left = rules.limit or None
        self._times: Ints | None = None
        """Times at which lines to come arrive (`upscale`)."""
        self._taken = 0
        """Lines that have arrived at the first of them."""
        self.is_full = False
        """The limit was reached: nothing that follows is used."""

    def select(self, block: Block) -> Block:
        """The block without the lines that are left out."""
        if self._arrivals is not None or self._rules.start_ns or self._rules.upscale > 1:
            block = block.as_arrays()
        if self._arrivals is not None:
            block.arrival_ns = self._arrivals.take(len(block.arrival_ns))
        if self._rules.start_ns:
            late = block.arrival_ns >= self._rules.start_ns
            early = len(late) - int(late.sum())
            if early:
                self._notes.skip("rows before start_s", early)
                block = block.take(late)
        if self._rules.upscale > 1:
            block.arrival_ns = self._denser(block.arrival_ns)
        if self._left is not None:
            if len(block.arrival_ns) > self._left:
                block = block.head(self._left)
            self._left -= len(block.arrival_ns)
            self.is_full = self._left == 0
        return block

    def _denser(self, times: Ints) -> Ints:
        """Line k arrives at the time of line k // `upscale`; both counted over all blocks."""
        import numpy as np

        known = times if self._times is None else np.concatenate((self._times, times))
        rows = (self._taken + np.arange(len(times))) // self._rules.upscale
        whole, self._taken = divmod(self._taken + len(times), self._rules.upscale)
        self._times = known[whole:]
        denser: Ints = known[rows]
        return denser

    def fit(self, block: Block) -> Block:
        """Clipped and judged: what is too large ends in an error, is cut, or is counted."""
        rules = self._rules
        for limit, name in (
            (rules.max_prompt_tokens, "max_prompt_tokens"),
            (rules.max_output_tokens, "max_output_tokens"),
        ):
            if limit:
                block = block.as_arrays()
                self._clip_all(block, limit, name)
        if rules.holds is not None and _may_exceed(block, rules.holds):
            self._judge_each(block, rules.holds)
        return block

    def _clip_all(self, block: Block, limit: int, name: str) -> None:
        import numpy as np

        is_prompt = name == "max_prompt_tokens"
        column = block.prompt_tokens if is_prompt else block.output_tokens
        count = int((column > limit).sum())
        if block.details is not None:
            count = 0
            for line in block.details:
                for item in line.sub_requests or (line,):
                    if (item.input_toks if is_prompt else item.output_toks) > limit:
                        count += 1
                        clip_item(item, *((limit, None) if is_prompt else (None, limit)))
        if is_prompt:
            block.prompt_tokens = np.minimum(column, limit)
        else:
            block.output_tokens = np.minimum(column, limit)
        if count:
            self._notes.clip(name, count)

    def _judge_each(self, block: Block, holds: Holds) -> None:
        for row in range(len(block.arrival_ns)):
            line = None if block.details is None else block.details[row]
            if line is None or line.sub_requests is None:
                prompt, output = int(block.prompt_tokens[row]), int(block.output_tokens[row])
                fit = self._judge(block, row, prompt, output, "", holds)
                if fit is not None:
                    block.prompt_tokens[row], block.output_tokens[row] = fit
                    if line is not None:
                        clip_item(line, *fit)
                continue
            for index, turn in enumerate(line.sub_requests):
                path = f"sub_requests[{index}]."
                fit = self._judge(block, row, turn.input_toks, turn.output_toks, path, holds)
                if fit is not None:
                    clip_item(turn, *fit)
            block.prompt_tokens[row] = line.sub_requests[0].input_toks
            block.output_tokens[row] = line.sub_requests[0].output_toks

    def _judge(
        self, block: Block, row: int, prompt: int, output: int, path: str, holds: Holds
    ) -> tuple[int, int] | None:
        """The lengths to clip to; None if the request stays as it is."""
        limit = holds(prompt, output)
        if not limit:
            return None
        rules = self._rules
        if rules.oversized == "reject":
            self._notes.reject(OVERSIZED)
            return None
        if rules.oversized == "clip":
            self._notes.clip(OVERSIZED)
            fit = _largest_fit(prompt, output, holds)
            if fit is not None:
                return fit
        line = int(block.line_numbers[row])
        path = path if line > 0 else ""  # made by a generator: its key is the place
        problem = f"a request of {prompt} + {output} tokens can never be served: {limit}"
        raise InputError(
            rules.source, line if line > 0 else None, path + rules.prompt_field, problem
        )


def _may_exceed(block: Block, holds: Holds) -> bool:
    """True if a request as long as the longest prompt and the longest output could not be held.

    What holds a request holds every shorter one, so that most blocks need one question.
    """
    if block.details is None:
        prompt, output = block.prompt_tokens.max(initial=1), block.output_tokens.max(initial=1)
        return bool(holds(int(prompt), int(output)))
    items = [item for line in block.details for item in line.sub_requests or (line,)]
    prompts, outputs = [item.input_toks for item in items], [item.output_toks for item in items]
    return bool(holds(max(prompts, default=1), max(outputs, default=1)))


def _largest_fit(prompt: int, output: int, holds: Holds) -> tuple[int, int] | None:
    """The prompt is cut first; the output only when a prompt of one token is still too much."""
    if not holds(1, output):
        low, high = 1, prompt
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle, output) else (middle, high)
        return low, output
    if holds(1, 1):
        return None
    low, high = 1, output
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(1, middle) else (middle, high)
    return 1, low
