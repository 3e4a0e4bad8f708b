"""`emu workload`: convert, generate, describe, scale and slice workload files.

A thin layer over `emu/workload/`: it parses, calls and prints. Paths are relative to the working
directory. Results go to stdout, what was lost or odd to stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from emu.cli.parser import Count, Jobs, Json, Overrides, Parameter, Quiet, Seconds, Seed, settings
from emu.config.names import WorkloadFormat
from emu.errors import InputError

if TYPE_CHECKING:
    from emu.config.schema import Config, WorkloadTable
    from emu.workload.statistics import Description
    from emu.workload.tools import Written

SUMMARY = "Convert, generate, describe, scale and slice workloads"

Source = Annotated[
    Path, Parameter(help="Workload file, or a config (.toml) whose workload is meant.")
]
Target = Annotated[Path, Parameter(help="File to write.")]
From = Annotated[
    WorkloadFormat, Parameter(name="--from", help="Format of the input; auto = by content.")
]
To = Annotated[
    str,
    Parameter(name="--to", help="Format of the output; empty = by its name: jsonl or csv."),
]
Tokenizer = Annotated[
    str, Parameter(help="sharegpt: path of a tokenizer.json; empty = estimated lengths.")
]
Set = Annotated[
    tuple[str, ...],
    settings("KEY=VALUE, keys of [workload.synthetic]: prompt.median=900 sessions.turns_max=5"),
]


def convert(
    source: Source,
    output: Target,
    *,
    to: To = "",
    from_: From = "auto",
    tokenizer: Tokenizer = "",
    expand_ids: Annotated[bool, Parameter(negative=())] = False,
    seed: Seed = 42,
) -> int:
    """Write a workload in another format.

    Parameters
    ----------
    expand_ids
        jsonl: write runs of token ids one by one, as other tools expect.
    seed
        Seed of what is drawn (arrivals of formats without any).
    """
    from emu.workload.tools import convert as write

    table, source_seed = _table(source, from_, tokenizer, seed)
    name = _format_of(output, to)
    written = write(table, output, name, base_dir=Path(), seed=source_seed, expand_ids=expand_ids)
    return _tell(written, output, name)


def generate(
    output: Target,
    *,
    config: Path | None = None,
    requests: int | None = None,
    rate: float | None = None,
    process: Literal["poisson", "gamma", "constant", "burst", "piecewise", "all_at_once"]
    | None = None,
    set_: Set = (),
    seed: Seed | None = None,
    to: To = "",
) -> int:
    """Write a synthetic workload.

    Parameters
    ----------
    config
        Config whose [workload.synthetic] is the start; without it, the defaults.
    requests
        Number of requests (sessions count as one each).
    rate
        Mean arrival rate, requests per second.
    process
        Arrival process.
    seed
        Seed; the config's, or 42.
    """
    from emu.workload.tools import generate as write

    settings = [f"workload.synthetic.{text}" for text in set_]
    for key, value in (
        ("requests", requests),
        ("arrivals.rate_per_s", rate),
        ("arrivals.process", process),
    ):
        if value is not None:
            settings.insert(0, f"workload.synthetic.{key}={value}")
    whole = _config(config, settings)
    table = whole.workload.synthetic
    if whole.workload.path or table is None:
        problem = "has a workload file; expected [workload.synthetic]"
        raise InputError(str(config), None, "workload.path", problem)
    name = _format_of(output, to)
    chosen = whole.seed if seed is None else seed
    return _tell(write(table, output, seed=chosen, to_format=name), output, name)


def describe(
    source: Source,
    *,
    from_: From = "auto",
    tokenizer: Tokenizer = "",
    svg: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    seed: Seed = 42,
) -> int:
    """Rates over time, lengths, sessions, shared prefixes: in figures and as a picture.

    Parameters
    ----------
    svg
        Also write the picture to this file.
    json
        Figures as JSON instead of the picture.
    """
    import msgspec

    from emu.workload.opened import open_workload
    from emu.workload.picture import picture
    from emu.workload.statistics import describe as look

    table, source_seed = _table(source, from_, tokenizer, seed)
    workload = open_workload(table, base_dir=Path(), seed=source_seed, config_source=str(source))
    description = look(workload)
    if svg is not None:
        _write_svg(svg, _picture_svg(description))
    if json:
        print(msgspec.json.format(msgspec.json.encode(description), indent=2).decode())
    else:
        print(picture(description), end="")
    return 0


def scale(
    source: Source,
    output: Target,
    *,
    time: float = 1.0,
    prompt: float = 1.0,
    outputs: float = 1.0,
    to: To = "",
    from_: From = "auto",
    tokenizer: Tokenizer = "",
    seed: Seed = 42,
) -> int:
    """Stretch arrivals and lengths.

    Parameters
    ----------
    time
        Factor of arrival times: above 1 is slower.
    prompt
        Factor of prompt lengths.
    outputs
        Factor of output lengths.
    """
    from emu.workload.tools import scale as write

    table, source_seed = _table(source, from_, tokenizer, seed)
    name = _format_of(output, to)
    written = write(
        table,
        output,
        base_dir=Path(),
        seed=source_seed,
        time_factor=time,
        prompt_factor=prompt,
        output_factor=outputs,
        to_format=name,
    )
    return _tell(written, output, name)


def slice_(
    source: Source,
    output: Target,
    *,
    start_s: Seconds = 0.0,
    end_s: Seconds = 0.0,
    limit: Count = 0,
    to: To = "",
    from_: From = "auto",
    tokenizer: Tokenizer = "",
    seed: Seed = 42,
) -> int:
    """Cut a piece out, which then starts at 0.

    Parameters
    ----------
    start_s
        First second of the piece.
    end_s
        End of the piece; 0 = the end of the workload.
    limit
        First N lines of the piece; 0 = all.
    """
    from emu.workload.tools import cut

    table, source_seed = _table(source, from_, tokenizer, seed)
    name = _format_of(output, to)
    written = cut(
        table,
        output,
        base_dir=Path(),
        seed=source_seed,
        start_s=start_s,
        end_s=end_s,
        limit=limit,
        to_format=name,
    )
    return _tell(written, output, name)


# --- helpers -------------------------------------------------------------------------------------
def _config(path: Path | None, settings: list[str]) -> Config:
    from emu.config.load import config_from_dict, load_config

    if path is not None:
        return load_config(path, settings)
    return config_from_dict({"workload": {"synthetic": {}}}, settings)


def _table(source: Path, format: str, tokenizer: str, seed: int) -> tuple[WorkloadTable, int]:
    """The workload that a path means, and the seed of what is drawn."""
    from emu.config.schema import WorkloadTable

    if source.suffix == ".toml":
        config = _config(source, [])
        return config.workload, config.seed
    if not source.exists():
        raise InputError(str(source), None, "", "no such file")
    fields: dict[str, Any] = {"path": str(source), "format": format, "tokenizer": tokenizer}
    return WorkloadTable(**fields), seed


def _format_of(output: Path, to: str) -> str:
    if to:
        return to
    if output.suffix in (".jsonl", ".csv"):
        return output.suffix[1:]
    raise InputError(str(output), None, "--to", "give a format, or name the file .jsonl or .csv")


def _tell(written: Written, output: Path, format: str) -> int:
    notes = written.notes
    for what, counts in (
        ("skipped", notes.skipped),
        ("clipped", notes.clipped),
        (f"not said by {format}", written.dropped),
    ):
        for reason, count in counts.items():
            print(f"{what}: {count} {reason}", file=sys.stderr)
    for warning in notes.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{output}: {written.requests:,} requests in {written.lines:,} lines ({format})")
    return 0


def _picture_svg(d: Description) -> str:
    """Rate over time, and the lengths of prompts and outputs."""
    from emu.report.page.panels import Bars, Line, Panel, svg

    starts_s = [d.first_s + index * d.rate_bin_s for index in range(len(d.rates_per_s))]
    panels = [
        Panel("arrivals", "s", "1/s", lines=[Line("arrivals", starts_s, d.rates_per_s, True)])
    ]
    for name, lengths in (("prompt", d.prompt), ("output", d.output)):
        bars = [Bars(name, [float(count) for _, count in lengths.histogram])]
        title = f"{name} tokens (bins double), p50 {lengths.p50:.0f}, p99 {lengths.p99:.0f}"
        names = [f"{low:,}+" for low, _ in lengths.histogram]
        every = -(-len(names) // 6)
        shown = [text if index % every == 0 else "" for index, text in enumerate(names)]
        panels.append(Panel(title, "tokens", "requests", bars=bars, names=shown))
    title = f"{d.source}: {d.requests:,} requests, {d.rate_per_s:.2f}/s"
    return svg(title, [panels], ["arrivals", "prompt", "output"])


def _write_svg(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), None, "--svg", error.strerror or str(error)) from None


COMMANDS = {
    "convert": convert,
    "generate": generate,
    "describe": describe,
    "scale": scale,
    "slice": slice_,
}


# --------------------------------------------------------------------------------------------------
# Commands about logs: what else could have been done, and a run as a log.


def whatif(
    log: Path,
    config: Path,
    /,
    *,
    try_: Annotated[tuple[str, ...], Parameter(name="--try", metavar="KEY=VALUE[,KEY=VALUE]")] = (),
    servers: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = (),
    metric: Literal["e2e", "ttft"] = "e2e",
    decisions: Annotated[int, Parameter(metavar="N")] = 40,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("runs/whatif"),
    set_: Overrides = (),
    seed: Seed = 0,
    jobs: Jobs = 0,
    ray: str | None = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Replay the log of a real server, and see what another choice would have given.

    Prints how far recorded and emulated latencies are apart; the difference that each alternative
    makes, request by request; the regret of routing decisions (what the best replica in hindsight
    would have given).

    Parameters
    ----------
    log
        Log of any format of docs/logs.md.
    config
        The servers as a configuration; its workload is the log.
    try_
        Another routing, split, scaling or set of GPUs: router.policy=round_robin (may be repeated).
    servers
        Names of the servers, in the order of the replicas; without it they are sorted.
    metric
        Latency whose regret is counted.
    decisions
        Decisions to look at, at random; 0 = all, -1 = none.
    output
        Directory for whatif.json and report.html.
    set_
        Override a key of every configuration.
    seed
        Of the draw of decisions and of the bootstrap.
    ray
        Address of a Ray cluster to run on, or local.
    json
        The content of whatif.json on stdout.

    Examples
    --------
    emu whatif spans.json cluster.toml --try router.policy=prefix_aware --try replicas.0.count=6
    """
    from emu.apps.whatif.command import whatif_command

    return whatif_command(
        log,
        config,
        try_,
        output=output,
        overrides=set_,
        servers=servers,
        metric=metric,
        decisions=decisions,
        seed=seed,
        jobs=jobs,
        ray=ray,
        quiet=quiet,
        as_json=json,
    )


def export(
    run: Path,
    output: Target,
    /,
    *,
    to: Literal["otel", "litellm", "gateway", "aiperf"] = "otel",
    quiet: Quiet = False,
) -> int:
    """A run (of `run` or `serve`) as the log that a real system would have left.

    Parameters
    ----------
    run
        Directory of a run that has ended.
    to
        Its format (docs/logs.md).

    Examples
    --------
    emu export runs/live/run spans.json
    """
    from emu.apps.whatif.command import export_run

    count = export_run(run, output, to)
    if not quiet:
        print(f"{output}: {count:,} requests")
    return 0
