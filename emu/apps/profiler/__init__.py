"""Measuring real kernels on the GPU at hand: a profile bundle for the `profile` backend.

    python -m emu.apps.profiler --model meta-llama/Llama-3.1-8B --out bundles     (or: emu profile)

Needs PyTorch (extra `profiler`), and of this package only the catalogue: `python -m
emu.apps.profiler` works in an environment with torch, numpy, pyyaml and msgspec alone.
"""
