"""Faults: what they do to a running cluster, and how it recovers.

injector   strikes at the times of `[[faults]]`; the single entry is `Injector.inject`
handlers   what each kind does: a table from the kind to its handler
recovery   crash, lost requests, restart, the end of a run that nothing can serve
ports      what all of them need of the world, and where every request is (`census`)
"""
