"""Measuring real kernels on the GPU at hand: a profile bundle for the `profile` backend.

    python -m emu.tools.profiler --model meta-llama/Llama-3.1-8B --out bundles     (or: emu profile)

Needs PyTorch (extra `profiler`), and of this package only the catalogue: `python -m
emu.tools.profiler` works in an environment with torch, numpy, pyyaml and msgspec alone.

    shapes     what one layer of a model computes, per rank
    grid       which points are measured, coarse ones first
    kernels    the operations, as PyTorch calls
    timing     how long one call takes on the device
    bundle     the tables and what is known about them, in files
    session    the measurement itself, within a time budget
"""
