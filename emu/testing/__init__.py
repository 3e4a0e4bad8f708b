"""What tests of policies, schedulers and runs use.

`Moment` is a run emulated again up to an instant; `emu story --as-test` prints a test with it.
`Bench` is one replica without a cluster, for tests of schedulers and of the replica itself.
"""

from __future__ import annotations

from emu.cluster.standing import Standing
from emu.runs.moment import Moment
from emu.testing.bench import Bench, own_scheduler
from emu.testing.fakes import (
    STEP_NS,
    FakeClock,
    FakeGaps,
    FakeLatency,
    FakeLedger,
    FakeObservers,
    FakeOutbox,
    FakeScheduler,
    request,
)

__all__ = [
    "STEP_NS",
    "Bench",
    "FakeClock",
    "FakeGaps",
    "FakeLatency",
    "FakeLedger",
    "FakeObservers",
    "FakeOutbox",
    "FakeScheduler",
    "Moment",
    "Standing",
    "own_scheduler",
    "request",
]
