"""LoRA adapters, as a feature of serving engines."""

from emu.features.lora.feature import FEATURE

__all__ = ["FEATURE"]
