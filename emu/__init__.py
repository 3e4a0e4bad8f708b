"""emu: an emulator of clusters that serve large language models.

`import emu` is cheap: what stands in `__all__` is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from emu.process.compiled import take as _take

if TYPE_CHECKING:
    from emu.api import Drawing, MissingPackage, Result, Rows, compare, frame, load, plot, run
    from emu.apps.plan.plan import plan
    from emu.apps.study.study import Study, study
    from emu.apps.sweeps.table import sweep
    from emu.errors import EmuError, InputError, InvariantViolation, RunError
    from emu.process.version import __version__
    from emu.world import World

__all__ = [
    "Drawing",
    "EmuError",
    "InputError",
    "InvariantViolation",
    "MissingPackage",
    "Result",
    "Rows",
    "RunError",
    "Study",
    "World",
    "__version__",
    "compare",
    "frame",
    "load",
    "plan",
    "plot",
    "run",
    "study",
    "sweep",
]

_take()  # before any other module of emu is loaded

_ELSEWHERE: Final = {
    "World": "emu.world",
    "Study": "emu.apps.study.study",
    "plan": "emu.apps.plan.plan",
    "study": "emu.apps.study.study",
    "sweep": "emu.apps.sweeps.table",
    "__version__": "emu.process.version",
}
_ERRORS: Final = ("EmuError", "InputError", "InvariantViolation", "RunError")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'emu' has no attribute {name!r}")
    home = "emu.errors" if name in _ERRORS else _ELSEWHERE.get(name, "emu.api")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
