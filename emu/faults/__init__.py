"""Faults: what they do to a running cluster, and how it recovers.

injector   strikes at the times of `[[faults]]`; the single entry is `Injector.inject`
strikes    what each kind does: a table of the handlers in onreplicas, onlinks, oncontrol and
           onclients
recovery   crash, lost requests, restart, the end of a run that nobody can serve
links      network links that are down, slow or partitioned
transfers  what befalls transfers while a fault says so
census     where every request is (also the ground of the invariants)
"""
