"""emu: an emulator of clusters that serve large language models."""

from typing import Final

__version__: Final = "0.1.0"
