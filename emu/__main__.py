"""`python -m emu`."""

import gc
import sys

gc.disable()  # importing makes many objects and no garbage; the run decides for itself
try:
    from emu.entry import main
    from emu.exits import leave
except KeyboardInterrupt:  # interrupted before anything has begun
    print("interrupted", file=sys.stderr)
    sys.exit(130)
gc.enable()
leave(main())
