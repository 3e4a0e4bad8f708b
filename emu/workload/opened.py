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

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import le
from pathlib import Path
from typing import Final

import msgspec

from emu.config.schema import WorkloadTable
from emu.errors import InputError
from emu.request import Request, plain_request
from emu.units import NS_PER_S, s_to_ns
from emu.workload.items import (
    Block,
    Holds,
    Ints,
    Line,
    Notes,
    has_prefix,
    is_plain,
    make_request,
    plain,
    prefix_of,
)
from emu.workload.naming import Naming
from emu.workload.session import NOTHING_FOLLOWS, Following, Session, open_session
from emu.workload.shaping import OVERSIZED, ArrivalStream, Rules, Shaper
from emu.workload.source import Opening, Source
from emu.workload.timebase import Timebase

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
        judged = bool(self.notes.rejected)
        for block, ids in self._timed():
            if naming is None and block.details is None and not judged:
                yield from map(
                    plain_request,
                    ids.tolist(),
                    block.arrival_ns.tolist(),
                    block.prompt_tokens.tolist(),
                    block.output_tokens.tolist(),
                )
                continue
            for request in self._each(block, ids, naming):
                if judged:
                    self._mark(request)
                yield request

    def _each(self, block: Block, ids: Ints, naming: Naming | None) -> Iterator[Request]:
        """The requests of a block, line by line."""
        for request_id, arrival_ns, prompt, output, detail in zip(
            ids.tolist(),
            block.arrival_ns.tolist(),
            block.prompt_tokens.tolist(),
            block.output_tokens.tolist(),
            block.details or repeat(None),
            strict=False,
        ):
            line = Line(arrival_ns, prompt, output) if detail is None else detail
            model = 0 if naming is None else naming.of(line.model)
            if line.sub_requests is None:
                yield make_request(line, line, request_id, arrival_ns, model, prefix_of(line))
                continue
            session = open_session(line, request_id, model)
            for index in session.roots():
                yield self._release(session, index, arrival_ns)

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
        request = session.release(index, arrival_ns)
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
    asked = _Asked(table, base_dir, seed if table.seed < 0 else table.seed, config_source)
    notes = Notes()
    source = asked.source()
    arrivals = _arrivals(asked, source, notes)
    naming = _naming(asked, models, default_model)
    if naming is not None:
        source.read_models()
    start_ns = s_to_ns(table.start_s)
    origin_ns = 0
    if source.is_absolute and start_ns:
        origin_ns = min(
            int(b.arrival_ns.min()) for b in source.blocks(Notes()) if len(b.arrival_ns)
        )
    rules = Rules(
        source=table.path or config_source,
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
    if source.is_absolute and not start_ns:
        origin_ns = workload.facts.first_ns
    _set_time(workload, asked, origin_ns + start_ns)
    if table.path and source.has_arrivals:
        _warn_implausible(workload.facts, notes)
    return workload


def _set_time(workload: Workload, asked: _Asked, zero_ns: int) -> None:
    """Fix how the file's times become arrivals; raises InputError where they cannot."""
    table, facts = asked.table, workload.facts
    if table.upscale > 1 and not facts.is_sorted:
        raise asked.error("upscale", "needs a file that is sorted by arrival")
    time_scale, key = table.time_scale, "time_scale"
    if table.rate_per_s:
        time_scale, key = _scale_to(asked, facts), "rate_per_s"
    workload.set_time(zero_ns, time_scale)
    try:
        _ = workload.last_arrival_ns
    except OverflowError:
        problem = f"the last arrival would be later than {2**62} ns"
        raise asked.error(key, problem) from None


class _Asked(msgspec.Struct, frozen=True):
    """A `[workload]` table, and what its keys are read with."""

    table: WorkloadTable
    base_dir: Path
    seed: int
    config_source: str

    def error(self, key: str, problem: str) -> InputError:
        """The error for a key of the table."""
        return InputError(self.config_source, None, f"workload.{key}", problem)

    def source(self) -> Source:
        """The file or the generator that the table names."""
        table = self.table
        if not table.path:
            if table.synthetic is None:
                problem = "give either a file here or a table [workload.synthetic]"
                raise self.error("path", problem)
            from emu.workload.synthetic import SyntheticSource

            return SyntheticSource(table.synthetic, self.base_dir, self.seed, self.config_source)
        from emu.workload.formats.table import open_source  # with all parsers

        opening = Opening(
            path=self.base_dir / table.path,
            source=table.path,
            tokenizer=self.base_dir / table.tokenizer if table.tokenizer else None,
            tokenizer_source=table.tokenizer,
            seed=self.seed,
            sessions=table.turns == "all",
            think_s=table.think_s,
            columns=table.columns,
            limit=table.limit,
        )
        source = open_source(opening, table.format)
        if table.turns == "all" and not source.has_conversations:
            problem = f"is for conversations of ShareGPT; {table.path} is {source.name}"
            raise self.error("turns", problem)
        return source


def _naming(asked: _Asked, models: Sequence[str], default: int) -> Callable[[], Naming] | None:
    table = asked.table
    for key, names in (("models", table.models.values()), ("model_shares", table.model_shares)):
        for name in names if models else ():
            if name not in models:
                problem = f"no model is served as {name!r}; there are {', '.join(models)}"
                raise asked.error(key, problem)
    if not models:
        return None
    return partial(
        Naming,
        models,
        default=default,
        aliases=table.models,
        shares=table.model_shares,
        run=table.model_run,
        seed=asked.seed,
    )


def _scale_to(asked: _Asked, facts: Facts) -> float:
    """What stretches arrivals to a mean rate; raises InputError where they have none."""
    span_s = (facts.last_ns - facts.first_ns) / NS_PER_S
    if span_s <= 0:
        raise asked.error("rate_per_s", "all requests arrive at once: no rate to scale")
    return (facts.lines - 1) / span_s / asked.table.rate_per_s


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


def _arrivals(asked: _Asked, source: Source, notes: Notes) -> Callable[[], ArrivalStream | None]:
    """Where the arrivals of a file without any come from: the config, or all at 0."""
    synthetic = asked.table.synthetic
    if not asked.table.path:
        return _no_arrivals
    if source.has_arrivals:
        if synthetic is not None:
            problem = "cannot be given together with a file that has arrival times"
            raise asked.error("synthetic", problem)
        return _no_arrivals
    if synthetic is None:
        if not asked.table.concurrency:
            notes.warn("the file has no arrival times: all requests arrive at 0")
        return _no_arrivals
    from emu.workload.arrivals import arrival_stream

    return lambda: arrival_stream(synthetic.arrivals, asked.seed, asked.config_source)


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
    if is_plain(times):
        return all(map(le, times, times[1:]))
    return bool((times[1:] >= times[:-1]).all())


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
