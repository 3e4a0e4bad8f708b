"""Functions that are alive get the code of another text; what it cannot reach, it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.living import Living

TEXT = """\
LIMIT = 3


def early():
    return 1


class Queue:
    most = early()

    def room(self):
        def left():
            return LIMIT - 1

        return left()

    def __init__(self):
        super().__init__()


keep = Queue.room
few = [one for one in range(2)]
"""


@pytest.mark.parametrize(
    ("old", "new", "room"),
    [
        ("LIMIT - 1", "LIMIT + 1", 4),
        ("        return left()", "        return 7", 7),
        ("LIMIT = 3", "LIMIT = 4", None),
        ("return 1", "return 2", None),
        ("most = early()", "most = 2", None),
        ("        super().__init__()", "        pass", None),
        ("range(2)", "range(3)", None),
        ("one for", "one + 1 for", None),
        ("", "", 2),
    ],
)
def test_only_functions_that_have_not_run_are_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, room: int | None
) -> None:
    path = tmp_path / "emu_living_queue.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    living = Living(tmp_path)
    with living.watched():
        module = importlib.import_module(path.stem)
    try:
        living.find()
        queue = module.Queue()
        changed = TEXT.replace(old, new, 1) if old else TEXT
        assert living.swap(str(path), TEXT.encode(), changed.encode()) == (room is not None)
        assert queue.room() == module.keep(queue) == (room or 2)
    finally:
        del sys.modules[path.stem]
