"""Many runs of one config: grids, lists, random points, searches. Parallel, resumable.

from emu.apps.sweeps.drive import run_sweep
result = run_sweep(Path("configs/experiments/sweep-capacity.toml"), jobs=2)
"""
