"""The host's part of an iteration: what the GPU waits for while the CPU works.

Owns pure functions and the constants behind them; backends that know GPU kernels only (roofline,
profile) add these terms when `latency.host_overhead` is on. The constants are argued from how
engines work, are the same for every model, GPU and run, and are not fitted to any of them.

Step. An engine must schedule, build the inputs, launch, fetch the sampled tokens, and detokenise.
With asynchronous scheduling (vLLM's default since 0.14) step n+1 is scheduled while step n runs;
what stays exposed is the input preparation that needs the sampled tokens, the launch of the
first kernels and one synchronising copy: a few hundred microseconds, and a little for each
sequence (its row of the block table, its sampling parameters, its output). Without it all of
it is exposed: 1 to 3 ms a step for batches of 1 to 256 (vLLM's own profile in the post on
v0.6, September 2024, found more than half of a step of a small model there).

First use. A new process pays for each kind of kernel once: modules are loaded lazily, the
allocator grows, autotuned kernels are chosen. One module takes milliseconds and a first prefill
meets some tens of them; later steps meet the few shapes that the first one did not.
"""

from __future__ import annotations

from typing import Final

import msgspec


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of an engine's host side."""

    step_ns: int
    """Exposed in every iteration."""
    sequence_ns: int
    """Exposed for each member of the batch."""
    first_use_ns: tuple[int, ...] = (100_000_000, 30_000_000, 10_000_000)
    """Added to the first iterations of a fresh process, in order."""


ASYNC_SCHEDULING: Final = HostCosts(step_ns=300_000, sequence_ns=2_000)
SYNC_SCHEDULING: Final = HostCosts(step_ns=1_000_000, sequence_ns=8_000)
NO_OVERHEAD: Final = HostCosts(step_ns=0, sequence_ns=0, first_use_ns=())


def host_costs(enabled: bool, step_overhead_us: float = -1.0) -> HostCosts:
    """The constants of a configuration: `latency.host_overhead`, `latency.step_overhead_us`.

    A `step_overhead_us` >= 0 replaces the base and the part for each sequence.
    """
    if not enabled:
        return NO_OVERHEAD
    if step_overhead_us < 0:
        return ASYNC_SCHEDULING
    return HostCosts(step_ns=round(step_overhead_us * 1000), sequence_ns=0)


def step_overhead_ns(costs: HostCosts, sequences: int) -> int:
    """Host time exposed in one iteration of a batch of `sequences` members."""
    return costs.step_ns + sequences * costs.sequence_ns


def first_use_ns(costs: HostCosts, iteration_index: int) -> int:
    """Additional time of the n-th iteration (from 0) after a replica's process started."""
    if iteration_index < len(costs.first_use_ns):
        return costs.first_use_ns[iteration_index]
    return 0
