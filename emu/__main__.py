"""`python -m emu`."""

import gc
import sys

gc.disable()  # importing makes many objects and no garbage; the run decides for itself

from emu.cli import main  # noqa: E402

gc.enable()
sys.exit(main())
