"""`emu plan`: the cheapest cluster that meets objectives under a given traffic.

question.py    what is asked: model, GPU kinds, traffic, objectives
layouts.py     which clusters come into question; pace.py: what arithmetic says of them
worlds.py      engines drawn from what is known, seeds, lengths of runs
search.py      the search over one layout; trials.py: over all, by runs in those worlds
find.py        from the question to the answer; survive.py, headroom.py, costs.py, doubt.py
plan.py        `emu.plan`; command.py, words.py, page.py, files.py: what is told and written
"""
