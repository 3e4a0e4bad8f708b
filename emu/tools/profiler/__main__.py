"""`python -m emu.tools.profiler`: the profiler with torch, numpy, pyyaml and msgspec alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from emu.errors import InputError
from emu.tools.profiler.grid import Limits
from emu.tools.profiler.session import ProfileOptions, profile


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print the directory; the exit status."""
    options = ProfileOptions()
    parser = argparse.ArgumentParser(
        prog="python -m emu.tools.profiler", description=profile.__doc__
    )
    add = parser.add_argument
    add("--model", default=options.model, help="catalogue name, or a label with --hf-config")
    add("--hf-config", default="", help="a Hugging Face config.json")
    add("--out", default=options.out, help="root of the bundles")
    add("--hardware", default="", help="name of the hardware folder; default: the device's")
    add("--tp", default="1", help="tensor-parallel degrees, comma separated")
    add("--device", default="", choices=("", "cuda", "cpu"))
    add("--budget-s", type=float, default=options.budget_s, help="finer points until then")
    add("--repeats", type=int, default=options.repeats, help="calls for each median")
    add("--max-tokens", type=int, default=options.limits.max_tokens)
    add("--max-sequences", type=int, default=options.limits.max_sequences)
    add("--max-context", type=int, default=options.limits.max_context)
    found = parser.parse_args(arguments)
    try:
        directory = profile(
            ProfileOptions(
                model=found.model,
                hf_config=found.hf_config,
                out=found.out,
                hardware=found.hardware,
                tp=degrees(found.tp),
                device=found.device,
                budget_s=found.budget_s,
                repeats=found.repeats,
                limits=Limits(
                    max_tokens=found.max_tokens,
                    max_sequences=found.max_sequences,
                    max_context=found.max_context,
                ),
            )
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(directory)
    return 0


def degrees(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises InputError."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError("profile", None, "--tp", f"expected numbers such as 1,2, got {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
