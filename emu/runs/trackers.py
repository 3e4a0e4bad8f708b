"""Runs sent to experiment trackers (`emu log`): a thin adapter for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.errors import needs_extra
from emu.report.summary import read_summary
from emu.runs.again import read_run_json

_FILES: Final = ("summary.json", "run.json", "report.html")


def log_runs(directories: Sequence[Path], to: str, project: str) -> Iterator[str]:
    """Send each run; its name when it is there. Raises InputError for what is no complete run."""
    from emu.report.what_ran import flat_settings

    send = {"wandb": _to_wandb, "mlflow": _to_mlflow}[to]
    for directory in directories:
        content = read_run_json(directory)
        settings = dict(flat_settings(content["config"]))
        summary = msgspec.to_builtins(read_summary(directory / "summary.json"))
        figures = dict(_numbers(summary))
        files = [directory / name for name in _FILES if (directory / name).exists()]
        name = directory.resolve().name
        send(project, name, settings, figures, files)
        yield name


def _numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Dotted names and values of the numbers of a summary."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def _to_wandb(
    project: str,
    name: str,
    settings: dict[str, str],
    figures: dict[str, float],
    files: Sequence[Path],
) -> None:
    with needs_extra("wandb", "log"):
        import wandb
    run = wandb.init(project=project, name=name, config=settings)
    run.summary.update(figures)
    artifact = wandb.Artifact(name, type="emu-run")
    for file in files:
        artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()


def _to_mlflow(
    project: str,
    name: str,
    settings: dict[str, str],
    figures: dict[str, float],
    files: Sequence[Path],
) -> None:
    with needs_extra("mlflow", "log"):
        import mlflow
    mlflow.set_experiment(project)
    with mlflow.start_run(run_name=name):
        # Names of parameters hold no brackets, values at most 500 characters.
        mlflow.log_params({key: value[:500] for key, value in settings.items()})
        mlflow.log_metrics(figures)
        for file in files:
            mlflow.log_artifact(str(file))
