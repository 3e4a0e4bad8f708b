"""One point of a sweep: its config, the key that its result is stored under, and its run.

`run_point` is what a worker does, in whatever process it lives; everything it needs is in the
`Task`, and its result is plain data. It never raises for a run that went wrong: the result says so.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.api import override_texts
from emu.config.load import config_from_text, effective_dict
from emu.config.schema import Config
from emu.config.tables.output import OutputTable
from emu.errors import InputError, InvariantViolation, RunError
from emu.plugins import digest
from emu.process.interrupts import scratch
from emu.runs.inputs import named_plugins, tree_digest
from emu.runs.runner import execute
from emu.sweeps.conditions import figures_of
from emu.sweeps.points import Point

FORMAT: Final = 1
"""Changes when stored results of earlier versions no longer mean the same."""


_PATHS: Final = ("path", "hf_config", "tokenizer", "replay")
"""Keys that name files on which a result depends."""


class Task(msgspec.Struct, frozen=True):
    """One run to be done."""

    key: str
    config: Config
    source: str
    keep_in: str
    """Where the run's directory is kept; empty = nowhere."""


class PointResult(msgspec.Struct):
    """What is stored of a run."""

    key: str
    status: str
    """completed; failed (the run could not go on); invalid (the config or workload is wrong);
    violated (an invariant of emu)."""
    error: str
    figures: dict[str, Any]
    """Figures of summary.json by dotted name; empty unless completed."""


class Base:
    """The config that all points start from. Digests of files are taken once."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        try:
            self._text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise InputError(self.source, None, "", problem.lower()) from None
        self._directory = path.resolve().parent
        self._digests: dict[str, str] = {}
        # Results of other code are other results, whatever the version says.
        self._code = tree_digest(Path(__file__).parents[1])

    def config(self, fixed: dict[str, Any], point: Point) -> Config:
        """The config of a point. Raises InputError."""
        texts = override_texts({**fixed, **point.values})
        config = config_from_text(self._text, self.source, texts, self._directory)
        return config if point.seed is None else msgspec.structs.replace(config, seed=point.seed)

    def key(self, config: Config) -> str:
        """What the result depends on, and nothing else, as a hash."""
        plain = effective_dict(config)
        del plain["output"]
        for table, name in named_plugins(plain):
            table[name] = f"{table[name].rpartition(':')[2]} {digest(table[name])}"
        self._replace_paths(plain)
        content = {"format": FORMAT, "emu": self._code, "config": plain}
        text = msgspec.json.encode(content, order="deterministic")
        return hashlib.sha256(text).hexdigest()[:32]

    def _replace_paths(self, value: Any) -> None:
        """Paths of files that exist become digests of their content, in place."""
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(items):
            if isinstance(inner, (dict, list)):
                self._replace_paths(inner)
            elif (key in ("path", "hf_config", "tokenizer", "replay") and inner) or (
                key == "engine" and str(inner).endswith(".toml")
            ):
                value[key] = self._digest(inner)

    def _digest(self, path: str) -> str:
        known = self._digests.get(path)
        if known is None:
            known = self._digests[path] = tree_digest(Path(path))
        return known


def run_point(task: Task) -> PointResult:
    """Run one point. KeyboardInterrupt passes through."""
    if task.keep_in:
        return _run(task, msgspec.structs.replace(task.config.output, dir=task.keep_in))
    with scratch("emu-sweep-") as directory:  # no user will see these files
        output = msgspec.structs.replace(
            task.config.output,
            dir=str(directory / "run"),
            trace=False,
            events=False,
            timeseries_interval_ms=0,
        )
        return _run(task, output)


def _run(task: Task, output: OutputTable) -> PointResult:
    config = msgspec.structs.replace(task.config, output=output)
    try:
        done = execute(config, task.source, report=False if not task.keep_in else None)
    except InputError as error:
        return PointResult(task.key, "invalid", str(error), {})
    except RunError as error:
        return PointResult(task.key, "failed", f"{type(error).__name__}: {error}", {})
    except InvariantViolation as error:
        return PointResult(task.key, "violated", f"{type(error).__name__}: {error}", {})
    assert done.summary is not None
    return PointResult(task.key, "completed", "", figures_of(done.summary))
