"""Commands that say what there is: keys of a configuration, models, GPUs."""

from __future__ import annotations


def schema() -> int:
    """JSON Schema of the configuration, for editors."""
    import json

    from emu.config.docs import config_schema

    print(json.dumps(config_schema(), indent=2))
    return 0


def models() -> int:
    """What the catalogue knows of models."""
    from emu.cli.tables import print_models

    print_models()
    return 0


def gpus() -> int:
    """What the catalogue knows of GPUs."""
    from emu.cli.tables import print_gpus

    print_gpus()
    return 0
