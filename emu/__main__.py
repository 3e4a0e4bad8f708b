"""`python -m emu`."""

import gc
import os
import sys

gc.disable()  # importing makes many objects and no garbage; the run decides for itself
try:
    from emu.entry import main
    from emu.process.exits import leave

    status = main()
except KeyboardInterrupt:  # interrupted before anything has begun
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)
leave(status)
