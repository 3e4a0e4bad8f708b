"""Faults: what they do to a running cluster, and how it recovers.

injector       strikes at the times of `[[faults]]`; the single entry is `Injector.inject`
handlers       what each kind does: a table of the handlers in the four modules below
replicas       crashes, stragglers, freezes, memory that shrinks
links          links that break, slow down or lag, partitions, windows of transfers, leases
control_plane  caches, drains, the planner and its metrics
clients        requests whose clients leave, overload
recovery       crash, lost requests, restart, the end of a run that nothing can serve
link_factors   what is in force on each link
transfers      what befalls transfers while a fault says so
census         where every request is (also the ground of the invariants)
ports          what all of them need of the world
"""
