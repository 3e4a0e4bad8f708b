"""The running package as a wheel: what a bundle holds so that its runs can be repeated.

It is written here and not by a build: it needs no checkout and no tools, and the same code gives
the same bytes. Pure Python; compiled modules are left out, their sources give the same results.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zipfile
from importlib.metadata import distributions
from typing import Final, NamedTuple

from emu.errors import DISTRIBUTION
from emu.process.version import PACKAGE, __version__, revision

_WHEEL: Final = """\
Wheel-Version: 1.0
Generator: emu
Root-Is-Purelib: true
Tag: py3-none-any
"""
_FILES: Final = ("METADATA", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE")
_COMPILED: Final = (".so", ".pyd", ".pyc")
_FIRST_DAY: Final = (1980, 1, 1, 0, 0, 0)
"""The date of every member: an archive cannot be without one."""
_BUILD: Final = "build.json"


class Wheel(NamedTuple):
    """A file for `pip install`."""

    name: str
    content: bytes


def own_wheel() -> Wheel | None:
    """This very code as a wheel; None where the package was not installed and its metadata are not
    known."""
    installed = distributions(name=DISTRIBUTION)
    # A checkout in which a wheel was built has other metadata, without a file of this name.
    known = next((one for one in installed if one.read_text("METADATA")), None)
    if known is None or known.version != __version__:
        return None
    top = f"{DISTRIBUTION.replace('-', '_')}-{__version__}"
    members = {f"emu/{_BUILD}": json.dumps({"revision": revision()}).encode()}
    for path in sorted(PACKAGE.rglob("*")):
        name = f"emu/{path.relative_to(PACKAGE).as_posix()}"
        if path.is_file() and path.suffix not in _COMPILED and name not in members:
            members[name] = path.read_bytes()
    for name in _FILES:
        text = known.read_text(name)
        if text is not None:
            members[f"{top}.dist-info/{name}"] = text.encode()
    members[f"{top}.dist-info/WHEEL"] = _WHEEL.encode()
    record = f"{top}.dist-info/RECORD"
    lines = [f"{name},{_digest(content)},{len(content)}" for name, content in members.items()]
    members[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, _FIRST_DAY)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return Wheel(f"{top}-py3-none-any.whl", buffer.getvalue())


def _digest(content: bytes) -> str:
    """The digest of a member, in the form of RECORD."""
    digest = hashlib.sha256(content).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")
