"""`emu init` writes examples that run as they stand; what the package says of itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import emu
from emu.cli import main
from emu.config.input_files import example_text, examples
from emu.config.load import config_from_text
from emu.errors import DISTRIBUTION, InputError, needs_extra
from emu.process.version import checkout_revision, revision, version_line

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", examples())
def test_an_example_is_whole_and_names_nothing_of_the_repository(name: str) -> None:
    text = example_text(name)
    assert text.startswith("# ")
    assert "configs/" not in text
    config = config_from_text(text, f"{name}.toml")
    assert re.fullmatch(r"runs/[\w/-]+", config.output.dir)


def test_init_writes_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--schema"]) == 0
    assert "emu run cluster.toml" in capsys.readouterr().out
    first = Path("cluster.toml").read_text()
    assert first.startswith("#:schema ./cluster.schema.json\n# Quick-start")
    assert Path("cluster.schema.json").exists()
    assert main(["init", "--example", "chaos"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert Path("cluster.toml").read_text() == first
    assert main(["init", "--example", "chaos", "--force", "-q"]) == 0
    assert "replica_crash" in Path("cluster.toml").read_text()
    assert main(["init", "x.toml", "--example", "caos"]) == 2
    assert "did you mean chaos?" in capsys.readouterr().err
    assert main(["init", "no/x.toml"]) == 2


def test_the_version_tells_revision_and_build() -> None:
    line = version_line(emu.__version__)
    found = checkout_revision(ROOT) or revision()
    assert f"revision {found or 'unknown'}" in line
    assert line.startswith(f"emu {emu.__version__} (")
    assert not found or re.fullmatch("[0-9a-f]{12}", found)
    assert checkout_revision(ROOT / "tests") == ""


def test_a_missing_extra_is_one_line_with_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert {"serve", "astra", "profiles", "plots"} <= set(project["optional-dependencies"])
    with (
        pytest.raises(InputError, match=r"needs the package nothing_like_it: pip install 'emu-llm"),
        needs_extra("serve", "serve"),
    ):
        import nothing_like_it.inner  # type: ignore[import-not-found]  # noqa: F401


def test_license_files_are_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "Apache ECharts" in (ROOT / "NOTICE").read_text()
    assert f"version: {emu.__version__}" in (ROOT / "CITATION.cff").read_text()
