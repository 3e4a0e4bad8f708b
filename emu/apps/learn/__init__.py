"""From a benchmark of a server to a model of it, with a stated uncertainty.

levels.py        result files of load generators -> load levels -> a workload and a configuration
session.py       what a level says of an engine; emulate, estimate, judge at another load level;
                 the learned engine as a file
probe.py         a designed load for a live endpoint, and what it says of itself
"""
