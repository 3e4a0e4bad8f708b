"""`emu reproduce DIR`: a measured run of vLLM emulated from its own record, and compared with it.

Writes a configuration and a workload that can be changed and run again, runs them, and prints the
comparison. Owns no rule: `importers/measured_run.py` reads the
directory, `report/measured.py` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emu.config.load import load_config
from emu.errors import InputError
from emu.process.terminal import open_console
from emu.report.measured import compare_with, print_measured
from emu.report.measurement import read_measurement
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute
from emu.tools.importers.measured_run import case_config, read_case, unknown_tokens


def reproduce_command(
    directory: Path,
    *,
    profiles: Path | None,
    gpu: str,
    output: Path | None,
    overrides: Sequence[str],
    only_config: bool,
    dataset: Path | None = None,
    no_tokens: bool = False,
) -> int:
    """Write, run, compare. Raises InputError for what the directory lacks.

    A run that names its dataset cached the prefixes of its prompts; without their tokens it is
    refused, unless `no_tokens` says that a run without prefix hits will do.
    """
    if profiles is not None and not profiles.is_dir():
        raise InputError("reproduce", None, "--profiles", f"{profiles} is not a directory")
    case = read_case(directory, dataset)
    place = output if output is not None else Path("runs") / directory.resolve().name
    text, workload = case_config(
        case, profiles.absolute() if profiles is not None else None, gpu=gpu
    )
    lacking = unknown_tokens(case, workload)
    if lacking and case.meta.get("dataset_path") and not no_tokens:
        problem = f"{lacking}: without its tokens there are no prefix hits; say --dataset FILE, "
        problem += "or --no-tokens to go on without"
        raise InputError(str(case.meta_path), None, "dataset_path", problem)
    note = f"no prefix hits where tokens are unknown: {lacking}" if lacking else ""
    if note:
        text = f"# {note}\n{text}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        config_path = place / "cluster.toml"
        config_path.write_text(text, encoding="utf-8")
        (place / "workload.jsonl").write_text(workload, encoding="utf-8")
    except OSError as error:
        raise InputError(str(place), None, "", f"cannot be written: {error.strerror}") from None
    console = open_console()
    console.print(f"configuration: {config_path}", soft_wrap=True)
    if note:
        console.print(note, soft_wrap=True)
    config = load_config(config_path, overrides=overrides)
    if only_config:
        return 0
    execute(adjust(config, seed=None, output=place / "run"), str(config_path))
    console.print(f"run: {place / 'run'}\n", soft_wrap=True)
    measurement = read_measurement(case.requests)
    # Its lines are the measured requests in the order of their ids.
    measurement.request_ids = measurement.request_ids.argsort().argsort()
    print_measured(compare_with(read_run(place / "run"), measurement), console)
    return 0
