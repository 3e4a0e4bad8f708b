"""The scaling experiments: fixed sets of runs, each with the table that it prints.

`emu experiment NAME` runs the configurations of `configs/experiments/` under several systems and
writes one table (`docs/experiments/` holds the tables that were measured, with what they mean).
"""
