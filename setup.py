"""What pyproject.toml cannot say: a wheel knows the revision that it was built from."""

from __future__ import annotations

import json
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def revision_of_checkout() -> str:
    """The revision of this checkout, as `emu --version` finds it; empty outside of one."""
    names: dict[str, object] = {"__file__": str(ROOT / "emu" / "process" / "version.py")}
    exec((ROOT / "emu" / "process" / "version.py").read_text(encoding="utf-8"), names)
    found = names["checkout_revision"]
    assert callable(found)
    return str(found(ROOT))


class BuildWithRevision(build_py):
    """Leaves emu/build.json beside the modules."""

    def run(self) -> None:
        super().run()
        revision = revision_of_checkout()
        if revision and not self.editable_mode:
            path = Path(self.build_lib) / "emu" / "build.json"
            path.write_text(json.dumps({"revision": revision}) + "\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithRevision})
