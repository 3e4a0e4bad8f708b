"""`emu chaos --log-level`: the log of one world."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.apps.chaos.command import chaos_command
from emu.apps.chaos.options import ChaosOptions
from emu.errors import InputError


def test_one_seed_tells_its_life_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = chaos_command(
        ChaosOptions(
            seeds="3",
            every=10**9,
            jobs=1,
            keep=tmp_path,
            quiet=True,
            log_level="info",
            log_format="json",
        )
    )
    assert done == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    names = {event["event"] for event in events}
    assert "request.ended" in names
    times = [event["at_ns"] for event in events]
    assert times == sorted(times)  # of one of its two runs, not of both


def test_a_log_of_several_worlds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one world, and there are 2"):
        chaos_command(
            ChaosOptions(seeds="0:2", jobs=1, keep=tmp_path, quiet=True, log_level="info")
        )
