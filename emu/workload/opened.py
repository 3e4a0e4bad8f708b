"""An opened workload: checked from end to end, then released request by request.

`open_workload` reads the whole input once, so that every mistake is found before anything is
emulated, and keeps only totals. `Workload.releases` reads it again, piece by piece, in order of
arrival: memory follows the requests in flight. Only when the file is not sorted by arrival is an
index kept (arrival, byte offset, first id: 24 bytes a line).

Owns: what the `[workload]` table does to lines after they were read (`Shaper`), request ids (a
running counter over the lines of the file; a session takes as many consecutive ids as it has
sub-requests) and the open sessions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.request import Request, plain_requests
from emu.rng import rng_stream
from emu.units import NS_PER_S, s_to_ns
from emu.workload.items import (
    NOTHING_FOLLOWS,
    TIME_MAX_NS,
    Block,
    Following,
    Holds,
    Ints,
    Line,
    Notes,
    Session,
    Turn,
    has_prefix,
    make_request,
    open_session,
    plain,
    prefix_of,
)

if TYPE_CHECKING:
    from fractions import Fraction

    from emu.workload.detect import Source


# --------------------------------------------------------------------------------------------------
# What the `[workload]` table does to lines after they were read: select, clip, judge the size.
#
# Order: arrivals for formats without any, `start_s`, `limit`, `max_prompt_tokens` and
# `max_output_tokens`, then `oversized`. A `Shaper` goes through the lines once, in the order of the
# file; a second pass needs a fresh one. Times are still those of the file here: `Timebase` makes
# them arrivals.


_SAFE: Final = 2**62
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


def clip_item(item: Line | Turn, prompt: int | None, output: int | None) -> None:
    """Cut a request to these lengths, its ids with it (None = leave).

    `prompt` and `output` are tokens.
    """
    new_prompt = item.input_toks if prompt is None else min(prompt, item.input_toks)
    new_output = item.output_toks if output is None else min(output, item.output_toks)
    if item.tok_id_ranges is not None:
        head = _cut_ranges(item.tok_id_ranges, 0, new_prompt)
        tail = _cut_ranges(item.tok_id_ranges, item.input_toks, new_output)
        item.tok_id_ranges = head + tail
    if item.input_tok_ids is not None:
        item.input_tok_ids = item.input_tok_ids[:new_prompt]
    if item.output_tok_ids is not None:
        item.output_tok_ids = item.output_tok_ids[:new_output]
    if item.hash_ids is not None:
        item.hash_ids = item.hash_ids[: -(-new_prompt // item.hash_block_toks)]
    if item.images is not None:  # an image is there as a whole or not at all
        item.images = [(i, at, n) for i, at, n in item.images if at + n <= new_prompt]
    if new_output < item.output_toks and item.max_output_toks:
        item.max_output_toks = max(new_output, min(item.max_output_toks, output or 0))
    item.input_toks, item.output_toks = new_prompt, new_output


def _cut_ranges(ranges: list[tuple[int, int]], skip: int, count: int) -> list[tuple[int, int]]:
    """The part [skip, skip + count) of the ids."""
    cut = []
    for first, length in ranges:
        begin = min(skip, length)
        used = min(length - begin, count)
        if used > 0:
            cut.append((first + begin, used))
        skip -= begin
        count -= used
    return cut


class Timebase:
    """Turns the file's times into arrivals: the zero is moved, then time is stretched."""

    def __init__(self, zero_ns: int, time_scale: float) -> None:
        """`time_scale` is taken as the decimal number that it prints as (0.1 is one tenth)."""
        self._zero_ns = zero_ns
        self._scale: Fraction | None = None
        if time_scale != 1.0:
            from fractions import Fraction

            self._scale = Fraction(repr(time_scale))

    def arrivals(self, times_ns: Ints) -> Ints:
        """Exact: (time - zero) * scale, rounded half to even."""
        times = times_ns - self._zero_ns
        scale = self._scale
        if scale is None or not len(times):
            return times
        import numpy as np

        times = np.asarray(times)
        return scale_exactly(times, scale)


def scale_exactly(values: Ints, scale: Fraction) -> Ints:
    """Non-negative integers times a fraction, rounded half to even, without floating point."""
    import numpy as np

    num, den = scale.numerator, scale.denominator
    highest = int(values.max(initial=0))
    if highest * scale > TIME_MAX_NS:
        raise OverflowError
    if (highest // den + 1) * num >= _SAFE or den * num >= _SAFE // 2:
        return np.array([round(value * scale) for value in values.tolist()], dtype=np.int64)
    whole, rest = np.divmod(values, den)
    quotient, left = np.divmod(rest * num, den)
    result: Ints = whole * num + quotient
    up = (2 * left > den) | ((2 * left == den) & (result % 2 == 1))
    result += up
    return result


# --------------------------------------------------------------------------------------------------
# Which of the served models a request asks for.
#
# A name comes from the line (JSON Lines, CSV), through the table `workload.models` where the trace
# has names of its own. Requests that name none are dealt to the models in proportion to
# `workload.model_shares`, in runs of `workload.model_run` requests in the mean, or go to the
# default. A name that no model is served as is no mistake of the file: the request is rejected when
# it arrives, as a server rejects it.

UNKNOWN: Final = "unknown_model"
"""Reason of a request that asks for a model which is not served."""


class Naming:
    """Models of the requests of one pass over a workload.

    `default` is the index of the model of requests that name none, `run` the mean length of a
    run of equal draws.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        default: int = 0,
        aliases: Mapping[str, str] | None = None,
        shares: Mapping[str, float] | None = None,
        run: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`names`: served models, by index. `run`: mean length of a run of equal draws."""
        self._index = {name: index for index, name in enumerate(names)}
        for alias, name in (aliases or {}).items():
            self._index[alias] = self._index.get(name, -1)
        self._default = default
        self._shares = list(accumulate((shares or {}).get(name, 0.0) for name in names))
        self._run = run
        self._rng = rng_stream(seed, "workload models")
        self._last = -1

    def of(self, name: str) -> int:
        """Index of the model that a line names (empty: it names none); -1 = it is not served."""
        if name:
            return self._index.get(name, -1)
        if not self._shares or self._shares[-1] <= 0:
            return self._default
        if self._last >= 0 and self._run > 1 and self._rng.random() >= 1 / self._run:
            return self._last
        point = self._rng.random() * self._shares[-1]
        self._last = min(bisect_right(self._shares, point), len(self._shares) - 1)
        return self._last


# --------------------------------------------------------------------------------------------------
# The workload


_RATE_ODD_PER_S: Final = 2_000
_GAP_ODD_S: Final = 3_600
_LINES_FOR_RATE: Final = 100


class Facts(msgspec.Struct):
    """Totals of the first pass, over what is used."""

    lines: int = 0
    requests: int = 0
    sessions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_prefixes: bool = False
    adapter: str = ""
    """The first LoRA adapter that a request names; empty = none does."""
    images: int = 0
    """Most images of a request."""
    image_tokens: int = 0
    """Tokens of the largest image."""
    names_models: bool = False
    """Some line says which model it is for."""

    is_sorted: bool = True
    first_ns: int = 0
    """In the file's own time."""
    last_ns: int = -1

    @property
    def asks(self) -> list[str]:
        """What requests ask of features of the engine."""
        asked = {"adapter": bool(self.adapter), "image": self.images > 0}
        return [name for name, is_asked in asked.items() if is_asked]


class Workload:
    """The source of requests of a run."""

    def __init__(
        self,
        source: Source,
        rules: Rules,
        arrivals: Callable[[], ArrivalStream | None],
        notes: Notes,
        naming: Callable[[], Naming] | None = None,
    ) -> None:
        """`naming`: makes what tells the models of one pass apart; None = there is one model."""
        self._naming = naming
        self._source = source
        self._rules = rules
        self._make_arrivals = arrivals
        self.notes = notes
        self.source = rules.source
        self.format = source.name
        self.facts = Facts()
        self._only: Block | None = None
        self._timebase = Timebase(0, 1.0)
        self._open: dict[int, Session] = {}
        """By request id, the sessions of the turns that are in the system."""

    @property
    def count(self) -> int:
        """Requests, sub-requests included."""
        return self.facts.requests

    @property
    def has_prefixes(self) -> bool:
        """Whether any request has token ids or hashes."""
        return self.facts.has_prefixes

    @property
    def open_sessions(self) -> int:
        """Sessions of which a sub-request is in the system."""
        return len({session.first_request_id for session in self._open.values()})

    @property
    def first_arrival_ns(self) -> int:
        """Arrival of the first release."""

        return int(self._timebase.arrivals(plain([self.facts.first_ns]))[0])

    @property
    def last_arrival_ns(self) -> int:
        """Arrival of the last release that the file itself dates."""

        return int(self._timebase.arrivals(plain([self.facts.last_ns]))[0])

    def scan(self) -> None:
        """The first pass: everything is checked and counted."""
        facts = self.facts
        kept: Block | None = None
        blocks = 0
        for block in self._file_order(self.notes):
            if not len(block.arrival_ns):
                continue
            blocks += 1
            kept = block
            times = block.arrival_ns
            low, high = int(times.min()), int(times.max())
            if facts.is_sorted:
                grows = _ascends(times)
                facts.is_sorted = grows and int(times[0]) >= facts.last_ns
            facts.first_ns = low if not facts.lines else min(low, facts.first_ns)
            facts.last_ns = max(high, facts.last_ns)
            _count(block, facts)
        if not facts.lines:
            if self._source.name == "synthetic":
                problem = "no request arrives in so short a time"
                raise InputError(self.source, None, "workload.synthetic.duration_s", problem)
            raise no_usable_rows(self.source, self.notes)
        if blocks == 1 and (self._source.is_small or self._rules.limit):
            self._only = kept
        refused = sum(self.notes.rejected.values())
        if 2 * refused > facts.requests:
            self.notes.warn(refused_warning(refused, facts.requests))
        if not self.notes.rejected and OVERSIZED not in self.notes.clipped:
            # Every request fits: the later passes need not ask again.
            self._rules = msgspec.structs.replace(self._rules, holds=None)

    def set_time(self, zero_ns: int, time_scale: float) -> None:
        """Fix how the file's times become arrivals.

        Arrivals are (time - `zero_ns`) x `time_scale`.
        """
        self._timebase = Timebase(zero_ns, time_scale)

    def _file_order(self, notes: Notes) -> Iterator[Block]:
        shaper = Shaper(self._rules, notes, self._make_arrivals())
        for block in self._source.blocks(notes):
            yield shaper.fit(shaper.select(block))
            if shaper.is_full:
                return

    def blocks(self) -> Iterator[tuple[Block, Ints]]:
        """The lines in order of arrival, with the first request id of each; times in ns."""
        import numpy as np

        for block, ids in self._timed():
            yield block.as_arrays(), np.asarray(ids)

    def _timed(self) -> Iterator[tuple[Block, Ints]]:
        """The same; columns may be plain."""
        for block, ids in self._arrival_order():
            timed = Block(
                self._timebase.arrivals(block.arrival_ns),
                block.prompt_tokens,
                block.output_tokens,
                block.line_numbers,
                block.offsets,
                block.details,
            )
            yield timed, ids

    def _arrival_order(self) -> Iterator[tuple[Block, Ints]]:
        if self._only is not None:
            block, ids = self._only, _first_ids(self._only, 0)
            if not self.facts.is_sorted:
                import numpy as np

                block, ids = block.as_arrays(), np.asarray(ids)
                order = np.argsort(block.arrival_ns, kind="stable")
                block, ids = block.take(order), ids[order]
            yield block, ids
            return
        if not self.facts.is_sorted:
            yield from self._by_index()
            return
        next_id = 0
        for block in self._file_order(Notes()):
            yield block, _first_ids(block, next_id)
            next_id += block.requests

    def _by_index(self) -> Iterator[tuple[Block, Ints]]:
        """An unsorted file: one more pass makes the index, then lines are fetched by offset."""
        import numpy as np

        times, offsets, ids = [], [], []
        next_id = 0
        for block in self._file_order(Notes()):
            block = block.as_arrays()
            times.append(block.arrival_ns)
            offsets.append(block.offsets)
            ids.append(np.asarray(_first_ids(block, next_id)))
            next_id += block.requests
        order = np.argsort(np.concatenate(times), kind="stable")
        offsets_in_order = np.concatenate(offsets)[order]
        ids_in_order = np.concatenate(ids)[order]
        del times, offsets, ids, order
        shaper = Shaper(self._rules, Notes())
        begin = 0
        for block in self._source.rows_at(offsets_in_order):
            end = begin + len(block.arrival_ns)
            yield shaper.fit(block), ids_in_order[begin:end]
            begin = end

    def releases(self) -> Iterator[Request]:
        """Flat requests and sub-requests that wait for none, in order of arrival and of the file.

        A request whose `reason` is set can never be served: the gateway must reject it.
        """
        naming = None if self._naming is None else self._naming()
        for block, ids in self._timed():
            if naming is None and block.details is None and not self.notes.rejected:
                yield from plain_requests(
                    ids.tolist(),
                    block.arrival_ns.tolist(),
                    block.prompt_tokens.tolist(),
                    block.output_tokens.tolist(),
                )
                continue
            columns = zip(
                ids.tolist(),
                block.arrival_ns.tolist(),
                block.prompt_tokens.tolist(),
                block.output_tokens.tolist(),
                block.details or repeat(None),
                strict=False,
            )
            judged = bool(self.notes.rejected)
            for request_id, arrival_ns, prompt, output, line in columns:
                model = 0
                if naming is not None:
                    model = naming.of("" if line is None else line.model)
                if line is None:
                    request = Request(
                        request_id=request_id,
                        arrival_ns=arrival_ns,
                        prompt_tokens=prompt,
                        output_tokens=output,
                        max_output_tokens=output,
                    )
                elif line.sub_requests is None:
                    request = make_request(line, request_id, arrival_ns, prefix_of(line))
                    request.session_id = line.session_id
                    request.tenant = line.tenant
                    request.priority = line.priority
                    request.acceptance_rate = line.acceptance_rate
                    request.adapter = line.adapter
                    request.pin = line.replica
                    request.decode_pin = line.decode_replica
                    request.handoff_after_ns = line.handoff_ns
                else:
                    session = open_session(line, request_id, model)
                    for index in session.roots():
                        request = self._release(session, index, arrival_ns)
                        if judged:
                            self._mark(request)
                        yield request
                    continue
                if model:
                    request.model = model
                    if model < 0:
                        request.reason = UNKNOWN
                if judged:
                    self._mark(request)
                yield request

    def end_turn(self, request: Request, now_ns: int, *, completed: bool) -> Following:
        """What follows in the session of a request that ended; nothing if it has none."""
        session = self._open.pop(request.request_id, None)
        if session is None:
            return NOTHING_FOLLOWS
        session.in_flight -= 1
        index = request.request_id - session.first_request_id
        arriving, dropped = [], []
        if completed:
            for follower in session.complete(index, now_ns):
                arriving.append(self._release(session, follower, session.ready_ns[follower]))
                if self.notes.rejected:
                    self._mark(arriving[-1])
        else:
            for left in session.drop():
                dropped.append(self._release(session, left, now_ns))
                del self._open[dropped[-1].request_id]
                session.in_flight -= 1
        return Following(arriving, dropped, bool(session.in_flight))

    def _release(self, session: Session, index: int, arrival_ns: int) -> Request:
        turn = session.turns[index]
        prefix = session.prefixes[index] or prefix_of(turn)
        session.prefixes[index] = None
        request = make_request(turn, session.first_request_id + index, arrival_ns, prefix)
        request.session_id = session.session_id
        request.sub_request_index = index
        request.has_more_turns = bool(session.followers[index])
        request.tenant = session.tenant
        request.model = session.model
        if session.model < 0:
            request.reason = UNKNOWN
        request.priority = session.priority
        request.acceptance_rate = session.acceptance_rate
        request.adapter = session.adapter
        session.in_flight += 1
        self._open[request.request_id] = session
        return request

    def _mark(self, request: Request) -> None:
        if self._rules.holds is not None and not request.reason:
            request.reason = self._rules.holds(request.prompt_tokens, request.output_tokens)


def open_workload(
    table: WorkloadTable,
    *,
    base_dir: Path,
    seed: int,
    holds: Holds | None = None,
    config_source: str = "config",
    models: Sequence[str] = (),
    default_model: int = 0,
) -> Workload:
    """Open and check the workload of a run.

    `holds(prompt, output)` is "" if some replica could hold such a request, else the limit.
    `config_source` names the config file in errors about keys of the table. `models`: what is
    served, by index; without any, requests are not asked which they mean.
    Raises InputError.
    `default_model` is the index for requests that name none.
    """
    notes = Notes()
    if table.seed >= 0:
        seed = table.seed
    source: Source
    arrivals: Callable[[], ArrivalStream | None]
    if table.path:
        from emu.workload.detect import open_source  # with the parsers of all formats

        tokenizer = (base_dir / table.tokenizer, table.tokenizer) if table.tokenizer else None
        source = open_source(
            base_dir / table.path,
            table.path,
            table.format,
            tokenizer,
            seed,
            sessions=table.turns == "all",
            think_s=table.think_s,
            limit=table.limit,
        )
        if table.turns == "all" and source.name != "sharegpt":
            problem = f"is for conversations of ShareGPT; {table.path} is {source.name}"
            raise InputError(config_source, None, "workload.turns", problem)
        label = table.path
        arrivals = _arrivals_for_file(table, source, seed, config_source, notes)
    else:
        if table.synthetic is None:
            problem = "give either a file here or a table [workload.synthetic]"
            raise InputError(config_source, None, "workload.path", problem)
        from emu.workload.synthetic import SyntheticSource

        source = SyntheticSource(table.synthetic, base_dir, seed, config_source)
        label, arrivals = config_source, _no_arrivals
    naming = _naming(table, models, default_model, seed, config_source)
    if naming is not None and table.path:
        from emu.workload.detect import ParsedFile

        if isinstance(source, ParsedFile):
            source.read_models()
    start_ns = s_to_ns(table.start_s)
    origin_ns = 0
    if source.is_absolute and start_ns:
        origin_ns = min(
            int(b.arrival_ns.min()) for b in source.blocks(Notes()) if len(b.arrival_ns)
        )
    rules = Rules(
        source=label,
        prompt_field=source.prompt_field,
        limit=table.limit,
        start_ns=origin_ns + start_ns if start_ns else 0,
        upscale=table.upscale,
        max_prompt_tokens=table.max_prompt_tokens,
        max_output_tokens=table.max_output_tokens,
        oversized=table.oversized,
        holds=holds,
    )
    workload = Workload(source, rules, arrivals, notes, naming)
    workload.scan()
    facts = workload.facts
    if source.is_absolute and not start_ns:
        origin_ns = facts.first_ns
    if table.upscale > 1 and not facts.is_sorted:
        problem = "needs a file that is sorted by arrival"
        raise InputError(config_source, None, "workload.upscale", problem)
    time_scale, key = table.time_scale, "time_scale"
    if table.rate_per_s:
        time_scale, key = _scale_to(table.rate_per_s, facts, config_source), "rate_per_s"
    workload.set_time(origin_ns + start_ns, time_scale)
    try:
        _ = workload.last_arrival_ns
    except OverflowError:
        problem = f"the last arrival would be later than {2**62} ns"
        raise InputError(config_source, None, f"workload.{key}", problem) from None
    if table.path and source.has_arrivals:
        _warn_implausible(facts, notes)
    return workload


def _naming(
    table: WorkloadTable, models: Sequence[str], default: int, seed: int, config_source: str
) -> Callable[[], Naming] | None:
    for key, names in (("models", table.models.values()), ("model_shares", table.model_shares)):
        for name in names if models else ():
            if name not in models:
                problem = f"no model is served as {name!r}; there are {', '.join(models)}"
                raise InputError(config_source, None, f"workload.{key}", problem)
    if not models:
        return None
    return partial(
        Naming,
        models,
        default=default,
        aliases=table.models,
        shares=table.model_shares,
        run=table.model_run,
        seed=seed,
    )


def _scale_to(rate_per_s: float, facts: Facts, config_source: str) -> float:
    """What stretches arrivals to a mean rate; raises InputError where they have none."""
    span_s = (facts.last_ns - facts.first_ns) / NS_PER_S
    if span_s <= 0:
        problem = "all requests arrive at once: no rate to scale"
        raise InputError(config_source, None, "workload.rate_per_s", problem)
    return (facts.lines - 1) / span_s / rate_per_s


def refused_warning(refused: int, requests: int) -> str:
    """What is said of a workload most of which is refused."""
    return f"{refused:,} of {requests:,} requests are refused: a result says little about the rest"


def no_usable_rows(source: str, notes: Notes) -> InputError:
    """The error for a workload that releases nothing."""
    if not notes.skipped:
        return InputError(source, 1, "$", "the file has no requests")
    reasons = ", ".join(f"{count} {reason}" for reason, count in notes.skipped.items())
    return InputError(source, 1, "$", f"no usable row (skipped: {reasons})")


def _no_arrivals() -> ArrivalStream | None:
    return None


def _arrivals_for_file(
    table: WorkloadTable, source: Source, seed: int, config_source: str, notes: Notes
) -> Callable[[], ArrivalStream | None]:
    """Where the arrivals of a file without any come from: the config, or all at 0."""
    synthetic = table.synthetic
    if source.has_arrivals:
        if synthetic is not None:
            problem = "cannot be given together with a file that has arrival times"
            raise InputError(config_source, None, "workload.synthetic", problem)
        return _no_arrivals
    if synthetic is None:
        if not table.concurrency:
            notes.warn("the file has no arrival times: all requests arrive at 0")
        return _no_arrivals
    from emu.workload.synthetic import arrival_stream

    return lambda: arrival_stream(synthetic.arrivals, seed, config_source)


def _count(block: Block, facts: Facts) -> None:
    facts.lines += len(block.arrival_ns)
    if block.details is None:
        facts.requests += len(block.arrival_ns)
        facts.prompt_tokens += int(block.prompt_tokens.sum())
        facts.output_tokens += int(block.output_tokens.sum())
        return
    for line in block.details:
        items = line.sub_requests or (line,)
        facts.sessions += line.sub_requests is not None
        facts.requests += len(items)
        facts.prompt_tokens += sum(item.input_toks for item in items)
        for item in items:
            if item.images:
                facts.images = max(facts.images, len(item.images))
                facts.image_tokens = max(facts.image_tokens, *[n for _, _, n in item.images])
        facts.output_tokens += sum(item.output_toks for item in items)
        facts.has_prefixes = facts.has_prefixes or has_prefix(line)
        facts.adapter = facts.adapter or line.adapter
        facts.names_models = facts.names_models or bool(line.model)


def _first_ids(block: Block, start: int) -> Ints:
    if block.details is None:
        return plain(list(range(start, start + len(block.arrival_ns))))
    import numpy as np

    each = block.requests_each()
    return np.cumsum(each) - each + start


def _ascends(times: Ints) -> bool:
    """No time is earlier than the one before it."""
    if hasattr(times, "dtype"):
        return bool((times[1:] >= times[:-1]).all())
    return all(map(le, times, times[1:]))  # plain


def _warn_implausible(facts: Facts, notes: Notes) -> None:
    """A wrong unit is off by a factor of 1000 or more, which shows in the rate."""
    span_s = (facts.last_ns - facts.first_ns) / NS_PER_S
    if span_s <= 0:
        return
    rate_per_s = facts.lines / span_s
    if facts.lines >= _LINES_FOR_RATE and rate_per_s > _RATE_ODD_PER_S:
        notes.warn(f"arrivals come at {rate_per_s:.4g} per second: is their unit right?")
    if facts.lines > 1 and rate_per_s < 1 / _GAP_ODD_S:
        notes.warn(f"arrivals span {span_s:.4g} s for {facts.lines} lines: is their unit right?")
