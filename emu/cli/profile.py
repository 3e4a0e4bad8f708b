"""`emu profile`: real kernels measured on the GPU at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from emu.options.declare import Option, Options


class ProfileCommand(Options):
    """What is measured, and how finely."""

    model: Annotated[str, Option("Catalogue name, or a label with --hf-config.")] = (
        "meta-llama/Llama-3.1-8B"
    )
    out: Annotated[Path, Option("Root of the bundles: OUT/HARDWARE/MODEL/bf16.")] = Path("bundles")
    hf_config: Annotated[Path | None, Option("A Hugging Face config.json.")] = None
    hardware: Annotated[str, Option("Name of the hardware folder; empty = the device's.")] = ""
    tp: Annotated[
        str,
        Option("Tensor-parallel degrees, comma separated; each is measured as one rank's shapes."),
    ] = "1"
    device: Annotated[str, Option("cuda or cpu; empty = cuda if there is one.")] = ""
    budget_s: Annotated[float, Option("Finer points are measured until then.", at_least=0)] = 360.0
    repeats: Annotated[int, Option("Calls for each median.", at_least=1)] = 5
    max_tokens: Annotated[int, Option("New tokens of one iteration.", at_least=1)] = 2048
    max_sequences: Annotated[int, Option("Sequences of one iteration.", at_least=1)] = 256
    max_context: Annotated[int, Option("Longest history.", at_least=1)] = 16384


def profile(options: ProfileCommand) -> int:
    """A bundle of this GPU."""
    import msgspec

    from emu.apps.profiler.grid import Limits
    from emu.apps.profiler.measure import ProfileOptions, degrees
    from emu.apps.profiler.measure import profile as measure
    from emu.process.prepared import prepared

    asked = ProfileOptions(
        model=options.model,
        hf_config=str(options.hf_config or ""),
        out=str(options.out),
        hardware=options.hardware,
        tp=degrees(options.tp),
        device=options.device,
        budget_s=options.budget_s,
        repeats=options.repeats,
        limits=msgspec.convert(options, prepared(Limits), from_attributes=True),
    )
    print(measure(asked))
    return 0
