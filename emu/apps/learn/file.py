"""A learned engine as a file that `engine.learned` names.

    base = "vllm-0.15"          what differs from this engine
    weights_time = 1.031 ...

    [learned]                   format, name, date, emu's version, what was measured, the verdict
    [posterior]                 mean, covariance and noise (emu/latency/posterior.py)

The file depends on the data and the options only: the date is the data's, or the option's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.learn.session import Learned
from emu.apps.shared.posteriorfile import posterior_text, table
from emu.documents import Document
from emu.engines.registry import engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import NAMES, Posterior, values_of
from emu.process.version import __version__
from emu.report.atomic import write_text

FORMAT: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Where a learned engine comes from."""

    name: str
    data: list[str]
    """Files or the address."""
    sha256: list[str]
    """Of each file."""
    tool: str
    requests: int
    levels: list[str]
    model: str
    gpu: str
    tensor_parallel: int
    backend: str
    date: str


def check_name(name: str) -> str:
    """The name. Raises InputError for one that is no file's name."""
    if not _NAME.fullmatch(name):
        raise InputError("learn", None, "--name", f"{name!r} is no name of a file")
    return name


def save(path: Path, base: str, learned: Learned, about: About) -> None:
    """Write the file."""
    judged = learned.judged
    verdict = "gain" if judged.is_gain else "nothing gained"
    lines: Document = {
        "format": FORMAT,
        "name": about.name,
        "emu": __version__,
        "date": about.date,
        "verdict": verdict,
        "prior": learned.known.source,
        "data": about.data,
        "sha256": about.sha256,
        "tool": about.tool,
        "requests": about.requests,
        "levels": about.levels,
        "model": about.model,
        "gpu": about.gpu,
        "tensor_parallel": about.tensor_parallel,
        "backend": about.backend,
        "judged_on": judged.label,
    }
    for metric, (before, after) in judged.by_metric.items():
        lines[f"{metric}_error_percent"] = [round(before, 3), round(after, 3)]
    text = engine_text(learned.engine, base) + "\n[learned]\n" + table(lines)
    posterior = Posterior(
        list(NAMES),
        (values_of(learned.engine) if judged.is_gain else learned.estimate.values).tolist(),
        learned.estimate.covariance.tolist(),
        learned.noise,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n" + posterior_text(posterior, "posterior"))


def save_partial(path: Path, base: str, engine: EngineModel) -> None:
    """What an interrupted fit had found; not judged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"format": FORMAT, "emu": __version__, "verdict": "interrupted: not judged"}
    write_text(path, engine_text(engine, base) + "\n[learned]\n" + table(about))
