"""Commands to begin with: a first configuration, completion, what the catalogue and a file know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from emu.errors import InputError
from emu.options.declare import Argument, Option, Options
from emu.options.shared import Json, Quiet


class InitOptions(Quiet):
    """A file to write, and what it shows."""

    file: Annotated[Path, Argument("File to write.")] = Path("cluster.toml")
    example: Annotated[
        str,
        Option(
            "What it shows: cluster, colocated, disaggregated, autoscale, hpa, chaos or schedulers."
        ),
    ] = "cluster"
    force: Annotated[bool, Option("Replace a file that is there.")] = False
    schema: Annotated[
        bool,
        Option("Also write the JSON Schema beside it, for editors that check TOML files."),
    ] = False
    quiet: Annotated[bool, Option("Print nothing.", "--quiet", "-q")] = False


def init(options: InitOptions) -> int:
    """A commented cluster file."""
    from emu.config.input_files import SCHEMA_DIRECTIVE, example_text

    file, text = options.file, example_text(options.example)
    if file.exists() and not options.force:
        raise InputError(str(file), None, "", "is there already; another name, or --force")
    if not file.parent.is_dir():
        raise InputError(str(file), None, "", f"no such directory: {file.parent}")
    written = [file]
    if options.schema:
        from emu.config.docs import config_schema

        beside = file.with_name("cluster.schema.json")
        beside.write_text(json.dumps(config_schema(), indent=2) + "\n", encoding="utf-8")
        text = f"{SCHEMA_DIRECTIVE}./{beside.name}\n{text}"
        written.append(beside)
    file.write_text(text, encoding="utf-8")
    if not options.quiet:
        for path in written:
            print(f"{path} written")
        print(f"next: emu validate {file}; emu run {file}; emu --help")
    return 0


class CompletionOptions(Options):
    """A shell."""

    shell: Annotated[Literal["bash", "zsh", "tcsh"], Argument("Which shell.")] = "bash"


def completion(options: CompletionOptions) -> int:
    """Completion of commands and options."""
    import shtab

    from emu.cli import root_parser

    print(shtab.complete(root_parser(), shell=options.shell))
    return 0


class SchemaOptions(Options):
    """A kind of file."""

    kind: Annotated[Literal["cluster", "sweep"], Argument("Of which kind of file.")] = "cluster"


def schema(options: SchemaOptions) -> int:
    """JSON Schema of a file."""
    from emu.cli.docs import schema_text

    print(schema_text(options.kind), end="")
    return 0


class CatalogueOptions(Json):
    """Names to look for."""

    pattern: Annotated[str, Argument("Only names that contain this.")] = ""
    as_json: Annotated[bool, Option("Figures as JSON.", "--json")] = False


def models(options: CatalogueOptions) -> int:
    """Models of the catalogue."""
    from emu.cli.catalogue import print_models

    print_models(options.pattern, as_json=options.as_json)
    return 0


def gpus(options: CatalogueOptions) -> int:
    """GPUs of the catalogue."""
    from emu.cli.catalogue import print_gpus

    print_gpus(options.pattern, as_json=options.as_json)
    return 0
