"""Speculative decoding, as a feature of serving engines."""

from emu.features.speculation.feature import FEATURE

__all__ = ["FEATURE"]
