"""Every shipped configuration survives `emu chaos`, run as a user would."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from emu.apps.chaos.campaign import campaign, world_of, write_world
from emu.apps.chaos.command import Asked, chaos_command, jobs_of, read_world
from emu.apps.chaos.options import ChaosOptions
from emu.config.load import config_from_dict
from emu.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.toml"))
SWEEPS = [path for path in SHIPPED if path.stem in ("sweep-capacity", "sweep-grid")]
CLUSTERS = [path for path in SHIPPED if path not in SWEEPS]
WORK_MAX = 200_000
"""Of a seed in the quick form; below five CPU seconds."""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a copy of what is shipped."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("copy")
@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_shipped_configuration_has_no_violation(path: Path) -> None:
    ordered = jobs_of(Asked(path, range(2), quick=True))
    totals = campaign(ordered.jobs, processes=1)
    told = {verdict.seed: verdict.problems for verdict in totals.failing}
    assert told == {}, f"python -m emu chaos {path} --seeds 0:2 --quick"
    assert totals.seeds == 2
    assert totals.ends["completed"] > 0
    assert sum(totals.faults.values()) > 0
    assert totals.work < 2 * WORK_MAX


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
@pytest.mark.usefixtures("copy")
@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_whole_shipped_configuration_has_no_violation(path: Path) -> None:
    totals = campaign(jobs_of(Asked(path, range(20))).jobs)
    told = {verdict.seed: verdict.problems for verdict in totals.failing}
    assert told == {}, f"python -m emu chaos {path} --seeds 0:20"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_world_of_a_shipped_configuration_is_read_back_as_written(copy: Path, path: Path) -> None:
    world = world_of(jobs_of(Asked(path, range(1), quick=True)).jobs[0])
    again = read_world(write_world(world, 0, copy / "kept"))
    assert config_from_dict(again.tables) == config_from_dict(world.tables)


@pytest.mark.usefixtures("copy")
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_is_refused_with_the_command_that_takes_it(path: Path) -> None:
    with pytest.raises(InputError, match=r"a file with a base is a sweep: emu sweep FILE"):
        chaos_command(
            ChaosOptions(
                config=path, seeds="0:2", jobs=1, keep=Path("unused"), quiet=True, quick=True
            )
        )
