"""What tests of policies, schedulers and runs use.

`Moment` is a run emulated again up to an instant; `emu story --as-test` prints a test with it.
"""

from __future__ import annotations

from emu.runs.moment import Moment, Standing

__all__ = ["Moment", "Standing"]
