"""Many runs of one config: grids, lists, random points, searches. Parallel, resumable.

`run_sweep(SweepOptions(sweep=Path("capacity.toml"), jobs=2))`.
"""
