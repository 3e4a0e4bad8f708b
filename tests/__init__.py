"""Tests run the sources as they stand; `EMU_COMPILE=1` runs the compiled build."""

import os

os.environ.setdefault("EMU_COMPILE", "0")  # before anything of emu is imported
