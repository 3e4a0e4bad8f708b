"""`emu whatif`: a log of a real server, replayed, and what else could have been done with it.

replay.py    the log as a workload with the replicas that served it, how far the emulation is off
variants.py  one run of the log with other routing, roles, replicas or GPUs; request by request
regret.py    what the best replica in hindsight would have given, for each decision
answer.py    what was found, and how its rows read
page.py      the answer as a page
command.py   the command
export.py    a run of emu as a log of each format
"""
