"""The command without the rest of emu: `python -m emu.apps.profiler`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from emu.apps.profiler.grid import Limits
from emu.apps.profiler.measure import ProfileOptions, degrees, profile
from emu.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print the directory; the exit status."""
    options = ProfileOptions()
    parser = argparse.ArgumentParser(
        prog="python -m emu.apps.profiler", description=profile.__doc__
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


if __name__ == "__main__":
    sys.exit(main())
