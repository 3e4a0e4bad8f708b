"""From a benchmark of a server to a model of it, with a stated uncertainty.

formats.py     result files of load generators -> load levels of single requests
case.py        a level as a configuration and a workload
parameters.py  what is estimated, how far each may reasonably lie from the shipped engine
estimate.py    the posterior from linearised emulations. Pure
session.py     emulate, estimate, judge at another load level; the learned engine as a file
probe.py       a designed load for a live endpoint, and what it says of itself
"""
