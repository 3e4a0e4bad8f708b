"""`emu whatif`: a log of a real server, replayed, and what else could have been done with it.

variants.py  the log as a workload with the replicas that served it, and with others
command.py   the command: what was found, the best replica in hindsight for each decision, the page;
             a run of emu as a log of each format
"""
