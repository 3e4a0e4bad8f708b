"""Commands that say what there is: keys of a configuration, models, GPUs."""

from __future__ import annotations

from typing import Literal

from emu.cli.options import Json


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
    from emu.cli.tables import print_models

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
    from emu.cli.tables import print_gpus

    print_gpus(pattern, as_json=json)
    return 0
