"""Workloads: readers of trace formats, synthetic generators, and the opened source of requests."""

from emu.workload.items import Holds, Notes
from emu.workload.opened import Workload, open_workload
from emu.workload.session import Session

__all__ = ["Holds", "Notes", "Session", "Workload", "open_workload"]
