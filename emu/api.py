"""emu from Python: run an experiment, look at its results as arrays.

    import emu

    result = emu.run("cluster.toml", overrides={"scheduler.max_num_seqs": 64})
    result.summary.p99_ttft_ms
    result.requests["ttft_ns"]          # numpy; result.requests.to_polars(), .to_pandas()
    emu.load("runs/quickstart")         # the same view of a run that has ended

The command line runs the same code. A running event loop (a notebook) is no obstacle: the run
then goes on in a thread of its own, and an interrupt of the cell ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from emu.config.load import config_from_dict, load_config
from emu.config.schema import Config
from emu.documents import Document, DocumentView
from emu.errors import EmuError, InputError
from emu.plugins.named import named
from emu.report.atomic import find
from emu.report.summary import Summary, read_summary
from emu.runs.request_rows import Table, write_workload
from emu.runs.runner import RunResult, adjust, execute

if TYPE_CHECKING:
    from emu.report.compare import Comparison
    from emu.report.paired import PairedComparison, SeedSet
    from emu.report.rundata import RunData

_TEXT_COLUMNS: Final = frozenset(
    {"session_id", "status", "reason", "tenant", "from", "to", "writer", "cause", "state"}
)
"""Columns of results that hold words; every other holds integers, -1 where empty."""


class MissingPackage(EmuError):
    """A package that only some of the API needs is not installed."""


class Rows(np.ndarray[Any, Any]):
    """A structured array: one record per row of a results file, fields named as its columns."""

    def __getitem__(self, key: Any) -> Any:
        """A column is a plain array, a slice is Rows again."""
        value = super().__getitem__(key)
        if isinstance(value, Rows) and value.dtype.names is None:
            return np.asarray(value)
        return value

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns by name."""
        return {name: np.ascontiguousarray(self[name]) for name in self.dtype.names or ()}

    def to_pandas(self) -> Any:
        """A pandas.DataFrame. Raises MissingPackage without pandas."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingPackage("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.columns())

    def to_polars(self) -> Any:
        """A polars.DataFrame. Raises MissingPackage without polars."""
        try:
            import polars
        except ModuleNotFoundError:
            raise MissingPackage("to_polars() needs polars: pip install polars") from None
        return polars.DataFrame(
            {
                name: values.tolist() if values.dtype.kind == "U" else values
                for name, values in self.columns().items()
            }
        )


class Result:
    """A run that has ended. Files are read when they are first asked for."""

    def __init__(self, directory: Path, wall_s: float | None = None) -> None:
        self.directory = directory
        self.wall_s = wall_s
        """Wall-clock seconds that the run took; None for a run that was loaded."""

    def __repr__(self) -> str:
        """The figures one looks at first."""
        s = self.summary
        return (
            f"<emu.Result {str(self.directory)!r}: {s.completed} completed, "
            f"TTFT p50 {s.median_ttft_ms:.1f} p99 {s.p99_ttft_ms:.1f} ms, "
            f"TPOT p50 {s.median_tpot_ms:.1f} p99 {s.p99_tpot_ms:.1f} ms, load {s.load.verdict}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: latencies, and the figures below them."""
        from emu.report.grid import html_table
        from emu.report.summary import METRICS, STATISTICS
        from emu.report.table import figures, latency_cells

        latencies = [[metric, *latency_cells(self.summary, metric)] for metric in METRICS]
        others = [[name, text] for name, text, _ in figures(self.summary)]
        return html_table(f"{self.directory}: latency, ms", ["", *STATISTICS], latencies) + (
            html_table("", ["", ""], others)
        )

    @cached_property
    def summary(self) -> Summary:
        """summary.json; docs/metrics.md says what each figure means."""
        return read_summary(self._file("summary.json"))

    @cached_property
    def requests(self) -> Rows:
        """requests.csv, one record per request in order of arrival. Times in ns, -1 = none."""
        return _read_rows(self._file("requests.csv"))

    @cached_property
    def timeseries(self) -> Rows:
        """timeseries.csv, one record per interval."""
        return _read_rows(self._file("timeseries.csv"))

    @cached_property
    def transitions(self) -> Rows:
        """transitions.csv, one record per change of a replica's state."""
        return _read_rows(self._file("transitions.csv"))

    @cached_property
    def data(self) -> RunData:
        """Everything that pages and figures are made of."""
        from emu.report.rundata import read_run

        return read_run(self.directory)

    def plot(self, figure: str = "ttft-cdf", **options: Any) -> Drawing:
        """`emu.plot` of this run."""
        return plot(self, figure=figure, **options)

    def read_all(self) -> None:
        """Read every file now: what comes later does not need the directory."""
        _ = (self.summary, self.requests, self.transitions, self.config, self.data)
        if find(self.directory, "timeseries.csv") is not None:
            _ = self.timeseries

    @cached_property
    def config(self) -> Document:
        """The whole configuration of the run, defaults filled in."""
        content: Document = json.loads(self._file("run.json").read_text(encoding="utf-8"))
        config: Document = content["config"]
        return config

    def write_report(self) -> Path:
        """(Re)write report.html; its path."""
        from emu.report.run_page import write_report

        return write_report(self.directory)

    def _file(self, name: str) -> Path:
        path = find(self.directory, name)
        if path is None:
            raise InputError(str(self.directory), None, name, "no such file in this directory")
        return path


def run(
    config: str | Path | DocumentView | Config,
    overrides: DocumentView | Sequence[str] = (),
    *,
    seed: int | None = None,
    output: str | Path | None = None,
    report: bool | None = None,
    progress: bool = False,
    workload: Table | None = None,
    keep: bool = True,
) -> Result:
    """Run one experiment and return its results.

    `config` is the path of a TOML file, or the same tables as a dict. `overrides` maps dotted
    keys to values, or is a list of `KEY=VALUE` as on the command line. `output` is the directory
    of the results (default: the config's), `report` whether report.html is written (default: the
    config's). `workload`: the requests as a DataFrame (pandas or polars) or a list of mappings
    instead of the config's (emu/runs/request_rows.py names the columns); they are written beside
    the directory. `keep` False: nothing is left on disk, the results are in memory. Raises
    InputError for what is wrong in a config or a workload, before anything is written; RunError,
    InvariantViolation or KeyboardInterrupt for a run that did not end well.
    """
    texts = override_texts(overrides) if isinstance(overrides, Mapping) else list(overrides)
    with contextlib.ExitStack() as stack:
        if not keep:
            from emu.process.interrupts import scratch

            output, report = stack.enter_context(scratch("emu-run-")) / "run", False
        if workload is not None:
            place = Path(output) if output is not None else Path("runs/run")
            config, more = _with_workload(config, workload, place)
            output, texts = place, texts + more
        loaded, source = _loaded(config, texts)
        loaded = adjust(loaded, seed=seed, output=None if output is None else Path(output))

        def work(stop: threading.Event | None) -> RunResult:
            return execute(loaded, source, progress=progress, report=report, stop=stop)

        done = _beside_a_loop(work)
        result = Result(done.directory, done.wall_s)
        if not keep:
            result.read_all()
            if workload is not None:  # the file is gone
                for config_read in (result.config, result.data.config):
                    config_read["workload"]["path"] = "in memory"
        return result


def _with_workload(
    config: str | Path | DocumentView | Config, workload: Table, place: Path
) -> tuple[str | Path | DocumentView, list[str]]:
    """The configuration without its own requests, and what names the file of the given ones."""
    if isinstance(config, Config):
        problem = "cannot be given with a Config; give a file or a dict"
        raise InputError("config", None, "workload", problem)
    path = write_workload(workload, place.with_name(f"{place.name}.workload.jsonl"))
    if isinstance(config, Mapping):
        config = {key: value for key, value in config.items() if key != "workload"}
    where = _toml(str(path.resolve()), "workload")
    return config, [f"workload.path={where}", "workload.format='jsonl'"]


def _loaded(config: str | Path | DocumentView | Config, texts: Sequence[str]) -> tuple[Config, str]:
    """The configuration, and what it is called in messages."""
    if isinstance(config, Config):
        if texts:
            problem = "cannot be applied to a Config; give a file or a dict"
            raise InputError("config", None, "overrides", problem)
        return config, "config"
    if isinstance(config, Mapping):
        return config_from_dict(dict(config), texts), "config"
    return load_config(config, texts), str(config)


One = Result | str | Path
Runs = One | Mapping[str, One | Sequence[One]]
"""A run or its directory, or several by name; a list of runs is one system over its seeds."""


def compare(*runs: Runs, seed: int = 0) -> Comparison | PairedComparison:
    """Two to ten runs side by side, the first is the base: `.rows` with differences in per cent and
    their 95 % intervals, `.settings` with the keys that differ.

    Runs are results or directories, or a mapping from names to them. Where names stand for lists of
    runs, these are the seeds of a system: `.rows` has means over seeds with their intervals, and
    differences paired by seed. Raises InputError.
    """
    from emu.report.compare import compare_data
    from emu.report.paired import compared

    sets = _sets_of(runs)
    if all(len(one.runs) == 1 and not one.is_list for one in sets):
        return compare_data(_data_of(sets), seed)
    return compared([_seed_set(one) for one in sets])


class Drawing:
    """A figure of runs: a notebook shows it, `save` writes it."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure
        """matplotlib's Figure."""

    def __repr__(self) -> str:
        """The titles of its axes."""
        titles = [f"{axes.get_ylabel()} over {axes.get_xlabel()}" for axes in self.figure.axes]
        return f"<emu.Drawing: {'; '.join(titles)}>"

    def save(self, path: str | Path) -> Path:
        """Write a .pdf, .svg or .png; its path. Raises InputError."""
        from emu.report.figures import save

        save(self.figure, Path(path))
        return Path(path)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


def plot(
    *runs: Runs,
    figure: str = "",
    width: str = "single",
    x: str = "gpu_seconds.total",
    y: str | Sequence[str] = "",
) -> Drawing:
    """A figure of runs, as `emu plot` draws it: ttft-cdf, tpot-cdf, itl-cdf, e2e-cdf, timeline,
    gpus, gantt, means, or pareto with the figures `x` and `y` of summary.json.

    Runs as for `compare`. Lists of runs are drawn as means over their seeds with 95 % intervals:
    `means` (the default for them) and the distributions. Needs matplotlib (extra `plots`). Raises
    InputError.
    """
    from emu.report.figures import draw_charts, figure_charts
    from emu.report.mean_figures import MEANS_SHOWN, cdf_bands, draw_means

    sets = _sets_of(runs)
    has_lists = any(one.is_list for one in sets)
    if figure == "means" or (has_lists and not figure):
        shown = ([y] if y else MEANS_SHOWN) if isinstance(y, str) else list(y)
        return Drawing(draw_means([_seed_set(one) for one in sets], shown, width))
    data = _data_of(sets)
    if not has_lists:
        charts = figure_charts(figure or "ttft-cdf", data, x, str(y or "p99_ttft_ms"))
        return Drawing(draw_charts(charts, width))
    parts = iter(data)
    grouped = [(one.name, [next(parts) for _ in one.runs]) for one in sets]
    return Drawing(draw_charts([cdf_bands(figure, grouped)], width))


class _Set(NamedTuple):
    """What one name stands for."""

    name: str
    """Empty for a run that was given without one."""
    runs: list[Result]
    is_list: bool


def _sets_of(runs: Sequence[Runs]) -> list[_Set]:
    """Runs, or lists of them, by name. Raises InputError."""
    sets = []
    for one in runs:
        for name, found in one.items() if isinstance(one, Mapping) else [("", one)]:
            is_list = isinstance(found, (list, tuple))
            if not isinstance(name, str):
                raise InputError("runs", None, "", f"expected names that are texts, got {name!r}")
            if is_list and not (found and name):
                raise InputError("runs", None, name, "a list of runs needs a name and a run")
            of = found if isinstance(found, (list, tuple)) else [found]
            sets.append(_Set(name, [_result_of(name, each) for each in of], is_list))
    if not sets:
        raise InputError("runs", None, "", "give at least one run")
    return sets


def _data_of(sets: Sequence[_Set]) -> list[RunData]:
    """What was read of runs; those with a name are called by it."""
    found = []
    for one in sets:
        for result in one.runs:
            called = Path(one.name) if one.name and not one.is_list else result.directory
            found.append(msgspec.structs.replace(result.data, directory=called))
    return found


def _seed_set(one: _Set) -> SeedSet:
    """The figures of a system over its seeds."""
    from emu.report.paired import SeedSet, numbers_of
    from emu.report.summary import figures_of

    figures = numbers_of([figures_of(result.summary) for result in one.runs])
    seeds = [int(result.config["seed"]) for result in one.runs]
    return SeedSet(one.name or one.runs[0].directory.name, seeds, figures)


def _result_of(name: str, run_: object) -> Result:
    """A run, or its directory as one. Raises InputError."""
    if isinstance(run_, (str, Path)):
        return Result(Path(run_))
    if isinstance(run_, Result):
        return run_
    problem = f"expected a result or a directory, got a value of type {type(run_).__name__}"
    raise InputError("runs", None, name, problem)


def column_of(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Values as a column: numbers where all are numbers (NaN for none), else words."""
    if values and all(isinstance(v, bool) for v in values):
        return np.array(values)
    if all(v is None or isinstance(v, (int, float)) for v in values):
        is_whole = all(type(v) is int for v in values)
        kind = np.int64 if is_whole else np.float64
        return np.array([np.nan if v is None else v for v in values], dtype=kind)
    return np.array(["" if v is None else str(v) for v in values], dtype=np.str_)


def table_of(columns: Mapping[str, np.ndarray[Any, Any]]) -> Rows:
    """Columns of one length as records."""
    kinds = [(name, column.dtype) for name, column in columns.items()]
    table = np.empty(max((len(column) for column in columns.values()), default=0), dtype=kinds)
    for name, column in columns.items():
        table[name] = column
    return table.view(Rows)


def frame(runs: Mapping[str, Result]) -> Rows:
    """The requests of many runs as one table: `run`, then what a request is and how long it took.

    Times since the start in s (`arrival_s`), latencies in ms (`ttft_ms`, `tpot_ms`, `e2e_ms`,
    `queue_ms`), NaN where there is none. `preempted_ms`: in service, and in no batch nor in a
    migration, as Vidur counts it; `pd_ratio`: prompt over output tokens. `frame(...).to_pandas()`.
    """
    if not runs:
        raise InputError("frame", None, "", "give at least one run, by name")
    words = {"run": "", "status": "status", "reason": "reason", "tenant": "tenant"}
    counts = {
        "request_id": "request_id",
        "prompt_tokens": "prompt_toks",
        "output_tokens": "output_toks",
        "priority": "priority",
        "replica": "instance_id",
        "decode_replica": "decode_instance_id",
        "preemptions": "preemptions",
    }
    times = {"ttft_ms": "ttft_ns", "tpot_ms": "tpot_ns", "e2e_ms": "latency_ns"}
    times["queue_ms"] = "queue_ns"
    more = ("arrival_s", *times, "preempted_ms", "pd_ratio")
    columns: dict[str, list[Any]] = {name: [] for name in (*words, *counts, *more)}
    for name, result in runs.items():
        rows = result.requests
        columns["run"].append(np.full(len(rows), name))
        for mine, theirs in (*list(words.items())[1:], *counts.items()):
            columns[mine].append(rows[theirs])
        columns["arrival_s"].append(rows["arrival_ns"] / 1e9)
        for mine, theirs in times.items():
            values = rows[theirs].astype(np.float64)
            columns[mine].append(np.where(values < 0, np.nan, values / 1e6))
        in_service = rows["latency_ns"] - rows["queue_ns"]
        stopped = in_service - rows["execution_ns"] - np.maximum(rows["migration_ns"], 0)
        is_whole = rows["status"] == "completed"
        columns["preempted_ms"].append(np.where(is_whole, stopped / 1e6, np.nan))
        outputs = np.maximum(rows["output_toks"], 1)
        columns["pd_ratio"].append(rows["prompt_toks"] / outputs)
    return table_of({name: np.concatenate(parts) for name, parts in columns.items()})


def load(directory: str | Path) -> Result:
    """The results of a run that has ended. Raises InputError if there are none."""
    result = Result(Path(directory))
    _ = result.summary
    return result


def override_texts(overrides: DocumentView) -> list[str]:
    """`{"router.policy": "random"}` as `KEY=VALUE` texts. Raises InputError for odd values."""
    return [f"{key}={_toml(value, key)}" for key, value in overrides.items()]


def _toml(value: Any, key: str) -> str:
    """A value as TOML on one line."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, type):
        value = named(value)
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(k))} = {_toml(v, key)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Iterable):
        return "[" + ", ".join(_toml(item, key) for item in value) + "]"
    raise InputError("overrides", None, key, f"cannot hold {value!r}")


def _beside_a_loop(work: Callable[[threading.Event | None], RunResult]) -> RunResult:
    """Call `work`; in a thread of its own if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work(None)
    stop = threading.Event()
    done: list[RunResult] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            done.append(work(stop))
        except BaseException as error:  # re-raised where it belongs
            failed.append(error)

    thread = threading.Thread(target=body, name="emu run")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _read_rows(path: Path) -> Rows:
    """A CSV file of a run as a structured array."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        columns = list(zip(*reader, strict=True)) or [() for _ in header]
    arrays = {}
    for name, texts in zip(header, columns, strict=True):
        if name in _TEXT_COLUMNS:
            arrays[name] = np.array(texts or (), dtype=np.str_)
            continue
        try:
            values = [int(text) if text else -1 for text in texts]
        except ValueError as error:
            raise InputError(str(path), None, name, str(error)) from None
        arrays[name] = np.array(values, dtype=np.int64)
    return table_of(arrays)
