"""Commands to begin with: a first configuration from the examples in the package, completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from emu.cli.parser import Json, Parameter, Quiet
from emu.errors import InputError


def init(
    file: Path = Path("cluster.toml"),
    /,
    *,
    example: str = "cluster",
    force: Annotated[bool, Parameter(negative=())] = False,
    schema: Annotated[bool, Parameter(negative=())] = False,
    quiet: Quiet = False,
) -> int:
    """Write a commented cluster file to start from.

    Parameters
    ----------
    file
        File to write.
    example
        What it shows: cluster, colocated, disaggregated, autoscale, hpa, chaos or schedulers.
    force
        Replace a file that is there.
    schema
        Also write the JSON Schema beside it, for editors that check TOML files.
    """
    from emu.config.names import SCHEMA_DIRECTIVE, example_text

    text = example_text(example)
    if file.exists() and not force:
        raise InputError(str(file), None, "", "is there already; another name, or --force")
    if not file.parent.is_dir():
        raise InputError(str(file), None, "", f"no such directory: {file.parent}")
    written = [file]
    if schema:
        from emu.config.docs import config_schema

        beside = file.with_name("cluster.schema.json")
        beside.write_text(json.dumps(config_schema(), indent=2) + "\n", encoding="utf-8")
        text = f"{SCHEMA_DIRECTIVE}./{beside.name}\n{text}"
        written.append(beside)
    file.write_text(text, encoding="utf-8")
    if not quiet:
        for path in written:
            print(f"{path} written")
        print(f"next: emu validate {file}; emu run {file}; emu --help")
    return 0


def completion(shell: Literal["bash", "zsh", "tcsh"] = "bash", /) -> int:
    """Completion of commands and options for a shell, on stdout.

    Parameters
    ----------
    shell
        Which shell.

    Examples
    --------
    emu completion bash > ~/.local/share/bash-completion/completions/emu
    """
    import shtab

    from emu.cli import root_parser

    print(shtab.complete(root_parser(), shell=shell))
    return 0


# --------------------------------------------------------------------------------------------------
# Commands that say what there is: keys of a configuration, models, GPUs.


def schema(kind: Literal["cluster", "sweep"] = "cluster", /) -> int:
    """JSON Schema of a configuration or of a sweep file, for editors.

    Parameters
    ----------
    kind
        Of which kind of file.
    """
    from emu.cli.docs import schema_text

    print(schema_text(kind), end="")
    return 0


def models(pattern: str = "", /, *, json: Json = False) -> int:
    """What the catalogue knows of models.

    Parameters
    ----------
    pattern
        Only names that contain this.
    json
        Figures as JSON.
    """
    from emu.cli.docs import print_models

    print_models(pattern, as_json=json)
    return 0


def gpus(pattern: str = "", /, *, json: Json = False) -> int:
    """What the catalogue knows of GPUs.

    Parameters
    ----------
    pattern
        Only names that contain this.
    json
        Figures as JSON.
    """
    from emu.cli.docs import print_gpus

    print_gpus(pattern, as_json=json)
    return 0
