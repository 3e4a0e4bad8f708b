"""`emu workload`: convert, generate, describe, scale and slice workload files.

A thin layer over `emu/workload/`: it parses, calls and prints. Paths are relative to the working
directory. Results go to stdout, what was lost or odd to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from emu.config.names import WorkloadFormat
from emu.errors import InputError
from emu.options.declare import Argument, Option, Options
from emu.options.shared import Json

if TYPE_CHECKING:
    from emu.config.schema import Config, WorkloadTable
    from emu.workload.statistics import Description
    from emu.workload.tools import Written


class Drawn(NamedTuple):
    """A workload, and the seed of what of it is drawn."""

    table: WorkloadTable
    seed: int


class Source(Options):
    """A workload to read."""

    source: Annotated[Path, Argument("Workload file, or a config (.toml) whose workload is meant.")]
    format: Annotated[
        WorkloadFormat, Option("Format of the input; auto = by content.", "--from")
    ] = "auto"
    columns: Annotated[
        str,
        Option(
            "Columns of a CSV with names of its own: arrival=time,prompt=in,output=out.",
            metavar="MEANING=NAME,...",
        ),
    ] = ""
    tokenizer: Annotated[
        str, Option("sharegpt: path of a tokenizer.json; empty = estimated lengths.")
    ] = ""
    seed: Annotated[
        int,
        Option("Seed of what is drawn (arrivals of formats without any).", at_least=0),
    ] = 42

    def read(self) -> Drawn:
        """The workload that the path means."""
        from emu.config.schema import WorkloadTable
        from emu.workload.formats.csv_named import columns_of

        if self.source.suffix == ".toml":
            config = _config(self.source, [])
            return Drawn(config.workload, config.seed)
        if not self.source.exists():
            raise InputError(str(self.source), None, "", "no such file")
        table = WorkloadTable(
            path=str(self.source),
            format=self.format,
            columns=columns_of(self.columns),
            tokenizer=self.tokenizer,
        )
        return Drawn(table, self.seed)


class Target(Options):
    """A workload to write."""

    output: Annotated[Path, Argument("File to write.")]
    to: Annotated[
        str, Option("Format of the output; empty = by its name: jsonl or csv.", "--to")
    ] = ""

    @property
    def written_format(self) -> str:
        """The format that is meant. Raises InputError if nothing says it."""
        if self.to:
            return self.to
        if self.output.suffix in (".jsonl", ".csv"):
            return self.output.suffix[1:]
        problem = "give a format, or name the file .jsonl or .csv"
        raise InputError(str(self.output), None, "--to", problem)


class ConvertOptions(Source, Target):
    """A workload and its new format."""

    expand_ids: Annotated[
        bool, Option("jsonl: write runs of token ids one by one, as other tools expect.")
    ] = False


def convert(options: ConvertOptions) -> int:
    """The same workload in another format."""
    from emu.workload.tools import convert as write

    table, seed = options.read()
    name, output = options.written_format, options.output
    written = write(table, output, name, base_dir=Path(), seed=seed, expand_ids=options.expand_ids)
    return _tell(written, output, name)


class GenerateOptions(Target):
    """Keys of `[workload.synthetic]`."""

    config: Annotated[
        Path | None,
        Option("Config whose [workload.synthetic] is the start; without it, the defaults."),
    ] = None
    requests: Annotated[int | None, Option("Number of requests (sessions count as one each).")] = (
        None
    )
    rate: Annotated[float | None, Option("Mean arrival rate, requests per second.")] = None
    process: Annotated[
        Literal["poisson", "gamma", "constant", "burst", "piecewise", "all_at_once"] | None,
        Option("Arrival process."),
    ] = None
    overrides: Annotated[
        Sequence[str],
        Option(
            "KEY=VALUE, keys of [workload.synthetic]: prompt.median=900 sessions.turns_max=5",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = ()
    seed: Annotated[int | None, Option("Seed; the config's, or 42.", at_least=0)] = None


def generate(options: GenerateOptions) -> int:
    """A synthetic workload."""
    from emu.workload.tools import generate as write

    settings = [f"workload.synthetic.{text}" for text in options.overrides]
    for key, value in (
        ("requests", options.requests),
        ("arrivals.rate_per_s", options.rate),
        ("arrivals.process", options.process),
    ):
        if value is not None:
            settings.insert(0, f"workload.synthetic.{key}={value}")
    whole = _config(options.config, settings)
    table = whole.workload.synthetic
    if whole.workload.path or table is None:
        problem = "has a workload file; expected [workload.synthetic]"
        raise InputError(str(options.config), None, "workload.path", problem)
    name, output = options.written_format, options.output
    seed = whole.seed if options.seed is None else options.seed
    return _tell(write(table, output, seed=seed, to_format=name), output, name)


class DescribeOptions(Source, Json):
    """A workload, and how it is shown."""

    svg: Annotated[Path | None, Option("Also write the picture to this file.")] = None
    as_json: Annotated[bool, Option("Figures as JSON instead of the picture.", "--json")] = False


def describe(options: DescribeOptions) -> int:
    """Figures and a picture of a workload."""
    import msgspec

    from emu.workload.opened import open_workload
    from emu.workload.picture import picture
    from emu.workload.statistics import describe as look

    table, seed = options.read()
    source = str(options.source)
    description = look(open_workload(table, base_dir=Path(), seed=seed, config_source=source))
    if options.svg is not None:
        _write_svg(options.svg, _picture_svg(description))
    if options.as_json:
        print(msgspec.json.format(msgspec.json.encode(description), indent=2).decode())
    else:
        print(picture(description), end="")
    return 0


class ScaleOptions(Source, Target):
    """Factors."""

    time: Annotated[float, Option("Factor of arrival times: above 1 is slower.")] = 1.0
    prompt: Annotated[float, Option("Factor of prompt lengths.")] = 1.0
    outputs: Annotated[float, Option("Factor of output lengths.")] = 1.0


def scale(options: ScaleOptions) -> int:
    """A workload with other arrivals and lengths."""
    from emu.workload.tools import scale as write

    read = options.read()
    name, output = options.written_format, options.output
    written = write(
        read.table,
        output,
        base_dir=Path(),
        seed=read.seed,
        time_factor=options.time,
        prompt_factor=options.prompt,
        output_factor=options.outputs,
        to_format=name,
    )
    return _tell(written, output, name)


class SliceOptions(Source, Target):
    """Where a piece begins and ends."""

    start_s: Annotated[float, Option("First second of the piece.", at_least=0)] = 0.0
    end_s: Annotated[
        float, Option("End of the piece; 0 = the end of the workload.", at_least=0)
    ] = 0.0
    limit: Annotated[int, Option("First N lines of the piece; 0 = all.", at_least=0)] = 0


def slice_(options: SliceOptions) -> int:
    """A piece of a workload."""
    from emu.workload.tools import cut

    read = options.read()
    name, output = options.written_format, options.output
    written = cut(
        read.table,
        output,
        base_dir=Path(),
        seed=read.seed,
        start_s=options.start_s,
        end_s=options.end_s,
        limit=options.limit,
        to_format=name,
    )
    return _tell(written, output, name)


def _config(path: Path | None, settings: list[str]) -> Config:
    from emu.config.load import config_from_dict, load_config

    if path is not None:
        return load_config(path, settings)
    return config_from_dict({"workload": {"synthetic": {}}}, settings)


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
