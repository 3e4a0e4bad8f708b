"""Images in prompts, as a feature of serving engines."""

from emu.features.images.feature import FEATURE

__all__ = ["FEATURE"]
