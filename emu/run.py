"""What this module held is `emu.runner`; importing it keeps `emu.run(...)` callable.

A submodule hides a function of the package that has the same name, so the module itself can be
called. It goes when nothing imports it any more.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from emu.runner import RunResult, execute, prepare

__all__ = ["RunResult", "execute", "prepare"]


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from emu.api import run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
