"""Run the notebooks, and compare what they show with what they hold: python -m benchmarks.notebooks

`--write` stores the outputs instead. It needs nbclient and a kernel (`make notebooks` has its own
environment). Texts must be equal but for what a machine decides; pictures depend on the version of
matplotlib and must be there. The whole takes at most `LIMIT_S`.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
NOTEBOOKS: Final = ROOT / "notebooks"
LIMIT_S: Final = 180.0
"""Wall time of all notebooks together."""
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
            notebook, timeout=round(LIMIT_S), resources={"metadata": {"path": str(here)}}
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


def main() -> int:
    """The exit status."""
    import nbformat

    started_s, different = time.monotonic(), []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        before_s = time.monotonic()
        fresh = run(path)
        print(f"{path.name}: {time.monotonic() - before_s:.1f} s", flush=True)
        if "--write" in sys.argv:
            nbformat.write(fresh, path)
            continue
        held = nbformat.read(path, as_version=4)
        different += [
            f"{path.name}, cell {index}: {shown(new)!r:.300} instead of {shown(old)!r:.300}"
            for index, (new, old) in enumerate(zip(fresh.cells, held.cells, strict=True))
            if shown(new) != shown(old)
        ]
    total_s = time.monotonic() - started_s
    print(f"together {total_s:.1f} s; at most {LIMIT_S:.0f}")
    print("\n".join(different))
    return 1 if different or total_s > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
