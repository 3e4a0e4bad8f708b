"""Applications: what asks questions of worlds that the core builds, runs and finishes.

Each package is an island above the edge; none imports another but the shared parts in
`emu.apps.shared`.
"""
