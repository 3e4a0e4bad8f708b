"""Run the notebooks, and compare what they show with what they hold: python -m benchmarks.notebooks

`--write` stores the outputs instead. Texts should be equal but for what a machine decides; a
difference is told (a change of an engine's constants changes what all notebooks show), and fails
with `--exact`. Pictures depend on the version of matplotlib and must be there. The whole takes at
most `LIMIT_S` of processor time, which does not depend on what else the machine does; on two free
cores the wall time is less. Needs nbclient and a kernel (`make notebooks` has its own environment).
"""

from __future__ import annotations

import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
NOTEBOOKS: Final = ROOT / "notebooks"
LIMIT_S: Final = 180.0
"""Processor time of all notebooks together."""
_CELL_S: Final = 600
"""Wall time of a cell, on however busy a machine."""
_AROUND: Final = 60
"""Characters that are shown on either side of a difference."""
_PICTURE: Final = "image/png"
_WAITING: Final = re.compile(r"<progress[^>]*></progress>.*")


def run(path: Path) -> Any:
    """A notebook with fresh outputs, without dates."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        here = Path(place) / "notebooks"
        here.mkdir()
        (Path(place) / "configs").symlink_to(ROOT / "configs")
        expects = any("raises-exception" in c.metadata.get("tags", ()) for c in notebook.cells)
        assert expects or path.name[0] != "1", "the first notebook shows a mistake"
        nbclient.NotebookClient(
            notebook, timeout=_CELL_S, resources={"metadata": {"path": str(here)}}
        ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def shown(cell: Any) -> list[Any]:
    """What a cell shows, without what a machine decides."""
    found: list[Any] = []
    for output in cell.get("outputs", ()):
        if output.output_type == "error":
            found.append(output.traceback)
        elif output.output_type == "stream":
            found.append(output.text)
        elif "data" in output:
            text = output.data.get("text/html", output.data.get("text/plain"))
            if _PICTURE in output.data:
                found.append(_PICTURE)
            elif not _WAITING.match(text):  # a bar may have been replaced at any time
                found.append(text)
    return found


def apart(new: str, old: str) -> str:
    """Where two texts begin to differ, and how."""
    pairs = enumerate(zip(new, old, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(new), len(old)))
    near = slice(max(0, at - _AROUND), at + _AROUND)
    return f"{new[near]!r} instead of {old[near]!r}"


def processor_s() -> float:
    """Processor time of the kernels that have ended, and of what they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """The exit status."""
    import nbformat

    different: list[str] = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        before_s = time.monotonic()
        fresh = run(path)
        print(f"{path.name}: {time.monotonic() - before_s:.1f} s", flush=True)
        if "--write" in sys.argv:
            nbformat.write(fresh, path)
            continue
        held = nbformat.read(path, as_version=4)
        different += [
            f"{path.name}, cell {index}: {apart(str(shown(new)), str(shown(old)))}"
            for index, (new, old) in enumerate(zip(fresh.cells, held.cells, strict=True))
            if shown(new) != shown(old)
        ]
    total_s = processor_s()
    print(f"together {total_s:.1f} s of processor time; at most {LIMIT_S:.0f}")
    if different:
        print("\n".join([*different, "make notebooks WRITE=1 stores what they show now"]))
    is_wrong = bool(different) and "--exact" in sys.argv
    return 1 if is_wrong or total_s > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
