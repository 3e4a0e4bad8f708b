"""What is running: version, revision, build.

The revision comes from `emu/build.json`, which the build of a wheel leaves behind, or from the
checkout that the package stands in (its `.git` is read, no program is started). Imports
nothing of emu, because the build of a wheel executes this file before there is a package.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]


def version_line(version: str) -> str:
    """`emu 0.1.0 (revision 0123456789ab, pure Python, CPython 3.11.7)`."""
    import platform

    parts = [f"revision {revision() or 'unknown'}", build()]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"emu {version} ({', '.join([*parts, python])})"


def revision() -> str:
    """Twelve digits of the commit; empty if it cannot be known."""
    try:
        text = (PACKAGE / "build.json").read_text(encoding="utf-8")
    except OSError:
        return checkout_revision(PACKAGE.parent)
    import json  # a checkout needs none

    try:
        return str(json.loads(text)["revision"])
    except (ValueError, KeyError):
        return checkout_revision(PACKAGE.parent)


def build() -> str:
    """Which modules run compiled: `compiled (85 modules)`, `pure Python`, or what of both."""
    from emu.process import compiled

    return str(compiled.build())


def checkout_revision(root: Path) -> str:
    """The commit that is checked out in `root`; empty if that is no git checkout."""
    try:
        git = root / ".git"
        if git.is_file():  # a worktree: gitdir: PATH
            git = root / git.read_text(encoding="utf-8").partition(":")[2].strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        kind, _, name = head.partition(" ")
        if kind != "ref:":
            return head[:12]
        common = git / "commondir"
        base = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
        for place in (git, base):
            if (place / name).is_file():
                return (place / name).read_text(encoding="utf-8").strip()[:12]
        for line in (base / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line[:12]
    except OSError:
        pass
    return ""
