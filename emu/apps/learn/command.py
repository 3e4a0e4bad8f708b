"""`emu learn`: sources in, an engine's file out.

The rim: options, what the server says of itself, progress, tables, what an interrupt leaves.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.learn.case import save_case
from emu.apps.learn.emulations import Emulator
from emu.apps.learn.fields import Level
from emu.apps.learn.file import About, check_name, save, save_partial
from emu.apps.learn.levels import read_benchmarks
from emu.apps.learn.options import LearnOptions
from emu.apps.learn.server import Server, server_of
from emu.apps.learn.session import Learned, Session
from emu.apps.shared.answer import Reply, tell
from emu.cluster.plan import make_plan
from emu.config.load import load_config
from emu.errors import InputError
from emu.latency.posterior import PARAMETERS, known_engine, values_of, with_values
from emu.process.pool import cores

_ADDRESS: Final = re.compile(r"[\w.-]+:\d+(/.*)?")
"""`localhost:8000`."""


def learn_command(options: LearnOptions) -> int:
    """Read, fit, judge, save, print. Raises InputError."""
    urls = [s for s in options.sources if s.startswith(("http://", "https://"))]
    if urls and len(options.sources) > 1:
        raise InputError("learn", None, "SOURCE", "one server at a time, or files")
    if urls:
        from emu.apps.learn.live import probe_levels

        levels, server, files = probe_levels(urls[0], options)
    else:
        for source in options.sources:
            if _ADDRESS.fullmatch(source) and not Path(source).exists():
                raise InputError("learn", None, source, f"no such file; write http://{source}")
        files = [Path(source) for source in options.sources]
        levels = [level for path in files for level in read_benchmarks(path)]
        levels = _told_apart(levels)
        server = server_of(options)
        if options.server:
            from emu.apps.learn.live import asked

            server = asked(options.server, server)
    levels = [level for level in levels if level.label not in options.skip]
    if not levels:
        raise InputError("learn", None, "--skip", "leaves nothing")
    return learn_levels(levels, server, files, options)


def _told_apart(levels: Sequence[Level]) -> list[Level]:
    """Levels with labels of their own."""
    seen: dict[str, int] = {}
    found = []
    for level in levels:
        number = seen[level.label] = seen.get(level.label, 0) + 1
        label = level.label if number == 1 else f"{level.label} ({number})"
        found.append(msgspec.structs.replace(level, label=label))
    return found


def learn_levels(
    levels: Sequence[Level], server: Server, files: Sequence[Path], options: LearnOptions
) -> int:
    """Fit to levels that have been read or driven."""
    name = check_name(options.name or files[0].stem)
    place = options.output / name
    path, overrides = _case(levels, server, place, options)
    plan = make_plan(load_config(path, overrides), str(path))
    replica = plan.replicas[0]
    bound = replica.bound
    if bound is None:
        raise InputError(str(path), None, "engine.name", "learning needs an engine, not none")
    engine, base = bound.constants, bound.engine.label
    known = known_engine(
        engine, bound.learned, replica.gpu.name, replica.model.name, replica.latency.backend
    )
    requests = sum(len(level.requests) for level in levels)
    progress = Progress(is_quiet=options.quiet)
    out = options.output / f"{name}.toml"
    with Emulator(
        path, overrides, requests, base, options.jobs or cores(), progress.done
    ) as emulator:
        session = Session(levels, known, emulator)
        try:
            learned = session.learn(progress.phase)
        except KeyboardInterrupt:
            progress.close()
            if session.best is not None:
                partial = options.output / f"{name}.partial.toml"
                save_partial(partial, base, with_values(engine, session.best.values))
                print(f"what was found so far is in {partial}, not judged", file=sys.stderr)
            raise
    progress.close()
    about = About(
        name=name,
        data=[path.name for path in files],
        sha256=[hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        tool=levels[0].tool,
        requests=requests,
        levels=[level.label for level in levels],
        model=replica.model.name,
        gpu=replica.gpu.name,
        tensor_parallel=replica.tensor_parallel,
        backend=replica.latency.backend,
        date=options.date or max((level.date for level in levels), default=""),
    )
    save(out, base, learned, about)

    def show(console: Console) -> None:
        _print(console, out, learned, levels)
        console.print(f"workload and configuration: {place}", soft_wrap=True)

    return tell(Reply(show, lambda: _document(out, learned, about)), options)


def _case(
    levels: Sequence[Level], server: Server, place: Path, options: LearnOptions
) -> tuple[Path, tuple[str, ...]]:
    """The configuration that is emulated, with the overrides that belong to it."""
    overrides = tuple(options.overrides)
    if options.config is None:
        if not server.model:
            said = next((level.model for level in levels if level.model), "")
            server = msgspec.structs.replace(server, model=said)
        path = save_case(place, server.text(place.name), levels, options.shared_prefix)
    else:
        text = options.config.read_text("utf-8") if options.config.is_file() else ""
        load_config(options.config, overrides)
        path = options.config
        save_case(place, text, levels, options.shared_prefix)
        overrides = (*overrides, f"workload.path={(place / 'workload.jsonl').absolute()}")
    if any(level.is_engines_time for level in levels):
        overrides = (*overrides, "latency.front_end=false")
    return path, overrides


def _document(out: Path, learned: Learned, about: About) -> dict[str, object]:
    judged = learned.judged
    return {
        "file": str(out),
        "about": msgspec.to_builtins(about),
        "is_gain": judged.is_gain,
        "judged_on": judged.label,
        "error_percent": {k: list(v) for k, v in judged.by_metric.items()},
        "gain_percent": judged.gain,
        "gain_error_percent": judged.gain_error,
        "values": dict(
            zip((p.name for p in PARAMETERS), values_of(learned.engine).tolist(), strict=True)
        ),
        "standard_errors": dict(
            zip(
                (p.name for p in PARAMETERS),
                (learned.estimate.covariance.diagonal() ** 0.5).tolist(),
                strict=True,
            )
        ),
        "observations": [
            {"label": o.label, "metric": ("ttft", "tpot")[o.metric], "error_percent": float(left)}
            for o, left in zip(learned.observations, learned.left, strict=True)
        ],
        "rounds": learned.rounds,
    }


def _print(console: Console, out: Path, learned: Learned, levels: Sequence[Level]) -> None:
    judged = learned.judged
    for level in levels:
        notes = f"{len(level.requests)} requests, {level.running:.1f} in flight"
        notes += f", {level.skipped} left out (failed, warm-up)" if level.skipped else ""
        notes += ", starts not recorded: drawn" if level.is_drawn else ""
        console.print(f"{level.tool}, {level.label}: {notes}", soft_wrap=True)
    table = Table(title="Constants", title_justify="left")
    for column in ("", "configured", "prior", "learned", "± standard error"):
        table.add_column(column, justify="right" if column else "left")
    before = values_of(learned.known.engine)
    after = values_of(learned.engine)
    spread = learned.estimate.covariance.diagonal() ** 0.5
    for index, parameter in enumerate(PARAMETERS):
        shape = ",.0f" if parameter.is_whole else ".3f"
        cells = (
            before[index],
            learned.known.posterior.mean[index],
            after[index],
            spread[index],
        )
        table.add_row(parameter.name, *(f"{cell:{shape}}" for cell in cells))
    console.print(table)
    table = Table(
        title=f"Judged on {judged.label}: mean |error|, %",
        title_justify="left",
    )
    for column in ("", "as configured", "learned"):
        table.add_column(column, justify="right" if column else "left")
    for metric, pair in judged.by_metric.items():
        table.add_row(metric.upper(), *(f"{each:.1f}" for each in pair))
    console.print(table)
    console.print(f"prior: {learned.known.source}", soft_wrap=True)
    if judged.is_gain:
        words = f"better by {judged.gain:.1f} ± {judged.gain_error:.1f} %"
        console.print(f"{words} at a load that was not fitted to", soft_wrap=True)
    else:
        console.print(
            f"nothing gained ({judged.gain:+.1f} ± {judged.gain_error:.1f} %): the engine stays as"
            " configured, with its prior",
            soft_wrap=True,
        )
    console.print(f'[latency] engine = "{out}"', markup=False, soft_wrap=True)


class Progress:
    """A line on standard error: rewritten on a terminal, else one for each phase."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._is_terminal = sys.stderr.isatty()
        self._phase = ""

    def phase(self, words: str) -> None:
        """What is done now."""
        self._phase = words
        if not self._is_quiet and not self._is_terminal:
            print(words, file=sys.stderr, flush=True)

    def done(self, done: int, known: int) -> None:
        """Emulations of this phase. `known` is their number."""
        if self._is_terminal and not self._is_quiet:
            line = f"\r\033[K{self._phase}: emulation {done} of {known}"
            print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line empty."""
        if self._is_terminal and not self._is_quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
