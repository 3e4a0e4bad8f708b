"""LLMServingSim's own loop, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emu.options.declare import Argument, Option, Options
from emu.options.shared import output


class ParityCommand(Options):
    """The original's command line, as far as it changes results."""

    cluster: Annotated[Path, Argument("LLMServingSim's cluster file (JSON).")]
    workload: Annotated[
        Path | None,
        Argument(
            "Its workload (JSON Lines); without one each instance gets the original's default"
            " requests."
        ),
    ] = None
    profiles: Annotated[
        Path,
        Option("Folder with LLMServingSim's profiles (and `pim/` for memories that compute)."),
    ]
    output: Annotated[
        Path | None, output("Write the rows of the original's result file there (CSV).")
    ] = None
    limit: Annotated[int, Option("First N lines of the workload; 0 = all.", at_least=0)] = 0
    max_num_seqs: Annotated[int, Option("Requests of a batch at most.", at_least=1)] = 128
    max_num_batched_tokens: Annotated[int, Option("Tokens of a batch at most.", at_least=1)] = 2048
    block_size: Annotated[int, Option("Tokens of a KV block.", at_least=1)] = 16
    prefix_caching: Annotated[bool, Option("Reuse KV of equal prefixes.")] = True
    prefix_storage: Annotated[
        Literal["none", "cpu", "cxl"], Option("Where prefixes go behind the GPU.")
    ] = "none"
    prefix_sharing: Annotated[bool, Option("Instances of a node share that storage.")] = False
    attention_offloading: Annotated[
        bool, Option("Attention of decodes in memories that compute.")
    ] = False
    sub_batches: Annotated[bool, Option("Interleave two halves of a batch.")] = False
    local_offloading: Annotated[bool, Option("Bill reads of weights in GPU memory.")] = False
    expert_routing: Annotated[str, Option("The gate of experts.")] = "balanced"
    request_routing: Annotated[
        Literal["load", "rr", "rand"], Option("How requests go to instances.")
    ] = "load"
    block_copy: Annotated[bool, Option("All blocks of a model with experts run, not one.")] = True
    log_interval_s: Annotated[
        float,
        Option("The original's interval of its log: its first event comes after it.", at_least=0),
    ] = 1.0
    habits: Annotated[bool, Option("Keep what the original does by accident.")] = True


def parity(options: ParityCommand) -> int:
    """LLMServingSim's own loop."""
    import msgspec

    from emu.lab.parity.command import run_parity
    from emu.lab.parity.instance import ParityOptions
    from emu.process.prepared import prepared

    asked = msgspec.convert(options, prepared(ParityOptions), from_attributes=True)
    if not options.habits:
        asked = msgspec.structs.replace(
            asked,
            idle_grid=False,
            late_arrivals=False,
            end_npu_stagger=False,
            quirks=(),
            pim_prompt_length=False,
        )
    return run_parity(
        options.cluster,
        options.workload,
        options.profiles,
        asked,
        output=options.output,
        limit=options.limit,
    )
