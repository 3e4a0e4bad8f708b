"""The host's part of an iteration: what the GPU waits for while the CPU works.

Owns pure functions and the constants behind them. Backends that know GPU kernels only (roofline,
profile) add these terms when `latency.host_overhead` is on. The constants are the same for every
model, GPU and run; docs/fidelity.md shows what each of them does to two measured runs.

Step. An engine must schedule, build the inputs, launch, fetch the sampled tokens, and detokenise.
With asynchronous scheduling (vLLM's default since 0.14) step n+1 is scheduled while step n runs;
what stays exposed is one synchronizing copy and the start of the first kernel. Without it all of
it is exposed: 1 to 3 ms a step for batches of 1 to 256 (vLLM's own profile in the post on
v0.6, September 2024, found more than half of a step of a small model there).

Layers. A step of decodes alone is replayed as one CUDA graph: between its ten or so kernels a
layer the GPU pauses about 1.5 us each (not on top of profiled times, which have a kernel's start
and end in them). A step with a prompt has no such graph: the host launches
each layer's attention and compiled pieces one by one, about twelve launches of some 20 us, and
the GPU waits for them at every layer.

Compiled. Token-wise layers were profiled in eager mode, one by one; a served model runs compiled,
with the element-wise layers fused and kernels back to back on a busy GPU, and takes less. What is
not compiled does not: attention, experts, exchanges between GPUs, logits and sampling.

First use. A new process pays for each kind of kernel once: modules are loaded lazily, the
allocator grows, autotuned kernels are chosen. One module takes milliseconds and a first prefill
meets some tens of them; later steps meet the few shapes that the first one did not. Two measured
processes took 457 and 67 ms (their files were cached or not, perhaps); the sum here is the
middle.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.latency.base import BatchShape

FIRST_USE_NS: Final = (180_000_000, 60_000_000, 20_000_000)
"""Added to the first iterations of a process that has not warmed up."""


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of an engine's host side."""

    step_ns: int
    """Exposed in every iteration."""
    sequence_ns: int = 0
    """Exposed for each member of the batch."""
    graph_layer_ns: int = 0
    """Pauses of the GPU in a layer that is replayed from a graph."""
    launched_layer_ns: int = 0
    """Waits of the GPU for the host in a layer that is launched piece by piece."""
    prompt_step_ns: int = 0
    """Exposed in an iteration with a prompt, whatever its size."""
    compiled_permille: int = 1000
    """What compiled token-wise layers take of the sum of the profiled ones."""
    first_use_ns: tuple[int, ...] = FIRST_USE_NS
    """Added to the first iterations of a fresh process, in order."""


ASYNC_SCHEDULING: Final = HostCosts(
    step_ns=300_000,
    graph_layer_ns=15_000,
    launched_layer_ns=240_000,
    compiled_permille=900,
)
SYNC_SCHEDULING: Final = msgspec.structs.replace(
    ASYNC_SCHEDULING, step_ns=1_000_000, sequence_ns=8_000
)
NO_OVERHEAD: Final = HostCosts(step_ns=0, first_use_ns=())


def host_costs(
    enabled: bool, step_overhead_us: float = -1.0, *, overlapped: bool = True
) -> HostCosts:
    """The constants of a configuration: `latency.host_overhead`, `latency.step_overhead_us`.

    A `step_overhead_us` >= 0 replaces all that is added to a step. `overlapped`: the engine
    schedules asynchronously.
    """
    if not enabled:
        return NO_OVERHEAD
    costs = ASYNC_SCHEDULING if overlapped else SYNC_SCHEDULING
    if step_overhead_us < 0:
        return costs
    return HostCosts(
        step_ns=round(step_overhead_us * 1000), compiled_permille=costs.compiled_permille
    )


def step_overhead_ns(
    costs: HostCosts, sequences: int, *, layers: int = 0, has_prompt: bool = False
) -> int:
    """Host time exposed in one iteration of a batch of `sequences` members over so many layers."""
    layer_ns = costs.launched_layer_ns if has_prompt else costs.graph_layer_ns
    step_ns = costs.step_ns + (costs.prompt_step_ns if has_prompt else 0)
    return step_ns + sequences * costs.sequence_ns + layers * layer_ns


def host_ns(costs: HostCosts, shape: BatchShape, layers: int) -> int:
    """`step_overhead_ns` of a batch shape."""
    return step_overhead_ns(
        costs, shape.sequences, layers=layers, has_prompt=bool(shape.prefill_new)
    )
