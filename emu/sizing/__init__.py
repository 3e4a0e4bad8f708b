"""`emu plan`: the cheapest cluster that meets objectives under a given traffic.

question.py    what is asked: model, GPU kinds, traffic, objectives
layouts.py     which clusters come into question, and the bounds that rule clusters out
search.py      the search over one layout, as a generator of candidates. Pure
answer.py      the search over all layouts with the emulator, intervals, headroom
manifests.py   the answer as a configuration, vLLM flags and a Kubernetes manifest
"""
