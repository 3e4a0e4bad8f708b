"""Commands about faults: many seeds of random ones, and what those of a configuration cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.apps.chaos.options import ChaosOptions
from emu.options.declare import Argument
from emu.options.shared import Settings, output

_OF_A_CAMPAIGN = (
    *("seeds", "quick", "faults", "lost_ranks", "corpus", "every", "keep", "at_least"),
    *("log_level", "log_format"),
)
"""Options of many seeds of random faults alone."""


def chaos(options: ChaosOptions) -> int:
    """A campaign."""
    if options.slo:
        options.refuse(_OF_A_CAMPAIGN, "goes not with --slo, which tries single faults in turn")
        from emu.apps.chaos.breaking import slo_command

        return slo_command(options)
    options.refuse(("rate", "moments"), "goes with --slo")
    from emu.apps.chaos.command import chaos_command

    return chaos_command(options)


class ResilienceOptions(Settings):
    """A configuration with faults."""

    config: Annotated[Path, Argument("Configuration with [[faults]].")]
    output: Annotated[Path | None, output("Keep both runs in this directory.")] = None


def resilience(options: ResilienceOptions) -> int:
    """A run beside the same run without faults."""
    from emu.apps.chaos.resilience import resilience_command

    return resilience_command(options.config, options.overrides, options.output)
