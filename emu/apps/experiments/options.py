"""What `emu experiment` is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.options.declare import Argument, Option
from emu.options.shared import Quiet, output


class ExperimentOptions(Quiet):
    """Which experiment, from which configurations, where its tables and pictures go."""

    command = "experiment"

    name: Annotated[
        str,
        Argument(
            "pairings, ablation, six, cache, fleet (ten models), paper (BlitzScale's headline"
            " figures) or loads (what might slow its loads)."
        ),
    ]
    configs: Annotated[Path, Option("Directory of the configurations.")] = Path(
        "configs/experiments"
    )
    output: Annotated[Path, output("Directory for the runs and the tables.")] = Path(
        "runs/experiments"
    )
    clusters: Annotated[str, Option("A, B or AB: the clusters of BlitzScale's Table 1.")] = "AB"
    seeds: Annotated[
        int,
        Option(
            "pairings: more than 1 adds the order of the systems over so many seeds, with"
            " intervals.",
            at_least=1,
        ),
    ] = 1
    page: Annotated[
        Path | None, Option("Put tables and pictures into this page, between its marks.")
    ] = None
    traces: Annotated[
        Path | None,
        Option(
            "paper, loads: folder of Azure's traces of 2023 (AzureLLMInferenceTrace_code.csv and"
            " _conv.csv)."
        ),
    ] = None
    quiet: Annotated[bool, Option("Do not say which run is under way.", "--quiet", "-q")] = False
