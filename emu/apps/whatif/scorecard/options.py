"""What `emu scorecard` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from emu.config.tables.routing import ROUTERS_OF_ALL
from emu.options.declare import Argument, Option
from emu.options.shared import Settings, Shown, Workers, output


class ScorecardOptions(Settings, Workers, Shown):
    """A recording of a live server, and what an outside router's choices are held against."""

    command = "scorecard"

    recording: Annotated[Path, Argument("Directory that `emu serve -o` has written.")]
    routers: Annotated[
        Sequence[str],
        Option("Policies of `router` that get the same arrivals.", metavar="POLICY"),
    ] = tuple(str(kind.__struct_config__.tag) for kind in ROUTERS_OF_ALL)
    metric: Annotated[Literal["e2e", "ttft"], Option("Latency whose regret is counted.")] = "ttft"
    decisions: Annotated[int, Option("Decisions to look at, at random; 0 = all, -1 = none.")] = 20
    output: Annotated[Path, output("Directory for scorecard.json and report.html.")] = Path(
        "runs/scorecard"
    )
    seed: Annotated[int, Option("Of the draw of decisions and of the bootstrap.", at_least=0)] = 0
