"""`emu reproduce DIR`: a measured run of vLLM emulated from its own record, and compared with it.

Writes a configuration and a workload that can be changed and run again, runs them, and prints the
comparison (`emu/report/compare.py`).
"""

from __future__ import annotations

from pathlib import Path

from emu.apps.fidelity.measured_run import case_config
from emu.apps.fidelity.options import ReproduceOptions
from emu.apps.fidelity.record import read_case
from emu.apps.fidelity.tokens import unknown_tokens
from emu.config.load import load_config
from emu.errors import InputError
from emu.process.console import open_console
from emu.report.measured import compare_with, print_measured
from emu.report.measurement import read_measurement
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute


def reproduce_command(options: ReproduceOptions) -> int:
    """Write, run, compare. Raises InputError for what the directory lacks.

    A run that names its dataset cached the prefixes of its prompts; without their tokens it is
    refused, unless `--no-tokens` says that a run without prefix hits will do.
    """
    directory, profiles = options.directory, options.profiles
    if profiles is not None and not profiles.is_dir():
        raise InputError("reproduce", None, "--profiles", f"{profiles} is not a directory")
    case = read_case(directory, options.dataset)
    place = options.output or Path("runs") / directory.resolve().name
    text, workload = case_config(
        case, profiles.absolute() if profiles is not None else None, gpu=options.gpu
    )
    lacking = unknown_tokens(case, workload)
    if lacking and case.meta.get("dataset_path") and not options.no_tokens:
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
    config = load_config(config_path, overrides=options.overrides)
    if options.only_config:
        return 0
    execute(adjust(config, seed=None, output=place / "run"), str(config_path))
    console.print(f"run: {place / 'run'}\n", soft_wrap=True)
    measurement = read_measurement(case.requests)
    # Its lines are the measured requests in the order of their ids.
    measurement.request_ids = measurement.request_ids.argsort().argsort()
    print_measured(compare_with(read_run(place / "run"), measurement), console)
    return 0
