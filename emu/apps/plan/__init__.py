"""`emu plan`: the cheapest cluster that meets objectives under a given traffic.

question.py    what is asked: model, GPU kinds, traffic, objectives; which clusters come into
               question, and the bounds that rule clusters out
answer.py      the search over one layout, over all layouts with the emulator, intervals, headroom
plan.py        the command; the answer as a configuration, vLLM flags and a Kubernetes manifest
"""
