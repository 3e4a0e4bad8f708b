"""`python -m tests.house [PATH ...]`: figures below `emu/PATH` (`PATH` will do); places too when a path is given."""

from __future__ import annotations

import subprocess
import sys

from tests.house.measure import ROOT, RUFF, count

paths = [path.removeprefix("emu/") for path in sys.argv[1:]]
for name, places in count(paths or ("",)).items():
    print(f"{name:20} {len(places)}")
    if paths:
        print("".join(f"    {place}\n" for place in places), end="")
subprocess.run([*RUFF, *([str(ROOT / path) for path in paths] or [str(ROOT)])], check=False)
