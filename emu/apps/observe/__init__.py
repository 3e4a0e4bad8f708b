"""`emu observe`: a real server driven with a workload, and what its client saw."""
